"""The scheduler beside a real engine: the requests of a recorded vLLM 0.32, with the tokens it said, one at a time.

The recordings are described in tests/vectors/streams and in the golden folder's README.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from kvatlas.events import AllBlocksCleared, BlockStored, decode_batch
from kvatlas.hashing import RequestExtras
from kvatlas.simulator import EngineConfig, EngineCore, EventsConfig, GroupConfig, ReplySampler, SamplingParams
from kvatlas.stream import RecordedFrames, RecordedRequest, RecordedReset, read_recording
from support.golden import golden_dir, golden_files

# The recorder of this one joined a warm engine: until then requests hit what was cached before the recording.
WARM_UNTIL_LINE = {"vllm-bytes-serial": 0, "vllm-cbor-serial": 15}


@dataclass
class Recorded:
    """A recorded reply as a token source."""

    token_ids: tuple[int, ...]

    def token_id(self, index):
        """See `TokenSource`."""
        return self.token_ids[index]


@dataclass
class Rerun:
    """What the engine said and what ours says, since both were in the same state."""

    name: str
    compared: int = 0
    differences: list[tuple[int, int, int]] = field(default_factory=list)
    theirs: list[tuple] = field(default_factory=list)
    ours: list[tuple] = field(default_factory=list)
    was_reset: bool = False


def flat(events):
    """Events as single blocks: what was stored after what, with which tokens and keys, and what was removed."""
    blocks = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            blocks.append(("cleared",))
        elif isinstance(event, BlockStored):
            size = event.block_size
            parents = [event.parent_block_hash, *event.block_hashes]
            for index, block in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                keys = event.extra_keys[index] if event.extra_keys else None
                blocks.append(("stored", block, parents[index], tokens, tuple(keys or ()), event.kv_cache_spec_kind))
        else:
            blocks += [("removed", block, event.medium, event.group_idx) for block in event.block_hashes]
    return blocks


class Driver:
    """Takes steps as the engine's loop does: up to as many at a time as the core allows, ended in order."""

    def __init__(self, core):
        self.core = core
        self._running = deque()

    def run(self, until=None):
        """Take steps until a request has ended, or nobody is left; yield their events."""
        while self.core.has_requests or self._running if until is None else until.finish_reason is None:
            if self.core.has_requests and len(self._running) < self.core.max_running_steps:
                step = self.core.begin_step(0.0)
                self._running.append(step)
                if step.plan.scheduled and len(self._running) < self.core.max_running_steps:
                    continue
            yield from self.core.end_step(self._running.popleft(), 0.0).events


def rerun(name, *, async_scheduling):
    """Put a recording's requests through our engine."""
    (path,) = golden_files("streams", (name,))
    events = EventsConfig(int_block_hashes=name != "vllm-bytes-serial")
    config = EngineConfig(
        block_size=32,
        num_blocks=300,
        max_model_len=4096,
        hash_algo="sha256_cbor",
        events=events,
        async_scheduling=async_scheduling,
    )
    core = EngineCore(config, ReplySampler((1,), eos_token_id=None))
    run = Rerun(name)
    for record in read_recording(path):
        if isinstance(record, RecordedFrames):
            run.theirs += flat(decode_batch(record.payload).batch.events)
        elif isinstance(record, RecordedReset):
            assert core.reset_prefix_cache()
            run.was_reset = True
            run.compared = 0
            run.differences, run.theirs, run.ours = [], [], []
        elif isinstance(record, RecordedRequest):
            request = put(core, record)
            run.ours += flat(Driver(core).run())
            if record.line > WARM_UNTIL_LINE[name]:
                run.compared += 1
                if request.cached_tokens != record.cached_tokens:
                    run.differences.append((record.line, request.cached_tokens, record.cached_tokens))
    return run


def put(core, record):
    """Queue a recorded request with the reply it got."""
    return core.add(
        f"line-{record.line}",
        record.prompt_token_ids,
        SamplingParams(max_tokens=record.body["max_tokens"], ignore_eos=True),
        extras=RequestExtras(cache_salt=record.cache_salt),
        source=Recorded(record.output_token_ids),
    )


@pytest.fixture(
    scope="module",
    params=[(name, overlap) for name in sorted(WARM_UNTIL_LINE) for overlap in (False, True)],
    ids=lambda param: f"{param[0]}-{'async' if param[1] else 'sync'}",
)
def run(request):
    """One recording, run again with steps one after the other or overlapping: the real engine's overlapped."""
    name, async_scheduling = request.param
    return rerun(name, async_scheduling=async_scheduling)


def test_cached_tokens_are_the_engines(run):
    """Every request hits exactly what it hit in the real engine."""
    assert run.differences == []
    assert run.compared > 20


def test_events_are_the_engines(run):
    """Block by block and in order: the same stores (hash, parent, tokens, keys) and the same removals."""
    if WARM_UNTIL_LINE[run.name] and not run.was_reset:
        pytest.skip("a sample without the reset: the engine's cache held blocks from before the recording")
    assert len(run.theirs) > 100
    assert run.ours == run.theirs[: len(run.ours)]
    assert len(run.theirs) - len(run.ours) < 20, "a sample may be cut between a request's events and its response"


@pytest.fixture(scope="module")
def two_groups():
    """The recording of a model with sliding-window and full attention, cut at its reset: requests, their events."""
    folder = golden_dir()
    path = folder / "streams" / "vllm-gemma-mix.jsonl" if folder else None
    if path is None or not path.is_file():
        pytest.skip("the recording of a two-group model is not among the committed samples")
    parts = [([], [])]
    for record in read_recording(path):
        requests, events = parts[-1]
        if isinstance(record, RecordedRequest):
            requests.append(record)
        elif isinstance(record, RecordedFrames):
            events += spans(decode_batch(record.payload).batch.events)
        elif isinstance(record, RecordedReset):
            parts.append(([], []))
    return parts


def spans(events):
    """Events of any group: each store as a whole (its tokens may be more than its hashes name), each removal."""
    found = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.append(("cleared",))
        elif isinstance(event, BlockStored):
            found.append(
                (
                    "stored",
                    event.group_idx,
                    tuple(event.block_hashes),
                    event.parent_block_hash,
                    tuple(event.token_ids),
                    event.block_size,
                    event.kv_cache_spec_kind,
                    event.kv_cache_spec_sliding_window,
                )
            )
        else:
            found += [("removed", event.group_idx, block) for block in event.block_hashes]
    return found


def test_two_groups_four_at_a_time(two_groups):
    """A hybrid model under concurrency: every hit is the engine's, and so are the events but for their order.

    Four clients sent their next request as soon as they had an answer. Arrivals and answers are replayed in the order
    of their recorded times: a request is queued when it was sent, and steps are taken until the next that was answered
    has ended. What cannot be compared: which *step* a request joined, as the times say nothing of steps. A request may
    join a step earlier or later than it did, and then stores of different requests change places, a chunk's end moves
    its store, and of equal blocks the other is evicted first. So hits are compared one by one, and events as a multiset:
    all of the first part, all but a few of the second.
    """
    groups = (GroupConfig(kind="sliding_window", window=128), GroupConfig(kind="full_attention"))
    config = EngineConfig(
        block_size=32,
        num_blocks=300,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        hash_algo="sha256_cbor",
        groups=groups,
    )
    core = EngineCore(config, ReplySampler((1,), eos_token_id=None))
    tolerated = [0, 10]
    for number, (requests, theirs) in enumerate(two_groups):
        if number:
            assert core.reset_prefix_cache()
        ours = replay_by_time(core, requests)
        assert len(theirs) > 400
        assert (Counter(ours) - Counter(theirs)).total() <= tolerated[number]
        assert (Counter(theirs) - Counter(ours)).total() <= tolerated[number]


def replay_by_time(core, requests):
    """Queue and finish requests in the order of their recorded times; return the events. Hits must be the recorded."""
    moments = [(record.sent_s, False, record) for record in requests]
    moments += [(record.t_s, True, record) for record in requests]
    events = []
    running = {}
    driver = Driver(core)
    for _, is_answer, record in sorted(moments, key=lambda moment: moment[:2]):
        if not is_answer:
            running[record.line] = put(core, record)
            continue
        events += spans(driver.run(until=running[record.line]))
        assert running[record.line].cached_tokens == record.cached_tokens
    return events + spans(driver.run())
