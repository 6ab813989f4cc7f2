"""The one call for all dialects: what it accepts, refuses and returns."""

import dataclasses
from array import array

import pytest

from kvatlas.errors import HashingError
from kvatlas.hashing import (
    DIALECT_OPTIONS,
    DIALECTS,
    LlmdHasher,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    RequestExtras,
    SglangNamespace,
    VllmHasher,
    dynamo_local_hashes,
    dynamo_multimodal_hash,
    dynamo_padded_tokens,
    dynamo_seed,
    dynamo_sequence_hashes,
    fnv1a_64,
    hash64,
    hash_blocks,
    sglang_chain,
    sglang_namespaced_hash,
    signed64,
    unsigned64,
)
from kvatlas.hashing.words import machine_integers, token_words

NEEDED = {"llmd": {"model": "m"}}
TOKENS = [5, 0, 70_000, 2**31 - 1, 151_644, 9, 8, 7, 6]
ADAPTER = "0123456789abcdef0123456789abcdef"


def hashed(dialect, tokens=TOKENS, block_size=4, **options):
    return hash_blocks(dialect, tokens, block_size, **{**NEEDED.get(dialect, {}), **options})


@pytest.mark.parametrize("dialect", DIALECTS)
class TestTokenForms:
    def test_sequences_and_buffers_hash_alike(self, dialect):
        """A list, a tuple, arrays of every width and views of them give the same hashes."""
        expected = hashed(dialect)
        forms = [tuple(TOKENS), *(array(code, TOKENS) for code in "iIlLqQ")]
        forms += [memoryview(forms[1]), memoryview(array("q", TOKENS))]
        forms.append(memoryview(array("i", [x for token in TOKENS for x in (token, 1)]))[::2])
        assert all(hashed(dialect, form) == expected for form in forms)

    def test_numpy_arrays_hash_alike(self, dialect):
        """Numpy's int32, int64, uint32, small and strided arrays give the hashes of a list."""
        numpy = pytest.importorskip("numpy")
        expected = hashed(dialect)
        forms = [numpy.array(TOKENS, dtype=kind) for kind in ("int32", "int64", "uint32", "uint64", ">i4")]
        forms.append(numpy.repeat(forms[1], 2)[::2])
        assert all(hashed(dialect, form) == expected for form in forms)
        assert hashed(dialect, numpy.array([1, 2], dtype="int16"), 2) == hashed(dialect, [1, 2], 2)

    @pytest.mark.parametrize("tokens", [[], (), array("i"), array("q"), [1, 2, 3]], ids=repr)
    def test_too_few_tokens_are_all_tail(self, dialect, tokens):
        """Less than a block gives no hash, and says how many tokens were left."""
        result = hashed(dialect, tokens)
        assert result.blocks == ()
        assert result.tail_tokens == len(tokens)

    @pytest.mark.parametrize(
        "tokens",
        [
            *([-1] * 4, array("i", [1, -1, 1, 1]), array("q", [1, 1, 1, -1]), array("Q", [2**63] * 4), [2**63] * 4),
            *([1.0] * 4, ["1"] * 4, array("d", [1.0] * 4), None, 5),
        ],
        ids=repr,
    )
    def test_bad_tokens_are_refused(self, dialect, tokens):
        """Negative, too large, or no integers at all: an error of ours, whatever carries them."""
        with pytest.raises(HashingError, match="token id"):
            hashed(dialect, tokens)


@pytest.mark.parametrize("dialect", DIALECTS)
class TestCall:
    def test_shape_of_the_answer(self, dialect):
        """Two whole blocks and a tail, in order, unchangeable."""
        result = hashed(dialect)
        assert (result.dialect, result.block_size, result.tail_tokens) == (dialect, 4, 1)
        assert [(block.block, block.first_token) for block in result.blocks] == [(0, 0), (1, 4)]
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.tail_tokens = 0

    def test_unknown_option_names_the_known_ones(self, dialect):
        """The message lists what the dialect has."""
        with pytest.raises(
            HashingError, match=f"{dialect} dialect has no option 'sald'.*{DIALECT_OPTIONS[dialect][-1]}"
        ):
            hashed(dialect, sald="x")

    def test_block_size_below_one(self, dialect):
        """There is no empty block."""
        with pytest.raises(HashingError, match="block size must be at least 1"):
            hashed(dialect, TOKENS, 0)


def test_unknown_dialect_names_the_known_ones():
    """The message lists what exists."""
    with pytest.raises(HashingError, match="choose one of vllm, sglang, llmd, dynamo"):
        hash_blocks("trt", [1], 1)


@pytest.mark.parametrize("dialect", ["llmd", "dynamo"])
@pytest.mark.parametrize("tokens", [[1, 2, 3, 2**32], array("q", [1, 2, 3, 2**32])], ids=["list", "array"])
def test_dialects_of_32_bit_tokens_say_so(dialect, tokens):
    """Wide ids are an error where the dialect has no bytes for them."""
    with pytest.raises(HashingError, match=r"32-bit token ids.*4294967296"):
        hashed(dialect, tokens)


@pytest.mark.parametrize(
    ("dialect", "options", "message"),
    [
        ("vllm", {"algo": "md5"}, "unknown hash algorithm"),
        ("vllm", {"lora": 7}, "lora must be a name"),
        ("sglang", {"chain": "other"}, "unknown chain 'other': choose one of event, storage"),
        ("sglang", {"event_format": "x"}, "unknown event format 'x': choose one of default, dynamo"),
        ("sglang", {"extra_key": 1, "chain": "storage"}, "must be text, got int"),
        ("sglang", {"cache_salt": "\ud800"}, "must be valid Unicode"),
        ("llmd", {"model": ""}, "give model"),
        ("llmd", {"model": 3}, "model must be text"),
        ("llmd", {"algo": "xxhash"}, "choose one of cbor-fnv, xxh64"),
        ("dynamo", {"namespace": b"x"}, "namespace must be text"),
    ],
)
def test_bad_options_are_refused(dialect, options, message):
    """What an option may be is said in the error."""
    with pytest.raises(HashingError, match=message):
        hashed(dialect, **options)


def test_a_buffer_of_32_bits_is_read_in_place():
    """No copy is made: the words are the buffer's own memory."""
    tokens = array("i", TOKENS)
    words, width = token_words(tokens)
    tokens[0] = 6
    assert width == 4
    assert words[0] == 6
    assert machine_integers(memoryview(b"abcd")) is None


def test_vllm_options_reach_the_hasher():
    """The call gives what VllmHasher gives for the same extras."""
    items = (MultimodalItem("img", 4, 2),)
    embeds = PromptEmbeds(b"x" * 18, 2)
    extras = RequestExtras(Lora("a", "/p"), items, "s", embeds)
    digests = VllmHasher("sha256_cbor", "0").hash_tokens(TOKENS, 4, extras=extras)
    result = hashed(
        "vllm",
        algo="sha256_cbor",
        seed="0",
        lora=Lora("a", "/p"),
        multimodal=items,
        cache_salt="s",
        prompt_embeds=embeds,
    )
    assert [(block.digest, block.hash64) for block in result.blocks] == [(d, hash64(d)) for d in digests]
    assert hashed("vllm", lora="") == hashed("vllm")


class TestSglang:
    def test_width_is_decided_page_by_page(self):
        """A wide id changes its own page; the page before keeps its narrow digest, list or buffer alike."""
        wide = [1, 2, 3, 2**32, 5, 6]
        pages = sglang_chain(wide, 2)
        assert pages[0] == sglang_chain([1, 2], 2)[0]
        assert pages[2] == sglang_chain([5, 6], 2, previous=pages[1])[0]
        assert pages == sglang_chain(array("q", wide), 2)

    def test_bigram_pages_share_a_token(self):
        """N + 1 tokens make n units; with no token over, the last page has no right end."""
        assert len(sglang_chain(range(8), 4, bigram=True)) == 1
        assert hash_blocks("sglang", range(9), 4, bigram=True).tail_tokens == 0
        assert hash_blocks("sglang", range(8), 4, bigram=True).tail_tokens == 3

    def test_default_format_shows_tenants_no_difference(self):
        """A tenant's event hashes are those of no tenant; its storage keys are its own."""
        assert hashed("sglang", extra_key="t").blocks == hashed("sglang").blocks
        assert hashed("sglang", extra_key="t", chain="storage").blocks != hashed("sglang", chain="storage").blocks

    def test_without_a_namespace_both_chains_are_one(self):
        """Event chain and storage chain part only by namespaces."""
        assert hashed("sglang", chain="storage") == hashed("sglang")
        assert hashed("sglang", cache_salt="") == hashed("sglang")

    def test_adapter_follows_the_extra_key(self):
        """The engine hashes the caller's key and the adapter's id as one text."""
        assert SglangNamespace("t", ADAPTER).node_key == "t" + ADAPTER
        assert SglangNamespace("t", ADAPTER).storage_seed() == SglangNamespace("t" + ADAPTER).storage_seed()
        assert SglangNamespace("t", None, "s").event_hash_seed() is None

    def test_namespaced_hash_wants_a_signed_hash(self):
        """The unsigned form is refused, not wrapped."""
        with pytest.raises(HashingError, match="signed 64-bit"):
            sglang_namespaced_hash(b"seed", 2**63)

    def test_page_size_below_one(self):
        """There is no empty page."""
        with pytest.raises(HashingError, match="page size"):
            sglang_chain([1], 0)


class TestLlmd:
    def test_fnv_published_vectors(self):
        """FNV-1a's own test vectors for "" and "a" and "foobar"."""
        assert [fnv1a_64(text) for text in (b"", b"a", b"foobar")] == [
            0xCBF29CE484222325,
            0xAF63DC4C8601EC8C,
            0x85944171F73967E8,
        ]

    def test_salt_follows_the_images_of_the_first_block(self):
        """An image id and a salt on block 0 are two extras in this order; later blocks have no salt."""
        hasher = LlmdHasher("xxh64")
        first = hasher.block_key(hasher.root_key("m"), [1, 2], ("img", "s"))
        keys = [first, hasher.block_key(first, [3, 4])]
        extras = RequestExtras(multimodal=(MultimodalItem("img", 0, 1),), cache_salt="s")
        assert hasher.chain([1, 2, 3, 4], 2, model="m", extras=extras) == keys

    def test_adapter_replaces_the_model(self):
        """The LoRA name stands for the model's, whatever the model and the adapter's path."""
        assert hashed("llmd", lora=Lora("a", "/p")).blocks == hashed("llmd", model="a").blocks

    def test_more_than_23_images_in_a_block(self):
        """The list of extras has a head of two bytes then; every image counts."""
        hasher = LlmdHasher()
        many = [str(i) for i in range(24)]
        assert hasher.block_key(5, [1], many) != hasher.block_key(5, [1], many[:-1])

    @pytest.mark.parametrize("parent", [0, -1, 2**64])
    def test_key_zero_is_no_parent(self, parent):
        """0 means "no key"."""
        with pytest.raises(HashingError, match="parent key"):
            LlmdHasher().block_key(parent, [1])

    def test_embeds_and_block_size(self):
        """Prompt embeds have no place in a key, and a block has a token."""
        with pytest.raises(HashingError, match="prompt embeds"):
            LlmdHasher().chain([1], 1, model="m", extras=RequestExtras(prompt_embeds=PromptEmbeds(b"", 1)))
        with pytest.raises(HashingError, match="block size"):
            LlmdHasher().chain([1], 0, model="m")


class TestDynamo:
    def test_empty_names_count_as_none(self):
        """An empty adapter or namespace leaves the seed as it is."""
        assert dynamo_seed("", "") == dynamo_seed() == 1337

    def test_multimodal_id_of_another_form(self):
        """64 hex digits are cut, anything else is hashed."""
        assert dynamo_multimodal_hash("00000000deadbeef" + "0" * 48) == 0xDEADBEEF
        assert dynamo_multimodal_hash("00000000deadbeef") != 0xDEADBEEF

    def test_known_image_token_becomes_a_pad(self):
        """Inside an item's range image tokens are replaced, other tokens and places stay; no bytes are appended."""
        item = MultimodalItem(f"{2**30 + 5:016x}" + "0" * 48, 1, 3)
        tokens = [99, 99, 1, 99, 99, 2]
        assert dynamo_padded_tokens(tokens, [item], 99) == [99, 1_000_005, 1, 1_000_005, 99, 2]
        padded = hash_blocks("dynamo", tokens, 3, multimodal=[item], image_token=99)
        assert padded == hash_blocks("dynamo", [99, 1_000_005, 1, 1_000_005, 99, 2], 3)

    def test_item_over_two_blocks_marks_both(self):
        """An item's hash enters each block it overlaps and no other."""
        plain = dynamo_local_hashes(range(12), 4)
        marked = dynamo_local_hashes(range(12), 4, multimodal=[MultimodalItem("i", 3, 2)])
        assert [a == b for a, b in zip(plain, marked, strict=True)] == [False, False, True]

    def test_chain_goes_on_from_a_parent(self):
        """Sequence hashes of a tail, given the one before, are those of the whole."""
        local = dynamo_local_hashes(range(12), 4)
        whole = dynamo_sequence_hashes(local)
        assert dynamo_sequence_hashes(local[1:], whole[0]) == whole[1:]

    def test_eagle_tail(self):
        """A window reaches one token into the next block."""
        assert hash_blocks("dynamo", range(9), 4, eagle=True).tail_tokens == 0
        assert hash_blocks("dynamo", range(8), 4, eagle=True).tail_tokens == 3

    def test_block_size_below_one(self):
        """There is no empty block."""
        with pytest.raises(HashingError, match="block size"):
            dynamo_local_hashes([1], 0)


def test_signed_forms_have_borders():
    """Both readings cover 64 bits and refuse what lies outside."""
    assert [signed64(value) for value in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
    for call, value in ((signed64, -1), (signed64, 2**64), (unsigned64, 2**63), (unsigned64, -(2**63) - 1)):
        with pytest.raises(HashingError, match="64-bit hash must be in"):
            call(value)
