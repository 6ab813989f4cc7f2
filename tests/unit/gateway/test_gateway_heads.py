"""Request and response heads as bytes."""

import pytest

from kvatlas.errors import BadRequest, ConfigError
from kvatlas.gateway.heads import (
    RequestIds,
    ends_with_connection,
    forward_head,
    insert_response_headers,
    origin_form,
    read_request_head,
)

WHERE = ("w:8000", "")


def head_of(*lines: bytes, first: bytes = b"POST /v1 HTTP/1.1") -> bytes:
    """A request head up to its blank line."""
    return b"\r\n".join((first, b"Host: a", *lines))


class TestReadRequestHead:
    """`read_request_head`"""

    def test_forwarded_lines_are_the_bytes_that_were_sent(self):
        """Spelling, spacing, order and duplicates stay; what speaks to this hop goes."""
        head = read_request_head(
            head_of(
                b"X-B:  two ", b"TE: trailers", b"x-b:", b"Content-Length: 3", b"Proxy-Authorization: p", b"A: \xff"
            )
        )
        assert head.forwarded == b"\r\nX-B:  two \r\nx-b:\r\nA: \xff"
        assert (head.method, head.target, head.content_length) == ("POST", b"/v1", 3)

    def test_names_that_only_begin_like_a_special_one_are_forwarded(self):
        """`te` is hop-by-hop, `telemetry` and `x-te` are not."""
        head = read_request_head(head_of(b"Telemetry: 1", b"X-TE: 2", b"Hostess: 3", b"Upgrade-Insecure-Requests: 1"))
        assert head.forwarded.count(b"\r\n") == 4
        assert not head.upgrade

    def test_nominated_fields_are_hop_by_hop(self):
        """Fields named in Connection are dropped, whatever their case; `close` and `keep-alive` name none."""
        head = read_request_head(
            head_of(b"Connection: close, X-Secret ,x-other", b"X-SECRET: 1", b"X-Other: 2", b"X-C: 3")
        )
        assert head.forwarded == b"\r\nX-C: 3"

    @pytest.mark.parametrize("value", [b"", b"-1", b"+1", b"1,1", b"0x1", b"1 1", b"\xb2", b"9" * 19])
    def test_a_length_that_is_no_plain_number_is_refused(self, value: bytes):
        """Only up to 18 ASCII digits are a length."""
        with pytest.raises(BadRequest, match="content-length"):
            read_request_head(head_of(b"Content-Length: " + value))

    @pytest.mark.parametrize(
        "line", [b"GET /", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET / http/1.1", b"", b"GET / HTTP/3"]
    )
    def test_odd_request_lines_are_refused(self, line: bytes):
        """Method, target and version with one space between, and nothing else."""
        with pytest.raises(BadRequest, match="not spoken here"):
            read_request_head(head_of(first=line))

    @pytest.mark.parametrize("value", [b"a b", b"", b"x" * 129, b"\x7f", b"\xc3\xa9"])
    def test_an_unusable_request_id_is_not_kept(self, value: bytes):
        """Only 1 to 128 visible ASCII characters are echoed and logged."""
        assert read_request_head(head_of(b"X-Request-Id: " + value)).request_id is None

    def test_the_first_usable_request_id_is_kept(self):
        """Several are one too many, and none of them is forwarded twice."""
        head = read_request_head(head_of(b"x-request-id: one", b"X-Request-ID: two"))
        assert (head.request_id, head.forwarded) == ("one", b"")

    def test_http_1_0_needs_no_host_but_may_not_chunk(self):
        """Host is optional in HTTP/1.0, a transfer coding does not exist there."""
        assert read_request_head(b"GET / HTTP/1.0").http_1_0
        with pytest.raises(BadRequest, match="transfer-encoding"):
            read_request_head(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b"/a?b=http://c", b"/a?b=http://c"),
        (b"http://h/a?b", b"/a?b"),
        (b"HTTPS://h:1", b"/"),
        (b"http://h?q=1", b"/?q=1"),
        (b"//h/a", b"//h/a"),
    ],
)
def test_origin_form(given: bytes, sent: bytes):
    """Absolute targets lose scheme and authority; others stay as they are."""
    assert origin_form(given) == sent


@pytest.mark.parametrize("given", [b"*", b"h:443", b"ftp://h/a", b"/a#b", b"a", b"mailto:x"])
def test_targets_that_cannot_be_forwarded(given: bytes):
    """Asterisk, authority and other forms are refused."""
    with pytest.raises(BadRequest, match="request target"):
        origin_form(given)


class TestForwardHead:
    """`forward_head`"""

    def test_a_get_carries_no_length_and_a_post_always_does(self):
        """`content-length: 0` is said for a POST without a body, nothing for a GET."""
        get = read_request_head(head_of(first=b"GET /a HTTP/1.1"))
        assert forward_head(get, "r", WHERE, (), b"") == b"GET /a HTTP/1.1\r\nhost: w:8000\r\nx-request-id: r\r\n\r\n"
        post = read_request_head(head_of())
        assert b"\r\ncontent-length: 0\r\n" in forward_head(post, "r", WHERE, (), b"")

    def test_added_fields_replace_and_are_checked(self):
        """Names match in any case; a value that would break out of its line is refused."""
        head = read_request_head(head_of(b"X-Salt: client", b"X-K: 1"))
        sent = forward_head(head, "r", ("w:1", "/e"), ((b"x-salt", b"ours"),), b"b")
        assert sent.startswith(b"POST /e/v1 HTTP/1.1\r\n")
        assert sent.endswith(b"\r\nX-K: 1\r\nx-salt: ours\r\n\r\n")
        with pytest.raises(ConfigError, match="cannot be sent"):
            forward_head(head, "r", WHERE, ((b"x", b"a\r\nb: c"),), b"")


class TestInsertResponseHeaders:
    """`insert_response_headers`"""

    def test_all_else_stays_byte_for_byte(self):
        """Without fields of this hop the head is only cut after its status line."""
        data = b"HTTP/1.1 200 OK\r\nServer:x\r\nX: connection: y\r\n\r\nbody\r\nconnection: no\r\n"
        out = insert_response_headers(data, data.index(b"\r\n\r\n") + 4, b"a: b\r\n")
        assert out == data.replace(b"OK\r\n", b"OK\r\na: b\r\n", 1)

    def test_fields_of_one_hop_are_taken_out(self):
        """Connection, what it names, and our own names go; framing stays even when it is named."""
        data = (
            b"HTTP/1.1 200 OK\r\nA: 1\r\nCONNECTION: X-Hop, Content-Length\r\nx-hop: 2\r\nKeep-Alive: 3\r\nX-KVAtlas-Any: 4\r\n"
            b"X-Request-Id: 5\r\nContent-Length: 4\r\nB: 6\r\n\r\nbody"
        )
        out = insert_response_headers(data, data.index(b"\r\n\r\n") + 4, b"n: 0\r\n")
        assert out == b"HTTP/1.1 200 OK\r\nn: 0\r\nA: 1\r\nContent-Length: 4\r\nB: 6\r\n\r\nbody"

    def test_a_head_without_fields_works(self):
        """A status line alone takes the inserted lines."""
        assert insert_response_headers(b"HTTP/1.1 204 N\r\n\r\n", 18, b"a: b\r\n") == b"HTTP/1.1 204 N\r\na: b\r\n\r\n"


@pytest.mark.parametrize(
    ("fields", "until_close"),
    [
        (b"Content-Length: 1\r\n", False),
        (b"Transfer-Encoding: gzip, Chunked\r\n", False),
        (b"Transfer-Encoding: gzip\r\n", True),
        (b"X-Content-Length: 1\r\nX: chunked\r\n", True),
        (b"", True),
    ],
)
def test_which_responses_end_with_their_connection(fields: bytes, until_close: bool):
    """Those with neither a length nor a final chunked coding."""
    assert ends_with_connection(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n") is until_close


def test_request_ids_do_not_repeat():
    """Neither within a source nor between two."""
    one, two = RequestIds(), RequestIds()
    assert len({source.next() for source in (one, two) for _ in range(100)}) == 200
