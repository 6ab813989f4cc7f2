"""Replays a recording of vLLM's KVCacheManager (golden/core) through ours, and says where they first differ."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvatlas.hashing import RequestExtras, VllmHasher
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    MambaSpec,
    Request,
    SlidingWindowSpec,
)

INPUTS = {"op", "id", "tokens", "cache_salt", "report_mode", "prompt_logprobs", "scheduled", "append", "block_ids"}


@dataclass(frozen=True)
class Difference:
    """The first field in which we are not equal to the recording."""

    line: int
    op: str
    field: str
    recorded: object
    ours: object

    def __str__(self):
        return f"line {self.line} ({self.op}), field {self.field}:\n  recorded {self.recorded}\n  ours     {self.ours}"


@dataclass
class Replayed:
    """How far a recording was replayed: lines compared, the first difference, whether final statistics were recorded."""

    lines: int = 0
    difference: Difference | None = None
    has_stats: bool = False


def replay(path: Path) -> Replayed:
    """Replay a file up to its end or the first difference."""
    done = Replayed()
    with path.open() as file:
        replayer = CoreReplay(json.loads(next(file)))
        for number, text in enumerate(file, start=2):
            recorded = json.loads(text)
            ours = replayer.apply(recorded)
            done.lines += 1
            done.has_stats = recorded["op"] == "stats"
            done.difference = first_difference(number, recorded, ours)
            if done.difference is not None:
                return done
    return done


def first_difference(number, recorded, ours):
    """The first field, in the recording's order, whose values differ; every field that is no input is compared."""
    fields = [field for field in recorded if field not in INPUTS]
    for field in [*fields, *(field for field in ours if field not in fields)]:
        if recorded.get(field) != ours.get(field):
            return Difference(number, recorded["op"], field, recorded.get(field), ours.get(field))
    return None


class CoreReplay:
    """Drives a manager with recorded operations; `apply` returns what the line should say, in the recording's form."""

    def __init__(self, config):
        self.hasher = VllmHasher(config["hash_algo"], config["hash_seed"])
        self.hash_block_size = config["hash_block_size"]
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["num_blocks"],
                groups=tuple(KVCacheGroup(make_spec(group)) for group in config["groups"]),
                hash_block_size=self.hash_block_size,
                max_model_len=config["max_model_len"],
                max_in_flight_tokens=config["max_in_flight_tokens"],
                use_eagle=config["use_eagle"],
                retention_interval=config["retention_interval"],
            )
        )
        assert self.manager.config.scheduler_block_size == config["scheduler_block_size"]
        self.requests = {}

    def apply(self, line):
        """Do what the line says, and describe the state afterwards."""
        self.manager.new_step_starts()
        result = getattr(self, "_" + line["op"])(line)
        if line["op"] == "stats":
            return result
        result["events"] = list(map(as_recorded, self.manager.take_events()))
        result["free"] = self.manager.free_block_ids()
        result["usage"] = round(self.manager.usage, 6)
        result["cached"] = self.manager.num_cached_keys
        if line.get("tables") is not None:
            result["tables"] = {rid: list(self.manager.block_ids(rid)) for rid in self.requests}
        return result

    def _admit(self, line):
        request = Request(
            line["id"],
            line["tokens"],
            self.hasher,
            self.hash_block_size,
            extras=RequestExtras(cache_salt=line["cache_salt"]),
            report_mode=line["report_mode"],
            skip_reading_prefix_cache=line["prompt_logprobs"],
        )
        found = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = found.shared_prefix_boundary
        new = self.manager.allocate_slots(
            request, line["scheduled"], new_computed_tokens=found.hit_tokens, computed_blocks=found
        )
        if new is not None:
            request.num_computed_tokens = found.hit_tokens + line["scheduled"]
            self.requests[line["id"]] = request
        return {
            "hit": found.hit_tokens,
            "hit_blocks": [[block.block_id for block in blocks] for blocks in found.blocks],
            "shared_prefix_boundary": found.shared_prefix_boundary,
            "new": as_lists(new),
        }

    def _step(self, line):
        request = self.requests[line["id"]]
        request.append_output(line["append"])
        new = self.manager.allocate_slots(request, line["scheduled"])
        if new is None:
            self._free(line)
        else:
            request.num_computed_tokens += line["scheduled"]
        return {"new": as_lists(new), "freed": True if new is None else None}

    def _free(self, line):
        self.manager.free(self.requests.pop(line["id"]))
        return {}

    def _evict_blocks(self, line):
        self.manager.evict_blocks(line["block_ids"])
        return {}

    def _reset(self, line):
        return {"ok": self.manager.reset_prefix_cache()}

    def _free_all_and_reset(self, line):
        for request in self.requests.values():
            self.manager.free(request)
        self.requests.clear()
        return self._reset(line)

    def _stats(self, line):
        stats = self.manager.make_stats()
        return {"requests": stats.requests, "queries": stats.queries, "hits": stats.hits}


def make_spec(group):
    """The spec of a recorded group."""
    size = group["block_size"]
    match group["kind"]:
        case "full_attention":
            return FullAttentionSpec(size)
        case "sliding_window":
            return SlidingWindowSpec(size, group["window"])
        case "chunked_local_attention":
            return ChunkedLocalAttentionSpec(size, group["chunk"])
        case "mamba":
            return MambaSpec(size)
        case kind:
            raise NotImplementedError(f"no replay for groups of kind {kind}")


def as_lists(new):
    """Block ids per group as JSON has them."""
    return None if new is None else list(new)


def as_recorded(event):
    """An event as the recording has it: a mapping with the class name first and fields that are None left out."""
    fields = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    return json.loads(json.dumps({name: value for name, value in fields.items() if value is not None}))
