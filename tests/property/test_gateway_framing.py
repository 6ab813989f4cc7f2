"""However a client's bytes are cut, the gateway reads the same requests; whatever they are, it never breaks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import KvAtlasError
from kvatlas.gateway.heads import RequestIds, forward_head, insert_response_headers, read_request_head
from kvatlas.gateway.reader import RequestReader
from kvatlas.gateway.usage import NO_USAGE, Usage, parse_usage

TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ-0123456789", min_size=1, max_size=12).map(
    lambda text: "X-" + text
)
VALUE = st.text("abc XYZ,;=/\"'()\t09", max_size=20).map(str.strip)
BODY = st.one_of(
    st.binary(max_size=300), st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
)


@st.composite
def requests(draw) -> tuple[bytes, bytes]:
    """A valid request's bytes, and its body."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE"]))
    fields = draw(st.lists(st.tuples(TOKEN, VALUE), max_size=5))
    body = draw(BODY) if method in {"POST", "PUT"} else b""
    lines = [f"{method} /v1/x?q=%20{draw(st.integers(0, 99))} HTTP/1.1", "Host: h"] + [f"{n}: {v}" for n, v in fields]
    upgrade = draw(st.booleans()) if body else False
    if body and not upgrade and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
        pieces = [piece for piece in map(lambda a, b: body[a:b], [0, *cuts], [*cuts, len(body)]) if piece]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"
        framed += draw(st.sampled_from([b"", b"X-Trailer: t\r\nHost: evil\r\n"])) + b"\r\n"
        lines.append("Transfer-Encoding: chunked")
    else:
        framed = body
        if body or draw(st.booleans()):
            lines.append(f"content-length: {len(body)}")
        if upgrade:
            lines += ["Connection: Upgrade", "Upgrade: h2c"]
    return "\r\n".join([*lines, "", ""]).encode() + framed, body


def read(pieces: list[bytes]) -> tuple[list[tuple[bytes, bytes]], KvAtlasError | None]:
    """What is forwarded of a stream that comes in these pieces, and the refusal that ended it."""
    reader = RequestReader(RequestIds(), max_head_bytes=4096, max_body_bytes=100_000)
    for piece in pieces:
        reader.feed(piece)
    forwarded = [
        (forward_head(ready.head, "id", ("w:1", ""), (), ready.request.body), ready.request.body)
        for ready in reader.ready
    ]
    assert not reader.reading or reader.refusal is None
    return forwarded, reader.refusal


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Data cut at these places (modulo its length)."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=12))
def test_cuts_do_not_change_what_is_forwarded(sent: list[tuple[bytes, bytes]], at: list[int]):
    """One read, a read per byte and any cuts between give the same forwarded requests with the same bodies."""
    data = b"".join(request for request, _ in sent)
    whole, refusal = read([data])
    assert refusal is None
    assert [body for _, body in whole] == [body for _, body in sent]
    assert read(cut(data, at)) == (whole, None)
    assert read([data[i : i + 1] for i in range(len(data))]) == (whole, None)


@given(
    st.lists(requests(), min_size=1, max_size=2),
    st.integers(0, 5000),
    st.binary(max_size=6),
    st.lists(st.integers(0, 5000), max_size=5),
)
def test_damaged_requests_are_read_alike_or_refused(sent, place: int, damage: bytes, at: list[int]):
    """With bytes overwritten anywhere, cuts still decide nothing: the same requests come out, the same are refused."""
    data = b"".join(request for request, _ in sent)
    place %= len(data)
    data = data[:place] + damage + data[place + len(damage) :]
    whole, refusal = read([data])
    pieces, pieces_refusal = read(cut(data, at))
    assert pieces == whole
    assert type(pieces_refusal) is type(refusal)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_break_the_reader(data: bytes):
    """Garbage is refused or waited on; nothing is raised."""
    forwarded, _ = read([data])
    assert all(head.endswith(b"\r\n\r\n") for head, _ in forwarded)


@given(requests())
def test_a_forwarded_head_reads_as_the_same_head(sent: tuple[bytes, bytes]):
    """Forwarding what was forwarded changes nothing more: same fields, same length, one Host."""
    ((first, body),) = read([sent[0]])[0]
    again = read_request_head(first[:-4])
    assert forward_head(again, "id", ("w:1", ""), (), body) == first


@given(st.lists(st.tuples(TOKEN, VALUE), max_size=6), st.binary(max_size=50))
def test_insertion_only_inserts(fields: list[tuple[str, str]], body: bytes):
    """With fields of no meaning to this hop, taking the inserted lines out gives the original."""
    kept = [(n, v) for n, v in fields if not n.lower().startswith(("x-request-id", "x-kvatlas-"))]
    head = ("HTTP/1.1 200 OK\r\n" + "".join(f"{n}: {v}\r\n" for n, v in kept) + "\r\n").encode()
    out = insert_response_headers(head + body, len(head), b"i: j\r\n")
    assert out == head.replace(b"\r\n", b"\r\ni: j\r\n", 1) + body


@given(
    st.binary(max_size=200), st.integers(0, 10**9), st.one_of(st.none(), st.integers(0, 10**6)), st.binary(max_size=30)
)
def test_usage_is_found_behind_anything(before: bytes, prompt: int, cached: int | None, after: bytes):
    """Whatever precedes it; and arbitrary bytes alone never raise."""
    details = b"null" if cached is None else b'{"cached_tokens":%d}' % cached
    usage = b'{"x":1,"usage":{"prompt_tokens":%d,"prompt_tokens_details":%b}}' % (prompt, details)
    assert parse_usage(before + usage) == Usage(prompt, None, cached)
    assert parse_usage(before + after) == NO_USAGE or b'"usage"' in before + after
