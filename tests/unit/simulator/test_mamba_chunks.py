"""Models with Mamba layers: where prefills are cut, what a resend hits, and who has to wait a step."""

import pytest

from kvatlas.errors import ConfigError
from kvatlas.simulator import EngineConfig, EngineCore, GroupConfig, ReplySampler, SamplingParams, SpeculativeConfig

GROUPS = (GroupConfig(kind="full_attention"), GroupConfig(kind="mamba"))


def make_core(**settings):
    """An engine with attention and Mamba layers, blocks of 8."""
    values = {"block_size": 8, "num_blocks": 64, "max_model_len": 64, "max_num_batched_tokens": 64, "groups": GROUPS}
    config = EngineConfig(**{**values, "async_scheduling": False, **settings})
    return EngineCore(config, ReplySampler((1,), eos_token_id=None))


def run(core, prompt, name="a", max_tokens=1):
    """Send a prompt and run until the engine is idle: the request, and the chunks its prompt was cut into."""
    request = core.add(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    chunks = []
    while core.has_requests:
        step = core.begin_step(0.0)
        chunks += [(share.start_tokens, share.start_tokens + share.num_tokens) for share in step.plan.scheduled]
        core.end_step(step, 0.0)
    return request, [chunk for chunk in chunks if chunk[0] < len(prompt)]


@pytest.mark.parametrize(
    ("unit", "chunks", "hit"),
    [(8, [(0, 24), (24, 30)], 24), (4, [(0, 24), (24, 28), (28, 30)], 28)],
    ids=["whole blocks", "inside a block"],
)
def test_resend(unit, chunks, hit):
    """Scenario 43: the prompt is cut where a resend can resume, on a block end or, with finer hashes, inside a block."""
    core = make_core(prefix_match_unit=unit)
    assert run(core, range(30))[1] == chunks
    again, rest = run(core, range(30), "b")
    assert (again.cached_tokens, rest) == (hit, [(hit, 30)])
    assert core.scheduler.usage == 0


def test_chunks_end_with_blocks():
    """A budget that ends inside a block is cut to the block's end; one smaller than a block is used as it is."""
    assert run(make_core(max_num_batched_tokens=20), range(60))[1] == [(0, 16), (16, 32), (32, 48), (48, 56), (56, 60)]
    assert run(make_core(max_num_batched_tokens=6), range(20))[1] == [(0, 6), (6, 8), (8, 14), (14, 16), (16, 20)]


def test_a_shared_prefix_gets_a_state():
    """The second request with a prefix leaves a state where it ended; the third resumes there."""
    core = make_core()
    run(core, range(40))
    second, chunks = run(core, [*range(20), *range(100, 120)], "b")
    assert second.cached_tokens == 0
    assert (0, 16) in chunks
    third, _ = run(core, [*range(20), *range(200, 220)], "c")
    assert third.cached_tokens == 16


def test_a_state_of_this_step_cannot_be_hit():
    """Scenario 45: a request that hits a state cached in the same step waits for a later one.

    The step that ends the first prompt names the state once more, so the second request joins in the third step.
    """
    core = make_core()
    for name in "ab":
        core.add(name, range(30), SamplingParams(max_tokens=9, ignore_eos=True))
    steps = []
    for _ in range(3):
        step = core.begin_step(0.0)
        steps.append([(share.request.request_id, share.start_tokens) for share in step.plan.scheduled])
        core.end_step(step, 0.0)
    assert steps == [[("a", 0)], [("a", 24)], [("a", 30), ("b", 24)]]
    assert core.scheduler.cache.block_ids("b")[0][:3] == core.scheduler.cache.block_ids("a")[0][:3]


@pytest.mark.parametrize(
    "settings",
    [{"speculative": SpeculativeConfig(num_tokens=2)}, {"enable_prefix_caching": False}, {"async_scheduling": True}],
    ids=["drafts", "no cache", "overlap"],
)
def test_other_rules(settings):
    """With drafts (scratch states), without prefix caching, and with overlapping steps, requests end whole."""
    core = make_core(**settings)
    hits = []
    for name in "ab":
        request, _ = run(core, range(30), name, max_tokens=12)
        assert request.request.num_output_tokens == 12
        hits.append(request.cached_tokens)
    assert hits == [0, 0 if "enable_prefix_caching" in settings else 24]
    assert core.scheduler.usage == 0


def test_a_pool_too_small_for_one_request():
    """Groups that together need more blocks than there are for the longest request are refused with the number."""
    with pytest.raises(ConfigError, match="17 blocks"):
        make_core(num_blocks=8)
