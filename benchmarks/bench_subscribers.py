"""What following many event streams costs: idle, connecting all at once, and when one is faster than its receiver.

    .venv/bin/python benchmarks/bench_subscribers.py [--idle 100] [--settle 90] [--seconds 20] [--connect 1000]

Publishers run in a process of their own, so that only the subscribers are measured.
"""

import argparse
import asyncio
import multiprocessing
import os
import resource
import time
from pathlib import Path

import uvloop
import zmq

from kvatlas.clock import SystemClock
from kvatlas.events import BlockStored, EventBatch, encode_batch
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber

BATCH = encode_batch(
    EventBatch(
        ts=1.0,
        events=[
            BlockStored(
                block_hashes=list(range(8)),
                parent_block_hash=None,
                token_ids=list(range(128)),
                block_size=16,
                medium="GPU",
            )
        ],
    )
)


def publishers(count: int, pipe) -> None:
    """`count` engines' PUB and ROUTER sockets; each replay question is answered with ten batches and the end marker."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 100)
    pubs, routers, ports = [], [], []
    poller = zmq.Poller()
    for _ in range(count):
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports.append((pub.bind_to_random_port("tcp://127.0.0.1"), router.bind_to_random_port("tcp://127.0.0.1")))
        poller.register(router, zmq.POLLIN)
        pubs.append(pub)
        routers.append(router)
    pipe.send(ports)
    flood_until_s, seq, rate = 0.0, 10, 0
    while True:
        if pipe.poll():
            order = pipe.recv()
            if order is None:
                break
            rate, seconds = order
            begun_s = time.monotonic()
            flood_until_s, sent = begun_s + seconds, 0
        for router, _ in poller.poll(0 if rate else 50):
            identity, _, start = router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), 10):
                router.send_multipart([identity, b"", b"", number.to_bytes(8, "big"), BATCH])
            router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])
        if rate:
            now_s = time.monotonic()
            while sent < rate * (min(now_s, flood_until_s) - begun_s):
                pubs[0].send_multipart([b"", seq.to_bytes(8, "big"), BATCH])
                seq, sent = seq + 1, sent + 1
            if now_s > flood_until_s:
                pipe.send((seq, time.monotonic() - flood_until_s))
                rate = 0
    context.destroy(linger=0)


class Sink:
    """Counts, and takes as long over each batch as it is told to."""

    def __init__(self, batch_s: float = 0.0) -> None:
        self.batches = self.gaps = 0
        self.status = ""
        self.batch_s = batch_s
        self.seconds_until_live = 0.0
        self.begun_s = time.monotonic()

    def on_life(self, reason: str) -> None:
        pass

    def on_batch(self, seq: int, payload: bytes) -> None:
        self.batches += 1
        until_s = time.perf_counter() + self.batch_s
        while self.batch_s and time.perf_counter() < until_s:
            pass

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.gaps += 1

    def on_status(self, status: str, reason: str) -> None:
        self.status = status
        if status == "live" and not self.seconds_until_live:
            self.seconds_until_live = time.monotonic() - self.begun_s


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def follow(ports: list[tuple[int, int]], **config: object):
    sinks, subscribers, tasks = [], [], []
    for live, replay in ports:
        sinks.append(Sink())
        settings = SubscriberConfig(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", **config)
        subscribers.append(ZmqEventSubscriber(settings, sinks[-1], SystemClock()))
        tasks.append(asyncio.create_task(subscribers[-1].run()))
    return sinks, subscribers, tasks


async def end(subscribers, tasks) -> None:
    for subscriber in subscribers:
        subscriber.close()
    await asyncio.gather(*tasks)


async def until_all_live(sinks) -> None:
    while not all(sink.seconds_until_live for sink in sinks):  # noqa: ASYNC110 - a benchmark may look
        await asyncio.sleep(0.01)


async def measure_idle(ports, settle_s: float, seconds: float) -> None:
    sinks, subscribers, tasks = await follow(ports)
    await until_all_live(sinks)
    await asyncio.sleep(settle_s)
    begun_s, replays = time.process_time(), sum(s.counters.replays for s in subscribers)
    await asyncio.sleep(seconds)
    used = (time.process_time() - begun_s) / seconds
    asked = sum(s.counters.replays for s in subscribers) - replays
    print(
        f"{len(ports)} subscribers, idle for {settle_s:g} s: {1000 * used:.2f} ms CPU per second, "
        f"{asked / seconds:.1f} tail polls per second"
    )
    await end(subscribers, tasks)


async def measure_connect(ports) -> None:
    memory, files, cpu_s = resident_bytes(), open_files(), time.process_time()
    sinks, subscribers, tasks = await follow(ports)
    await until_all_live(sinks)
    times = sorted(sink.seconds_until_live for sink in sinks)
    print(
        f"{len(ports)} subscribers at once: all live after {times[-1]:.2f} s (median {times[len(times) // 2]:.2f} s), "
        f"{time.process_time() - cpu_s:.2f} s CPU, {(open_files() - files) / len(ports):.1f} files and "
        f"{(resident_bytes() - memory) / len(ports) / 1024:.0f} KiB each, "
        f"{sum(s.batches for s in sinks)} batches applied"
    )
    await end(subscribers, tasks)


async def measure_overload(ports, pipe, seconds: float) -> None:
    batch_s = 0.0005
    rate = int(5 / batch_s)
    (sink,), (subscriber,), tasks = await follow(ports[:1], max_queue_batches=5_000, replay_timeout_s=1.0)
    await until_all_live([sink])
    sink.batch_s = batch_s
    memory = peak = resident_bytes()
    applied = sink.batches
    pipe.send((rate, seconds))
    first_doubt_s, begun_s = None, time.monotonic()
    while not pipe.poll():
        await asyncio.sleep(0.05)
        peak = max(peak, resident_bytes())
        if first_doubt_s is None and sink.status != "live":
            first_doubt_s = time.monotonic() - begun_s
    published, late_s = pipe.recv()
    print(
        f"a stream at 5 times its receiver ({rate} batches/s of {len(BATCH)} bytes for {seconds:g} s): "
        f"publisher {1000 * late_s:.0f} ms late, {sink.batches - applied} of {published - 10} batches applied, "
        f"{subscriber.counters.overflowed} dropped here, loss told after {first_doubt_s or 0:.2f} s, "
        f"memory +{(peak - memory) / 2**20:.1f} MiB at most"
    )
    await end([subscriber], tasks)


async def measure(arguments: argparse.Namespace, ports, pipe) -> None:
    await measure_connect(ports)
    await measure_idle(ports[: arguments.idle], arguments.settle, arguments.seconds)
    await measure_overload(ports, pipe, 3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=100)
    parser.add_argument("--settle", type=float, default=90.0, help="idle seconds before: tail polls become rarer")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connect", type=int, default=1000)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publishers, args=(arguments.connect, theirs))
    process.start()
    try:
        uvloop.run(measure(arguments, pipe.recv(), pipe))
    finally:
        pipe.send(None)
        process.join(5)
        process.kill()


if __name__ == "__main__":
    main()
