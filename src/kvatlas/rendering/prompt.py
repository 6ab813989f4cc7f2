"""What rendering gives to the index: token ids, and what else goes into a block's hash."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvatlas.hashing import NO_EXTRAS, RequestExtras
from kvatlas.rendering.request import ParsedRequest

__all__ = ["RenderedPrompt", "Renderer", "extras_of"]


class RenderedPrompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt as the engine's cache sees it. A completions request may hold several."""

    token_ids: Sequence[int]
    extras: RequestExtras = NO_EXTRAS


class Renderer(Protocol):
    """Turns requests into token ids."""

    async def render(self, request: ParsedRequest) -> tuple[RenderedPrompt, ...]:
        """The request's prompts, in order.

        Raises:
            RenderError: the token ids cannot be known; route without the index.
        """
        ...


def extras_of(request: ParsedRequest) -> RequestExtras:
    """What of the request itself is hashed beside tokens: its salt. Which names are adapters, the caller knows."""
    return NO_EXTRAS if request.cache_salt is None else RequestExtras(cache_salt=request.cache_salt)
