"""Hashes of SGLang, llm-d and Dynamo against what those produced (vectors/hashing-{sglang,llmd,dynamo}.json)."""

import json

import pytest

from kvatlas.hashing import (
    LlmdHasher,
    MultimodalItem,
    SglangNamespace,
    dynamo_block_hash,
    dynamo_sequence_hashes,
    fnv1a_64,
    hash_blocks,
    sglang_chain,
    sglang_event_hash,
    sglang_namespaced_hash,
    sglang_page_digest,
)
from kvatlas.hashing.cbor import encode
from support.golden import VECTORS

SGLANG = json.loads((VECTORS / "hashing-sglang.json").read_text())
LLMD = json.loads((VECTORS / "hashing-llmd.json").read_text())
DYNAMO = json.loads((VECTORS / "hashing-dynamo.json").read_text())


def name(case):
    return case.get("name", "")


def options(case):
    """Options as `hash_blocks` takes them."""
    given = dict(case["options"])
    if "multimodal" in given:
        given["multimodal"] = [MultimodalItem(**item) for item in given["multimodal"]]
    return given


class TestSglang:
    @pytest.mark.parametrize("case", SGLANG["chains"], ids=name)
    def test_chain(self, case):
        """Vectors A-H: page digests and event hashes, bigrams and wide ids included, as a chain and page by page."""
        tokens, size, bigram = case["token_ids"], case["page_size"], case["bigram"]
        digests = sglang_chain(tokens, size, bigram=bigram)
        assert [digest.hex() for digest in digests] == case["hex"]
        assert [sglang_event_hash(digest) for digest in digests] == case["event_hashes"]
        previous = None
        for start, digest in zip(range(0, len(tokens), size), digests, strict=False):
            previous = sglang_page_digest(previous, tokens[start : start + size + bigram], bigram=bigram)
            assert previous == digest
        hashed = hash_blocks("sglang", tokens, size, bigram=bigram)
        assert [(b.digest.hex(), b.hash64) for b in hashed.blocks] == list(
            zip(case["hex"], case["event_hashes"], strict=True)
        )

    def test_whole_sequence(self):
        """Tokens hashed without pages are one page as long as they are."""
        case = SGLANG["whole_sequence"]
        assert sglang_page_digest(None, case["token_ids"]).hex() == case["hex"]

    @pytest.mark.parametrize("case", SGLANG["seeds"], ids=lambda case: f"{case['kind']}-{case['cache_salt']}")
    def test_seeds(self, case):
        """The three seeds: of the storage chain, of the event chain, and of namespaced event hashes."""
        namespace = SglangNamespace(lora_id=case["lora_id"], cache_salt=case["cache_salt"])
        seed = {
            "storage": namespace.storage_seed,
            "event_chain": namespace.event_chain_seed,
            "event_hash": lambda: namespace.event_hash_seed("dynamo"),
        }[case["kind"]]()
        assert seed.hex() == case["hex"]

    @pytest.mark.parametrize("pair", SGLANG["namespaced"]["pairs"], ids=str)
    def test_namespaced_hash(self, pair):
        """An event hash moved into a namespace."""
        assert sglang_namespaced_hash(bytes.fromhex(SGLANG["namespaced"]["seed"]), pair[0]) == pair[1]

    @pytest.mark.parametrize("case", SGLANG["events"], ids=name)
    def test_hashes_in_events(self, case):
        """The hashes of a radix cache's store events: salt, tenant and adapter, in both formats."""
        hashed = hash_blocks("sglang", case["token_ids"], case["page_size"], **case["options"])
        assert [block.hash64 for block in hashed.blocks] == case["event_hashes"]


class TestLlmd:
    @pytest.mark.parametrize("case", LLMD["init"], ids=lambda case: case["seed"] or "none")
    def test_init_hash(self, case):
        """V0: the seed alone."""
        assert f"{LlmdHasher(seed=case['seed']).init_key:016x}" == case["hex"]

    def test_root_bytes(self):
        """V1: the bytes under a root key, and that FNV of them is it."""
        case = LLMD["root_cbor"]
        data = encode((LlmdHasher().init_key, None, case["model"]))
        assert data.hex() == case["hex"]
        assert f"{fnv1a_64(data):016x}" == LLMD["roots"][0]["hex"]

    @pytest.mark.parametrize("case", LLMD["roots"], ids=name)
    def test_root(self, case):
        """V1, V2, X1: a model's root key."""
        assert f"{LlmdHasher(case['algo'], case['seed']).root_key(case['model']):016x}" == case["hex"]

    @pytest.mark.parametrize("case", LLMD["chains"], ids=name)
    def test_chain(self, case):
        """V3-V12, X2: seeds, block sizes, a dropped tail, LoRA, images, salt, wide ids, and the Go tests' own key."""
        hashed = hash_blocks("llmd", case["token_ids"], case["block_size"], **options(case))
        assert [f"{block.hash64:016x}" for block in hashed.blocks] == case["keys"]

    def test_block_after_a_known_parent(self):
        """V7: a chain continues from a parent's key."""
        case = LLMD["continued"]
        assert f"{LlmdHasher().block_key(int(case['parent'], 16), case['token_ids']):016x}" == case["key"]


class TestDynamo:
    @pytest.mark.parametrize("case", DYNAMO["chains"], ids=name)
    def test_local_hashes(self, case):
        """Plain, LoRA, namespace, both, and EAGLE's windows."""
        hashed = hash_blocks("dynamo", range(DYNAMO["num_tokens"]), DYNAMO["block_size"], **case["options"])
        assert [block.local_hash for block in hashed.blocks] == case["local_hashes"]

    def test_sequence_hashes(self):
        """The chained hashes, from the local ones and through the public call."""
        assert dynamo_sequence_hashes(DYNAMO["chains"][0]["local_hashes"]) == DYNAMO["sequence_hashes"]
        hashed = hash_blocks("dynamo", range(DYNAMO["num_tokens"]), DYNAMO["block_size"])
        assert [block.hash64 for block in hashed.blocks] == DYNAMO["sequence_hashes"]

    def test_multimodal_block(self):
        """Two items in block 0, given as hashes and as ids whose first 16 of 64 hex digits they are."""
        case = DYNAMO["multimodal"]
        tokens = range(DYNAMO["block_size"])
        assert dynamo_block_hash(tokens, case["hashes"]) == case["local_hash"]
        items = [MultimodalItem(f"{value:016x}" + "f" * 48, 4 * i, 2) for i, value in enumerate(case["hashes"])]
        (block,) = hash_blocks("dynamo", tokens, DYNAMO["block_size"], multimodal=items).blocks
        assert block.local_hash == case["local_hash"]
