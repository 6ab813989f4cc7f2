"""The seam between moving bytes and deciding where they go.

The gateway knows no index, no policy and no tokenizer: it asks a `Planner`. Tests and benchmarks bring a planner of ten
lines.
"""

from collections.abc import Awaitable
from typing import Protocol

from kvatlas.gateway.values import GatewayRequest, Outcome, Plan, Reply, Target

__all__ = ["FixedPlanner", "Planner"]


class Planner(Protocol):
    """Decides where a request goes and is told what became of it.

    Every method is called on the event loop. `dispatched` and `finished` are strictly paired: each `dispatched` is
    followed by exactly one `finished` with the same target, on every way out, so counters built on them return to zero.
    """

    def plan(self, request: GatewayRequest) -> Plan | Reply | Awaitable[Plan]:
        """Choose targets, best first, or answer by a `Reply`.

        Return a `Plan` at once whenever possible: an awaitable costs a task. A pending awaitable is cancelled when the
        client leaves.

        Raises:
            KvAtlasError: the client gets its `http_status`, `code` and message. Anything else becomes a 500.
        """
        ...

    def dispatched(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """An attempt at `target` begins now, before any connection is made: count it as load at once."""
        ...

    def first_byte(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """The first byte of the response body arrived: prefill is over. At most once per `dispatched`."""
        ...

    def finished(self, request: GatewayRequest, plan: Plan, target: Target | None, outcome: Outcome) -> None:
        """The attempt at `target` is over.

        With target None: the plan was made but never dispatched (it named no target, or the client left meanwhile); no
        `dispatched` was called.
        """
        ...

    def ready(self) -> bool:
        """Whether `/readyz` should say that traffic may come."""
        ...


class FixedPlanner:
    """Sends every request to the same targets, rotating through them. For benchmarks, tests and plain proxying."""

    __slots__ = ("_next", "_plans")

    def __init__(self, targets: tuple[Target, ...]) -> None:
        self._plans = tuple(Plan(targets[i:] + targets[:i]) for i in range(len(targets))) or (Plan(()),)
        self._next = 0

    def plan(self, request: GatewayRequest) -> Plan:
        """The next rotation of the targets. Cost: O(1)."""
        plan = self._plans[self._next]
        self._next = (self._next + 1) % len(self._plans)
        return plan

    def dispatched(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """Nothing to count."""

    def first_byte(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """Nothing to learn."""

    def finished(self, request: GatewayRequest, plan: Plan, target: Target | None, outcome: Outcome) -> None:
        """Nothing to count."""

    def ready(self) -> bool:
        """Whether there is any target."""
        return bool(self._plans[0].targets)
