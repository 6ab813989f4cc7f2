"""From the engine's loop to the HTTP handlers: one wake-up per step and connection, however many tokens it brings."""

import asyncio
from collections.abc import AsyncIterator

from kvatlas.errors import KvAtlasError
from kvatlas.simulator.step import RequestOutput

__all__ = ["OutputStream"]


class OutputStream:
    """The outputs of the requests one client waits for (several, when it asked for several choices or prompts).

    Iterating yields lists of outputs in the order they were made, and ends when the last of the requests has ended.
    `whole` waits for that end at once, which spares a wake-up per step.
    """

    __slots__ = ("_error", "_open_requests", "_pending", "_waiter", "_wakes_at_end")

    def __init__(self) -> None:
        self._pending: list[RequestOutput] = []
        self._open_requests: set[str] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_at_end = False
        self._error: KvAtlasError | None = None

    @property
    def open_request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(self._open_requests)

    def expect(self, request_id: str) -> None:
        """Announce a request whose outputs will come here."""
        self._open_requests.add(request_id)

    def close_request(self, request_id: str) -> None:
        """No more outputs of this request will come: it was aborted."""
        self._open_requests.discard(request_id)
        self._wake()

    def deliver(self, output: RequestOutput) -> None:
        """Hand over one step's output. Cost: an append, and a wake-up when somebody waits."""
        if output.finish_reason is not None:
            self._open_requests.discard(output.request_id)
        self._pending.append(output)
        if not self._wakes_at_end or not self._open_requests:
            self._wake()

    def fail(self, error: KvAtlasError) -> None:
        """The engine is dead: whoever waits gets `error`."""
        self._error = error
        self._wake()

    async def whole(self) -> list[RequestOutput]:
        """All outputs, when the last request has ended.

        Raises:
            KvAtlasError: the engine died before.
        """
        self._wakes_at_end = True
        while self._open_requests and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self._pending

    async def __aiter__(self) -> AsyncIterator[list[RequestOutput]]:
        while True:
            if self._pending:
                outputs, self._pending = self._pending, []
                yield outputs
            elif self._error is not None:
                raise self._error
            elif not self._open_requests:
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
