"""The hashing benchmark measures every chain, and tells why it cannot."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from kvatlas.bench import hash_peer
from kvatlas.bench.hash import run_hash_bench
from kvatlas.errors import ConfigError
from kvatlas.hashing import VllmHasher

QUICK = {"rounds": 1, "calls": 1, "scale": 0.002}


def test_ours_beside_python():
    """Every chain, each from an array and from a list, all held against the Python kernels."""
    report = run_hash_bench(**QUICK)
    assert [row.work.split(",")[0] for row in report.rows[::2]] == [
        "vLLM sha256_cbor",
        "vLLM xxhash_cbor",
        "block keys (XXH3)",
        "Dynamo local hashes (XXH3)",
        "Dynamo local and sequence hashes",
        "SGLang pages (SHA-256)",
        "llm-d keys (FNV-1a)",
        "llm-d keys (XXH64)",
    ]
    assert [row.work.rpartition(", ")[2] for row in report.rows] == ["int32 array", "list"] * 8
    assert all(row.ours > 0 and row.peer == "python" and row.peer_value > 0 for row in report.rows)
    assert report.machine.endswith(" kernels")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"against": "sglang"}, "measured against vllm, dynamo"),
        ({"rounds": 0}, "at least one round"),
        ({"against": "vllm", "interpreter": "/nowhere/python"}, "cannot be started"),
        ({"against": "dynamo", "interpreter": "/bin/false"}, "have ai-dynamo-runtime"),
    ],
)
def test_what_it_refuses(settings, message):
    """Unknown peers, no rounds, and an interpreter that is absent or has no peer are named."""
    with pytest.raises(ConfigError, match=message):
        run_hash_bench(**QUICK | settings)


def fake_vllm(folder, seed):
    """A vLLM of four modules that hashes with ours, under a seed."""
    for package in ("vllm", "vllm/utils", "vllm/v1", "vllm/v1/core"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "vllm/utils/hashing.py").write_text("sha256_cbor, xxhash_cbor = 'sha256_cbor', 'xxhash_cbor'")
    (folder / "vllm/v1/request.py").write_text("Request = lambda name, ids, params, pooling: ids")
    (folder / "vllm/sampling_params.py").write_text("SamplingParams = dict")
    (folder / "vllm/v1/core/kv_cache_utils.py").write_text(
        "from kvatlas.hashing import VllmHasher\n"
        "init_none_hash = print\n"
        f"get_request_block_hasher = lambda size, algo: lambda ids: VllmHasher(algo, {seed!r}).hash_tokens(ids, size)"
    )


def test_a_peer_is_measured_in_its_rows(tmp_path, monkeypatch):
    """With a peer the rows of its chain show its time; what it prints does not disturb the answers."""
    fake_vllm(tmp_path, "0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = run_hash_bench(**QUICK, against="vllm", interpreter=sys.executable)
    assert [row.peer for row in report.rows] == ["vllm"] * 4 + ["python"] * 12


def test_a_peer_that_hashes_otherwise_is_no_comparison(tmp_path, monkeypatch):
    """Another digest means another work: no ratio is printed."""
    fake_vllm(tmp_path, "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="vllm sha256_cbor hashes otherwise"):
        run_hash_bench(**QUICK, against="vllm", interpreter=sys.executable)


def test_the_child_answers_with_time_and_last_hash(monkeypatch):
    """One JSON line in, one out; dynamo gets an int32 array or a list as asked."""
    core = SimpleNamespace(
        compute_block_hash_for_seq=lambda ids, size: [type(ids).__name__ == "array", len(ids) // size]
    )
    monkeypatch.setattr(hash_peer.importlib, "import_module", lambda name: core)
    commands = [{"peer": "dynamo", "num_tokens": 64, "form": form, "calls": 1} for form in ("array", "list")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, commands))))
    answers = io.StringIO()
    hash_peer.main(answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [line["last"] for line in lines] == [4, 4]
    assert all(line["ns"] > 0 for line in lines)


def test_both_sides_hash_the_same_prompt():
    """The prompt is a function of its length, so that digests can be compared across processes."""
    assert hash_peer.prompt(16) == hash_peer.prompt(32)[:16]
    digests = VllmHasher("sha256_cbor", hash_peer.HASH_SEED).hash_tokens(hash_peer.prompt(16), hash_peer.BLOCK_SIZE)
    assert len(digests) == 1
