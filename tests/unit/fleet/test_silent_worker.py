"""A worker whose stream is judged silent: who is left out, for how long, and what brings it back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvatlas.clock import ManualClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.events import BlockStored, EventBatch, encode_batch
from kvatlas.fleet import Fleet, FleetSpeed, LoadLedger, PrefillSpeed, SilenceTerm, TrafficCount, Trust, TrustState
from kvatlas.fleet import Worker as FleetWorker
from kvatlas.fleet import follower as follower_module
from kvatlas.fleet.follower import EventFollower
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.stream import EventSink, StreamCounters

BLOCK = 16
SILENT_S = 5.0


def worker_named(name: str, *models: str, silent: bool = False, healthy: bool = True) -> FleetWorker:
    clock = ManualClock()
    load = LoadLedger(clock, PrefillSpeed(clock, FleetSpeed(8000.0)), decode_step_s=0.02)
    config = WorkerConfig(url=f"http://{name}:1", events="tcp://127.0.0.1:9")
    worker = FleetWorker(f"{name}:1", config, name, 1, "", load, TrustState(), models=models, healthy=healthy)
    worker.silent_reason = "silent" if silent else None
    return worker


def names_of(*workers: FleetWorker, model: str | None = "m") -> tuple[str, str]:
    """Candidates and those left out, a letter each."""
    fleet = Fleet(ServeConfig(), PrefixIndex(BlockKeyHasher(1)), ManualClock())
    fleet._workers.update({worker.worker_id: worker for worker in workers})
    found, left_out = fleet.candidates(model), fleet.left_out(model)
    return "".join(worker.host for worker in found), "".join(worker.host for worker in left_out)


def test_a_silent_worker_is_left_out_where_others_are_heard() -> None:
    """One of two, two of four: what is left out never exceeds what takes its load."""
    assert names_of(worker_named("a"), worker_named("b", silent=True)) == ("a", "b")
    silent = [worker_named(name, silent=True) for name in "bd"]
    assert names_of(worker_named("a"), silent[0], worker_named("c"), silent[1]) == ("ac", "bd")


def test_no_service_is_lost_for_a_doubt() -> None:
    """The only worker, all workers, most workers: silent ones stay candidates, in their order."""
    assert names_of(worker_named("a", silent=True)) == ("a", "")
    assert names_of(worker_named("a", silent=True), worker_named("b", silent=True)) == ("ab", "")
    most = [worker_named(name, silent=True) for name in "bc"]
    assert names_of(worker_named("a"), *most) == ("abc", "")
    assert names_of(worker_named("a", healthy=False), worker_named("b", silent=True)) == ("b", "")


def test_only_workers_of_the_same_model_stand_in() -> None:
    """A healthy worker of another model is no help; one whose models are unknown takes anything."""
    silent, other, unknown = worker_named("a", "m", silent=True), worker_named("b", "n"), worker_named("c")
    assert names_of(silent, other) == ("a", "")
    assert names_of(silent, other, model="n") == ("b", "")
    assert names_of(silent, other, model=None) == ("b", "a")
    assert names_of(silent, other, unknown) == ("c", "a")


def test_a_term_doubles_while_no_batch_comes_and_starts_again_after_one() -> None:
    """A minute, two, up to ten; a batch between two verdicts makes the next one a first one."""
    term = SilenceTerm()
    assert not term.is_unanswered(0)
    assert [term.begin(0.0, 7) for _ in range(6)] == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert (term.is_over(599.9), term.is_over(600.0)) == (False, True)
    assert (term.is_unanswered(7), term.is_unanswered(8)) == (True, False)
    assert term.begin(0.0, 8) == 60.0


class FakeSubscriber:
    """Does to its sink what the tests say."""

    def __init__(self, config: object, sink: EventSink, clock: object, *, counters: StreamCounters) -> None:
        self.sink, self.counters, self.probes = sink, counters, 0
        sink.on_status("live", "caught up")

    async def run(self) -> None:
        """Nothing comes by itself."""

    def close(self) -> None:
        """Nothing is open."""

    def probe_soon(self) -> None:
        self.probes += 1

    def distrust(self, reason: str) -> None:
        self.sink.on_status("lost", reason)

    def bring(self) -> None:
        """One batch, as a live one comes."""
        event = BlockStored([1], None, [1] * BLOCK, BLOCK)
        self.sink.on_batch(self.counters.batches, encode_batch(EventBatch(ts=1.0, events=[event])))
        self.counters.batches += 1
        self.sink.on_status("live", "caught up")


@dataclass
class Followed:
    """One worker under its follower, in a time of its own."""

    worker: FleetWorker
    follower: EventFollower
    clock: ManualClock
    computed: float = 0.0

    @property
    def subscriber(self) -> FakeSubscriber:
        subscriber = self.follower._subscriber
        assert isinstance(subscriber, FakeSubscriber)
        return subscriber

    async def check(self, *, blocks: int = 20, after_s: float = 2.0) -> bool:
        """A health check, with so many more blocks computed; whether the worker is silent then."""
        self.clock.advance(after_s)
        self.computed += blocks * BLOCK
        self.worker.gauges.traffic = TrafficCount(self.computed, 0, 0)
        assert await self.follower.after_check(recovered=False)
        return self.worker.silent_reason is not None

    async def next_verdict(self) -> float:
        """Seconds of checks with traffic until the verdict."""
        begun_s = self.clock.monotonic_s()
        for _ in range(100):
            if await self.check():
                return self.clock.monotonic_s() - begun_s
        raise AssertionError("never silent")


@asynccontextmanager
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(follower_module, "ZmqEventSubscriber", FakeSubscriber)
    clock, index, worker = ManualClock(), PrefixIndex(BlockKeyHasher(1)), worker_named("a")
    index.add_worker(worker.worker_id, block_size=BLOCK)
    follower = EventFollower(
        worker,
        index,
        clock,
        discovery=None,
        silent_s=SILENT_S,
        owner_of=lambda _: None,
        on_ranks=lambda *_: True,
    )
    follower.start()
    yield Followed(worker, follower, clock)
    await follower.close()


@pytest.mark.asyncio
async def test_the_verdict_is_a_state_with_a_reason_and_a_batch_lifts_it_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out after the patience, with a line; back with the batch, before any other check, with another line."""
    caplog.set_level("INFO")
    async with followed(monkeypatch) as one:
        assert await one.next_verdict() == 2 + 2 + 6  # a base, the eighth block, the first check after the patience
        assert one.worker.trust.level is Trust.STALE
        assert "silent while the engine works" in str(one.worker.silent_reason)
        assert "worker a:1: left out where others are heard, for 60 s unless a batch comes" in caplog.text
        one.subscriber.bring()
        assert one.worker.silent_reason is None
        assert one.worker.trust.level is Trust.SYNCED
        assert "worker a:1: no longer left out: trust synced: caught up" in caplog.text


@pytest.mark.asyncio
async def test_a_connection_that_is_gone_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never judged, and ends a verdict: the engine may work well behind a network that does not."""
    async with followed(monkeypatch) as one:
        one.subscriber.sink.on_status("lost", "the connection is gone")
        assert not any([await one.check() for _ in range(10)])
        one.subscriber.bring()
        await one.next_verdict()
        one.subscriber.sink.on_status("lost", "the connection is gone")
        assert one.worker.silent_reason is None
        assert not any([await one.check() for _ in range(10)])


@pytest.mark.asyncio
async def test_what_connects_again_and_stays_silent_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck publisher behind a connection that comes and goes does not escape; a first replay is never judged."""
    async with followed(monkeypatch) as one:
        one.subscriber.sink.on_status("syncing", "replaying")
        assert not any([await one.check() for _ in range(10)])
        one.subscriber.sink.on_status("live", "caught up")
        await one.next_verdict()
        one.subscriber.sink.on_status("syncing", "connected again")
        assert one.worker.silent_reason is None
        assert await one.next_verdict() == 2 + 2 + 6


@pytest.mark.asyncio
async def test_a_silent_worker_is_tried_again_after_its_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without requests nothing can be announced: a minute later it gets some, judged as before, then after two."""
    async with followed(monkeypatch) as one:
        await one.next_verdict()
        assert await one.check(blocks=0, after_s=58.0)
        assert not await one.check(blocks=0)
        assert one.worker.trust.level is Trust.STALE
        assert await one.next_verdict() == 2 + 2 + 6
        assert await one.check(blocks=0, after_s=118.0)
        assert not await one.check(blocks=0)
        assert not any([await one.check(blocks=0) for _ in range(50)])
        one.subscriber.bring()
        assert await one.next_verdict() == 2 + 2 + 6
        assert not await one.check(blocks=0, after_s=60.0)


@pytest.mark.asyncio
async def test_another_process_begins_without_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start time in the metrics changed: what its predecessor kept to itself says nothing of it."""
    async with followed(monkeypatch) as one:
        one.worker.gauges.started_s = 1_000.0
        await one.next_verdict()
        one.worker.gauges.started_s = 2_000.0
        assert not await one.check(blocks=0)


@pytest.mark.asyncio
async def test_a_stream_that_is_not_followed_any_more_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says that it has no events now: routed by load alone, and a candidate."""
    async with followed(monkeypatch) as one:
        await one.next_verdict()
        one.follower._unfollow("KV events are off in the engine")
        assert one.worker.silent_reason is None
        assert not any([await one.check() for _ in range(10)])
