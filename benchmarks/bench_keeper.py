"""Print what a keeper costs: processor time a batch, replay rate, disk and memory a resident block.

    python benchmarks/bench_keeper.py [BATCHES [BLOCKS]]

A publisher sends BATCHES batches (one store of 8 blocks of 16 tokens, 8 removals: a pool in balance) to `kvatlas
keeper`; a subscriber then replays them all from it. After that BLOCKS resident blocks and four times as many that came
and went are compacted in this process, and traced for memory.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
import urllib.request
from pathlib import Path

from kvatlas.clock import SystemClock
from kvatlas.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.keeper import CopyCounting, EventReader, compact, read_residency, resident_events
from kvatlas.stream import (
    Journal,
    PublisherConfig,
    SubscriberConfig,
    ZmqEventPublisher,
    ZmqEventSubscriber,
)

ANY_PORT = "tcp://127.0.0.1:0"
SIZE = 16
RUN = 8
rng = random.Random(1)


def store(first_hash, parent=None):
    tokens = [rng.randrange(150_000) for _ in range(RUN * SIZE)]
    hashes = [rng.getrandbits(63) for _ in range(RUN - 1)]
    return BlockStored([first_hash, *hashes], parent, tokens, SIZE, medium="GPU", group_idx=0)


def batches(count, kept):
    """Chains of 64 blocks; all but the last `kept` blocks are removed again, in the order they came."""
    alive, parent = [], None
    for number in range(count):
        event = store(rng.getrandbits(63), parent)
        parent = None if number % 8 == 7 else event.block_hashes[-1]
        alive += event.block_hashes
        gone, alive = alive[: max(len(alive) - kept, 0)], alive[-kept:]
        yield EventBatch(1_000.0 + number, [event, *(BlockRemoved([each], "GPU", 0) for each in gone)], 0)


class Count:
    def __init__(self, wanted):
        self.left = wanted
        self.done = asyncio.Event()

    def on_life(self, reason): ...

    def on_gap(self, first_seq, last_seq):
        raise AssertionError((first_seq, last_seq))

    def on_batch(self, seq, payload):
        self.left -= 1
        if not self.left:
            self.done.set()

    def on_status(self, status, reason): ...


def status_of(ready):
    with urllib.request.urlopen(f"http://127.0.0.1:{ready['status_port']}/status", timeout=5) as answer:
        return json.load(answer)


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_mb(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


async def replay_all(ready, count):
    sink = Count(count)
    subscriber = ZmqEventSubscriber(SubscriberConfig(ready["publish"], ready["replay"]), sink, SystemClock())
    task = asyncio.create_task(subscriber.run())
    await sink.done.wait()
    subscriber.close()
    await task


def bench_stream(count):
    prepared = list(batches(count, 4096))
    size = sum(len(encode_batch(batch)) for batch in prepared) / count
    config = PublisherConfig(ANY_PORT, ANY_PORT, bind=True, buffer_steps=count)
    with ZmqEventPublisher(config) as publisher, tempfile.TemporaryDirectory() as folder:
        arguments = ["--events", publisher.endpoint, "--replay", publisher.replay_endpoint, "--data", folder]
        arguments += ["--publish", ANY_PORT, "--serve-replay", ANY_PORT, "--status-port", "0", "--json"]
        command = [sys.executable, "-m", "kvatlas", "keeper", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as keeper:
            text = b""
            while not text.rstrip().endswith(b"}"):
                text += keeper.stdout.readline()
            ready = json.loads(text)
            while not status_of(ready)["serving"]:
                time.sleep(0.05)
            memory_mb = rss_mb(keeper.pid)
            cpu, began = cpu_s(keeper.pid), time.monotonic()
            for batch in prepared:
                publisher.publish(batch)
            while status_of(ready)["last_engine_seq"] < count - 1:
                time.sleep(0.02)
            took, used = time.monotonic() - began, cpu_s(keeper.pid) - cpu
            print(f"batches of {size:.0f} bytes: {count / took:.0f}/s as sent, {1e6 * used / count:.1f} us of")
            print(f"the keeper's processor a batch, so one core keeps up with {count / used:.0f}/s")
            cpu, began = cpu_s(keeper.pid), time.monotonic()
            asyncio.run(replay_all(ready, count))
            took, used = time.monotonic() - began, cpu_s(keeper.pid) - cpu
            print(f"replay of all of them: {count / took:.0f}/s, {1e6 * used / count:.1f} us of its processor each")
            print(f"resident memory of the keeper: {memory_mb:.0f} MB before, {rss_mb(keeper.pid):.0f} MB after")
            keeper.terminate()


def bench_compaction(blocks):
    count = 5 * blocks // RUN
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder), "engine") as journal:
        for number, batch in enumerate(batches(count, blocks)):
            journal.append(number, number, encode_batch(batch))
        before = journal.size_bytes
        began = time.process_time()
        target = journal.successor()
        done = compact(journal.extents(), count, target, CopyCounting.COUNT)
        took = time.process_time() - began
        print(f"compaction: {before / 1e6:.1f} MB to {target.end / 1e6:.1f} MB in {took:.1f} s of processor time;")
        print(f"{target.end / done.blocks:.0f} bytes of disk a resident block of {SIZE} tokens, {done.batches} batches")
        tracemalloc.start()
        extents = journal.extents()
        residency = read_residency(extents, count)
        held = tracemalloc.get_traced_memory()[0]
        with EventReader([extent.path for extent in extents]) as reader:
            for _ in resident_events(residency, reader):
                pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"memory while it runs: {held / done.blocks:.0f} bytes a block to read, {peak / done.blocks:.0f} at most")
        target.remove()
    with tempfile.TemporaryDirectory() as folder:
        with Journal(Path(folder), "engine") as journal:
            for number, batch in enumerate(batches(count, blocks)):
                journal.append(number, number, encode_batch(batch))
        began = time.monotonic()
        with Journal(Path(folder), "engine") as journal:
            took = time.monotonic() - began
            print(f"opening a journal: {took:.2f} s for {journal.size_bytes / 1e6:.1f} MB in {count} batches")


if __name__ == "__main__":
    bench_stream(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
    bench_compaction(int(sys.argv[2]) if len(sys.argv) > 2 else 50_000)
