"""From a publisher's socket to the trust of a worker: what a router believes when the stream misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.events import BlockStored, EventBatch, encode_batch
from kvatlas.fleet import EventSource, Trust, TrustState
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber
from support.engines import open_pub, subscribed

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

TOKENS = list(range(8))


@dataclass
class RawEngine:
    """A PUB and a ROUTER that stay open while the publisher behind them changes, as behind a TCP proxy."""

    publisher: zmq.Socket
    router: zmq.Socket
    endpoint: str
    replay_endpoint: str
    kept: list[tuple[int, bytes]] = field(default_factory=list)

    def publish(self, seq: int, first_hash: int, ts: float) -> None:
        stored = BlockStored(
            block_hashes=[first_hash], parent_block_hash=None, token_ids=TOKENS[:4], block_size=4, medium="GPU"
        )
        payload = encode_batch(EventBatch(ts=ts, events=[stored], data_parallel_rank=0))
        self.kept.append((seq, payload))
        self.publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        while True:
            if self.router.poll(0):
                identity, _, start = self.router.recv_multipart()
                for seq, payload in self.kept:
                    if seq >= int.from_bytes(start, "big"):
                        self.router.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), payload])
                self.router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])
            await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(*, replay: bool, topic: str = "") -> AsyncIterator[tuple[RawEngine, EventSource, PrefixIndex]]:
    """An engine, and a worker that follows its stream."""
    with zmq.Context() as context, open_pub(context) as publisher, context.socket(zmq.ROUTER) as router:
        for socket in (publisher, router):
            socket.setsockopt(zmq.LINGER, 0)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, router)]
        engine = RawEngine(publisher, router, *(f"tcp://127.0.0.1:{port}" for port in ports))
        index = PrefixIndex(BlockKeyHasher(1))
        index.add_worker("w", block_size=4)
        source = EventSource("w", index, TrustState(), SystemClock())
        config = SubscriberConfig(
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint if replay else None,
            topic=topic,
            probe_s=0.1,
        )
        subscriber = ZmqEventSubscriber(config, source, SystemClock())
        tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(engine.serve_replays())]
        try:
            yield engine, source, index
        finally:
            subscriber.close()
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replay", [True, False])
async def test_new_life_on_a_living_connection_is_trusted_again(replay: bool) -> None:
    """Numbers go back to 0 while the connection stays: the old life is forgotten, the new one earns full trust."""
    async with followed(replay=replay) as (engine, source, index):
        await subscribed(engine.publisher)
        for seq in range(3):
            engine.publish(seq, 1, 100.0 + seq)
        await until(lambda: source.stats.last_seq == 2 and source.trust.level is Trust.SYNCED)
        engine.kept.clear()
        engine.publish(0, 7, 200.0)
        await until(lambda: source.stats.lives == 2 and source.stats.last_seq == 0)
        engine.publish(1, 8, 201.0)
        await until(lambda: source.stats.last_seq == 1 and source.trust.level is Trust.SYNCED)
        assert index.match([*TOKENS[:4], 9])["w"].hit_tokens == 4
        assert index.stats("w").resident_now == 2


async def test_wrong_topic_is_noticed() -> None:
    """Batches that come by replay only are late: such a worker is not trusted, and the reason says what to check."""
    async with followed(replay=True, topic="nope") as (engine, source, _):
        await until(lambda: source.trust.level is Trust.SYNCED)

        async def publish() -> None:
            for seq in range(200):
                engine.publish(seq, seq + 1, 100.0 + seq)
                await asyncio.sleep(0.02)

        publishing = asyncio.create_task(publish())
        await until(lambda: "check" in source.trust.reason)
        assert source.trust.level is Trust.SYNCING
        assert "'nope'" in source.trust.reason
        publishing.cancel()


async def test_joining_late_without_replay_is_partial() -> None:
    """The first batch seen is not the publisher's first: what came before is unknown, and said to be."""
    async with followed(replay=False) as (engine, source, _):
        await subscribed(engine.publisher)
        await until(lambda: source.trust.level is Trust.SYNCING)
        engine.publish(5, 1, 100.0)
        await until(lambda: source.trust.level is Trust.PARTIAL)
        assert "0..4" in source.trust.reason


async def test_joining_late_with_replay_is_synced() -> None:
    """What was published before the worker joined is replayed, and the worker is wholly known."""
    async with followed(replay=True) as (engine, source, index):
        for seq in range(3):
            engine.publish(seq, seq + 1, 100.0 + seq)
        await until(lambda: source.stats.last_seq == 2 and source.trust.level is Trust.SYNCED)
        assert index.stats("w").resident_now == 3
