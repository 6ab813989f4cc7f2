"""Where a running engine is reached."""

from dataclasses import dataclass

__all__ = ["EngineAddress"]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a running engine is reached; every port is the real one.

    `events_endpoint` and `replay_endpoint` are rank 0's; `rank_endpoints` has both for each data-parallel rank.
    """

    pid: int
    host: str
    port: int
    events_endpoint: str | None
    replay_endpoint: str | None
    rank_endpoints: tuple[tuple[str, str | None], ...] = ()

    @property
    def base_url(self) -> str:
        """The URL clients put before `/v1/...`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
