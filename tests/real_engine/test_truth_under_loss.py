"""Real engines that are killed, and streams that lose more than a replay brings back: nothing false is ever promised."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvatlas.clock import SystemClock
from kvatlas.replay import Conversation, TurnResult, hold_conversations
from support.event_relay import EventRelay, running_relay
from support.real_prompts import (
    BLOCKS_PER_PROMPT,
    Answer,
    claimed_tokens,
    make_prompts,
    metric,
    random_tokens,
    send,
    send_direct,
)
from support.real_vllm import BLOCK_SIZE_TOKENS, MODEL_NAME, NUM_BLOCKS, RealVllm
from support.serve import Gateway, running_gateway

TALKERS = 4
TURNS = 4
FIRM_TURNS = 8
"""Follow-ups that the engine back from the dead must answer as promised."""
BUFFER_STEPS = 20
HIT_TOKENS = BLOCKS_PER_PROMPT * BLOCK_SIZE_TOKENS


def worker_id(engine: RealVllm) -> str:
    return f"127.0.0.1:{engine.port}"


def worker_argument(engine: RealVllm, events_port: int, replay_port: int) -> tuple[str, str]:
    return "--worker", f"{engine.base_url},events=tcp://127.0.0.1:{events_port},replay=tcp://127.0.0.1:{replay_port}"


def trust_path(log_path: Path, worker: str) -> list[str]:
    """Every level the worker's trust went to, in order, as the gateway logged it."""
    return re.findall(rf"worker {re.escape(worker)}: trust \w+ -> (\w+):", log_path.read_text())


# -- a killed engine --


@dataclass
class Load:
    """People who talk all the time, each in one conversation after the other, until told to stop."""

    gateway: Gateway
    ended: list[tuple[float, TurnResult]] = field(default_factory=list)
    """Each turn with the time at which it ended."""
    is_over: bool = False

    async def talk(self, talker: int) -> None:
        rng = random.Random(f"talker {talker}")
        number = 0
        while not self.is_over:
            conversation = Conversation(
                name=f"talker{talker}-{number}",
                system=_words(rng, 16),
                questions=tuple(_words(rng, 12) for _ in range(TURNS)),
                pauses_s=tuple(rng.uniform(0.6, 1.4) for _ in range(TURNS)),
                reply_tokens=24,
            )
            await hold_conversations(
                self.gateway.base_url, MODEL_NAME, [conversation], SystemClock(), on_turn=self._note
            )
            number += 1

    def _note(self, result: TurnResult) -> None:
        self.ended.append((time.monotonic(), result))

    def firm_turns(self, worker: str, since_s: float) -> list[TurnResult]:
        """Turns begun and ended since then on that worker, with a hit promised."""
        return [
            turn
            for ended_s, turn in self.ended
            if turn.worker == worker and ended_s - turn.duration_s > since_s and turn.predicted_tokens
        ]


def _words(rng: random.Random, number: int) -> str:
    return " ".join(
        f"{rng.choice(('north', 'kettle', 'amber', 'harbour'))}{rng.randrange(1000)}" for _ in range(number)
    )


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> float:
    """Wait for a condition; the monotonic time at which it held."""
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic()


@dataclass
class KillTimes:
    """Monotonic times of one death and return."""

    killed_s: float = 0.0
    stale_s: float = 0.0
    left_out_s: float = 0.0
    started_s: float = 0.0
    synced_s: float = 0.0
    healthy_s: float = 0.0
    kept_s: float = 0.0
    """The first promise of a hit that the engine kept."""


async def kill_and_bring_back(gateway: Gateway, engine: RealVllm, load: Load, times: KillTimes) -> None:
    """Under load: kill, start on the same ports, wait until the engine keeps promises again."""
    name = worker_id(engine)

    def view() -> dict[str, Any]:
        return gateway.workers()[name]

    async with asyncio.TaskGroup() as group:
        talking = [group.create_task(load.talk(talker)) for talker in range(TALKERS)]
        await until(lambda: len(load.firm_turns(name, 0.0)) >= 5, "five hits on the engine before it dies")
        times.killed_s = time.monotonic()
        dying = group.create_task(asyncio.to_thread(engine.kill))
        times.stale_s = await until(lambda: view()["trust"]["level"] == "stale", "trust is stale")
        times.left_out_s = await until(lambda: not view()["healthy"], "no traffic for the dead")
        await dying
        times.started_s = time.monotonic()
        engine.start()
        ready = group.create_task(asyncio.to_thread(engine.wait_ready))
        times.synced_s = await until(lambda: view()["trust"]["level"] == "synced", "synced", 240.0)
        await ready
        times.healthy_s = await until(lambda: view()["healthy"], "traffic again")
        await until(lambda: load.firm_turns(name, times.healthy_s), "a first hit after the return")
        times.kept_s = time.monotonic()
        await until(lambda: len(load.firm_turns(name, times.healthy_s)) >= FIRM_TURNS, "hits after the return")
        load.is_over = True
        await asyncio.gather(*talking)


def test_a_killed_engine_is_forgotten_and_learnt_anew(
    two_engines: tuple[RealVllm, RealVllm], tiny_model: Path, tmp_path: Path, figures: list[str]
) -> None:
    """Kill -9 under load loses only what was in flight there; the next life is claimed nothing of the old, then all."""
    victim = two_engines[0]
    name, ports = worker_id(victim), (victim.port, victim.events_port, victim.replay_port)
    workers = [part for e in two_engines for part in worker_argument(e, e.events_port, e.replay_port)]
    log_path, times = tmp_path / "gateway.log", KillTimes()
    with running_gateway(log_path, "--tokenizer", str(tiny_model), *workers) as gateway:
        gateway.await_workers(lambda worker: worker["trust"]["level"] == "synced" and worker["healthy"])
        load, old_prompts = Load(gateway), make_prompts("the old life", 4)
        send_direct(victim, old_prompts)
        asyncio.run(until(lambda: claimed_tokens(gateway, old_prompts[-1])[name] == HIT_TOKENS, "the prompts claimed"))
        asyncio.run(kill_and_bring_back(gateway, victim, load, times))
        assert (victim.port, victim.events_port, victim.replay_port) == ports
        assert [claimed_tokens(gateway, prompt)[name] for prompt in old_prompts] == [0] * len(old_prompts)
        lives = gateway.workers()[name]["stream"]["lives"]
    turns = [turn for _, turn in load.ended]
    failed = [(ended_s, turn) for ended_s, turn in load.ended if turn.error is not None]
    for ended_s, turn in failed:
        assert ended_s - turn.duration_s < times.killed_s, f"sent after the kill, and lost: {turn}"
        assert turn.worker in {name, ""}, f"lost, and not by the engine that died: {turn}"
    promised = [turn for turn in turns if turn.error is None and turn.predicted_tokens is not None]
    assert [turn for turn in promised if (turn.predicted_tokens or 0) > (turn.cached_tokens or 0)] == []
    firm = load.firm_turns(name, times.healthy_s)
    assert [turn for turn in firm if turn.predicted_tokens != turn.cached_tokens] == []
    path = trust_path(log_path, name)
    path = path[
        path.index("stale") :
    ]  # stale and syncing once more where the metrics tell of the new life before the stream
    assert path in (["stale", "syncing", "synced"], ["stale", "syncing"] * 2 + ["synced"])
    assert lives == 2
    equal = sum(turn.predicted_tokens == turn.cached_tokens for turn in promised)
    figures.append(
        f"kill -9 under load: {len(turns)} requests, {len(failed)} lost (in flight at the kill), 0 over-claims, {equal} of "
        f"{len(promised)} promises equal; stale after {times.stale_s - times.killed_s:.2f} s, without traffic after "
        f"{times.left_out_s - times.killed_s:.2f} s; from its start synced after {times.synced_s - times.started_s:.1f} s, "
        f"traffic after {times.healthy_s - times.started_s:.1f} s, the first hit kept {times.kept_s - times.healthy_s:.1f} s later"
    )


# -- a stream that loses more than the engine's buffer holds --


@pytest.fixture(name="forgetful", scope="module")
def _forgetful(two_engines: tuple[RealVllm, RealVllm]) -> Iterator[RealVllm]:
    """An engine that keeps a few batches for replay only."""
    engine = two_engines[0]
    usual_steps = engine.buffer_steps
    engine.stop()
    engine.buffer_steps = BUFFER_STEPS
    engine.start()
    engine.wait_ready()
    yield engine
    engine.stop()
    engine.buffer_steps = usual_steps


@dataclass
class Outage:
    """One loss: what was sent, what is known of it."""

    gateway: Gateway
    engine: RealVllm
    answers: list[Answer] = field(default_factory=list)
    """Every answer through the gateway, in order."""

    @property
    def name(self) -> str:
        return worker_id(self.engine)

    def ask(self, prompts: list[list[int]]) -> list[Answer]:
        answers = [send(self.gateway, prompt) for prompt in prompts]
        self.answers += answers
        return answers

    def view(self) -> dict[str, Any]:
        return self.gateway.workers()[self.name]

    def healed(self) -> dict[str, int]:
        """Blocks that reports confirmed, refuted and added so far."""
        ways = ("confirmed", "refuted", "adopted")
        sample = 'kvatlas_healed_blocks_total{how="%s",worker="%s"}'
        return {how: int(metric(self.gateway, sample % (how, self.name))) for how in ways}

    def doubted(self) -> int:
        return int(metric(self.gateway, f'kvatlas_index_doubted_blocks{{worker="{self.name}"}}'))

    def await_trust(self, level: str, timeout_s: float = 30.0) -> float:
        """Wait for a level of trust; the monotonic time at which it was reached."""
        views = self.gateway.await_workers(lambda worker: worker["trust"]["level"] == level, timeout_s)
        return time.monotonic() - views[self.name]["trust"]["age_s"]

    def kept_equal(self, prompts: list[list[int]], rng: random.Random) -> bool:
        """Whether new conversations and their second turns get what was promised."""
        longer = [prompt + random_tokens(rng, 2 * BLOCK_SIZE_TOKENS) for prompt in prompts]
        answers = self.ask(prompts) + self.ask(longer)
        return (
            [a.predicted_tokens for a in answers]
            == [a.cached_tokens for a in answers]
            == ([0] * len(prompts) + [HIT_TOKENS] * len(prompts))
        )


def lose(outage: Outage, relay: EventRelay, mishap: str, hot: list[list[int]]) -> list[list[int]]:
    """More than a turnover past the gateway while its stream is broken; `hot` stays in use.

    Returns:
        Prompts that the engine still holds and whose batches it can no longer replay.
    """
    if mishap == "cut":
        relay.cut()
    else:
        relay.drop_messages()
    unheard = make_prompts(f"{mishap} unheard", 42, blocks=10)
    for number, prompt in enumerate(unheard):
        send_direct(outage.engine, [prompt])
        if number % 6 == 5:
            assert send_direct(outage.engine, hot) == [HIT_TOKENS] * len(hot)
    return unheard[-22:-19]


@pytest.mark.parametrize("mishap", ["cut", "dropped messages"])
def test_a_loss_beyond_replay_is_told_and_overcome(
    forgetful: RealVllm, tiny_model: Path, tmp_path: Path, figures: list[str], mishap: str
) -> None:
    """After a loss that replay cannot fill nothing is promised before it is sure, and after one turnover all is."""
    rng = random.Random(mishap)
    with (
        running_relay(forgetful.events_port, forgetful.replay_port) as relay,
        running_gateway(
            tmp_path / "gateway.log", "--tokenizer", str(tiny_model), *worker_argument(forgetful, *relay.ports)
        ) as gateway,
    ):
        outage = Outage(gateway, forgetful)
        gateway.await_workers(lambda worker: worker["healthy"] and worker["trust"]["level"] in {"synced", "partial"})
        forgetful.call("POST", "/reset_prefix_cache")
        send_direct(forgetful, make_prompts(f"{mishap} clears", 1, blocks=1))
        outage.await_trust("synced")
        old = make_prompts(f"{mishap} old", 9)
        assert outage.kept_equal(old, rng)
        claimed = outage.view()["index"]["resident_blocks"]

        broken_s = time.monotonic()
        unheard = lose(outage, relay, mishap, old[:3])
        stale_after_s = outage.await_trust("stale") - broken_s
        (unsure,) = outage.ask(make_prompts(f"{mishap} stale", 1))
        assert unsure.predicted_tokens is None

        began, healed_before = len(outage.answers), outage.healed()
        relay.restore()
        restored_s = time.monotonic()
        send_direct(forgetful, make_prompts(f"{mishap} restored", 1, blocks=2))
        partial_after_s = outage.await_trust("partial") - restored_s
        loss = outage.view()
        assert re.search(r"batches \d+\.\.\d+ are lost", loss["trust"]["reason"])
        doubted = outage.doubted()
        sure = [claimed_tokens(gateway, prompt)[outage.name] for prompt in old]
        assert sure == [0] * len(old)
        if mishap == "cut":
            assert (doubted, loss["stream"]["lives"]) == (0, 2)  # nothing proves that it is still the same engine
        else:
            assert (doubted > 0, loss["stream"]["lives"]) == (True, 1)

        outage.ask(old[:3] + unheard + old[3:])
        assert [answer.cached_tokens for answer in outage.answers[began : began + 3]] == [HIT_TOKENS] * 3
        healed = {how: count - healed_before[how] for how, count in outage.healed().items()}
        assert healed["adopted"] >= 10 * len(unheard)
        if mishap != "cut":
            # A doubt about a block that is gone ends with the report, or with its new announcement, whichever is first.
            assert healed["confirmed"] > 0
            assert [claimed_tokens(gateway, prompt)[outage.name] for prompt in old] == [HIT_TOKENS] * len(old)

        fresh = iter(make_prompts(f"{mishap} fresh", 2 * NUM_BLOCKS // BLOCKS_PER_PROMPT))
        while outage.view()["trust"]["level"] != "synced":
            outage.ask([next(fresh)])
        requests = len(outage.answers) - began
        stored = outage.view()["index"]["stored_blocks"] - loss["index"]["stored_blocks"]
        assert stored <= NUM_BLOCKS + 2 * 10  # one turnover, and the request that completed it
        unpromised = [answer.predicted_tokens for answer in outage.answers[began:-1]]
        assert unpromised == [None] * len(unpromised)
        assert outage.kept_equal(make_prompts(f"{mishap} parity", 6), rng)

        send_direct(forgetful, make_prompts(f"{mishap} evicts", 32, blocks=10))
        gone = outage.ask(old + unheard)
        assert [(a.predicted_tokens, a.cached_tokens) for a in gone] == [(0, 0)] * len(gone)
        assert [answer for answer in outage.answers if answer.is_overclaimed] == []
        assert gateway.workers()[outage.name]["predictions"]["over"] == 0
    figures.append(
        f"stream broken by {mishap} ({relay.dropped_messages}): stale after {stale_after_s:.1f} s, "
        f"partial {partial_after_s:.2f} s after the return with {doubted} of {claimed} claims in doubt; confirmed "
        f"{healed['confirmed']}, refuted {healed['refuted']}, adopted {healed['adopted']} blocks; parity after {requests} "
        f"requests, {stored} blocks stored; 0 over-claims in {len(outage.answers)} requests"
    )


def test_a_gateway_that_comes_late_reaches_parity(
    forgetful: RealVllm, tiny_model: Path, tmp_path: Path, figures: list[str]
) -> None:
    """Started after the engine forgot its first batches, it promises nothing for a turnover, then what is reported."""
    unheard = make_prompts("before the gateway", 30)
    send_direct(forgetful, unheard)
    worker = worker_argument(forgetful, forgetful.events_port, forgetful.replay_port)
    with running_gateway(tmp_path / "gateway.log", "--tokenizer", str(tiny_model), *worker) as gateway:
        gateway.await_workers(lambda worker: worker["healthy"] and worker["trust"]["level"] in {"synced", "partial"})
        late = Outage(gateway, forgetful)
        late.ask(unheard[:3])
        fresh = iter(make_prompts("after the gateway", 2 * NUM_BLOCKS // BLOCKS_PER_PROMPT))
        while late.ask([next(fresh)])[0].predicted_tokens is None:
            pass
        requests, stored = len(late.answers), late.view()["index"]["stored_blocks"]
        assert NUM_BLOCKS <= stored <= NUM_BLOCKS + 2 * BLOCKS_PER_PROMPT
        assert late.kept_equal(make_prompts("late parity", 6), random.Random("late"))
        assert [answer for answer in late.answers if answer.is_overclaimed] == []
    figures.append(f"gateway started late: parity after {requests} requests, {stored} blocks stored; 0 over-claims")
