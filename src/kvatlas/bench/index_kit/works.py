"""The works: what is done to an index under test, and which part of it is timed.

Dynamo's tree works in a thread of its own, beside the one that calls it. So a work's time is what flatters either side
most: the lesser of the processor time of all threads (waiting costs nothing) and of the time on the wall (two threads
at once count once). Events are made before the clock starts. Memory is the growth of the process's resident set, so
those works want a fresh process.
"""

import gc
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any, Protocol, Self

from .workload import Prompt, Run, laddered, sessions, stores

__all__ = ["IndexUnderTest", "Works"]

_WORKERS = 64
_REMOVED_PER_EVENT = 16


class IndexUnderTest(Protocol):
    """One of the indexes, with prepared events and questions of a form of its own."""

    def stored(self, parent: int | None, hashes: list[int]) -> Any:
        """A store event in the form `apply` takes; not timed."""
        ...

    def removed(self, hashes: list[int]) -> Any:
        """A removal event in the form `apply` takes; not timed."""
        ...

    def apply(self, worker: int, event: Any) -> None:
        """Apply an event of a worker."""
        ...

    def flush(self) -> None:
        """Return when all that was applied can be found."""
        ...

    def question(self, hashes: "array[int]") -> Any:
        """A prompt in the form `find` takes; not timed."""
        ...

    def find(self, question: Any) -> Any:
        """Who holds how many leading blocks, as a mapping."""
        ...

    def depths(self, found: Any) -> dict[int, int]:
        """An answer of `find` as worker -> leading blocks, without those that hold none; not timed."""
        ...

    def purge(self, worker: int) -> None:
        """Forget all that a worker holds."""
        ...

    def used_bytes(self) -> int | None:
        """The index's own account of its memory; None when it keeps none."""
        ...


class Works:
    """Does works on indexes that `make` makes; the filled index of the last `find` is kept for the next.

    Args:
        make: an empty index.
    """

    def __init__(self, make: Callable[[], IndexUnderTest]) -> None:
        self._make = make
        self._filled: tuple[tuple[Any, ...], IndexUnderTest, list[Prompt]] | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, float]:
        """Do the work a command names, with its other members as arguments."""
        arguments = dict(command)
        works: dict[str, Callable[..., dict[str, float]]] = {
            "find": self.find,
            "store": self.store,
            "remove": self.remove,
            "purge": self.purge,
            "memory": self.memory,
            "churn": self.churn,
        }
        return works[arguments.pop("work")](**arguments)

    def find(self, workers: int, blocks: int, pattern: str, calls: int, *, miss: bool = False) -> dict[str, float]:
        """Look prompts up: `value` microseconds each, `wrong` answers among the prompts."""
        key = (workers, blocks, pattern)
        if self._filled is None or self._filled[0] != key:
            self._filled = None
            prompts = laddered(workers, blocks, pattern, count=4 if workers * blocks <= 1 << 18 else 2)
            self._filled = (key, _filled(self._make(), prompts), prompts)
        _, index, prompts = self._filled
        if miss:
            prompts = laddered(0, blocks, pattern, count=len(prompts), seed=99)
        questions = [index.question(prompt.hashes) for prompt in prompts]
        wrong = sum(
            index.depths(index.find(question)) != prompt.held
            for question, prompt in zip(questions, prompts, strict=True)
        )
        find = index.find
        with _Stopwatch() as watch:
            for question in islice(cycle(questions), calls):
                find(question)
        return {"value": watch.spent_ns / calls / 1000, "wrong": wrong}

    def store(self, entries: int, per_event: int) -> dict[str, float]:
        """Apply store events of `per_event` blocks to an empty index: `value` nanoseconds for each block."""
        index = self._make()
        runs = list(stores(_conversations(entries), per_event))
        events = [(run.worker, index.stored(run.parent, run.hashes)) for run in runs]
        return {"value": _applied_ns(index, events) / sum(len(run.hashes) for run in runs)}

    def remove(self, entries: int) -> dict[str, float]:
        """Apply removals of 16 blocks, leaves first, to a full index: `value` nanoseconds for each block."""
        prompts = list(_conversations(entries))
        index = _filled(self._make(), prompts)
        runs = [run for prompt in prompts for run in _removals(prompt)]
        events = [(worker, index.removed(hashes)) for worker, hashes in runs]
        return {"value": _applied_ns(index, events) / sum(len(hashes) for _, hashes in runs)}

    def purge(self, entries: int) -> dict[str, float]:
        """Forget worker after worker: `value` nanoseconds for each block held."""
        prompts = list(_conversations(entries))
        index = _filled(self._make(), prompts)
        blocks = sum(len(run.hashes) for run in stores(prompts, _REMOVED_PER_EVENT))
        with _Stopwatch() as watch:
            for worker in range(_WORKERS):
                index.purge(worker)
            index.flush()
        return {"value": watch.spent_ns / blocks}

    def memory(self, entries: int, copies: int) -> dict[str, float]:
        """Fill an index: `value` bytes of resident set for each (block, worker), `used_bytes` by its own account."""
        index = self._make()
        _grown_in_size(index, stores(sessions(_WORKERS, entries // 20, copies=copies, seed=98), 16))
        before = _resident_bytes()
        blocks = 0
        for run in stores(sessions(_WORKERS, entries, copies=copies), 16):
            index.apply(run.worker, index.stored(run.parent, run.hashes))
            blocks += len(run.hashes)
            if not blocks % 1024:
                index.flush()
        index.flush()
        gc.collect()
        resident = _resident_bytes() - before
        used = index.used_bytes()
        return {"value": resident / blocks, "resident_bytes": resident, "used_bytes": used or 0}

    def churn(self, entries: int, times: int) -> dict[str, float]:
        """Replace all blocks of a full index `times` over: `value` percent its memory grew by since the first time."""
        index = self._make()
        _grown_in_size(index, stores(sessions(_WORKERS, entries // 20, copies=1, seed=98), 16))
        before = _resident_bytes()
        held: deque[Prompt] = deque()
        room, stored = entries, 0
        warm_bytes = None
        for run in stores(_remembered(sessions(_WORKERS, (times + 1) * entries, copies=1), held), 16):
            index.apply(run.worker, index.stored(run.parent, run.hashes))
            room -= len(run.hashes)
            stored += len(run.hashes)
            while room < 0 and len(held) > 1:
                for worker, hashes in _removals(held.popleft()):
                    index.apply(worker, index.removed(hashes))
                    room += len(hashes)
                index.flush()
            if warm_bytes is None and stored >= 2 * entries:
                warm_bytes = _resident_bytes()
        gc.collect()
        warm_bytes = warm_bytes or _resident_bytes()
        return {"value": (_resident_bytes() - warm_bytes) / max(warm_bytes - before, 1 << 20) * 100}


def _conversations(entries: int) -> Iterator[Prompt]:
    return sessions(_WORKERS, entries, copies=1)


def _remembered(prompts: Iterable[Prompt], held: deque[Prompt]) -> Iterator[Prompt]:
    for prompt in prompts:
        held.append(prompt)
        yield prompt


def _filled(index: IndexUnderTest, prompts: Iterable[Prompt]) -> IndexUnderTest:
    """Apply what all workers announce. Events do not name the worker, so holders of the same run share one."""
    events: dict[tuple[int, int], Any] = {}
    for run in stores(prompts, _REMOVED_PER_EVENT):
        key = (run.hashes[0], len(run.hashes))
        if key not in events:
            events[key] = index.stored(run.parent, run.hashes)
        index.apply(run.worker, events[key])
    index.flush()
    return index


def _removals(prompt: Prompt) -> Iterator[tuple[int, list[int]]]:
    """All of a prompt's own blocks leave its holders, leaves first."""
    for worker, depth in prompt.held.items():
        leaves_first = prompt.hashes[prompt.num_shared : depth].tolist()[::-1]
        for start in range(0, len(leaves_first), _REMOVED_PER_EVENT):
            yield worker, leaves_first[start : start + _REMOVED_PER_EVENT]


def _applied_ns(index: IndexUnderTest, events: Sequence[tuple[int, Any]]) -> int:
    apply = index.apply
    with _Stopwatch() as watch:
        for worker, event in events:
            apply(worker, event)
        index.flush()
    return watch.spent_ns


def _grown_in_size(index: IndexUnderTest, runs: Iterator[Run]) -> None:
    """Make and drop events, so that the interpreter's own memory has grown before the index's is measured."""
    for run in runs:
        index.stored(run.parent, run.hashes)
        index.removed(run.hashes)
    gc.collect()


def _resident_bytes() -> int:
    """Source: /proc/self/statm, second field, pages."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Stopwatch:
    """Time spent in a block, as this module counts it. Garbage is collected before it and not in it."""

    spent_ns = 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        self._start = perf_counter_ns(), process_time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent_ns = min(perf_counter_ns() - self._start[0], process_time_ns() - self._start[1])
        gc.enable()
