"""What goes through the gateway arrives as it was sent: requests, responses, streams, connections."""

import asyncio

import pytest

from kvatlas.gateway import Target
from support.gateway import (
    ANSWER,
    BookKeeper,
    Client,
    Peer,
    Seen,
    echo_ok,
    gateway,
    on_both_loops,
    post,
    until,
    upstreams,
)

pytestmark = pytest.mark.e2e


@on_both_loops
async def test_a_json_request_passes_unchanged():
    """Method, target with query, other headers and body arrive byte for byte; hop-by-hop fields do not."""
    body = b'{"prompt": "h\xc3\xa9llo",\n "max_tokens":1}'
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1"), predicted_tokens=48)) as (_, port):
        client = await Client.connect(port)
        extra = (
            b"Authorization: Bearer t\r\nX-Dup: 1\r\nX-Dup: 2\r\nConnection: close, X-Secret\r\nX-Secret: s\r\n"
            b"Keep-Alive: timeout=5\r\nTE: trailers\r\nX-Request-Id: abc-123\r\n"
        )
        answer = await client.post(body, b"/v1/completions?a=1&b=%2F", extra)
        seen = up.seen[0]
    assert seen.line == b"POST /v1/completions?a=1&b=%2F HTTP/1.1"
    assert seen.body == body
    assert seen.values(b"host") == [b"127.0.0.1:%d" % up.port]
    assert seen.fields == [
        (b"host", b"127.0.0.1:%d" % up.port),
        (b"x-request-id", b"abc-123"),
        (b"content-length", b"%d" % len(body)),
        (b"authorization", b"Bearer t"),
        (b"x-dup", b"1"),
        (b"x-dup", b"2"),
    ]
    assert answer.body == ANSWER
    assert answer.values(b"x-request-id") == [b"abc-123"]
    assert answer.values(b"x-kvatlas-worker") == [b"w1"]
    assert answer.values(b"x-kvatlas-predicted-tokens") == [b"48"]
    assert answer.values(b"connection") == [b"close"]


@on_both_loops
async def test_a_response_head_keeps_everything_but_this_hop():
    """Duplicate and odd response fields stay in order and spelling; hop-by-hop and our own names are replaced."""

    async def script(peer: Peer, seen: Seen) -> None:
        fields = b"Set-Cookie: a\r\nset-cookie: b\r\nX-Request-ID: theirs\r\nX-KvAtlas-Worker: spoof\r\nKeep-Alive: timeout=5\r\n"
        await peer.answer(extra=fields)

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w 1"))) as (_, port):
        client = await Client.connect(port)
        answer = await client.post(extra=b"X-Request-Id: mine\r\n")
    assert answer.head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"x-request-id: mine",
        b"x-kvatlas-worker: w%201",
        b"Content-Length: 11",
        b"Set-Cookie: a",
        b"set-cookie: b",
    ]


@on_both_loops
async def test_a_request_without_an_id_gets_one():
    """The made id is the same towards the engine, the client and the planner; an unusable one is replaced."""
    async with upstreams(echo_ok) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        answer = await client.post()
        other = await client.post(extra=b"X-Request-Id: not usable\r\n")
    made = planner.asked[0].request_id.encode()
    assert answer.values(b"x-request-id") == [made] == up.seen[0].values(b"x-request-id")
    assert other.values(b"x-request-id") not in ([made], [b"not usable"])


@on_both_loops
async def test_the_plan_may_add_headers_and_replace_the_body():
    """Plan and target headers replace the client's of the same name; a plan's body is sent with its own length."""
    async with upstreams(echo_ok) as (up,):
        target = up.target("w1", base_path="/engine", headers=((b"X-Rank", b"1"),))
        async with gateway(BookKeeper(target, headers=((b"x-salt", b"s"),), body=b"other")) as (_, port):
            client = await Client.connect(port)
            await client.post(b"original", extra=b"X-RANK: 7\r\nX-Salt: client\r\nAccept: */*\r\n")
    seen = up.seen[0]
    assert seen.line == b"POST /engine/v1/completions HTTP/1.1"
    assert seen.fields[2:] == [(b"content-length", b"5"), (b"accept", b"*/*"), (b"x-salt", b"s"), (b"x-rank", b"1")]
    assert seen.body == b"other"


@on_both_loops
async def test_connections_are_reused_on_both_sides():
    """Ten requests over one client connection use one upstream connection, the last used first."""
    async with upstreams(echo_ok) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        for _ in range(10):
            assert (await client.post()).status == 200
        assert (up.connections, server.stats.connections_total) == (1, 1)
        assert server.upstream_connections() == {"w1": (1, 1)}
    assert planner.kinds == ["ok"] * 10
    assert planner.in_flight == {"w1": 0}


@on_both_loops
async def test_pipelined_requests_are_answered_in_order():
    """Requests sent in one go, local and refused ones among them, are answered one after the other."""

    async def script(peer: Peer, seen: Seen) -> None:
        await asyncio.sleep(0.02 if seen.body == b"0" else 0)
        await peer.answer(b"answer " + seen.body)

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(
            post(b"0") + post(b"1") + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" + post(b"2") + b"nonsense\r\n\r\n"
        )
        answers = [await client.answer() for _ in range(5)]
        assert await client.at_end()
    assert [a.body for a in answers[:4]] == [b"answer 0", b"answer 1", b'{"status":"ok"}', b"answer 2"]
    assert answers[4].status == 400


@on_both_loops
async def test_a_long_row_of_pipelined_requests_neither_recurses_nor_starves():
    """Three thousand pipelined requests that end at once are all answered."""
    async with gateway(BookKeeper()) as (_, port):
        client = await Client.connect(port)
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 3000)
        statuses = [(await client.answer()).status for _ in range(3000)]
    assert set(statuses) == {503}


@on_both_loops
async def test_a_chunked_upload_is_forwarded_with_its_length():
    """Chunk framing ends at the gateway: the same bytes go on with Content-Length; trailers are dropped."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.02)
        client.send(b"4;ext=1\r\ndefg\r\n0\r\nX-Trailer: t\r\nHost: evil\r\n\r\n")
        assert (await client.answer()).status == 200
        assert (await client.post(b"next")).status == 200
    first, second = up.seen
    assert (first.body, first.values(b"content-length"), first.values(b"transfer-encoding")) == (b"abcdefg", [b"7"], [])
    assert first.values(b"x-trailer") == second.values(b"x-trailer") == []


@on_both_loops
async def test_expect_100_continue_is_answered_here():
    """The client hears 100 before it sends its body, and the engine never sees the expectation."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await client.head() == b"HTTP/1.1 100 Continue"
        client.send(b"abc")
        assert (await client.answer()).status == 200
    assert up.seen[0].body == b"abc"
    assert up.seen[0].values(b"expect") == []


@on_both_loops
async def test_interim_responses_of_an_engine_stay_here():
    """100 and 103 from the engine are swallowed, also when they come in pieces; the final answer passes."""

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early")
        await asyncio.sleep(0.02)
        await peer.send(b" Hints\r\nLink: x\r\n\r\n")
        await asyncio.sleep(0.02)
        await peer.answer()

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        for _ in range(2):
            answer = await client.post()
            assert (answer.status, answer.body) == (200, ANSWER)
    assert up.connections == 1


@on_both_loops
async def test_head_get_and_answers_without_a_body():
    """HEAD carries no body whatever its length says; 204 and 304 end at their head; GET has no Content-Length added."""

    async def script(peer: Peer, seen: Seen) -> None:
        if seen.line.startswith(b"HEAD"):
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        elif b"empty" in seen.line:
            await peer.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        else:
            await peer.answer(b"models")

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await client.answer(to_head=True)
        assert (answer.status, answer.values(b"content-length")) == (200, [b"500"])
        client.send(b"DELETE /empty HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer(to_head=True)).status == 204
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer()).body == b"models"
    assert up.seen[2].values(b"content-length") == []
    assert planner.kinds == ["ok"] * 3


@on_both_loops
async def test_an_absolute_target_and_an_unwanted_upgrade_are_served_as_plain_http():
    """`http://host/path` loses its host; an h2c offer is ignored and its body is still read by its length."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        smuggled = b"GET /admin HTTP/1.1\r\nHost: a\r\n\r\n"
        request = post(smuggled, b"http://gw:1/v1/completions?x", offer)
        client.send(request[:-5])
        await asyncio.sleep(0.02)
        client.send(request[-5:] + post(b"next"))
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert [seen.line for seen in up.seen] == [b"POST /v1/completions?x HTTP/1.1", b"POST /v1/completions HTTP/1.1"]
    assert up.seen[0].body == smuggled
    assert up.seen[0].values(b"upgrade") == up.seen[0].values(b"http2-settings") == []


@on_both_loops
async def test_an_http_1_0_client_is_answered_in_its_own_version():
    """HTTP/1.0 goes upstream as HTTP/1.0, without Host being demanded, and the connection closes after the answer."""

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.send(b"HTTP/1.0 200 OK\r\n\r\nto the end")
        peer.writer.close()

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.answer()).body == b"to the end"
    assert up.seen[0].line == b"GET /v1/models HTTP/1.0"
    assert planner.kinds == ["ok"]


@on_both_loops
async def test_a_stream_is_passed_on_byte_for_byte_and_without_delay():
    """Each event reaches the client before the engine sends the next; the chunk framing is the engine's own."""
    events = [b'data: {"n":%d,"t":"\xe2\x82\xac\\n"}\n\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]
    received = asyncio.Event()

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.sse_head()
        for event in events:
            received.clear()
            await peer.chunk(event)
            await asyncio.wait_for(received.wait(), 2)
        await peer.chunk(b"")

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(post(b'{"stream":true}'))
        await client.head()
        for event in events:
            framed = b"%x\r\n%b\r\n" % (len(event), event)
            assert await client.reader.readexactly(len(framed)) == framed
            received.set()
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"
        assert await until(lambda: planner.kinds == ["ok"])
    assert planner.first_bytes == 1
    assert planner.outcomes[0][1].first_byte_s is not None


@on_both_loops
async def test_usage_reaches_the_planner_from_json_and_from_a_stream():
    """Cached, prompt and completion tokens are read from the end of either kind of answer."""
    usage = b'"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":96}}'

    async def script(peer: Peer, seen: Seen) -> None:
        if b"stream" in seen.body:
            await peer.sse_head()
            for n in range(3000):
                await peer.chunk(b'data: {"choices":[{"text":"%d"}]}\n\n' % n)
            await peer.chunk(b'data: {"choices":[],%b}\n\n' % usage)
            await peer.chunk(b"data: [DONE]\n\n")
            await peer.chunk(b"")
        else:
            await peer.answer(b'{"choices":[{"text":"say \\"usage\\":{}"}],%b}' % usage)

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        await client.post(b"{}")
        await client.post(b'{"stream":true}')
        assert await until(lambda: len(planner.outcomes) == 2)
    for _, outcome in planner.outcomes:
        assert (outcome.cached_tokens, outcome.prompt_tokens, outcome.completion_tokens) == (96, 100, 7)
        assert outcome.status == 200
        assert 0 <= outcome.first_byte_s <= outcome.duration_s
    assert planner.outcomes[1][1].response_bytes > 100_000


@on_both_loops
async def test_large_bodies_pass_both_ways():
    """A 20 MB request and a 20 MB answer arrive whole."""
    big = bytes(range(256)) * 80_000

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.answer(seen.body[::-1])

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        answer = await client.post(big)
    assert up.seen[0].body == big
    assert answer.body == big[::-1]


@on_both_loops
async def test_an_ipv6_literal_is_bracketed_in_host():
    """Host of an IPv6 worker is `[address]:port`; where the machine has no IPv6 the answer is a clear 502."""
    async with gateway(BookKeeper(Target("w6", "::1", 1))) as (_, port):
        client = await Client.connect(port)
        answer = await client.post()
    assert answer.status == 502
    assert b"w6" in answer.body
