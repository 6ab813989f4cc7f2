"""BlockKeyHasher and BlockExtras: typed dimensions, seeds, readers of event keys."""

import pytest
import xxhash

from kvatlas.errors import HashingError
from kvatlas.hashing import (
    NO_BLOCK_EXTRAS,
    BlockExtras,
    BlockKeyHasher,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    RequestExtras,
    block_extra_keys,
    published_extra_keys,
)

KEYS = BlockKeyHasher(7)


def test_encoding_is_pinned():
    """Keys may be stored in snapshots and shared by processes: the encoding must not change unnoticed."""
    extras = BlockExtras("ad", (("img", -2),), "salt", b"\x01" * 32)
    assert KEYS.root_key("model") == 5883519010230561160
    assert KEYS.block_key(1, [1, 2, 3, 4]) == 15521229752750678684
    assert KEYS.block_key(1, [1, 2, 3, 4], extras) == 8351146838221693556


def test_hashed_bytes_are_as_documented():
    """The layout in the module's docstring, written out by hand."""
    extras = BlockExtras("ad", (("img", -2),), "s", b"\x01\x02")
    head = bytes.fromhex("42" + "0500000000000000" + "02000000" + "0100000000000000" + "ffffffffffffff7f")
    fields = b"l\x02\0\0\0ad" + b"m\x0b\0\0\0\xfe" + b"\xff" * 7 + b"img" + b"s\x01\0\0\0s" + b"e\x02\0\0\0\x01\x02"
    assert KEYS.block_key(5, [1, 2**63 - 1], extras) == xxhash.xxh3_64_intdigest(head + fields, 7)


def test_one_text_in_each_dimension_gives_different_keys():
    """T12: LoRA name, salt, image id and embeds of the same text are four different blocks, and none is plain."""
    extras = [
        NO_BLOCK_EXTRAS,
        BlockExtras(lora_name="x"),
        BlockExtras(cache_salt="x"),
        BlockExtras(multimodal=(("x", 0),)),
        BlockExtras(prompt_embeds_digest=b"x"),
    ]
    assert len({KEYS.block_key(0, [1, 2], extra) for extra in extras}) == len(extras)


def test_chain_equals_block_by_block():
    """`chain` is `block_key` folded over full blocks, starting at the namespace's root."""
    extras = RequestExtras(lora=Lora("ad", "/p"), multimodal=(MultimodalItem("X", 2, 7),), cache_salt="s")
    key = KEYS.root_key("m")
    expected = []
    for start in (0, 4, 8):
        tagged, _ = block_extra_keys(extras, start, start + 4)
        key = KEYS.block_key(key, range(start, start + 4), BlockExtras.from_tagged(tagged))
        expected.append(key)
    assert KEYS.chain(range(15), 4, extras=extras, namespace="m").tolist() == expected


def test_request_and_event_agree():
    """What an event publishes about a block leads to the key the request computes, LoRA path lost on the way."""
    extras = RequestExtras(
        lora=Lora("ad", "/p"),
        multimodal=(MultimodalItem("ad", 1, 4),),
        cache_salt="ad",
        prompt_embeds=PromptEmbeds(bytes(8), 1),
    )
    for start in (0, 4):
        tagged, _ = block_extra_keys(extras, start, start + 4)
        published = published_extra_keys(tagged)
        assert BlockExtras.from_published(published, "ad") == BlockExtras.from_tagged(tagged)


def test_seed_namespace_and_length_matter():
    """Other seed, other model or other block length: other keys; an unseeded hasher picks its own seed."""
    assert BlockKeyHasher(8).chain([1, 2], 2) != KEYS.chain([1, 2], 2)
    assert KEYS.chain([1, 2], 2, namespace="a") != KEYS.chain([1, 2], 2, namespace="b")
    assert KEYS.block_key(0, [1]) != KEYS.block_key(0, [1, 0])
    assert BlockKeyHasher().seed != BlockKeyHasher().seed


def test_bad_inputs():
    """Seeds, parents, block sizes and token ids out of range are refused."""
    for call in (
        lambda: BlockKeyHasher(-1),
        lambda: BlockKeyHasher(2**64),
        lambda: KEYS.block_key(-1, [1]),
        lambda: KEYS.block_key(0, [-1]),
        lambda: KEYS.chain([1], 0),
        lambda: KEYS.block_key(0, [1], BlockExtras(multimodal=(("x", 2**63),))),
    ):
        with pytest.raises(HashingError):
            call()


def test_lone_surrogates_have_a_key():
    """A salt that is not valid Unicode (JSON allows it) neither fails nor equals another."""
    first, second = (KEYS.chain([1], 1, extras=RequestExtras(cache_salt=salt)) for salt in ("\ud800", "\ud801"))
    assert first != second


@pytest.mark.parametrize(
    ("published", "lora_name", "cache_salt", "expected"),
    [
        (None, None, None, NO_BLOCK_EXTRAS),
        ((), None, "", NO_BLOCK_EXTRAS),
        (None, "ad", None, BlockExtras(lora_name="ad")),
        (None, None, "s", BlockExtras(cache_salt="s")),
        (["ad", ["X", 2], "s"], "ad", None, BlockExtras("ad", (("X", 2),), "s")),
        (["ad", "ad"], "ad", None, BlockExtras("ad", (), "ad")),
        (["s", b"d"], None, None, BlockExtras(None, (), "s", b"d")),
        (["s"], "ad", None, BlockExtras("ad", (), "s")),
        (["s"], None, "s", BlockExtras(None, (), "s")),
    ],
)
def test_published_keys_are_told_apart(published, lora_name, cache_salt, expected):
    """Type and lora_name decide: first element equal to the LoRA name, pairs, bytes, and one salt."""
    assert BlockExtras.from_published(published, lora_name, cache_salt) == expected


@pytest.mark.parametrize("bad", [["a", "b"], [b"a", b"b"], [7], [["X", "2"]], [["X", 1, 2]], [["X", True]], [None]])
def test_ambiguous_published_keys_are_refused(bad):
    """Keys that cannot be told apart are an error, never a guess."""
    with pytest.raises(HashingError):
        BlockExtras.from_published(bad, None)


def test_unknown_tag():
    """A tagged key of an unknown kind is refused."""
    with pytest.raises(HashingError, match="lora, mm, cache_salt or prompt_embeds"):
        BlockExtras.from_tagged((("color", "red"),))
