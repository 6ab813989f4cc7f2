"""The kernels: both backends against vectors of the engines, against the general libraries, and against each other."""

import hashlib
import json
import shutil
import struct
import subprocess
from array import array

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvatlas._native import _pure, load_native
from kvatlas._native.select import NAMES
from kvatlas.errors import HashingError
from support.backends import BACKENDS, NATIVE, NOT_BUILT, can_build
from support.golden import PROJECT_ROOT, VECTORS

GOLDEN = json.loads((VECTORS / "hashing-vllm.json").read_text())
CBOR_CHAINS = [case for case in GOLDEN["chains"] if case["algo"] == "sha256_cbor"]
NONE_HASHES = {case["seed"]: case["hex"] for case in GOLDEN["none_hash"] if case["algo"] == "sha256_cbor"}
BASIS = 0xCBF29CE484222325

ARM_TOOLS = shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64-static")

both = pytest.mark.parametrize("kernels", BACKENDS)
needs_native = pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)

TOKEN = st.one_of(
    st.integers(0, 300), st.integers(0, 2**17), st.integers(2**32 - 2, 2**32 + 2), st.integers(0, 2**63 - 1)
)
EXTRA = st.none() | st.binary(max_size=200)


U32_TOKEN = st.one_of(st.integers(0, 300), st.integers(0, 2**17), st.integers(0, 2**32 - 1))


@st.composite
def chains(draw, tokens=TOKEN):
    """Token ids, a block size, and extras for each block or none."""
    block_size = draw(st.integers(1, 40))
    token_ids = draw(st.lists(tokens, max_size=130))
    num_blocks = len(token_ids) // block_size
    extras = draw(st.none() | st.lists(EXTRA, min_size=num_blocks, max_size=num_blocks))
    return token_ids, block_size, extras


def rows(digests):
    """Digests as hex."""
    return [digest.hex() for digest in digests]


# What engines publish


@both
@pytest.mark.parametrize("case", CBOR_CHAINS, ids=lambda case: f"{case.get('name', '')}-{case['seed']}")
def test_vllm_chains(kernels, case):
    """A real vLLM's sha256_cbor digests, from a list, a tuple, and arrays of 4 and 8 bytes."""
    parent = bytes.fromhex(NONE_HASHES[case["seed"]])
    ids = case["token_ids"]
    for token_ids in (ids, tuple(ids), array("i", ids), array("I", ids), array("q", ids), array("Q", ids)):
        assert rows(kernels.chain_sha256_cbor(token_ids, case["block_size"], parent)) == case["hex"]


@both
@pytest.mark.parametrize("case", GOLDEN["extra_keys"], ids=lambda case: case["name"])
def test_vllm_extra_keys(kernels, case):
    """Each kind of extra key, given as CBOR, leads to the digest of a real vLLM."""

    def tuples(value):
        if isinstance(value, list):
            return tuple(map(tuples, value))
        return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value

    extra = None if case["extra_keys"] is None else cbor2.dumps(tuples(case["extra_keys"]), canonical=True)
    parent = bytes.fromhex(NONE_HASHES[case["seed"]])
    (digest,) = kernels.chain_sha256_cbor(case["token_ids"], len(case["token_ids"]), parent, [extra])
    assert digest.hex() == case["hex"]["sha256_cbor"]


@both
@pytest.mark.parametrize(
    ("token_ids", "page_size", "bigram", "expected"),
    [
        (
            range(32),
            16,
            False,
            [
                "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
                "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
            ],
        ),
        (
            [151644, 872, 198, 9707, 151645, 198, 151644, 77091],
            4,
            False,
            [
                "65c2cc9f0ef284bdfbdfa0ca8cb5878b7eeafcc59e84eed72e420dd06282bce4",
                "ebd6a2cfb6dec9b30b43b1e4fb9021452fb2d32b7308cd362cab15cd68111979",
            ],
        ),
        (
            [1, 2, 3, 4, 5],
            2,
            True,
            [
                "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269",
                "678c5307f2a02a2aaf8edbeb80ebac13663f70e14a4fc8d5d62b77e702841e4b",
            ],
        ),
        (
            [10, 11, 12],
            1,
            True,
            [
                "50ac472466c102b9f97990af92e6c7acc1e76efbfd9b10904c4e2cfd533b0ca8",
                "dd64979a28ffbe6f5af1f92d74e35321a1256e97897fe310200fe498a7784a32",
            ],
        ),
        ([2**32, 1], 2, False, ["0b45c074fe1a25a1cecda69e81f68b777e83ad8793ae6fed071773015d05210e"]),
        (range(1, 65), 64, False, ["0c8f462927e331f28e3f1a6d342957cd27118febc309bd3b2f646e2dfbaeec32"]),
    ],
    ids=["plain", "wide vocabulary", "bigram", "bigram of one", "64-bit ids", "page of 64"],
)
def test_sglang_pages(kernels, token_ids, page_size, bigram, expected):
    """Page digests a real SGLang computed."""
    assert rows(kernels.chain_sha256_pages(list(token_ids), page_size, bigram=bigram)) == expected


@both
@pytest.mark.parametrize(
    ("seed", "model", "token_ids", "block_size", "extras", "expected"),
    [
        ("", "m", range(1, 33), 16, None, ["fccf55888d5ee3d5", "1f279613e611c44a"]),
        ("42", "m", range(1, 33), 16, None, ["923b8e59683f3f17", "ac29e994cb8a329c"]),
        ("", "m", range(1, 18), 16, None, ["fccf55888d5ee3d5"]),
        ("", "my-lora", range(1, 17), 16, None, ["2aa0cb60b77b53f7"]),
        ("", "m", range(1, 33), 16, [None, [{"Hash": "img"}]], ["fccf55888d5ee3d5", "e77dcb5e8829e8fa"]),
        ("", "m", [128000, 151644, 0, 2**32 - 1, *[65536] * 12], 16, None, ["282ae79c4a1b9386"]),
        ("", "m", range(1, 33), 16, [[{"Hash": "s"}], None], ["b2c5058f67b39d89", "65071bfcdeaf16e4"]),
        (
            "",
            "ibm-granite/granite-3.1-8b-instruct",
            [8197, 438, 322, 18926, 432, 45600, 49],
            4,
            None,
            ["1286d14d8d6de8c0"],
        ),
    ],
    ids=["plain", "seed", "tail", "lora", "image", "wide ids", "salt", "published by llm-d"],
)
def test_llmd_keys(kernels, seed, model, token_ids, block_size, extras, expected):
    """llm-d's default keys; the root is the key of the model name under the hash of the seed."""
    root = kernels.fnv1a_64(cbor2.dumps([kernels.fnv1a_64(seed.encode()), None, model], canonical=True))
    encoded = None if extras is None else [x and cbor2.dumps(x, canonical=True) for x in extras]
    keys = kernels.chain_fnv1a_cbor(list(token_ids), block_size, root, encoded)
    assert [f"{key:016x}" for key in keys] == expected


@both
def test_fnv_of_seeds(kernels):
    """llm-d's initial hashes of the empty seed and of "42"."""
    assert kernels.fnv1a_64(b"") == BASIS
    assert kernels.fnv1a_64(b"42") == 0x07EE7E07B4B19223


# Against the general libraries


@both
@given(chains(), st.binary(max_size=40))
def test_sha256_cbor_equals_the_libraries(kernels, chain, parent):
    """The digests of hashlib over cbor2's canonical form, block by block."""
    token_ids, block_size, extras = chain
    expected = []
    for block in range(len(token_ids) // block_size):
        ids = token_ids[block * block_size : (block + 1) * block_size]
        extra = b"\xf6" if extras is None or extras[block] is None else extras[block]
        parent_and_ids = cbor2.dumps((parent if not expected else expected[-1], ids), canonical=True)[1:]
        expected.append(hashlib.sha256(b"\x83" + parent_and_ids + extra).digest())
    assert kernels.chain_sha256_cbor(token_ids, block_size, parent, extras) == expected


@both
@given(st.binary(max_size=2500), st.integers(0, 2**64 - 1))
def test_xxh3_equals_the_library(kernels, data, seed):
    """Any bytes, any seed."""
    assert kernels.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@both
def test_xxh3_equals_the_library_at_every_length(kernels):
    """Each length up to 300 and around the long form's inner blocks: all the ways the algorithm reads its input."""
    data = bytes(number * 37 % 251 for number in range(4200))
    lengths = [*range(301), *range(1000, 1100), *range(2040, 2060), *range(4090, 4200)]
    for seed in (0, 1, 2**64 - 1):
        assert [kernels.xxh3_64(data[:n], seed) for n in lengths] == [
            xxhash.xxh3_64_intdigest(data[:n], seed) for n in lengths
        ]


@both
@given(st.binary(max_size=2500), st.integers(0, 2**64 - 1))
def test_xxh3_128_equals_the_library(kernels, data, seed):
    """Any bytes, any seed."""
    assert kernels.xxh3_128(data, seed) == xxhash.xxh3_128_digest(data, seed)


@both
def test_xxh3_128_equals_the_library_at_every_length(kernels):
    """Each length up to 300 and around the long form's inner blocks: all the ways the algorithm reads its input."""
    data = bytes(number * 37 % 251 for number in range(4200))
    lengths = [*range(301), *range(1000, 1100), *range(2040, 2060), *range(4090, 4200)]
    for seed in (0, 1, 2**64 - 1):
        assert [kernels.xxh3_128(data[:n], seed) for n in lengths] == [
            xxhash.xxh3_128_digest(data[:n], seed) for n in lengths
        ]


@both
@given(chains(), st.binary(max_size=40))
def test_xxh3_128_cbor_equals_the_libraries(kernels, chain, parent):
    """The digests of xxhash over cbor2's canonical form, block by block."""
    token_ids, block_size, extras = chain
    expected = []
    for block in range(len(token_ids) // block_size):
        ids = token_ids[block * block_size : (block + 1) * block_size]
        extra = b"\xf6" if extras is None or extras[block] is None else extras[block]
        parent_and_ids = cbor2.dumps((parent if not expected else expected[-1], ids), canonical=True)[1:]
        expected.append(xxhash.xxh3_128_digest(b"\x83" + parent_and_ids + extra))
    assert kernels.chain_xxh3_128_cbor(token_ids, block_size, parent, extras) == expected


def u32_bytes(token_ids):
    """Ids as 4 bytes little-endian each."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


@both
@given(chains(U32_TOKEN), st.integers(0, 2**64 - 1))
def test_xxh64_chain_equals_the_library(kernels, chain, parent):
    """XXH64 over parent, ids and extra, block by block; long blocks reach the algorithm's four lanes."""
    token_ids, block_size, extras = chain
    keys = kernels.chain_xxh64(token_ids, block_size, parent, extras).tolist()
    assert len(keys) == len(token_ids) // block_size
    for block, key in enumerate(keys):
        ids = token_ids[block * block_size : (block + 1) * block_size]
        extra = (extras and extras[block]) or b""
        assert key == xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + u32_bytes(ids) + extra)
        parent = key


@both
@given(chains(U32_TOKEN), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_xxh3_blocks_equal_the_library(kernels, chain, seed, overlap):
    """XXH3-64 over each block's window of ids and its extra; a window that is not complete is left out."""
    token_ids, block_size, extras = chain
    starts = range(0, len(token_ids) - block_size - overlap + 1, block_size)
    windows = [u32_bytes(token_ids[start : start + block_size + overlap]) for start in starts]
    tails = [(extras and extras[block]) or b"" for block in range(len(windows))]
    expected = [xxhash.xxh3_64_intdigest(window + tail, seed) for window, tail in zip(windows, tails, strict=True)]
    assert kernels.xxh3_blocks(token_ids, block_size, seed, extras, overlap=overlap).tolist() == expected


@both
@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=9), st.none() | st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)
)
def test_xxh3_pairs_equal_the_library(kernels, hashes, parent, seed):
    """XXH3-64 over the chained hash so far and the next one; without a parent the first starts the chain."""
    for form in (hashes, tuple(hashes), array("Q", hashes)):
        chain = kernels.chain_xxh3_pairs(form, parent, seed).tolist()
        assert len(chain) == len(hashes)
        for before, own, after in zip([parent, *chain], hashes, chain, strict=False):
            pair = b"" if before is None else before.to_bytes(8, "little") + own.to_bytes(8, "little")
            assert after == (xxhash.xxh3_64_intdigest(pair, seed) if pair else own)


# Each other


def outcome(kernels, function, *arguments, **options):
    """What a call returns, or says when it refuses."""
    try:
        return getattr(kernels, function)(*arguments, **options)
    except HashingError as error:
        return str(error)


@needs_native
@given(chains(), st.binary(max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans())
def test_native_equals_pure(chain, parent, key, seed, bigram):
    """Every function, from every kind of sequence; those of 32-bit ids refuse wider ones in the same words."""
    token_ids, block_size, extras = chain
    forms = [token_ids, tuple(token_ids), array("Q", token_ids), array("q", token_ids)]
    if all(token < 2**32 for token in token_ids):
        forms.append(array("I", token_ids))
    if all(token < 2**31 for token in token_ids):
        forms.append(array("i", token_ids))
    for form in forms:
        for function, *arguments in [
            ("chain_sha256_cbor", block_size, parent, extras),
            ("chain_xxh3_128_cbor", block_size, parent, extras),
            ("chain_xxh3", block_size, key, seed, extras),
            ("chain_fnv1a_cbor", block_size, key, extras),
            ("chain_xxh64", block_size, key, extras),
            ("xxh3_blocks", block_size, seed, extras),
        ]:
            assert outcome(NATIVE, function, form, *arguments) == outcome(_pure, function, form, *arguments)
        windows = outcome(NATIVE, "xxh3_blocks", form, block_size, seed, overlap=1)
        assert windows == outcome(_pure, "xxh3_blocks", form, block_size, seed, overlap=1)
        pages = NATIVE.chain_sha256_pages(form, block_size, parent, bigram=bigram)
        assert pages == _pure.chain_sha256_pages(form, block_size, parent, bigram=bigram)
        assert NATIVE.pack_tokens(form).tolist() == _pure.pack_tokens(form).tolist() == token_ids
    for first in (None, key):
        assert NATIVE.chain_xxh3_pairs(token_ids, first, seed) == _pure.chain_xxh3_pairs(token_ids, first, seed)
    assert NATIVE.fnv1a_64(parent) == _pure.fnv1a_64(parent)
    assert NATIVE.xxh3_128(parent, seed) == _pure.xxh3_128(parent, seed)


@needs_native
@given(
    st.integers(1, 140),
    st.lists(st.tuples(st.integers(0, 600), st.sampled_from([0, 2**30, 2**62, True, -1, 2**63, 1.0])), max_size=3),
)
def test_long_lists_are_read_alike(block_size, odd):
    """Lists longer than what is read at once, with plain, large, odd and bad ids anywhere in them."""
    token_ids = [number * 977 % 128_000 for number in range(601)]
    for position, value in odd:
        token_ids[position] = value
    for form in (token_ids, tuple(token_ids)):
        keys = outcome(NATIVE, "chain_xxh3", form, block_size, 5, 7)
        assert keys == outcome(_pure, "chain_xxh3", form, block_size, 5, 7)


@needs_native
@given(st.lists(TOKEN, max_size=60), st.integers(1, 9), st.integers(0, 7))
def test_native_reads_a_part_of_a_view_like_pure(token_ids, block_size, first):
    """Slices of what `pack_tokens` returned, by either backend, are read by both."""
    for view in (NATIVE.pack_tokens(token_ids), _pure.pack_tokens(token_ids)):
        part = view[first * block_size :]
        assert NATIVE.chain_xxh3(part, block_size, 1, 2) == _pure.chain_xxh3(part, block_size, 1, 2)


class Row:
    """Says it is an integer and is none, as a row of a two-dimensional numpy array does."""

    def __repr__(self):
        return "row"

    def __index__(self):
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


class Index:
    """An integer by `__index__`, as numpy's are."""

    def __index__(self):
        return 7


@both
@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([True, False], [1, 0]),
        ([Index(), 1], [7, 1]),
        (range(3), [0, 1, 2]),
        (b"\x01\x02", [1, 2]),
        (bytearray(b"\x01\x02"), [1, 2]),
        (array("h", [1, 2]), [1, 2]),
        (memoryview(array("i", [1, 2, 3, 4]))[::2], [1, 3]),
        ([], []),
        (array("i"), []),
        ((2**63 - 1,), [2**63 - 1]),
        ([2**30 - 1, 2**30, 2**60], [2**30 - 1, 2**30, 2**60]),
    ],
    ids=["bool", "index", "range", "bytes", "bytearray", "int16", "strided", "empty", "empty array", "most", "digits"],
)
def test_odd_sequences_are_read(kernels, token_ids, expected):
    """What is not a plain list or array of machine integers is read by its values."""
    assert kernels.pack_tokens(token_ids).tolist() == expected


@both
@pytest.mark.parametrize(
    "token_ids",
    [
        [-1],
        [2**63],
        [2**64],
        (1, -1),
        [1.0],
        ["1"],
        [None],
        5,
        None,
        "12",
        array("i", [1, -1]),
        array("q", [-1]),
        array("Q", [2**63]),
        array("d", [1.0]),
        [1, [2]],
        [Row()],
    ],
    ids=repr,
)
def test_bad_token_ids_are_refused(kernels, token_ids):
    """Both backends refuse the same token ids, in every function, with the same class of error."""
    for call in (
        kernels.pack_tokens,
        lambda ids: kernels.chain_sha256_cbor(ids, 1, b""),
        lambda ids: kernels.chain_sha256_pages(ids, 1),
        lambda ids: kernels.chain_xxh3(ids, 1, 0, 0),
        lambda ids: kernels.chain_fnv1a_cbor(ids, 1, 0),
        lambda ids: kernels.chain_xxh3_128_cbor(ids, 1, b""),
        lambda ids: kernels.chain_xxh64(ids, 1, 0),
        lambda ids: kernels.xxh3_blocks(ids, 1, 0),
    ):
        with pytest.raises(HashingError, match="token id"):
            call(token_ids)


@both
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.chain_sha256_cbor([1], 0, b""), "block size must be"),
        (lambda k: k.chain_sha256_pages([1], -1), "block size must be"),
        (lambda k: k.chain_xxh3([1], 2**32, 0, 0), "block size must be"),
        (lambda k: k.chain_xxh3([1], 1, 2**64, 0), "parent key must be"),
        (lambda k: k.chain_xxh3([1], 1, 0, -1), "seed must be"),
        (lambda k: k.chain_fnv1a_cbor([1], 1, -1), "parent key must be"),
        (lambda k: k.chain_fnv1a_cbor([1, 2], 1, 0, [None]), "one entry for each of 2 blocks"),
        (lambda k: k.xxh3_64(b"", 2**64), "seed must be"),
        (lambda k: k.xxh3_128(b"", -1), "seed must be"),
        (lambda k: k.chain_xxh3_128_cbor([1], 0, b""), "block size must be"),
        (lambda k: k.chain_xxh3_128_cbor([1, 2], 1, b"", [None]), "one entry for each of 2 blocks"),
        (lambda k: k.chain_xxh64([1], 1, 2**64), "parent key must be"),
        (lambda k: k.chain_xxh64([1], 0, 1), "block size must be"),
        (lambda k: k.chain_xxh64([1, 2**32], 1, 1), r"expected 0\.\.2\^32-1, got 4294967296"),
        (lambda k: k.chain_fnv1a_cbor([1, 2**32], 2, 1), r"expected 0\.\.2\^32-1, got 4294967296"),
        (lambda k: k.xxh3_blocks([1, 2**32], 3, 1), r"expected 0\.\.2\^32-1, got 4294967296"),
        (lambda k: k.xxh3_blocks([1], 1, 2**64), "seed must be"),
        (lambda k: k.xxh3_blocks([1], 1, 1, overlap=-1), "overlap must be"),
        (lambda k: k.chain_xxh3_pairs([1], 2**64, 0), "parent key must be"),
        (lambda k: k.chain_xxh3_pairs([1], None, -1), "seed must be"),
        (lambda k: k.chain_xxh3_pairs([2**64], None, 0), "hashes must be"),
        (lambda k: k.chain_xxh3_pairs([-1], None, 0), "hashes must be"),
        (lambda k: k.chain_xxh3_pairs(["1"], None, 0), "hashes must be"),
        (lambda k: k.chain_xxh3_pairs(5, None, 0), "hashes must be"),
    ],
)
def test_bad_arguments_are_refused(kernels, call, message):
    """Both backends refuse them with the same words."""
    with pytest.raises(HashingError, match=message):
        call(kernels)


@needs_native
def test_arrays_are_not_copied():
    """The view of an array is the array's own memory, so a long prompt costs nothing to pass on."""
    token_ids = array("i", [1, 2, 3])
    view = NATIVE.pack_tokens(token_ids)
    token_ids[0] = 9
    assert view.tolist() == [9, 2, 3]
    token_ids[0] = -9
    with pytest.raises(HashingError, match="negative"):
        NATIVE.chain_xxh3(view, 1, 0, 0)


# The build


@pytest.mark.skipif(not can_build(), reason="no C compiler or no Python.h, or KVATLAS_NATIVE=0")
def test_the_extension_is_built_where_it_can_be():
    """A build that silently fell back to Python would go unnoticed: with a compiler at hand that is a failure."""
    native = load_native()
    assert native is not None, "reinstall with `pip install -v -e .` and read why the extension did not build"
    assert [name for name in NAMES if not hasattr(native, name)] == []
    assert native.BACKEND.startswith("native (")


def test_both_backends_have_the_names():
    """The literal list is what the Python twin exports."""
    assert sorted(NAMES) == sorted(_pure.__all__)


@pytest.mark.skipif(shutil.which("cc") is None or shutil.which("make") is None, reason="no C compiler or no make")
def test_c_files_run_clean_under_the_sanitizers():
    """The C driver ends well under AddressSanitizer and UndefinedBehaviorSanitizer."""
    done = subprocess.run(
        ["make", "sanitize"], check=False, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=110
    )
    if "cannot find -lasan" in done.stderr or "cannot find -lubsan" in done.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    assert "all kernels well" in done.stdout


@pytest.mark.skipif(not ARM_TOOLS, reason="no aarch64-linux-gnu-gcc or no qemu-aarch64-static")
def test_c_files_run_well_on_an_emulated_arm(tmp_path):
    """The C driver, built for ARMv8, finds its SHA-256 instructions there and ends well."""
    sources = PROJECT_ROOT / "src/kvatlas/_native/c"
    driver, program = PROJECT_ROOT / "tests/native/driver.c", tmp_path / "driver"
    flags = ["-std=c11", "-O2", "-static", "-I", sources]
    subprocess.run(
        ["aarch64-linux-gnu-gcc", *flags, "-o", program, driver, *sources.glob("*.c")], check=True, timeout=110
    )
    done = subprocess.run(["qemu-aarch64-static", program], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "sha256: armv8 beside portable" in done.stdout


# Runs of batches


@st.composite
def runs(draw):
    """Batches that follow one another, with heads and time stamps of every sort."""
    times = st.floats(0, 50) | st.sampled_from([float("inf"), float("-inf"), float("nan")])
    heads = st.builds(lambda ts: b"\x93\xcb" + struct.pack(">d", ts), times)
    payload = st.builds(lambda head, rest: head + rest, heads | st.binary(max_size=12), st.binary(max_size=40))
    payloads = draw(st.lists(payload, max_size=12))
    first = draw(st.sampled_from([0, 1, 7, 2**32 - 1, 2**53, 2**63 - 3, 2**64 - 12]))
    return first, payloads


@needs_native
@given(runs(), st.floats(0, 50) | st.just(float("-inf")), st.integers(1, 9), st.booleans())
def test_accepted_runs_are_those_of_the_twin(run, last_ts, room, must_rise):
    """The same count, time and digests, whatever the numbers, heads and times are."""
    first, payloads = run
    outcomes = []
    for kernels in (NATIVE, _pure):
        digests = array("Q", [5] * room)
        count, ts = kernels.accept_run(payloads, first, last_ts, digests, must_rise)
        outcomes.append((count, repr(ts), digests))
    assert outcomes[0] == outcomes[1]


@both
def test_an_accepted_run_notes_what_it_saw(kernels):
    """Up to the batch that is older: digests at their places, the time of the last one."""
    payloads = [b"\x93\xcb" + struct.pack(">d", ts) + b"\x90\xc0" for ts in (1.0, 2.0, 1.5)]
    seen = [xxhash.xxh3_64_intdigest(payload, 0) for payload in payloads]
    digests = array("Q", [0] * 4)
    assert kernels.accept_run(payloads, 7, 0.5, digests, True) == (2, 2.0)
    assert list(digests) == [seen[1], 0, 0, seen[0]]
    assert kernels.accept_run(payloads, 7, 1.2, digests, True) == (0, 1.2)
    assert kernels.accept_run([], 7, 1.2, digests, True) == (0, 1.2)
    assert list(digests) == [seen[1], 0, 0, seen[0]]
    assert kernels.accept_run(payloads, 7, 1.2, digests, False) == (3, 1.5)
    assert list(digests) == [seen[1], seen[2], 0, seen[0]]


@both
def test_the_last_number_there_is_can_be_accepted(kernels):
    """2**64 - 1 has its place among the digests as any other number."""
    digests = array("Q", [0] * 5)
    assert kernels.accept_run([b"a", b"b"], 2**64 - 2, 0.0, digests, False) == (2, float("-inf"))
    seen = [xxhash.xxh3_64_intdigest(payload, 0) for payload in (b"a", b"b")]
    assert list(digests) == [seen[1], 0, 0, 0, seen[0]]  # 2**64 is 1 modulo 5


@needs_native
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (((b"a",), 0, 0.0, array("Q", [0]), False), TypeError),
        ((["a"], 0, 0.0, array("Q", [0]), False), TypeError),
        (([None], 0, 0.0, array("Q", [0]), False), TypeError),
        (([(0, b"a")], 0, 0.0, array("Q", [0]), False), TypeError),
        (([b"a"], -1, 0.0, array("Q", [0]), False), OverflowError),
        (([b"a"], 2**64, 0.0, array("Q", [0]), False), OverflowError),
        (([b"a"], 0, 0.0, array("i", [0]), False), ValueError),
        (([b"a"], 0, 0.0, None, False), TypeError),
    ],
)
def test_a_run_of_another_form_is_refused(arguments, error):
    """The kernel takes a list of bytes, a number of 64 bits and words; all else is an error, not a crash."""
    with pytest.raises(error):
        NATIVE.accept_run(*arguments)
