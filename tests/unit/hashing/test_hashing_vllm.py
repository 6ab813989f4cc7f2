"""VllmHasher: chains, seeds, inputs."""

import pickle
from array import array

import pytest

from kvatlas.errors import HashingError
from kvatlas.hashing import VLLM_ALGOS, Lora, MultimodalItem, PromptEmbeds, RequestExtras, VllmHasher, block_extra_keys
from kvatlas.hashing.cbor import encode


class Index:
    """An integer-like that is not an int, as numpy's scalars are."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("algo", VLLM_ALGOS)
@pytest.mark.parametrize(
    "token_ids",
    [
        (1, 2, 3, 4),
        array("i", [1, 2, 3, 4]),
        [Index(1), 2, 3, Index(4)],
        [True, 2, 3, 4],
        b"\x01\x02\x03\x04",
        range(1, 5),
    ],
    ids=["tuple", "array", "index", "bool", "bytes", "range"],
)
def test_digest_depends_on_values_not_on_types(algo, token_ids):
    """Any sequence of integer-likes hashes like a list of plain ints."""
    hasher = VllmHasher(algo, "0")
    assert hasher.hash_block(None, token_ids) == hasher.hash_block(None, [1, 2, 3, 4])
    assert hasher.hash_tokens(token_ids, 2) == hasher.hash_tokens([1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([1, -1], "token id -1 is negative: expected 0..2^63-1"),
        ([1, 2**63], "token id 9223372036854775808 is too large: expected 0..2^63-1"),
        ([1, 1 << 40_000], "token id of 40001 bits is too large: expected 0..2^63-1"),
        ([1.0, 2], "token ids must be integers: got 1.0 (float)"),
        (["1", 2], "token ids must be integers: got '1' (str)"),
        ("12", "token ids must be integers: got '1' (str)"),
        ([None, 1], "token ids must be integers: got None (NoneType)"),
        (7, "token ids must be a sequence of integers in 0..2^63-1, got int"),
    ],
)
def test_bad_token_ids(bad, says):
    """Anything but integers in 0..2**63-1 is refused; the message names the first bad one."""
    with pytest.raises(HashingError) as caught:
        VllmHasher("sha256", "0").hash_block(None, bad)
    assert caught.value.message.startswith(says)


def test_largest_token_id():
    """2**63 - 1 is still a token id; every width below hashes, each to a digest of its own; one more is refused."""
    for algo in VLLM_ALGOS:
        hasher = VllmHasher(algo, "0")
        digests = {hasher.hash_block(None, [token]) for token in (0, 2**31 - 1, 2**31, 2**32, 2**63 - 1)}
        assert len(digests) == 5
        with pytest.raises(HashingError):
            hasher.hash_block(None, [2**63])


def test_unknown_algorithm_and_block_size():
    """Errors say what is allowed."""
    with pytest.raises(HashingError, match="sha256_cbor"):
        VllmHasher("md5")
    with pytest.raises(HashingError, match="at least 1"):
        VllmHasher().hash_tokens([1], 0)


def test_falsy_parent_is_the_none_hash():
    """None and empty bytes start a chain."""
    hasher = VllmHasher("sha256_cbor", "0")
    first = hasher.hash_block(hasher.none_hash, [1, 2])
    assert hasher.hash_block(None, [1, 2]) == first == hasher.hash_block(b"", [1, 2])
    assert hasher.hash_block(None, [1, 2], ()) == first


def test_only_complete_blocks():
    """7 tokens of block size 4 make one digest, 8 make two."""
    hasher = VllmHasher("sha256_cbor", "0")
    assert len(hasher.hash_tokens(range(7), 4)) == 1
    assert len(hasher.hash_tokens(range(8), 4)) == 2
    assert hasher.hash_tokens([], 4) == []


def test_salt_changes_the_whole_chain():
    """Scenario 7: the salt is in block 0's keys only, later digests inherit it."""
    hasher = VllmHasher("sha256_cbor", "0")
    salted = RequestExtras(cache_salt="x")
    assert [block_extra_keys(salted, start, start + 4)[0] for start in (0, 4)] == [(("cache_salt", "x"),), None]
    plain = hasher.hash_tokens(range(8), 4)
    both = hasher.hash_tokens(range(8), 4, extras=salted)
    assert plain[0] != both[0]
    assert plain[1] != both[1]


def test_empty_salt_is_no_salt():
    """Scenario 8: an empty or missing salt adds no key."""
    hasher = VllmHasher("sha256_cbor", "0")
    assert hasher.hash_tokens(range(8), 4, extras=RequestExtras(cache_salt="")) == hasher.hash_tokens(range(8), 4)
    assert RequestExtras(cache_salt="").is_empty


def test_lora_path_is_hashed_but_not_published():
    """Scenario 10: one adapter name at two paths hashes differently."""
    hasher = VllmHasher("sha256_cbor", "0")
    here, there = (RequestExtras(lora=Lora("ad", path)) for path in ("/a", "/b"))
    assert hasher.hash_tokens(range(4), 4, extras=here) != hasher.hash_tokens(range(4), 4, extras=there)


def test_prompt_embeds_key_every_block():
    """Scenario 11: each block is keyed by the digest of its slice, decode blocks by the digest of nothing."""
    extras = RequestExtras(prompt_embeds=PromptEmbeds(bytes(range(16)), bytes_per_token=2))
    keys = [block_extra_keys(extras, start, start + 4)[0] for start in (0, 4, 8)]
    assert len(set(keys)) == 3
    assert keys[2][0][0] == "prompt_embeds"
    assert keys[2][0][1].hex().startswith("e3b0c442")


def test_resumed_chain_equals_the_whole():
    """Hashing in steps (as outputs arrive) gives the digests of hashing at once, multimodal cursor included."""
    hasher = VllmHasher("sha256_cbor", "0")
    extras = RequestExtras(
        lora=Lora("ad", "/p"), multimodal=(MultimodalItem("Y", 9, 2), MultimodalItem("X", 2, 7)), cache_salt="s"
    )
    whole = hasher.hash_tokens(range(18), 4, extras=extras)
    known: list[bytes] = []
    for end in range(19):
        known += hasher.extend_chain(known, range(end), 4, extras=extras)
    assert known == whole


def test_multimodal_cursor_from_the_end():
    """A negative cursor counts from the last item; a cursor past everything finds nothing."""
    extras = RequestExtras(multimodal=(MultimodalItem("X", 0, 2), MultimodalItem("Y", 4, 2)))
    assert block_extra_keys(extras, 4, 8, -1) == ((("mm", "Y", 0),), 2)
    assert block_extra_keys(extras, 8, 12, 0) == (None, 0)


def test_bad_extras():
    """An empty placeholder range and torn embeddings are refused."""
    with pytest.raises(HashingError, match="length > 0"):
        MultimodalItem("X", 0, 0)
    with pytest.raises(HashingError, match="whole positions"):
        PromptEmbeds(b"abc", 2)


def test_cbor_refuses_what_a_block_never_holds():
    """Floats, lists, lone surrogates and 65-bit integers have no place in a hashed block."""
    for bad in (1.0, [1], "\ud800", 2**64, -(2**64) - 1, True):
        with pytest.raises(HashingError):
            encode(bad)


def test_blocks_over_64_kib_pickle_in_several_frames():
    """A huge block still hashes as CPython pickles it."""
    hasher = VllmHasher("sha256", "0")
    token_ids = tuple(range(70000, 95000))
    data = pickle.dumps((hasher.none_hash, token_ids, None), protocol=5)
    assert hasher.hash_block(None, list(token_ids)) == hasher._digest(data)
