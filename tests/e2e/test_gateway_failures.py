"""Engines that refuse, die, stall or talk nonsense, and clients that leave: every way out ends clean."""

import asyncio
import contextlib
import random
import socket

import pytest

from kvatlas.gateway import Target
from support.gateway import (
    ANSWER,
    BookKeeper,
    Client,
    Peer,
    Seen,
    echo_ok,
    free_port,
    gateway,
    on_both_loops,
    post,
    until,
    upstreams,
)

pytestmark = pytest.mark.e2e


async def until_cut(peer: Peer) -> None:
    """Wait until the gateway ends the connection."""
    with contextlib.suppress(ConnectionError):
        while await peer.reader.read(1):
            pass


def hang_until_closed(closed: list[float]):
    """A script that never finishes: the head and two events for streams, nothing else; notes when it is cut."""

    async def script(peer: Peer, seen: Seen) -> None:
        if b"stream" in seen.body:
            await peer.sse_head()
            await peer.chunk(b"data: 1\n\n")
        await until_cut(peer)
        closed.append(asyncio.get_running_loop().time())
        raise ConnectionResetError

    return script


@on_both_loops
async def test_an_abort_reaches_the_engine_at_once():
    """A client that leaves, before any answer or within a stream, ends the engine's connection well within 1 s."""
    closed: list[float] = []
    async with (
        upstreams(hang_until_closed(closed)) as (up,),
        gateway(planner := BookKeeper(up.target("w1"))) as (g, port),
    ):
        for body in (b"{}", b'{"stream":true}'):
            client = await Client.connect(port)
            client.send(post(body))
            if body != b"{}":
                await client.head()
            assert await until(lambda: up.seen and up.seen[-1].body == body)  # noqa: B023
            left_s = asyncio.get_running_loop().time()
            client.abort()
            assert await until(lambda: up.open == 0)
            assert closed.pop() - left_s < 0.5
        assert await until(lambda: g.stats.in_flight == 0)
        assert g.stats.client_aborts == 2
        assert g.stats.snapshot().workers["w1"].client_aborts == 2
    assert planner.kinds == ["client_abort"] * 2
    assert [outcome.status for _, outcome in planner.outcomes] == [0, 200]
    assert planner.in_flight == {"w1": 0}


@on_both_loops
async def test_a_client_that_only_shuts_its_sending_side_counts_as_gone():
    """End of file from the client ends the request: a closed socket looks the same."""
    closed: list[float] = []
    async with (
        upstreams(hang_until_closed(closed)) as (up,),
        gateway(planner := BookKeeper(up.target("w1"))) as (_, port),
    ):
        client = await Client.connect(port)
        client.send(post(b"{}"))
        assert await until(lambda: len(up.seen) == 1)
        client.writer.write_eof()
        assert await until(lambda: up.open == 0 and planner.kinds == ["client_abort"])


@on_both_loops
async def test_a_client_that_leaves_during_planning_cancels_the_plan():
    """The pending plan is cancelled, nothing is dispatched, in-flight returns to zero."""
    cancelled = []

    class Slow(BookKeeper):
        async def _later(self):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        def plan(self, request):
            self.asked.append(request)
            return self._later()

    async with gateway(planner := Slow()) as (server, port):
        client = await Client.connect(port)
        client.send(post(b"{}"))
        assert await until(lambda: planner.asked)
        client.abort()
        assert await until(lambda: cancelled and server.stats.in_flight == 0)
    assert planner.outcomes == []


@on_both_loops
async def test_chaos_leaves_nothing_in_flight():
    """40 requests aborted at random, 5 engines dying within a stream, 5 refusing: all counters return to zero (T16)."""
    rng = random.Random(16)
    closed: list[float] = []

    async def die_mid_stream(peer: Peer, seen: Seen) -> None:
        await peer.sse_head()
        await peer.chunk(b"data: 1\n\n")
        await asyncio.sleep(rng.random() * 0.05)
        peer.abort()
        raise ConnectionResetError

    class Chaos(BookKeeper):
        def plan(self, request):
            name = request.header(b"x-case").decode()
            return type(self.plan_to_return)((self.cases[name],))

    async with upstreams(hang_until_closed(closed), die_mid_stream) as (hanging, dying):
        planner = Chaos()
        dead = Target("dead", "127.0.0.1", await free_port())
        planner.cases = {"hang": hanging.target("hang"), "die": dying.target("die"), "refuse": dead}
        async with gateway(planner) as (server, port):

            async def leave(body: bytes) -> None:
                client = await Client.connect(port)
                client.send(post(body, extra=b"X-Case: hang\r\n"))
                await asyncio.sleep(rng.random() * 0.3)
                client.abort()

            async def read_all(case: bytes) -> bytes:
                client = await Client.connect(port)
                client.send(post(b'{"stream":true}', extra=b"Connection: close\r\nX-Case: %b\r\n" % case))
                try:
                    return await client.reader.read()
                except ConnectionError:
                    return b""

            leaving = [leave(b'{"stream":true}' if n % 2 else b"{}") for n in range(40)]
            *_, a, b = await asyncio.gather(
                *leaving,
                asyncio.gather(*(read_all(b"die") for _ in range(5))),
                asyncio.gather(*(read_all(b"refuse") for _ in range(5))),
            )
            all_left_s = asyncio.get_running_loop().time()
            assert await until(lambda: hanging.open == 0, 1.0)
            assert await until(lambda: server.stats.in_flight == 0 and not any(planner.in_flight.values()))
            workers = server.stats.snapshot().workers.values()
            assert [worker.in_flight for worker in workers] == [0] * len(workers)
    assert all(b"0\r\n\r\n" not in answer for answer in a), "a truncated stream must not look complete"
    assert all(answer.startswith(b"HTTP/1.1 502 ") for answer in b)
    assert all(at_s < all_left_s + 1 for at_s in closed)
    kinds = [(worker_id, outcome.kind) for worker_id, outcome in planner.outcomes]
    assert kinds.count(("die", "upstream_error")) == kinds.count(("dead", "connect_error")) == 5
    assert kinds.count(("hang", "client_abort")) == len(kinds) - 10 > 0


@on_both_loops
async def test_a_refused_connection_goes_to_the_next_target_once():
    """The second target answers, the books show both attempts, and the prediction made for the first is not claimed."""
    async with upstreams(echo_ok) as (up,):
        dead = Target("dead", "127.0.0.1", await free_port())
        async with gateway(planner := BookKeeper(dead, up.target("w2"), predicted_tokens=16)) as (server, port):
            client = await Client.connect(port)
            answer = await client.post()
            assert server.stats.retries == 1
    assert (answer.status, answer.values(b"x-kvatlas-worker")) == (200, [b"w2"])
    assert answer.values(b"x-kvatlas-predicted-tokens") == []
    assert [(worker, outcome.kind) for worker, outcome in planner.outcomes] == [("dead", "connect_error"), ("w2", "ok")]
    assert planner.outcomes[0][1].error == "upstream_connect_error"
    assert planner.in_flight == {"dead": 0, "w2": 0}


@on_both_loops
async def test_two_dead_targets_are_a_502_that_names_the_second():
    """Only one other target is tried; the answer says which worker could not be reached and where."""
    async with upstreams(echo_ok) as (up,):
        first, second = Target("dead1", "127.0.0.1", await free_port()), Target("dead2", "127.0.0.1", await free_port())
        async with gateway(planner := BookKeeper(first, second, up.target("w3"))) as (server, port):
            client = await Client.connect(port)
            answer = await client.post()
            assert server.stats.in_flight == 0
    assert answer.status == 502
    assert b"upstream_connect_error" in answer.body
    assert b"dead2 at 127.0.0.1:" in answer.body
    assert planner.kinds == ["connect_error", "connect_error"]
    assert up.seen == []


@on_both_loops
async def test_a_stale_connection_is_tried_again():
    """A kept connection found dead goes to the next target; a plan's only target gets a new connection."""

    async def close_second(peer: Peer, seen: Seen) -> None:
        if seen.body == b"kill":
            raise ConnectionResetError
        await peer.answer()

    for others in (0, 1):
        async with upstreams(close_second, echo_ok) as (a, b):
            targets = [a.target("a"), b.target("b")][: 1 + others]
            async with gateway(planner := BookKeeper(*targets)) as (server, port):
                client = await Client.connect(port)
                await client.post(b"warm")
                answer = await client.post(b"kill")
                assert server.stats.retries == 1
        if others:
            assert (answer.status, answer.values(b"x-kvatlas-worker")) == (200, [b"b"])
            assert planner.kinds == ["ok", "connect_error", "ok"]
        else:  # the new connection to the same worker dies as well, and that is final
            assert answer.status == 502
            assert planner.kinds == ["ok", "connect_error", "upstream_error"]
            assert a.connections == 2


@on_both_loops
async def test_an_idle_connection_the_engine_closed_costs_nothing():
    """Between two requests the engine closes its idle connection: the next request opens a new one, without a retry."""

    async def close_after(peer: Peer, seen: Seen) -> None:
        await peer.answer()
        raise ConnectionResetError

    async with upstreams(close_after) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        for _ in range(3):
            assert (await client.post()).status == 200
            assert await until(lambda: server.upstream_connections() == {"w1": (0, 0)})
        assert server.stats.retries == 0
    assert planner.kinds == ["ok"] * 3


@on_both_loops
async def test_unused_engine_connections_are_closed_in_time():
    """An upstream connection nobody used for its idle limit is closed by the gateway, and a forgotten worker's at once."""
    async with (
        upstreams(echo_ok) as (up,),
        gateway(BookKeeper(up.target("w1")), timeouts={"upstream_idle_s": 0.3}) as (g, port),
    ):
        client = await Client.connect(port)
        await client.post()
        assert up.open == 1
        assert await until(lambda: up.open == 0, 4)
        await client.post()
        g.forget_worker("w1")
        assert await until(lambda: up.open == 0)
        assert (await client.post()).status == 200


@on_both_loops
async def test_a_connection_closed_without_an_answer_is_a_502_and_not_repeated():
    """A new connection that dies before a byte may have died of this request: another worker is not put at risk."""

    async def die(peer: Peer, seen: Seen) -> None:
        raise ConnectionResetError

    async with (
        upstreams(die, echo_ok) as (a, b),
        gateway(planner := BookKeeper(a.target("a"), b.target("b"))) as (_, port),
    ):
        client = await Client.connect(port)
        answer = await client.post()
        assert (await client.post()).status == 502
    assert (answer.status, b.seen) == (502, [])
    assert b"bad_upstream_response" in answer.body
    assert planner.kinds == ["upstream_error"] * 2


GARBAGE = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a bad status line": b"HTTP/1.1 OK 200\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "two framings": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "more than its length": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nX: injected\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nbytes",
    "a half head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000,
}


@pytest.mark.parametrize("case", GARBAGE)
@on_both_loops
async def test_upstream_garbage_is_a_502(case: str):
    """What is not one HTTP response is never passed on; the client's connection lives."""

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.send(GARBAGE[case])
        raise ConnectionResetError

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        answers = [await client.post() for _ in range(2)]
        assert server.stats.in_flight == 0
    assert [answer.status for answer in answers] == [502, 502]
    assert b"w1" in answers[0].body
    assert planner.kinds == ["upstream_error"] * 2


@on_both_loops
async def test_a_failure_after_the_first_byte_is_passed_on_as_truncation():
    """An engine that dies within its answer, whatever its framing, leaves the client with a visibly broken answer."""
    framings = {
        b"length": b"Content-Length: 100\r\n\r\npart",
        b"chunked": b"Transfer-Encoding: chunked\r\n\r\n4\r\npart\r\n",
        b"close": b"\r\npart",
    }

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\n" + framings[seen.body])
        await asyncio.sleep(0.02)
        peer.writer.transport.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: reset
        peer.abort()
        raise ConnectionResetError

    async with (
        upstreams(script, echo_ok) as (a, b),
        gateway(planner := BookKeeper(a.target("a"), b.target("b"))) as (_, port),
    ):
        for body in framings:
            client = await Client.connect(port)
            client.send(post(body))
            assert (await client.head()).startswith(b"HTTP/1.1 200")
            rest = b""
            ended_by_reset = False
            try:
                rest = await client.reader.read()
            except ConnectionResetError:
                ended_by_reset = True
            assert not rest.endswith(b"0\r\n\r\n")
            assert len(rest) < 100
            assert ended_by_reset or body != b"close", "only a reset can say that an answer framed by its end was cut"
    assert planner.kinds == ["upstream_error"] * 3
    assert b.seen == []


@on_both_loops
async def test_slow_engines_are_given_up():
    """No connection, no first byte, a pause within an answer, and too long in total are four limits."""

    async def script(peer: Peer, seen: Seen) -> None:
        if seen.body == b"silent":
            return await until_cut(peer)
        await peer.sse_head()
        await peer.chunk(b"data: 1\n\n")
        for _ in range(100 if seen.body == b"endless" else 0):
            await peer.chunk(b"data: 2\n\n")
            await asyncio.sleep(0.05)
        return await until_cut(peer)

    limits = {"first_byte_s": 0.3, "idle_s": 0.3, "total_s": 1.0}
    async with (
        upstreams(script) as (up,),
        gateway(planner := BookKeeper(up.target("w1")), timeouts=limits) as (server, port),
    ):
        silent = await (await Client.connect(port)).post(b"silent")
        for body in (b"pausing", b"endless"):
            client = await Client.connect(port)
            client.send(post(body))
            await client.head()
            with contextlib.suppress(ConnectionError):
                assert not (await client.reader.read()).endswith(b"0\r\n\r\n")
        assert await until(lambda: up.open == 0)
        assert server.stats.in_flight == 0
    assert silent.status == 504
    assert b"upstream_timeout" in silent.body
    assert planner.kinds == ["timeout"] * 3
    assert 0.3 <= planner.outcomes[0][1].duration_s < 0.8
    assert 0.3 <= planner.outcomes[1][1].duration_s < 0.8
    assert 1.0 <= planner.outcomes[2][1].duration_s < 1.6


@on_both_loops
async def test_a_connection_that_never_opens_goes_to_the_next_target():
    """The connect limit counts as a failed connect; a plan that never comes is a 504."""

    class Never(BookKeeper):
        def plan(self, request):
            if request.path == "/never":
                return asyncio.sleep(30)
            return super().plan(request)

    async with upstreams(echo_ok) as (up,):
        full = socket.create_server(("127.0.0.1", 0), backlog=0)  # never accepts: the kernel drops what comes after
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        target = Target("full", *full.getsockname())
        limits = {"connect_s": 0.2, "first_byte_s": 0.3}
        async with gateway(planner := Never(target, up.target("w2")), timeouts=limits) as (server, port):
            client = await Client.connect(port)
            assert (await client.post()).values(b"x-kvatlas-worker") == [b"w2"]
            assert (await client.post(path=b"/never")).status == 504
            assert server.stats.in_flight == 0
    for unused in (full, *fillers):
        unused.close()
    assert planner.kinds[:2] == ["connect_error", "ok"]
    assert planner.outcomes[0][1].duration_s >= 0.2


@on_both_loops
async def test_a_slow_client_holds_its_engine_back():
    """A client that does not read stops the engine's stream: 300 MB offered, at most some MB taken in; then all of it."""
    size, count = 300_000, 1000
    sent = 0

    async def script(peer: Peer, seen: Seen) -> None:
        nonlocal sent
        await peer.sse_head()
        for _ in range(count):
            await peer.chunk(b"x" * size)
            sent += size
        await peer.chunk(b"")

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port, limit=65_536)
        client.send(post(b'{"stream":true}'))
        await client.head()
        await asyncio.sleep(0.3)
        held_at = sent
        await asyncio.sleep(0.2)
        assert sent == held_at, "the engine must be held back"
        assert held_at < 30_000_000
        read = 0
        while read < 30_000_000:
            read += len(await client.reader.read(1 << 20))
        client.abort()
        assert await until(lambda: up.open == 0 and server.stats.in_flight == 0)
    assert planner.kinds == ["client_abort"]


@on_both_loops
async def test_a_client_that_stops_reading_is_cut_after_the_idle_limit():
    """A full client connection does not hold a worker for ever: it counts as an abort, not as the worker's fault."""

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.sse_head()
        while True:
            await peer.chunk(b"x" * 100_000)

    async with (
        upstreams(script) as (up,),
        gateway(planner := BookKeeper(up.target("w1")), timeouts={"idle_s": 0.5}) as (g, port),
    ):
        client = await Client.connect(port, limit=65_536)
        client.send(post(b'{"stream":true}'))
        assert await until(lambda: planner.kinds == ["client_abort"], 5)
        assert await until(lambda: up.open == 0 and g.stats.connections == 0)


@on_both_loops
async def test_a_pipelining_client_that_does_not_read_is_held_back():
    """Answers nobody reads do not pile up: the next pipelined request waits until the connection has room."""

    async def script(peer: Peer, seen: Seen) -> None:
        await peer.answer(b"x" * 1_000_000)

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port, limit=65_536)
        client.send(post(b"{}") * 200)
        await asyncio.sleep(0.4)
        assert len(up.seen) < 30
        for _ in range(200):
            assert len((await client.answer()).body) == 1_000_000
    assert len(up.seen) == 200


@on_both_loops
async def test_an_engine_that_answers_before_the_upload_ends_is_not_reused():
    """An early answer is passed on; the connection, still owed most of a body, is closed and not pooled."""

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy")
        await asyncio.sleep(0.3)
        writer.transport.abort()

    server = await asyncio.start_server(early, "127.0.0.1", 0, limit=65_536)
    target = Target("w1", "127.0.0.1", server.sockets[0].getsockname()[1])
    async with gateway(planner := BookKeeper(target)) as (g, port):
        client = await Client.connect(port)
        answer = await client.post(b"x" * 30_000_000)
        assert (answer.status, answer.body) == (429, b"busy")
        assert g.upstream_connections()["w1"][1] == 0
        await asyncio.sleep(0.35)
    server.close()
    assert [outcome.status for _, outcome in planner.outcomes] == [429]
    assert planner.kinds == ["ok"]


@on_both_loops
async def test_closing_lets_answers_finish_and_takes_no_new_connections():
    """During the drain an answer under way completes and says `connection: close`; idle clients are closed at once."""
    go_on = asyncio.Event()

    async def script(peer: Peer, seen: Seen) -> None:
        await go_on.wait()
        await peer.answer()

    async with upstreams(script) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (server, port):
        busy, idle = await Client.connect(port), await Client.connect(port)
        busy.send(post(b"{}"))
        assert await until(lambda: len(up.seen) == 1)
        closing = asyncio.create_task(server.close(5))
        assert await idle.at_end()
        with pytest.raises(ConnectionError):
            await Client.connect(port)
        go_on.set()
        answer = await busy.answer()
        assert await busy.at_end()
        await closing
    assert (answer.body, answer.values(b"connection")) == (ANSWER, [b"close"])
    assert planner.kinds == ["ok"]


@on_both_loops
async def test_closing_cuts_what_does_not_finish():
    """After the drain time, answers still under way are cut and reported as shut down."""
    closed: list[float] = []
    async with (
        upstreams(hang_until_closed(closed)) as (up,),
        gateway(planner := BookKeeper(up.target("w1"))) as (server, port),
    ):
        client = await Client.connect(port)
        client.send(post(b'{"stream":true}'))
        await client.head()
        await server.close(0.1)
        await server.close(0.1)
        assert server.stats.in_flight == 0
        assert await until(lambda: up.open == 0)
    assert planner.kinds == ["shutdown"]
    assert planner.in_flight == {"w1": 0}


@on_both_loops
async def test_counters_tell_what_happened():
    """The snapshot holds requests, statuses by class and worker, times and bytes."""

    async def script(peer: Peer, seen: Seen) -> None:
        if seen.body == b"bad":
            await peer.send(b"HTTP/1.1 422 Unprocessable\r\nContent-Length: 2\r\n\r\nno")
        else:
            await peer.answer()

    async with upstreams(script) as (up,), gateway(BookKeeper(up.target("w1"))) as (server, port):
        client = await Client.connect(port)
        await client.post(b"good")
        await client.post(b"bad")
        client.send(b"nonsense\r\n\r\n")
        await client.answer()
        snapshot = server.stats.snapshot()
    worker = snapshot.workers["w1"]
    assert (snapshot.requests, snapshot.in_flight, snapshot.connections_total) == (2, 0, 1)
    assert snapshot.refused_by_code == {"bad_request": 1}
    assert (worker.dispatched, worker.in_flight, worker.responses_by_class[:6]) == (2, 0, (0, 0, 1, 0, 1, 0))
    assert (worker.ttft_s.count, worker.duration_s.count) == (0, 1), "no stream was marked, one answer was good"
    assert snapshot.request_bytes == 7
    assert snapshot.response_bytes > len(ANSWER) + 2
    assert worker.errors_by_code == {}


@on_both_loops
async def test_only_marked_streams_are_timed_to_their_first_token():
    """With a plan that says so, the 2xx answer counts as a time to first token and the 422 does not."""

    async def script(peer: Peer, seen: Seen) -> None:
        if seen.body == b"bad":
            await peer.send(b"HTTP/1.1 422 Unprocessable\r\nContent-Length: 2\r\n\r\nno")
        else:
            await peer.answer()

    async with (
        upstreams(script) as (up,),
        gateway(BookKeeper(up.target("w1"), measures_ttft=True)) as (server, port),
    ):
        client = await Client.connect(port)
        await client.post(b"good")
        await client.post(b"bad")
        worker = server.stats.snapshot().workers["w1"]
    assert (worker.ttft_s.count, worker.duration_s.count) == (1, 1)


def lines_of(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """What the gateway logged at one level."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and record.name.startswith("kvatlas.gateway")
    ]


@on_both_loops
async def test_failures_before_the_head_are_logged_once_each(caplog: pytest.LogCaptureFixture):
    """Both attempts and the 502 leave one line each, with worker, code, request id and reason, and no body."""
    first, second = Target("dead1", "127.0.0.1", await free_port()), Target("dead2", "127.0.0.1", await free_port())
    async with gateway(BookKeeper(first, second)) as (_, port):
        client = await Client.connect(port)
        assert (await client.post(b"SECRET", extra=b"X-Request-Id: r-1\r\n")).status == 502
        lines = lines_of(caplog, "WARNING")
    assert [line.split(", request r-1: ")[0] for line in lines] == [
        "worker dead1: connect_error upstream_connect_error before any answer",
        "worker dead2: connect_error upstream_connect_error before any answer",
        "worker dead2: answered 502 upstream_connect_error",
    ]
    assert f"no connection to worker dead1 at 127.0.0.1:{first.port}" in lines[0]
    assert "SECRET" not in caplog.text


@on_both_loops
async def test_a_storm_of_failures_is_a_line_a_second_and_a_count(caplog: pytest.LogCaptureFixture):
    """Thirty 502 in a row: two lines now, and at the latest when the gateway closes the number left out."""
    dead = Target("dead", "127.0.0.1", await free_port())
    async with gateway(BookKeeper(dead)) as (server, port):
        client = await Client.connect(port)
        for _ in range(30):
            assert (await client.post()).status == 502
        await server.close(0)
    lines = lines_of(caplog, "WARNING")
    left_out = [int(line.split(": ")[1].split(" more ")[0]) for line in lines if "not shown" in line]
    shown = [line for line in lines if "not shown" not in line]
    assert len(shown) < 10
    assert len(shown) + sum(left_out) == 60


@on_both_loops
async def test_a_failure_after_the_head_is_logged_and_one_without_workers(caplog: pytest.LogCaptureFixture):
    """The cut stream names its worker; a 503 that no worker had a part in says `-`."""

    async def die(peer: Peer, seen: Seen) -> None:
        await peer.sse_head()
        raise ConnectionResetError

    async with upstreams(die) as (up,), gateway(planner := BookKeeper(up.target("w1"))) as (_, port):
        client = await Client.connect(port)
        client.send(post(b"{}", extra=b"X-Request-Id: r-1\r\n"))
        await client.head()
        assert await client.at_end()
        planner.plan_to_return = type(planner.plan_to_return)(())
        client = await Client.connect(port)
        assert (await client.post(extra=b"X-Request-Id: r-2\r\n")).status == 503
        cut, refused = lines_of(caplog, "WARNING")
    assert cut.startswith(
        "worker w1: upstream_error bad_upstream_response after the head of its answer, client cut, request r-1: "
    )
    assert refused == (
        "worker -: answered 503 no_worker_available, request r-2: no worker may take this request now; try again later"
    )


@on_both_loops
async def test_the_drain_is_logged_from_end_to_end(caplog: pytest.LogCaptureFixture):
    """How many get how long, and how many were cut: a warning only when there were any."""
    caplog.set_level("INFO")
    for hangs in (True, False):
        caplog.clear()
        async with (
            upstreams(hang_until_closed([]) if hangs else echo_ok) as (up,),
            gateway(BookKeeper(up.target("w1"))) as (server, port),
        ):
            client = await Client.connect(port)
            client.send(post(b"{}"))
            assert await until(lambda: server.stats.in_flight == hangs and len(up.seen) == 1)  # noqa: B023
            await server.close(0.05)
        infos, warnings = lines_of(caplog, "INFO"), lines_of(caplog, "WARNING")
        assert infos[0] == f"shutting down: the port is closed, {int(hangs)} requests in flight get 0.05 s"
        assert (warnings if hangs else infos)[-1] == f"drain over: {int(hangs)} requests in flight were cut"
        assert len(warnings) == int(hangs)


@on_both_loops
async def test_a_withdrawn_gateway_serves_but_is_not_ready():
    """Load balancers see 503 on /readyz while old and new connections are still answered; liveness stays."""
    async with upstreams(echo_ok) as (up,), gateway(BookKeeper(up.target("w1"))) as (server, port):
        old = await Client.connect(port)
        for ready in (200, 503):
            for client in (old, await Client.connect(port)):
                client.send(b"GET /readyz HTTP/1.1\r\nHost: gw\r\n\r\n")
                assert (await client.answer()).status == ready
                client.send(b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n")
                assert (await client.answer()).status == 200
                answer = await client.post()
                assert (answer.status, answer.values(b"connection")) == (200, [])
            server.withdraw()


@on_both_loops
async def test_a_hurried_drain_ends_at_once():
    """`hurry` during the drain cuts what runs; the drain time left is not waited for."""
    async with (
        upstreams(hang_until_closed([])) as (up,),
        gateway(planner := BookKeeper(up.target("w1"))) as (server, port),
    ):
        client = await Client.connect(port)
        client.send(post(b"{}"))
        assert await until(lambda: len(up.seen) == 1)
        closing = asyncio.create_task(server.close(60))
        await asyncio.sleep(0.05)
        assert not closing.done()
        server.hurry()
        await asyncio.wait_for(closing, 1)
        assert await client.at_end()
    assert planner.kinds == ["shutdown"]
