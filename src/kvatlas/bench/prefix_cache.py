"""What the prefix cache costs: recorded operations, and many long requests, beside the engine's own cache.

Ours runs in this process, vLLM's in a child process of an interpreter that has it; the two take turns and the median of
several rounds counts. Only calls of the manager are timed, in processor time of the thread, as the machine may be
shared: hashing prompts and parsing recordings is the same work on both sides, done beforehand.
"""

import gc
import statistics
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import thread_time_ns
from typing import Any, Protocol

import msgspec

from kvatlas.bench import prefix_cache_vllm
from kvatlas.bench.prefix_cache_vllm import BLOCK_SIZE, PROMPT_BLOCKS, long_prompts
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import ConfigError
from kvatlas.hashing import RequestExtras, VllmHasher
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    Request,
    SlidingWindowSpec,
)

__all__ = ["OperationsResult", "run_prefix_cache_bench"]

_PEER = "vllm"
_POOL_BLOCKS = 40_000
_MEMORY_BLOCKS = 20_000


class OperationsResult(msgspec.Struct, frozen=True):
    """Time of one run of a workload.

    Attributes:
        total_ns: in calls of the cache manager.
        count: operations.
    """

    total_ns: int
    count: int


class _Side(Protocol):
    """One of the two caches under test."""

    def operations(self, path: Path) -> OperationsResult: ...
    def requests(self, count: int) -> OperationsResult: ...
    def bytes_per_block(self) -> float: ...


def run_prefix_cache_bench(
    recordings: Sequence[Path],
    *,
    against: str | None = _PEER,
    interpreter: str | Path = ".venv-real/bin/python",
    rounds: int = 9,
    num_requests: int = 10_000,
) -> BenchReport:
    """Measure the prefix cache and its peer.

    Args:
        recordings: operation files, as `golden/core` has them; one row each.
        against: `vllm`, or None to measure ours alone.
        interpreter: a Python that has vLLM 0.32.
        rounds: how often each workload is repeated, in turns.
        num_requests: requests of 8192 tokens in the last workload; 0 = leave it and the memory row out.

    Raises:
        ConfigError: an unknown peer, no round, or a peer that does not run.
    """
    if against not in {None, _PEER}:
        raise ConfigError(f"the prefix cache is measured against {_PEER} or nothing, got {against!r}")
    if rounds < 1:
        raise ConfigError(f"at least one round is needed, got {rounds}")
    with ExitStack() as stack:
        peer = stack.enter_context(_vllm(interpreter)) if against else None
        ours = _OurCache()
        rows = [
            _row(f"prefix cache: {path.stem}", "us/operation", *_turns(ours, peer, rounds, _operations_us(path)))
            for path in recordings
        ]
        if num_requests:
            work = f"prefix cache: {num_requests} requests of {PROMPT_BLOCKS * BLOCK_SIZE} tokens, look up to free"
            rates = _turns(ours, peer, min(rounds, 3), lambda side: _per_second(side.requests(num_requests)))
            rows.append(_row(work, "requests/s", *rates))
            rows.append(_row("prefix cache: memory, pool full", "bytes/block", *_turns(ours, peer, 1, _memory)))
    return BenchReport(machine=machine_name(), rows=rows)


def _operations_us(path: Path) -> Callable[[_Side], float]:
    def measure(side: _Side) -> float:
        result = side.operations(path)
        return result.total_ns / result.count / 1000

    return measure


def _per_second(result: OperationsResult) -> float:
    return result.count / result.total_ns * 1e9


def _memory(side: _Side) -> float:
    return side.bytes_per_block()


def _turns(
    ours: _Side, peer: _Side | None, rounds: int, measure: Callable[[_Side], float]
) -> tuple[float, float | None]:
    """Medians of ours and the peer's, measured in turns."""
    our_values: list[float] = []
    peer_values: list[float] = []
    for _ in range(rounds):
        our_values.append(measure(ours))
        if peer is not None:
            peer_values.append(measure(peer))
    return statistics.median(our_values), statistics.median(peer_values) if peer_values else None


def _row(work: str, unit: str, ours: float, peer_value: float | None) -> BenchRow:
    if peer_value is None:
        return BenchRow(work, unit, round(ours, 3))
    ratio = ours / peer_value if unit.endswith("/s") else peer_value / ours
    return BenchRow(work, unit, round(ours, 3), _PEER, round(peer_value, 3), round(ratio, 2))


# Ours


class _Group(msgspec.Struct, frozen=True):
    kind: str
    block_size: int
    window: int = 0
    chunk: int = 0

    def spec(self) -> KVCacheSpec:
        match self.kind:
            case "full_attention":
                return FullAttentionSpec(self.block_size)
            case "sliding_window":
                return SlidingWindowSpec(self.block_size, self.window)
            case "chunked_local_attention":
                return ChunkedLocalAttentionSpec(self.block_size, self.chunk)
            case "mamba":
                return MambaSpec(self.block_size)
        raise ConfigError(f"no workload for groups of kind {self.kind!r}")


class _Setup(msgspec.Struct, frozen=True):
    hash_algo: str
    hash_seed: str
    groups: list[_Group]
    num_blocks: int
    hash_block_size: int
    use_eagle: bool
    retention_interval: int | None
    max_model_len: int
    max_in_flight_tokens: int

    def config(self) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            groups=tuple(KVCacheGroup(group.spec()) for group in self.groups),
            hash_block_size=self.hash_block_size,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_in_flight_tokens,
            use_eagle=self.use_eagle,
            retention_interval=self.retention_interval,
        )


class _Operation(msgspec.Struct, frozen=True):
    op: str
    id: str = ""
    tokens: list[int] = []
    cache_salt: str | None = None
    report_mode: str = "incremental"
    prompt_logprobs: bool = False
    scheduled: int = 0
    append: list[int] = []
    block_ids: list[int] = []


class _OurCache:
    """This package's cache."""

    def operations(self, path: Path) -> OperationsResult:
        lines = path.read_bytes().splitlines()
        setup = msgspec.json.decode(lines[0], type=_Setup)
        hasher = VllmHasher(setup.hash_algo, setup.hash_seed)
        operations = [msgspec.json.decode(line, type=_Operation) for line in lines[1:]]
        requests = {
            operation.id: Request(
                operation.id,
                operation.tokens,
                hasher,
                setup.hash_block_size,
                extras=RequestExtras(cache_salt=operation.cache_salt),
                report_mode=operation.report_mode,
                skip_reading_prefix_cache=operation.prompt_logprobs,
            )
            for operation in operations
            if operation.op == "admit"
        }
        run = _RecordedRun(KVCacheManager(setup.config()), requests)
        with _quiet_memory():
            for operation in operations:
                run.apply(operation)
        return OperationsResult(run.total_ns, len(operations))

    def requests(self, count: int) -> OperationsResult:
        manager = KVCacheManager(_plain_config(_POOL_BLOCKS))
        total_ns = 0
        with _quiet_memory():
            for request in _long_requests(count):
                start = thread_time_ns()
                _pass_through(manager, request)
                total_ns += thread_time_ns() - start
        return OperationsResult(total_ns, count)

    def bytes_per_block(self) -> float:
        requests = list(_long_requests(_MEMORY_BLOCKS // PROMPT_BLOCKS * 2))
        gc.collect()
        tracemalloc.start()
        manager = KVCacheManager(_plain_config(_MEMORY_BLOCKS))
        for request in requests:
            _pass_through(manager, request)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used / _MEMORY_BLOCKS


def _plain_config(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, (KVCacheGroup(FullAttentionSpec(BLOCK_SIZE)),), BLOCK_SIZE, 1 << 20)


def _pass_through(manager: KVCacheManager, request: Request) -> None:
    manager.new_step_starts()
    found = manager.get_computed_blocks(request)
    num_new_tokens = request.num_tokens - found.hit_tokens
    manager.allocate_slots(request, num_new_tokens, new_computed_tokens=found.hit_tokens, computed_blocks=found)
    manager.free(request)
    manager.take_events()


def _long_requests(count: int) -> Iterator[Request]:
    """The requests of `long_prompts`."""
    for number, (token_ids, digests) in enumerate(long_prompts(count)):
        request = Request(f"r{number}", token_ids, None, BLOCK_SIZE)
        request.block_hashes = digests
        yield request


class _RecordedRun:
    """Recorded operations on a manager; `total_ns` is the time spent in it."""

    def __init__(self, manager: KVCacheManager, requests: dict[str, Request]) -> None:
        self.total_ns = 0
        self._manager = manager
        self._requests = requests
        self._live: dict[str, Request] = {}

    def apply(self, operation: _Operation) -> None:
        """Do one operation, as a scheduler step of its own."""
        request = self._requests.get(operation.id)
        if operation.append and request is not None:
            request.append_output(operation.append)
        start = thread_time_ns()
        self._manager.new_step_starts()
        match operation.op:
            case "admit" if request is not None:
                self._admit(request, operation.scheduled)
            case "step" if request is not None:
                self._step(request, operation.scheduled)
            case "free" if request is not None:
                self._manager.free(self._live.pop(operation.id))
            case "evict_blocks":
                self._manager.evict_blocks(operation.block_ids)
            case "reset" | "free_all_and_reset":
                self._reset(everything=operation.op != "reset")
        self._manager.take_events()
        self.total_ns += thread_time_ns() - start

    def _admit(self, request: Request, scheduled: int) -> None:
        found = self._manager.get_computed_blocks(request)
        request.shared_prefix_boundary = found.shared_prefix_boundary
        new = self._manager.allocate_slots(
            request, scheduled, new_computed_tokens=found.hit_tokens, computed_blocks=found
        )
        if new is not None:
            request.num_computed_tokens = found.hit_tokens + scheduled
            self._live[request.request_id] = request

    def _step(self, request: Request, scheduled: int) -> None:
        if self._manager.allocate_slots(request, scheduled) is None:
            self._manager.free(self._live.pop(request.request_id))
        else:
            request.num_computed_tokens += scheduled

    def _reset(self, *, everything: bool) -> None:
        if everything:
            for request in self._live.values():
                self._manager.free(request)
            self._live.clear()
        self._manager.reset_prefix_cache()


@contextmanager
def _quiet_memory() -> Iterator[None]:
    """Collect garbage before, not while it is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# The peer


class _VllmCache:
    """The engine's cache in a child process: one JSON line asks, one answers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def _ask(self, **command: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ConfigError("the peer's process has no pipes")
        try:
            stdin.write(msgspec.json.encode(command) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise ConfigError("the vLLM process ended: its own error says why (does its interpreter have vllm 0.32?)")
        return msgspec.json.decode(line)

    def operations(self, path: Path) -> OperationsResult:
        return msgspec.convert(self._ask(work="operations", path=str(path)), OperationsResult)

    def requests(self, count: int) -> OperationsResult:
        return msgspec.convert(self._ask(work="requests", count=count, num_blocks=_POOL_BLOCKS), OperationsResult)

    def bytes_per_block(self) -> float:
        count = _MEMORY_BLOCKS // PROMPT_BLOCKS * 2
        return float(self._ask(work="memory", count=count, num_blocks=_MEMORY_BLOCKS))


@contextmanager
def _vllm(interpreter: str | Path) -> Iterator[_VllmCache]:
    """Run the peer until the block ends.

    Raises:
        ConfigError: there is no such interpreter.
    """
    command = [str(interpreter), prefix_cache_vllm.__file__]
    environment = prefix_cache_vllm.environment()
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    except OSError as error:
        raise ConfigError(
            f"the interpreter {str(interpreter)!r} cannot be started ({error.strerror}): run `make test-real` first, "
            "which installs one with vLLM, or give --interpreter"
        ) from error
    try:
        yield _VllmCache(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was written to a process that is gone
                if pipe is not None:
                    pipe.close()
