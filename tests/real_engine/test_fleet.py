"""The whole path on real engines: conversations through `kvatlas serve` in front of two vLLM servers."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.clock import SystemClock
from kvatlas.replay import Conversation, TurnResult, hold_conversations
from support.real_vllm import MODEL_NAME, RealVllm
from support.serve import Gateway, get_json, running_gateway

CONVERSATIONS = 8
TURNS = 4


@pytest.fixture(name="gateway")
def _gateway(two_engines: tuple[RealVllm, RealVllm], tiny_model: Path, tmp_path: Path) -> Iterator[Gateway]:
    """`kvatlas serve` over both engines, once both event streams are wholly known."""
    workers = [
        part
        for engine in two_engines
        for part in ("--worker", f"{engine.base_url},events={engine.events_endpoint},replay={engine.replay_endpoint}")
    ]
    with running_gateway(tmp_path / "gateway.log", "--tokenizer", str(tiny_model), *workers) as gateway:
        gateway.await_workers(lambda worker: worker["trust"]["level"] == "synced" and worker["healthy"])
        yield gateway


def make_conversations(seed: int, count: int, turns: int) -> list[Conversation]:
    """Conversations that share nothing, so that no request changes what another one finds cached.

    People think between turns: without pauses both engines are saturated, and then leaving a queue for the idle engine
    is what the policy should do.
    """
    rng = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(
            rng.choice(("north", "kettle", "amber", "violin", "seven", "harbour")) + str(rng.randrange(1000))
            for _ in range(number)
        )

    return [
        Conversation(
            name=f"s{seed}c{number}",
            system=words(16),
            questions=tuple(words(10) for _ in range(turns)),
            pauses_s=(0.5 * number, *(2.5 for _ in range(turns - 1))),
            reply_tokens=24,
        )
        for number in range(count)
    ]


def hold(gateway: Gateway, conversations: list[Conversation]) -> list[TurnResult]:
    return asyncio.run(hold_conversations(gateway.base_url, MODEL_NAME, conversations, SystemClock()))


def why(gateway: Gateway, result: TurnResult) -> str:
    """The gateway's own reason for a pick, for the message of a test that failed."""
    record = get_json(f"{gateway.admin_url}/api/decisions/{result.conversation}-{result.turn}")
    return f"{result.conversation} turn {result.turn}: {record['reason']} {record['candidates']}"


def test_conversations_stay_and_predictions_hold(gateway: Gateway, two_engines: tuple[RealVllm, RealVllm]) -> None:
    """Turns 2-4 go where turn 1 went, both engines are used, and every prediction is what the engine reports."""
    results = hold(gateway, make_conversations(1, CONVERSATIONS, TURNS))
    assert [result.error for result in results] == [None] * (CONVERSATIONS * TURNS)
    homes = {result.conversation: result.worker for result in results if result.turn == 0}
    assert set(homes.values()) == {f"127.0.0.1:{engine.port}" for engine in two_engines}
    moved = [why(gateway, r) for r in results if r.worker != homes[r.conversation]]
    assert moved == []
    wrong = [
        (r.conversation, r.turn, r.predicted_tokens, r.cached_tokens)
        for r in results
        if r.predicted_tokens != r.cached_tokens
    ]
    assert wrong == []
    assert all(r.cached_tokens > 0 for r in results if r.turn > 0)


def test_one_engine_down_leaves_the_other_serving(gateway: Gateway, two_engines: tuple[RealVllm, RealVllm]) -> None:
    """With one engine stopped every request is still answered, by the other."""
    stopped, alive = two_engines
    before = hold(gateway, make_conversations(2, 2, 1))
    assert [result.error for result in before] == [None, None]
    stopped.stop()
    results = hold(gateway, make_conversations(3, 4, 2))
    assert [result.error for result in results] == [None] * 8
    assert {result.worker for result in results} == {f"127.0.0.1:{alive.port}"}
    views = gateway.await_workers(lambda worker: worker["healthy"] == (worker["id"] == f"127.0.0.1:{alive.port}"))
    down = views[f"127.0.0.1:{stopped.port}"]
    assert down["trust"]["level"] == "stale"
    assert down["load"]["in_flight"] == 0
