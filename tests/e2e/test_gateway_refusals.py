"""What the gateway refuses, and that a refusal is clear, reaches the client and costs nobody else anything."""

import asyncio

import msgspec
import pytest

from kvatlas.errors import ModelNotFound
from support.gateway import BookKeeper, Client, echo_ok, gateway, on_both_loops, post, upstreams

pytestmark = pytest.mark.e2e

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
SMUGGLING = {
    "length and chunked": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths that differ": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "two equal lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\nab",
    "a signed length": HEAD + b"Content-Length: +2\r\n\r\nab",
    "space before the colon": HEAD + b"Content-Length : 2\r\n\r\nab",
    "a folded line": HEAD + b"X-A: b\r\n c\r\n\r\n",
    "bare LF between fields": HEAD + b"X-A: b\nX-C: d\r\n\r\n",
    "bare LF at the end": HEAD + b"X-A: b\n\n",
    "bare CR in a value": HEAD + b"X-A: b\rc\r\n\r\n",
    "NUL in a value": HEAD + b"X-A: b\0c\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a quoted coding": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "a second coding before chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two coding fields": HEAD + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare LF after a chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n",
    "a chunk longer than its size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n",
    "chunked over HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked beside an upgrade": HEAD
    + b"Connection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
}
INVALID = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3,
    "an unknown method": b"BREW /pot HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method that is not proxied": b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2 with prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a control byte in the target": b"GET /a\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown expectation": HEAD + b"Expect: a-gift\r\nContent-Length: 0\r\n\r\n",
}


def error_of(body: bytes) -> dict[str, str]:
    """The error object; its shape is checked on the way."""
    envelope = msgspec.json.decode(body)
    assert list(envelope) == ["error"]
    assert sorted(envelope["error"]) == ["code", "message", "type"]
    assert all(isinstance(value, str) for value in envelope["error"].values())
    return envelope["error"]


@pytest.mark.parametrize("case", [*SMUGGLING, *INVALID])
@on_both_loops
async def test_malformed_and_ambiguous_requests_get_400(case: str):
    """Nothing of an ambiguous or malformed request reaches an engine; the client reads why and is closed."""
    async with upstreams(echo_ok) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        client.send((SMUGGLING | INVALID)[case])
        answer = await client.answer()
        assert await client.at_end()
        assert (await (await Client.connect(port)).post()).status == 200
        assert server.stats.in_flight == 0
    error = error_of(answer.body)
    assert (answer.status, error["code"], error["type"]) == (400, "bad_request", "invalid_request_error")
    assert error["message"]
    assert len(up.seen) == len(planner.asked) == 1


@on_both_loops
async def test_a_declared_oversize_body_is_refused_before_it_is_sent():
    """413 comes from the head alone, without 100 Continue; a client that sends on all the same can read it."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1")), max_body_bytes=1000) as (_, port):
        client = await Client.connect(port)
        client.send(HEAD + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
        answer = await client.answer()
        pushing = await Client.connect(port)
        pushing.send(post(b"x" * 3_000_000))
        pushed = await pushing.answer()
        assert (await (await Client.connect(port)).post(b"x" * 1000)).status == 200
    assert (answer.status, pushed.status) == (413, 413)
    assert error_of(answer.body)["code"] == "body_too_large"
    assert "1000" in error_of(answer.body)["message"]
    assert len(up.seen) == 1


@on_both_loops
async def test_an_oversize_chunked_body_is_refused_when_it_crosses_the_limit():
    """A body without a declared length gets 413 as soon as its bytes exceed the limit, also when framing does."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1")), max_body_bytes=1000) as (_, port):
        client = await Client.connect(port)
        client.send(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n200\r\n" + b"y" * 512
        )
        first = await client.answer()
        padded = await Client.connect(port)
        padded.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.02)
        for _ in range(5):
            padded.send(b"1;" + b"e" * 20_000 + b"\r\nx\r\n")
        second = await padded.answer()
    assert (first.status, second.status) == (413, 413)
    assert up.seen == []


@on_both_loops
async def test_an_endless_head_is_refused():
    """A head above its limit is cut off, whether it is one field or many."""
    async with gateway(BookKeeper(), max_head_bytes=4096) as (_, port):
        for filler in (b"x" * 100, b"X-A: b\r\n" * 12):
            client = await Client.connect(port)
            client.send(HEAD + b"X-Long: ")
            for _ in range(200):
                client.send(filler)
                await asyncio.sleep(0)
            assert (await client.answer()).status == 400


@on_both_loops
async def test_planner_errors_become_answers_and_the_connection_lives_on():
    """A deliberate error speaks with its own status and text; any other is a 500 that hides its text."""

    class Failing(BookKeeper):
        def plan(self, request):
            if request.path == "/model":
                raise ModelNotFound("no worker serves 'gpt-x'")
            if request.path == "/bug":
                raise ZeroDivisionError("secret")
            return super().plan(request)

    async with upstreams(echo_ok) as (up,), gateway(planner := Failing(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        missing = await client.post(path=b"/model", extra=b"X-Request-Id: r1\r\n")
        bug = await client.post(path=b"/bug")
        assert (await client.post()).status == 200
        assert server.stats.in_flight == 0
        assert server.stats.planner_faults == 1
    assert (missing.status, bug.status) == (404, 500)
    assert error_of(missing.body) == {
        "message": "no worker serves 'gpt-x'",
        "type": "invalid_request_error",
        "code": "model_not_found",
    }
    assert missing.values(b"x-request-id") == [b"r1"]
    assert error_of(bug.body)["code"] == "internal_error"
    assert b"secret" not in bug.body
    assert planner.kinds == ["ok"]


@on_both_loops
async def test_a_planner_may_answer_later_and_may_fail_in_its_books():
    """An awaitable plan is awaited, its errors answered like others; faults in callbacks cost nobody a request."""

    class Slow(BookKeeper):
        async def _later(self, request):
            await asyncio.sleep(0.01)
            if request.path == "/model":
                raise ModelNotFound("none")
            if request.path == "/bug":
                raise KeyError
            return self.plan_to_return

        def plan(self, request):
            return self._later(request)

        def dispatched(self, request, plan, target):
            raise RuntimeError

        first_byte = finished = dispatched

    async with upstreams(echo_ok) as (up,), gateway(Slow(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        assert [(await client.post(path=path)).status for path in (b"/model", b"/bug", b"/v1/x")] == [404, 500, 200]
        assert server.stats.in_flight == 0
        assert server.stats.planner_faults == 4


@on_both_loops
async def test_no_worker_is_a_503_that_says_when_to_come_back():
    """An empty plan is a 503 with Retry-After, and the planner hears that nothing was dispatched."""
    async with gateway(planner := BookKeeper()) as (_, port):
        client = await Client.connect(port)
        answer = await client.post()
        client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer(to_head=True)).status == 503
        assert (await client.post()).status == 503
    assert (answer.status, answer.values(b"retry-after")) == (503, [b"1"])
    assert error_of(answer.body)["code"] == "no_worker_available"
    assert planner.outcomes[0][0] is None
    assert planner.kinds == ["rejected"] * 3


@on_both_loops
async def test_health_is_local_and_readiness_is_the_planners():
    """/health answers 200 while the gateway runs; /readyz follows the planner; neither reaches an engine."""
    async with gateway(planner := BookKeeper()) as (server, port):
        client = await Client.connect(port)
        answers = []
        for path, is_ready in ((b"/health", False), (b"/readyz", False), (b"/readyz?x=1", True)):
            planner.is_ready = is_ready
            client.send(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)
            answers.append((await client.answer()).status)
        assert server.stats.local == 3
    assert answers == [200, 503, 200]
    assert planner.asked == []


@on_both_loops
async def test_a_silent_client_is_closed():
    """A connection without a request, one that stalls within a head, and one that stalls within a body, all end."""
    limits = {"keep_alive_s": 0.2, "request_read_s": 0.2, "linger_s": 0.2}
    async with gateway(BookKeeper(), timeouts=limits) as (server, port):
        idle, in_head, in_body = [await Client.connect(port) for _ in range(3)]
        in_head.send(b"POST / HT")
        in_body.send(HEAD + b"Content-Length: 10\r\n\r\nabc")
        assert await idle.at_end()
        assert (await in_head.answer()).status == 400
        assert (await in_body.answer()).status == 400
        for client in (in_head, in_body):
            assert await client.at_end()
        for _ in range(200):
            if not server.stats.connections:
                break
            await asyncio.sleep(0.01)
        assert server.stats.connections == 0


@on_both_loops
async def test_a_refused_client_that_keeps_sending_is_cut_after_the_linger_time():
    """Discarding what a refused client still sends is bounded."""
    async with gateway(BookKeeper(), timeouts={"linger_s": 0.2}) as (server, port):
        client = await Client.connect(port)
        client.send(b"nonsense\r\n\r\n")
        assert (await client.answer()).status == 400
        for _ in range(100):
            client.send(b"x" * 1000)
            await asyncio.sleep(0.01)
            if not server.stats.connections:
                break
        assert server.stats.connections == 0
