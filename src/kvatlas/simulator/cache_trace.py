"""A scripted run of a small engine, told step by step: `kvatlas sim --trace-cache`.

A prompt in the script is a list of token ids, or a text of which every character is one token: so blocks can be read.
"""

from collections.abc import Iterator, Sequence

import msgspec

from kvatlas.errors import BadRequest, ConfigError
from kvatlas.events import AllBlocksCleared, BlockHandle, BlockRemoved, BlockStored, Event
from kvatlas.hashing import RequestExtras, hash64
from kvatlas.simulator.cache_picture import WIDTH, ContentNames, draw_cache
from kvatlas.simulator.config import EngineConfig, GroupConfig
from kvatlas.simulator.core import EngineCore
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import SamplingParams
from kvatlas.simulator.step import StepPlan

__all__ = ["EXAMPLE_SCRIPT", "TraceRequest", "TraceScript", "read_script", "trace_cache"]

_MOST_STEPS = 1000


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of the script.

    Args:
        id: short; it labels the table.
        prompt: token ids, or a text of one token a character.
        reply: what the model says; it may be shorter than `max_tokens`, then dots follow.
        max_tokens: length of the reply.
        at_step: the step before which it arrives, 1 the first.
        cache_salt: see vLLM's field of that name.
    """

    id: str
    prompt: str | list[int]
    reply: str | list[int] = ""
    max_tokens: int = 1
    at_step: int = 1
    cache_salt: str | None = None


class TraceScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine and what it is sent.

    Args:
        requests: in any order.
        block_size, num_blocks, groups, retention_interval, async_scheduling: see `EngineConfig`.
        max_num_batched_tokens: token budget of a step.
        reset_at_steps: before these steps the cache is reset, if nobody holds blocks.
    """

    requests: list[TraceRequest]
    block_size: int = 4
    num_blocks: int = 11
    max_num_batched_tokens: int = 64
    groups: tuple[GroupConfig, ...] = ()
    retention_interval: int | None = 0
    async_scheduling: bool = False
    reset_at_steps: list[int] = []


EXAMPLE_SCRIPT = TraceScript(
    num_blocks=10,
    requests=[
        TraceRequest(id="ann", prompt="Be kind. Hello?", reply="Hi.", max_tokens=3),
        TraceRequest(id="bob", prompt="Be kind. Who am I", reply="Bob", max_tokens=3, at_step=2),
        TraceRequest(id="cat", prompt="Tell me a tale of 9 cats.", reply=".", at_step=5),
        TraceRequest(id="ann2", prompt="Be kind. Hello?Hi.And?", reply="!", at_step=6),
    ],
)
"""Two users share the start of their prompts; a third one's long prompt evicts; the first one comes back."""


def read_script(data: bytes) -> TraceScript:
    """Read a script from JSON.

    Raises:
        BadRequest: not JSON, or not a script; the message names the field.
    """
    try:
        return msgspec.json.decode(data, type=TraceScript)
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"this is not a trace script: {error}; it needs at least requests with id and prompt"
        ) from None


def trace_cache(script: TraceScript) -> Iterator[str]:
    """Run a script and tell it, a line at a time, none wider than `WIDTH` columns.

    Raises:
        ConfigError: sizes that cannot work, or a script that does not come to an end.
    """
    trace = _Trace(script)
    yield from trace.head()
    for step in range(1, _MOST_STEPS):
        if trace.is_over(step):
            yield from trace.idle()
            return
        yield from trace.step(step)
    raise ConfigError(f"the script has not come to its end after {_MOST_STEPS} steps: give requests earlier steps")


class _Reply:
    """A reply of the script; dots follow it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def token_id(self, index: int) -> int:
        """See `TokenSource`."""
        return self._token_ids[index] if index < len(self._token_ids) else ord(".")


class _Trace:
    """The engine under the script, and the words for what it does."""

    def __init__(self, script: TraceScript) -> None:
        self._script = script
        longest = max((len(request.prompt) + request.max_tokens for request in script.requests), default=1)
        config = EngineConfig(
            block_size=script.block_size,
            num_blocks=script.num_blocks,
            max_model_len=longest,
            max_num_batched_tokens=script.max_num_batched_tokens,
            groups=script.groups,
            retention_interval=script.retention_interval,
            async_scheduling=script.async_scheduling,
            hash_algo="sha256_cbor",
            hash_seed="0",
        )
        self._core = EngineCore(config, ReplySampler((ord("."),), eos_token_id=None))
        self._names = ContentNames()
        self._by_handle: dict[BlockHandle, bytes] = {}
        self._live: dict[str, EngineRequest] = {}
        self._is_text = all(isinstance(request.prompt, str) for request in script.requests)

    def head(self) -> Iterator[str]:
        """What the picture shows."""
        script = self._script
        yield f"{script.num_blocks - 1} blocks of {script.block_size} tokens (block 0 is the null block)"
        yield "a box: block number, content    free: the next to be reused first    map: content=block"

    def is_over(self, step: int) -> bool:
        """Whether nothing is left to do from this step on."""
        return not self._core.has_requests and all(request.at_step < step for request in self._script.requests)

    def idle(self) -> Iterator[str]:
        """The end."""
        yield ""
        yield _rule("nobody is left")
        yield from draw_cache(self._core.scheduler.cache, (), self._names)

    def step(self, number: int) -> Iterator[str]:
        """Arrivals, then what is scheduled, allocated and announced, then who ended."""
        if number in self._script.reset_at_steps:
            yield ""
            yield "reset: " + (
                "everything is forgotten" if self._core.reset_prefix_cache() else "refused, blocks in use"
            )
        for wanted in self._script.requests:
            if wanted.at_step == number:
                self._arrive(wanted)
        step = self._core.begin_step(0.0)
        self._learn_handles()
        yield ""
        yield _rule(f"step {number}: {self._what(step.plan)}")
        held = [request_id for request_id in self._live if any(self._core.scheduler.cache.block_ids(request_id))]
        yield from draw_cache(self._core.scheduler.cache, held, self._names)
        result = self._core.end_step(step, 0.0)
        for event in result.events:
            yield from self._told(event)
        for output in result.outputs:
            said = self._shown(output.token_ids)
            end = "" if output.finish_reason is None else ", and ends: its blocks join the queue, the last first"
            yield f"{output.request_id} says {said}{end}"
        for request in result.finished:
            del self._live[request.request_id]

    def _arrive(self, wanted: TraceRequest) -> None:
        request = self._core.add(
            wanted.id,
            _tokens(wanted.prompt),
            SamplingParams(max_tokens=wanted.max_tokens, ignore_eos=True),
            extras=RequestExtras(cache_salt=wanted.cache_salt),
            source=_Reply(_tokens(wanted.reply)),
        )
        self._live[wanted.id] = request

    def _what(self, plan: StepPlan) -> str:
        parts = [f"{request.request_id} is preempted" for request in plan.preempted]
        joined = {*plan.admitted, *plan.resumed}
        for share in plan.scheduled:
            name = share.request.request_id
            tokens = f"{share.num_tokens} token{'s' if share.num_tokens > 1 else ''}"
            if share.request in joined:
                parts.append(f"{name} hits {share.start_tokens} and computes {tokens}")
            else:
                parts.append(f"{name} computes {tokens}")
        return "; ".join(parts) or "nothing can be computed"

    def _learn_handles(self) -> None:
        for request in self._live.values():
            for digest in request.request.block_hashes:
                self._by_handle.setdefault(hash64(digest), digest)

    def _told(self, event: Event) -> Iterator[str]:
        match event:
            case BlockStored():
                names = " ".join(self._name(handle) for handle in event.block_hashes) or "nothing"
                parent = "the root" if event.parent_block_hash is None else self._name(event.parent_block_hash)
                group = f" in group {event.group_idx}" if len(self._script.groups) > 1 else ""
                line = f"event    stored {names} after {parent}{group}: {self._shown(event.token_ids)}"
                yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
            case BlockRemoved():
                yield f"event    removed {' '.join(self._name(handle) for handle in event.block_hashes)}"
            case AllBlocksCleared():
                yield "event    all blocks cleared"

    def _name(self, handle: BlockHandle) -> str:
        return self._names.name(self._by_handle[handle])

    def _shown(self, token_ids: Sequence[object]) -> str:
        """Tokens as the script gave them: as text, or as numbers."""
        if self._is_text:
            return '"' + "".join(chr(token_id) for token_id in token_ids if isinstance(token_id, int)) + '"'
        return " ".join(map(str, token_ids))


def _tokens(text: str | list[int]) -> list[int]:
    return [ord(character) for character in text] if isinstance(text, str) else text


def _rule(text: str) -> str:
    line = f"── {text} "
    return line[:WIDTH] if len(line) >= WIDTH else line.ljust(WIDTH, "─")
