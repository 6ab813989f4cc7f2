"""What can be made to go wrong: each kind of fault is one frozen struct, its fields are the keys of its spec.

Times are seconds from the moment the fault is given, batch numbers count from there too.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

__all__ = [
    "ClockJump",
    "Crash",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "Fault",
    "Hang",
    "HwmLoss",
    "LostTail",
    "Reorder",
    "ReplayFault",
    "Reset",
    "Restart",
    "Silence",
    "SlowStart",
]

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Chance = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="fault", omit_defaults=True
):
    """What every fault has. `engine`: index of the engine it befalls, None = all."""

    engine: _Number | None = None


class _Timed(_Fault, kw_only=True, frozen=True):
    """A fault with a time.

    Args:
        at_s (`at`): when it begins.
        every_s (`every`): it comes again as often.
    """

    at_s: _Time = msgspec.field(name="at", default=0.0)
    every_s: Annotated[float, msgspec.Meta(gt=0)] | None = msgspec.field(name="every", default=None)


class _Lasting(_Timed, kw_only=True, frozen=True):
    """A fault that lasts. `for_s` (`for`): how long, None = to the end."""

    for_s: _Time | None = msgspec.field(name="for", default=None)


class _OnStream(_Lasting, kw_only=True, frozen=True):
    """A fault of the event stream.

    Args:
        from_batch (`from`): the first batch it can befall.
        rank: data-parallel rank whose stream is meant, None = all.
    """

    from_batch: _Number = msgspec.field(name="from", default=0)
    rank: _Number | None = None


class _OnBatches(_OnStream, kw_only=True, frozen=True):
    """A fault that befalls batches one by one.

    Args:
        count: how many it befalls at most, None = no bound.
        p: chance of each to be befallen.
    """

    count: _Count | None = None
    p: _Chance = 1.0


class Drop(_OnBatches, kw_only=True, frozen=True, tag="drop"):
    """The batch does not go live. Replay has it."""


class Duplicate(_OnBatches, kw_only=True, frozen=True, tag="duplicate"):
    """The batch goes live `copies` times more."""

    copies: _Count = 1


class Delay(_OnBatches, kw_only=True, frozen=True, tag="delay"):
    """The batch goes live `by_s` (`by`) later, and what comes after it waits behind it, as on one connection."""

    by_s: _Time = msgspec.field(name="by", default=0.5)


class Reorder(_OnBatches, kw_only=True, frozen=True, tag="reorder"):
    """The batch goes live after the `span` next ones, or `by_s` (`by`) later when they do not come."""

    span: _Count = 1
    by_s: _Time = msgspec.field(name="by", default=1.0)


class HwmLoss(_OnStream, kw_only=True, frozen=True, tag="hwm"):
    """The subscriber reads `rate` batches a second; of those that wait, the publisher keeps `size` and drops more.

    When the fault ends the rest is read at once.
    """

    size: _Count = 100
    rate: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class Silence(_OnBatches, kw_only=True, frozen=True, tag="silence"):
    """Nothing goes live although the connection stands. Replay works."""


class LostTail(_OnStream, kw_only=True, frozen=True, tag="lost_tail"):
    """Of the batches before the stream falls quiet, the last `count` never go live.

    To know which are the last, the live channel runs `count` batches behind while the fault is on.

    Args:
        count: batches in a tail.
        p: chance of each tail to be lost.
        quiet_s (`quiet`): no batch for so long is a quiet stream.
        times: how many tails are lost at most, None = no bound.
    """

    count: _Count = 1
    p: _Chance = 1.0
    quiet_s: Annotated[float, msgspec.Meta(gt=0)] = msgspec.field(name="quiet", default=1.0)
    times: _Count | None = None


class ReplayFault(_OnStream, kw_only=True, frozen=True, tag="replay"):
    """The replay endpoint fails a question.

    Args:
        mode: "refused" = no answer; "slow" = `interval_s` (`interval`) before each batch; "truncated" = only the newest
            `keep` batches; "holes" = some are missing; "no_marker" = the end marker does not come.
        holes: with `p`, each batch of an answer is missing with that chance; without it the batches `from` to `from` +
            `count` - 1 of every life are gone for good.
        times: how many questions fail at most, None = no bound.
    """

    mode: Literal["refused", "slow", "truncated", "holes", "no_marker"]
    keep: _Number = 0
    interval_s: _Time = msgspec.field(name="interval", default=0.1)
    p: _Chance | None = None
    count: _Count = 1
    times: _Count | None = None


class _Ending(_Timed, kw_only=True, frozen=True):
    """A fault that ends the engine's life.

    Args:
        from_batch (`from`): it comes only once the engine has published as many batches.
        p: chance that it comes, each time.
        down_s (`down`): ports are closed so long; the cache is empty and numbers start at 0 afterwards.
        overtaking: the new life first publishes empty batches, until its numbers have reached the old life's.
    """

    from_batch: _Number = msgspec.field(name="from", default=0)
    p: _Chance = 1.0
    down_s: _Time = msgspec.field(name="down", default=0.5)
    overtaking: bool = False


class Restart(_Ending, kw_only=True, frozen=True, tag="restart"):
    """The engine ends and starts again. `identity`: whether it shows the same boot identity or another."""

    identity: Literal["same", "other"] = "same"


class Crash(_Ending, kw_only=True, frozen=True, tag="crash"):
    """Connections are reset and the engine is gone for `down_s`; then another life of another identity begins.

    With `after` the crash waits for a streamed answer that has sent so many pieces, and cuts it there.
    """

    down_s: _Time = msgspec.field(name="down", default=2.0)
    after: _Count | None = None


class Hang(_Lasting, kw_only=True, frozen=True, tag="hang"):
    """Connections are accepted and not answered, steps stand still; then all goes on where it stood."""


class Reset(_Lasting, kw_only=True, frozen=True, tag="reset"):
    """A streamed answer's connection is reset after `after` pieces; the engine lives on.

    `p` is the chance of each answer, `count` how many are reset at most.
    """

    after: _Count = 1
    p: _Chance = 1.0
    count: _Count | None = None


class SlowStart(_Fault, kw_only=True, frozen=True, tag="slow_start"):
    """Each life of the engine serves only `for_s` (`for`) after it began.

    Until then connections are "refused", or every answer is 503 ("unhealthy").
    """

    for_s: _Time = msgspec.field(name="for", default=5.0)
    mode: Literal["refused", "unhealthy"] = "refused"


class ClockJump(_Lasting, kw_only=True, frozen=True, tag="clock"):
    """The engine's wall clock is off by `jump_s` (`jump`, negative = back): the timestamps of its batches are."""

    jump_s: float = msgspec.field(name="jump")


class Cut(_Lasting, kw_only=True, frozen=True, tag="cut"):
    """The network between subscribers and the event ports is gone: connections break, none can be made."""


Fault: TypeAlias = (
    Drop
    | Duplicate
    | Delay
    | Reorder
    | HwmLoss
    | Silence
    | LostTail
    | ReplayFault
    | Restart
    | Crash
    | Hang
    | Reset
    | SlowStart
    | ClockJump
    | Cut
)
"""Any fault."""
