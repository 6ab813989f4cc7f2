"""Properties of every dialect's hashes over generated prompts, and that the index takes them as handles."""

from array import array

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events import BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch
from kvatlas.hashing import DIALECTS, LlmdHasher, fnv1a_64, hash_blocks, sglang_event_hash, signed64, unsigned64
from kvatlas.index import PrefixIndex

TOKENS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1)), max_size=40)
TEXT = st.text(max_size=8)
OPTIONS = st.one_of(
    st.fixed_dictionaries(
        {"dialect": st.just("vllm"), "algo": st.just("xxhash_cbor"), "seed": TEXT, "cache_salt": TEXT}
    ),
    st.fixed_dictionaries(
        {
            "dialect": st.just("sglang"),
            "extra_key": st.none() | TEXT,
            "cache_salt": st.none() | TEXT,
            "lora_id": st.none() | TEXT,
            "event_format": st.sampled_from(["default", "dynamo"]),
            "chain": st.sampled_from(["event", "storage"]),
            "bigram": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "dialect": st.just("llmd"),
            "model": st.text(min_size=1, max_size=8),
            "algo": st.sampled_from(["cbor-fnv", "xxh64"]),
            "seed": TEXT,
            "cache_salt": TEXT,
        }
    ),
    st.fixed_dictionaries({"dialect": st.just("dynamo"), "lora": TEXT, "namespace": TEXT, "eagle": st.booleans()}),
)


@given(OPTIONS, TOKENS, st.integers(1, 5), st.integers(0, 40))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(options, tokens, block_size, cut):
    """What follows never changes a block's name, in any dialect with any option; buffers hash like lists."""
    whole = hash_blocks(token_ids=tokens, block_size=block_size, **options)
    part = hash_blocks(token_ids=tokens[:cut], block_size=block_size, **options)
    assert whole.blocks[: len(part.blocks)] == part.blocks
    assert hash_blocks(token_ids=array("i", tokens), block_size=block_size, **options) == whole
    overlap = bool(options.get("bigram") or options.get("eagle"))
    assert len(whole.blocks) == max(0, len(tokens) - overlap) // block_size


@given(st.sampled_from(DIALECTS), TOKENS, TOKENS, st.integers(1, 5))
def test_chained_hashes_meet_only_for_equal_prefixes(dialect, left, right, block_size):
    """Block i has one name in two prompts iff the prompts are equal up to its end."""
    options = {"model": "m"} if dialect == "llmd" else {}
    ours = hash_blocks(dialect, left, block_size, **options).blocks
    theirs = hash_blocks(dialect, right, block_size, **options).blocks
    for a, b in zip(ours, theirs, strict=False):
        end = a.first_token + block_size
        assert (a.hash64 == b.hash64) == (left[:end] == right[:end])


@given(st.integers(0, 2**64 - 1))
def test_signed_form_round_trips(value):
    """Signed and unsigned readings lead back to each other, and to the same 8 bytes."""
    assert unsigned64(signed64(value)) == value
    assert signed64(value).to_bytes(8, "big", signed=True) == value.to_bytes(8, "big")
    assert sglang_event_hash(value.to_bytes(8, "big") + b"rest") == signed64(value)


@given(st.integers(1, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=30), st.lists(TEXT, max_size=30))
def test_llmd_keys_hash_canonical_cbor(parent, tokens, identifiers):
    """A key is FNV-1a of what the general CBOR library writes."""
    extras = [{"Hash": text} for text in identifiers] or None
    expected = fnv1a_64(cbor2.dumps([parent, tokens, extras], canonical=True))
    assert LlmdHasher().block_key(parent, tokens, identifiers) == expected


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=40), st.integers(1, 3))
def test_the_index_takes_signed_hashes(tokens, block_size):
    """SGLang's hashes, negative ones too, go over the wire and work as handles of parents and removals."""
    blocks = hash_blocks("sglang", tokens, block_size).blocks
    handles = [block.hash64 for block in blocks]
    cut = max(1, len(handles) // 2)
    stored = len(handles) * block_size
    events = [
        BlockStored(handles[:cut], None, tokens[: cut * block_size], block_size, medium="GPU"),
        BlockStored(handles[cut:], handles[cut - 1], tokens[cut * block_size : stored], block_size, medium="GPU"),
    ]
    index = PrefixIndex()
    index.add_worker("w")
    for event in decode_batch(encode_batch(EventBatch(1.0, events[: 1 + (cut < len(handles))], 0))).batch.events:
        index.apply("w", event)
    asked = [*tokens[:stored], 1]
    assert index.match(asked)["w"].hit_tokens == stored
    index.apply("w", BlockRemoved([handles[-1]], "GPU"))
    assert index.match(asked)["w"].hit_tokens == stored - block_size
