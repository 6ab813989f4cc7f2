"""Properties of block names over generated content."""

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.hashing import (
    VLLM_ALGOS,
    BlockExtras,
    BlockKeyHasher,
    Lora,
    MultimodalItem,
    RequestExtras,
    VllmHasher,
    block_extra_keys,
    published_extra_keys,
)
from kvatlas.hashing.block_key import _encode_extras
from kvatlas.hashing.cbor import encode, encode_hash_block

TOKEN = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
TEXT = st.sampled_from(["", "a", "b", "ab", "é", "x" * 30, "x" * 300])
SCALAR = st.one_of(st.none(), st.integers(-(2**64), 2**64 - 1), st.binary(max_size=300), TEXT)
EXTRAS = st.builds(
    BlockExtras,
    lora_name=st.none() | TEXT,
    multimodal=st.lists(st.tuples(TEXT, st.integers(-50, 50)), max_size=2).map(tuple),
    cache_salt=st.none() | TEXT.filter(bool),
    prompt_embeds_digest=st.none() | st.binary(max_size=40),
)


@st.composite
def request_extras(draw):
    """Extras of a request, items in order and apart."""
    items = []
    position = 0
    for _ in range(draw(st.integers(0, 3))):
        position += draw(st.integers(0, 5))
        length = draw(st.integers(1, 9))
        items.append(MultimodalItem(draw(TEXT), position, length))
        position += length
    lora = draw(st.none() | st.builds(Lora, TEXT, st.none() | TEXT))
    return RequestExtras(lora, tuple(items), draw(st.none() | TEXT))


@given(st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=30).map(tuple), max_leaves=40))
def test_canonical_cbor_equals_cbor2(value):
    """Our encoder and the general library give the same bytes."""
    assert encode(value) == cbor2.dumps(value, canonical=True)


@given(st.binary(max_size=40), st.lists(TOKEN, max_size=300).map(tuple), st.none() | st.lists(SCALAR).map(tuple))
def test_hash_block_cbor_equals_cbor2(parent, token_ids, extra_keys):
    """The block encoder, with its remembered integers, gives cbor2's bytes too."""
    assert encode_hash_block(parent, token_ids, extra_keys) == cbor2.dumps(
        (parent, token_ids, extra_keys), canonical=True
    )


@given(EXTRAS, EXTRAS)
def test_extras_encode_apart(left, right):
    """Different extras never share bytes, so a LoRA name can never stand for a salt or an image."""
    assert (_encode_extras(left) == _encode_extras(right)) == (left == right)


@given(st.lists(st.integers(0, 3), max_size=12), EXTRAS, st.lists(st.integers(0, 3), max_size=12), EXTRAS)
def test_block_keys_meet_only_for_equal_content(left_ids, left_extras, right_ids, right_extras):
    """Equal key iff equal tokens and equal extras."""
    keys = BlockKeyHasher(1)
    equal = (left_ids, left_extras) == (right_ids, right_extras)
    assert (keys.block_key(5, left_ids, left_extras) == keys.block_key(5, right_ids, right_extras)) == equal


@settings(max_examples=50)
@given(st.lists(TOKEN, max_size=40), request_extras(), st.integers(1, 5), st.integers(0, 40))
def test_chains_are_prefix_closed(token_ids, extras, block_size, cut):
    """The names of a prefix are a prefix of the names, in every algorithm and for block keys."""
    prefix = token_ids[:cut]
    for hasher in [VllmHasher(algo, "0") for algo in VLLM_ALGOS]:
        whole = hasher.hash_tokens(token_ids, block_size, extras=extras)
        assert whole[: len(prefix) // block_size] == hasher.hash_tokens(prefix, block_size, extras=extras)
    keys = BlockKeyHasher(1)
    whole = keys.chain(token_ids, block_size, extras=extras)
    assert len(whole) == len(token_ids) // block_size
    assert whole[: len(prefix) // block_size] == keys.chain(prefix, block_size, extras=extras)


@given(st.lists(TOKEN, max_size=40), request_extras(), st.integers(1, 5))
def test_growing_equals_hashing_at_once(token_ids, extras, block_size):
    """Digests appended token by token equal those of the whole sequence."""
    hasher = VllmHasher("xxhash_cbor", "0")
    known: list[bytes] = []
    for end in range(len(token_ids) + 1):
        known += hasher.extend_chain(known, token_ids[:end], block_size, extras=extras)
    assert known == hasher.hash_tokens(token_ids, block_size, extras=extras)


@given(request_extras(), st.integers(1, 6), st.integers(0, 6))
def test_what_is_published_leads_to_the_same_block_extras(extras, block_size, index):
    """Reading an event's untagged keys gives the dimensions that were hashed, minus the LoRA path."""
    start = index * block_size
    tagged, _ = block_extra_keys(extras, start, start + block_size)
    lora_name = extras.lora.name if extras.lora else None
    read = BlockExtras.from_published(published_extra_keys(tagged), lora_name)
    assert read == BlockExtras.from_tagged(tagged)
