"""The scheduler beside a real engine: the requests of a recorded vLLM 0.32, with the tokens it said, one at a time.

The recordings are described in tests/vectors/streams and in the golden folder's README.
"""

from dataclasses import dataclass, field

import pytest

from kvatlas.events import AllBlocksCleared, BlockStored, decode_batch
from kvatlas.hashing import RequestExtras
from kvatlas.simulator import EngineConfig, EngineCore, EventsConfig, ReplySampler, SamplingParams
from kvatlas.stream import RecordedFrames, RecordedRequest, RecordedReset, read_recording
from support.golden import golden_files

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


def rerun(name):
    """Put a recording's requests through our engine."""
    (path,) = golden_files("streams", (name,))
    events = EventsConfig(int_block_hashes=name != "vllm-bytes-serial")
    config = EngineConfig(block_size=32, num_blocks=300, max_model_len=4096, hash_algo="sha256_cbor", events=events)
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
            request = core.add(
                f"line-{record.line}",
                record.prompt_token_ids,
                SamplingParams(max_tokens=record.body["max_tokens"], ignore_eos=True),
                extras=RequestExtras(cache_salt=record.cache_salt),
                source=Recorded(record.output_token_ids),
            )
            while core.has_requests:
                run.ours += flat(core.end_step(core.begin_step(0.0), 0.0).events)
            if record.line > WARM_UNTIL_LINE[name]:
                run.compared += 1
                if request.cached_tokens != record.cached_tokens:
                    run.differences.append((record.line, request.cached_tokens, record.cached_tokens))
    return run


@pytest.fixture(scope="module", params=sorted(WARM_UNTIL_LINE))
def run(request):
    """One recording, run again."""
    return rerun(request.param)


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
