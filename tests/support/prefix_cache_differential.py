"""Drive vLLM's own KVCacheManager beside ours with random operations, and stop at the first difference.

    .venv-real/bin/python tests/support/prefix_cache_differential.py [--seed 0] [--configurations 1] [--operations 350]

Runs with the Python that has vLLM, not with kvatlas's own. A seed stands for one random configuration and the operations done to
it, so that `--seed N` repeats what seed N did in a longer run. Prints what was exercised as one line of JSON and ends with 0, or
prints the difference and ends with 1.

A scheduler calls the managers in certain ways only; the operations here keep to those. Where vLLM fails an assertion nevertheless,
ours has to raise too, and the configuration ends there.
"""

import argparse
import importlib.util
import json
import logging
import os
import random
import shlex
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for support
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # for kvatlas
os.environ["PYTHONHASHSEED"] = "0"  # the engine's digests follow from it
if importlib.util.find_spec("xxhash") is None:  # only two hash algorithms need it, and neither is used here
    sys.modules["xxhash"] = types.ModuleType("xxhash")
    sys.modules["xxhash"].xxh3_128_digest = sys.modules["xxhash"].xxh3_64_intdigest = None

import msgspec

from kvatlas.errors import ConfigError, PrefixCacheError
from kvatlas.prefix_cache import AllocationRules, BlockCopy, ComputedBlocks, KVCacheManager, PrefixCacheStats
from support.prefix_cache_differential_requests import Pair, RequestMaker, StepEnds
from support.prefix_cache_differential_setups import EngineManager, draw_setup

PROJECT_ROOT = Path(__file__).resolve().parents[2]
ENGINE_ERRORS = (AssertionError, IndexError, ValueError)
OPERATIONS = {"admit": 4, "step": 8, "free": 2, "preempt": 1, "pop": 0.5, "copy": 2, "evict": 0.4, "reset": 0.4}
"""What a scheduler may do, with its weight; further operations of the engine are parts of these."""


class Difference(Exception):  # noqa: N818 - what is looked for, rather than an error
    """The first field in which we are not equal to the engine."""

    def __init__(self, field: str, engine: object, ours: object) -> None:
        super().__init__(f"field {field}:\n  vLLM {engine!r}\n  ours {ours!r}")


class BothRaised(Exception):  # noqa: N818 - an expected end
    """The engine failed an assertion and we refused; whatever comes next is undefined."""


class Trial:
    """One configuration under random operations.

    Args:
        seed: decides everything.
        exercised: counts what happened.
        spoilt: a field for which we report None, to see that a difference is found; None = none.
    """

    def __init__(self, seed: int, exercised: Counter[str], spoilt: str | None = None) -> None:
        self.rng = random.Random(seed)
        self.exercised = exercised
        self.setup = draw_setup(self.rng)
        self.operation = "construction"
        self._spoilt = spoilt
        self._requests = RequestMaker(self.rng, self.setup)
        self._live: list[Pair] = []
        self._popped: list[tuple[list[Any], list[Any]]] = []
        self._copies: list[tuple[list[Any], list[BlockCopy]]] = []
        self.engine: EngineManager
        self.ours: KVCacheManager
        self._ends: StepEnds

    def run(self, num_operations: int) -> None:
        """Do so many operations, comparing after each.

        Raises:
            Difference: at the first field that is not equal.
        """
        if not self._build():
            return
        self._ends = StepEnds(self.setup, self.ours.config.partial_hits)
        try:
            for number in range(1, num_operations + 1):
                if self.rng.random() < 0.7:
                    self.engine.new_step_starts()
                    self.ours.new_step_starts()
                name = self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
                if name in {"step", "free", "preempt", "pop"} and not self._live:
                    name = "admit"
                self.operation = f"{number} ({name})"
                getattr(self, f"_{name}")()
                self.exercised[name] += 1
                self._compare_state()
            self._compare_stats()
        except BothRaised:
            self.exercised["ended by an assertion of the engine"] += 1

    # Building

    def _build(self) -> bool:
        """Build both managers; False when the setup is refused as it should be."""
        engine, engine_error = attempt(self.setup.build_engine, AssertionError, ValueError)
        ours, our_error = attempt(self.setup.build_ours, ConfigError)
        if engine is not None and ours is not None:
            self.engine, self.ours = engine, ours
            self.exercised["configurations"] += 1
            self.exercised.update({type(spec).__name__ for spec in self.setup.specs})
            return True
        if engine is None and ours is not None:
            raise Difference("refusal", engine_error, None)
        if engine is not None and not self._lookup_fails(engine):
            raise Difference("refusal", None, our_error)
        self.exercised["configurations refused"] += 1
        return False

    def _lookup_fails(self, engine: EngineManager) -> bool:
        """We refuse at once what ends the engine at a lookup."""
        _, error = attempt(
            lambda: [engine.get_computed_blocks(self._requests.draw().engine) for _ in range(50)], *ENGINE_ERRORS
        )
        return error is not None

    # Comparing

    def _same(self, field: str, engine: object, ours: object) -> None:
        if field == self._spoilt:
            ours = None
        if engine != ours:
            raise Difference(field, engine, ours)

    def _both(self, field: str, engine_call: Callable[[], Any], our_call: Callable[[], Any]) -> tuple[Any, Any]:
        """Call both sides; if one raises, the other has to."""
        engine, engine_error = attempt(engine_call, *ENGINE_ERRORS)
        ours, our_error = attempt(our_call, PrefixCacheError)
        if (engine_error is None) != (our_error is None):
            raise Difference(f"exception of {field}", engine_error, our_error)
        if engine_error is not None:
            raise BothRaised
        return engine, ours

    def _compare_state(self) -> None:
        """Everything that can be asked of either side."""
        engine, ours = self.engine, self.ours
        self._compare_events()
        self._same(
            "free queue", block_ids(engine.block_pool.free_block_queue.get_all_free_blocks()), ours.free_block_ids()
        )
        self._same("usage", round(engine.usage, 12), round(ours.usage, 12))
        self._same("cached keys", len(engine.block_pool.cached_block_hash_to_block), ours.num_cached_keys)
        for pair in self._live:
            name, computed = pair.name, pair.ours.num_computed_tokens
            self._same(f"hashes of {name}", [bytes(one) for one in pair.engine.block_hashes], pair.ours.block_hashes)
            self._same(f"table of {name}", engine.get_block_ids(name), ours.block_ids(name))
            self._same(
                f"computed blocks of {name}",
                engine.get_block_ids_for_computed_tokens(name, computed),
                ours.computed_block_ids(name, computed),
            )
            self._same(
                f"known tokens of {name}",
                engine.estimate_cached_tokens(pair.engine),
                ours.estimate_cached_tokens(pair.ours),
            )

    def _compare_events(self) -> None:
        engine = [told(event) for event in self.engine.take_events()]
        ours = [told(event) for event in self.ours.take_events()]
        self.exercised["events"] += len(engine)
        if engine != ours:
            self._same("events", removals_sorted(engine), removals_sorted(ours))
        self._same("number of events", len(engine), len(ours))

    def _compare_stats(self) -> None:
        engine, ours = self.engine.make_prefix_cache_stats(), self.ours.make_stats()
        for field in PrefixCacheStats.__dataclass_fields__:
            self._same(f"statistics, {field}", getattr(engine, field), getattr(ours, field))

    # Operations

    def _admit(self) -> None:
        self._start(self._requests.draw())

    def _preempt(self) -> None:
        """Take a request's blocks away, and admit it again."""
        pair = self._take_live()
        self._release(pair)
        pair.preempt()
        self._start(pair)

    def _start(self, pair: Pair) -> None:
        """Look up, decide as a scheduler would, and allocate."""
        engine_blocks, found = self._look_up(pair)
        pair.set_boundary(found.shared_prefix_boundary)
        hit = found.hit_tokens
        external = self._external_tokens(pair, hit)
        rest = pair.ours.num_tokens - hit - external
        new = self._ends.length(pair.ours, hit + external, self._some(rest)) if rest else 0
        if hit + external + new == 0 or (rest and not new):
            self._release(pair)
            return
        delayed = external > 0 and self.rng.random() < 0.5
        new = 0 if delayed else new
        lookahead = self.rng.choice((0, 0, 2, 5))
        rules = AllocationRules(
            delayed, self.rng.random() < 0.4, self.rng.choice((0, 0, 1, 3)), self.rng.random() < 0.5
        )
        allocated = self._allocate_admitted(pair, new, (engine_blocks, found), external, lookahead, rules)
        if not allocated:
            self.exercised["admissions refused"] += 1
            self._release(pair)
            return
        self.engine.record_prefix_cache_stats(pair.engine, hit)
        computed = hit + external + new
        pair.run(computed)
        self._live.append(pair)
        self._count_admission(found, external)
        if delayed and self.setup.enable_caching:
            self._both(
                "cache_blocks",
                lambda: self.engine.cache_blocks(pair.engine, computed),
                lambda: self.ours.cache_blocks(pair.ours, computed),
            )

    def _allocate_admitted(
        self,
        pair: Pair,
        new: int,
        found: tuple[Any, ComputedBlocks],
        external: int,
        lookahead: int,
        rules: AllocationRules,
    ) -> bool:
        """Give an admitted request its hit and its slots; whether there is room."""
        engine_blocks, our_blocks = found
        hit = our_blocks.hit_tokens
        return self._same_slots(
            lambda: self.engine.allocate_slots(
                pair.engine,
                new,
                hit,
                engine_blocks,
                lookahead,
                external,
                delay_cache_blocks=rules.delay_caching,
                num_encoder_tokens=pair.ours.num_encoder_tokens,
                full_sequence_must_fit=rules.full_sequence_must_fit,
                reserved_blocks=rules.reserved_blocks,
                has_scheduled_reqs=rules.has_scheduled_requests,
            ),
            lambda: self.ours.allocate_slots(
                pair.ours,
                new,
                new_computed_tokens=hit,
                computed_blocks=our_blocks,
                lookahead_tokens=lookahead,
                external_tokens=external,
                rules=rules,
            ),
        )

    def _look_up(self, pair: Pair) -> tuple[Any, ComputedBlocks]:
        """A hit, now and then with a connector that has nothing for groups that lack it, or cut shorter."""
        if self.rng.random() < 0.15:
            (engine_blocks, *engine), ours = self._both(
                "get_computed_blocks_for_connector",
                lambda: self.engine.get_computed_blocks_for_connector(pair.engine),
                lambda: self.ours.get_computed_blocks_for_connector(pair.ours),
            )
            self._same("connector's hit", engine, [ours.hit_tokens, ours.shared_prefix_boundary, ours.diverged])
            if ours.diverged:
                self._same("connector's hit blocks", tables(engine_blocks.blocks), tables(ours.blocks))
                self.exercised["diverged hits"] += 1
        else:
            ours = None
        if ours is None or ours.diverged:
            (engine_blocks, *engine), ours = self._both(
                "get_computed_blocks",
                lambda: self.engine.get_computed_blocks(pair.engine),
                lambda: self.ours.get_computed_blocks(pair.ours),
            )
            self._same("hit", engine, [ours.hit_tokens, ours.shared_prefix_boundary])
        self._same("hit blocks", tables(engine_blocks.blocks), tables(ours.blocks))
        if ours.hit_tokens and self.setup.has_plain_hits and self.rng.random() < 0.05:
            return self._truncate(engine_blocks, ours)
        return engine_blocks, ours

    def _truncate(self, engine_blocks: Any, found: ComputedBlocks) -> tuple[Any, ComputedBlocks]:
        """Use a part of a hit only."""
        unit = self.setup.scheduler_block_size
        length = self.rng.randint(0, found.hit_tokens // unit) * unit
        engine, ours = self._both(
            "truncate",
            lambda: self.engine.truncate_computed_blocks(engine_blocks, length),
            lambda: self.ours.truncate(found, length),
        )
        self._same("truncated hit", tables(engine.blocks), tables(ours.blocks))
        self.exercised["hits cut"] += 1
        return engine, ours

    def _external_tokens(self, pair: Pair, hit: int) -> int:
        """Tokens a connector loads after the hit, 0 for most requests; up to the prompt's very end for full attention."""
        unit = self.setup.scheduler_block_size
        if hit % unit or self.rng.random() > 0.15:
            return 0
        rest = pair.ours.num_tokens - hit
        if len(self.setup.groups) == 1 and self.setup.has_plain_hits:
            return min(unit * self.rng.randint(1, 3), rest)
        return self.rng.randint(0, (rest - 1) // unit) * unit

    def _count_admission(self, found: ComputedBlocks, external: int) -> None:
        self.exercised["admissions"] += 1
        self.exercised["hit tokens"] += found.hit_tokens
        self.exercised["external loads"] += external > 0
        self.exercised["hits inside a block"] += found.hit_tokens % self.setup.scheduler_block_size > 0

    def _step(self) -> None:
        """Compute some tokens of a running request, drafts among them; without room it ends."""
        pair = self.rng.choice(self._live)
        if pair.num_uncomputed <= 0:
            count = 1 if self.setup.mamba else self.rng.randint(1, 3)
            if pair.ours.num_tokens + count > self.setup.max_model_len:
                return
            pair.append(self._requests.tokens(count))
        length = self._ends.length(pair.ours, pair.ours.num_computed_tokens, self._some(pair.num_uncomputed))
        if length == 0:
            return
        drafts, lookahead = self._drafts(pair), self.rng.choice((0, 0, 3))
        pair.set_in_flight(self.rng.choice((0, 0, 0, 1, 5)))
        if self._same_slots(
            lambda: self.engine.allocate_slots(pair.engine, length + drafts, num_lookahead_tokens=lookahead),
            lambda: self.ours.allocate_slots(pair.ours, length + drafts, lookahead_tokens=lookahead),
        ):
            pair.set_computed(pair.ours.num_computed_tokens + length)
            self.exercised["drafts"] += drafts > 0
        else:
            self.exercised["steps refused"] += 1
            self._live.remove(pair)
            self._release(pair)

    def _drafts(self, pair: Pair) -> int:
        """Draft tokens of a decode step, as many as the model's length and its scratch states allow."""
        if pair.ours.num_computed_tokens < pair.ours.num_prompt_tokens or self.rng.random() > 0.3:
            return 0
        most = min([spec.num_speculative_blocks for spec in self.setup.mamba], default=4)
        return self.rng.randint(0, min(most, self.setup.max_model_len - pair.ours.num_tokens))

    def _free(self) -> None:
        self._release(self._take_live())

    def _pop(self) -> None:
        """End a request whose blocks a running step still reads."""
        pair = self._take_live()
        engine, ours = self.engine.pop_blocks_for_free(pair.engine), self.ours.pop_blocks(pair.ours)
        self._same("popped blocks", block_ids(engine), block_ids(ours))
        self._popped.append((engine, ours))

    def _copy(self) -> None:
        """Take the copies that are due; sometimes copies have run, or popped blocks are no longer read."""
        self._take_copies()
        if self.rng.random() < 0.8:
            self._release_copies()
        if self.rng.random() < 0.5:
            self._free_popped()

    def _evict(self) -> None:
        ids = {self.rng.randrange(1, self.setup.num_blocks) for _ in range(self.rng.randint(1, 3))}
        self.engine.evict_blocks(set(ids))
        self.ours.evict_blocks(ids)

    def _reset(self) -> None:
        """Forget everything, half the time while nothing is in use."""
        if self.rng.random() < 0.5:
            while self._live:
                self._release(self._live.pop(0))
            self._take_copies()
            self._release_copies()
            self._free_popped()
        done = self.engine.reset_prefix_cache()
        self._same("reset", done, self.ours.reset_prefix_cache())
        self.exercised["resets done"] += done

    # Parts of operations

    def _some(self, num_tokens: int) -> int:
        """All of so many tokens, or some."""
        return self.rng.randint(1, num_tokens) if self.rng.random() < 0.5 else num_tokens

    def _take_live(self) -> Pair:
        return self._live.pop(self.rng.randrange(len(self._live)))

    def _release(self, pair: Pair) -> None:
        self.engine.free(pair.engine)
        self.ours.free(pair.ours)

    def _same_slots(self, engine_call: Callable[[], Any], our_call: Callable[[], Any]) -> bool:
        """Allocate on both sides; whether there was room."""
        engine, ours = self._both("allocate_slots", engine_call, our_call)
        self._same(
            "new blocks", None if engine is None else tables(engine.blocks), None if ours is None else list(ours)
        )
        return ours is not None

    def _take_copies(self) -> None:
        (engine, held), ours = self.engine.take_kv_cache_block_copies(), self.ours.take_block_copies()
        self._same(
            "copies",
            [(copy.src_block_id, copy.dst_block_id) for copy in engine],
            [(copy.source.block_id, copy.destination.block_id) for copy in ours],
        )
        self.exercised["copies"] += len(ours)
        self._copies.append((held, ours))

    def _release_copies(self) -> None:
        for engine, ours in self._copies:
            self.engine.block_pool.free_blocks(engine)
            self.ours.release_block_copies(ours)
        self._copies.clear()

    def _free_popped(self) -> None:
        for engine, ours in self._popped:
            self.engine.block_pool.free_blocks(reversed(engine))
            self.ours.free_popped(ours)
        self._popped.clear()


def attempt(call: Callable[[], Any], *errors: type[Exception]) -> tuple[Any, Exception | None]:
    """What a call returned, or which of these errors it raised."""
    try:
        return call(), None
    except errors as error:
        return None, error


def block_ids(blocks: Any) -> list[int]:
    """Ids of blocks of either side."""
    return [block.block_id for block in blocks]


def tables(groups: Any) -> list[list[int]]:
    """Ids of the blocks of each group."""
    return [block_ids(blocks) for blocks in groups]


def told(event: Any) -> dict[str, object]:
    """An event of either side, without what it leaves out."""
    fields = {name: value for name, value in msgspec.structs.asdict(event).items() if value is not None}
    return {"type": type(event).__name__, **fields}


def removals_sorted(events: list[dict[str, object]]) -> list[dict[str, object]]:
    """Events with each run of removals sorted: the engine lists the further keys of a block in the order of a set."""
    result: list[dict[str, object]] = []
    run: list[dict[str, object]] = []
    for event in events:
        if event["type"] == "BlockRemoved":
            run.append(event)
        else:
            result += [*sorted(run, key=repr), event]
            run = []
    return result + sorted(run, key=repr)


def describe(seed: int, trial: Trial, options: argparse.Namespace) -> str:
    """Where a trial is, and how to get there again."""
    script = Path(__file__).resolve().relative_to(PROJECT_ROOT)
    rerun = [sys.executable, str(script), "--seed", str(seed), "--operations", str(options.operations)]
    rerun += ["--spoil", options.spoil] if options.spoil else []
    return f"seed {seed}, operation {trial.operation}\n  rerun {shlex.join(rerun)}\n  {trial.setup}"


def main() -> int:
    """Run the trials of some seeds; the exit status."""
    parser = argparse.ArgumentParser(description="vLLM's KVCacheManager and ours under the same random operations")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--configurations", type=int, default=1, help="how many seeds")
    parser.add_argument("--operations", type=int, default=350, help="of each configuration")
    parser.add_argument("--spoil", metavar="FIELD", help="make a field of ours wrong, to see that it is noticed")
    options = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # a reset that is refused is no news here
    exercised: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.configurations):
        trial = Trial(seed, exercised, options.spoil)
        try:
            trial.run(options.operations)
        except Difference as difference:
            print(f"{describe(seed, trial, options)}\n{difference}")  # noqa: T201 - a script's output
            return 1
        except Exception as error:
            error.add_note(describe(seed, trial, options))
            raise
    print(json.dumps(dict(sorted(exercised.items()))))  # noqa: T201 - a script's output
    return 0


if __name__ == "__main__":
    sys.exit(main())
