"""Hashing against digests that a real vLLM 0.32.0 produced (vectors/hashing-*.json)."""

import json
import subprocess
import sys

import pytest

from kvatlas.hashing import (
    Lora,
    MultimodalItem,
    RequestExtras,
    VllmHasher,
    block_extra_keys,
    external_hash,
    hash64,
    key_with_group,
    published_extra_keys,
)
from kvatlas.hashing.cbor import encode_hash_block
from kvatlas.hashing.vllm import _pickle_hash_block
from support.golden import VECTORS

GOLDEN = json.loads((VECTORS / "hashing-vllm.json").read_text())
STREAMS = json.loads((VECTORS / "hashing-streams.json").read_text())


def tuples(value):
    """JSON lists as tuples, {"hex": ...} as bytes."""
    if isinstance(value, list):
        return tuple(map(tuples, value))
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return value


def label(case):
    return f"{case.get('name', '')}-{case['algo']}-{case.get('seed')}"


@pytest.mark.parametrize("case", GOLDEN["none_hash"], ids=label)
def test_none_hash(case):
    """Scenarios 1, 2: NONE_HASH follows algorithm and literal seed ("random" is a word like any other)."""
    assert VllmHasher(case["algo"], case["seed"]).none_hash.hex() == case["hex"]


@pytest.mark.parametrize("case", GOLDEN["chains"], ids=label)
def test_chain(case):
    """Scenario 1: chains A, B, C and E equal the engine's digests, in whole and block by block."""
    hasher = VllmHasher(case["algo"], case["seed"])
    digests = hasher.hash_tokens(case["token_ids"], case["block_size"])
    assert [digest.hex() for digest in digests] == case["hex"]
    parent = None
    for index, digest in enumerate(digests):
        start = index * case["block_size"]
        parent = hasher.hash_block(parent, case["token_ids"][start : start + case["block_size"]])
        assert parent == digest
    if "ints" in case:
        assert [hash64(digest) for digest in digests] == case["ints"]


@pytest.mark.parametrize("case", GOLDEN["chains_of_ints"], ids=label)
def test_published_ints(case):
    """The published integers of a 32-token chain for three seeds and the default algorithm."""
    digests = VllmHasher(case["algo"], case["seed"]).hash_tokens(case["token_ids"], case["block_size"])
    assert [external_hash(digest) for digest in digests] == case["ints"]


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("case", GOLDEN["extra_keys"], ids=lambda case: case["name"])
def test_extra_keys_in_the_digest(case, algo):
    """Vectors D: each kind of extra key, a negative offset, and all four together."""
    digest = VllmHasher(algo, case["seed"]).hash_block(None, case["token_ids"], tuples(case["extra_keys"]))
    assert digest.hex() == case["hex"][algo]


@pytest.mark.parametrize("case", GOLDEN["serialised"], ids=lambda case: case["name"])
def test_serialised_bytes(case):
    """The exact bytes that are hashed, before the digest."""
    serialise = encode_hash_block if case["algo"].endswith("cbor") else _pickle_hash_block
    data = serialise(bytes.fromhex(case["parent"]), tuple(case["token_ids"]), tuples(case["extra_keys"]))
    assert data.hex() == case["hex"]


@pytest.mark.parametrize("one_object", [True, False])
def test_equal_text_hashes_equally_whether_or_not_it_is_one_object(one_object):
    """Pickle would write one string object used twice as a back reference; we hash as an engine that decoded both."""
    case = GOLDEN["equal_text_in_two_keys"]
    first = case["extra_keys"][0][1]
    second = first if one_object else "".join(list(first))
    keys = (("mm", first, 0), ("mm", second, 1))
    digest = VllmHasher(case["algo"]).hash_block(bytes.fromhex(case["parent"]), case["token_ids"], keys)
    assert digest.hex() == case["hex"]


@pytest.mark.parametrize("case", GOLDEN["hash64"], ids=lambda case: case["hex"][:8])
def test_published_forms(case):
    """Scenarios 4, 5: the last 8 bytes, unsigned big-endian, of 32- and 16-byte digests; or the digest itself."""
    digest = bytes.fromhex(case["hex"])
    assert hash64(digest) == external_hash(digest) == case["int"]
    assert external_hash(digest, as_int=False) == digest


def test_group_key():
    """The cache-map key appends the group as 4 bytes big-endian."""
    case = GOLDEN["key_with_group"]
    assert key_with_group(bytes.fromhex(case["hex"]), case["group"]).hex() == case["key"]


def test_multimodal_walk_and_publication():
    """Scenario 9: offsets relative to each block, the cursor, and the untagged form in events."""
    walk = GOLDEN["walk"]
    extras = RequestExtras(
        lora=Lora(*walk["lora"]),
        multimodal=tuple(MultimodalItem(*item) for item in walk["multimodal"]),
        cache_salt=walk["cache_salt"],
    )
    cursor = 0
    for index, block in enumerate(walk["blocks"]):
        start = index * walk["hash_block_size"]
        tagged, cursor = block_extra_keys(extras, start, start + walk["hash_block_size"], cursor)
        assert (tagged, cursor) == (tuples(block["tagged"]), block["cursor"])
        assert published_extra_keys(tagged) == tuples(block["published"])


def test_xxhash_seed_across_processes():
    """Scenario 3: without a seed two processes disagree, with seed "0" they agree."""
    code = "import sys; from kvatlas.hashing import VllmHasher as H; print(H('xxhash', *sys.argv[1:]).none_hash.hex())"

    def none_hash(*seed):
        return subprocess.run([sys.executable, "-c", code, *seed], check=True, capture_output=True, text=True).stdout

    assert none_hash() != none_hash()
    assert none_hash("0") == none_hash("0")


@pytest.mark.parametrize("stream", STREAMS["streams"], ids=lambda stream: stream["name"])
def test_chains_of_real_servers(stream):
    """Digests a real server published, recomputed from the tokens and salts it published with them."""
    hasher = VllmHasher(stream["algo"], stream["seed"])
    digests = {None: None}
    for store in stream["stores"]:
        parent = digests[store["parent"]]
        size = store["block_size"]
        for index, (handle, keys) in enumerate(zip(store["handles"], store["extra_keys"], strict=True)):
            tagged = tuple(("cache_salt", salt) for salt in keys) if keys else None
            parent = hasher.hash_block(parent, store["token_ids"][index * size : (index + 1) * size], tagged)
            assert (parent.hex() if isinstance(handle, str) else hash64(parent)) == handle
            digests[handle] = parent
