"""Request fields only the engine looks at, beside those `kvatlas.rendering.parse_request` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from kvatlas.errors import BadRequest
from kvatlas.prefix_cache import ReportMode

__all__ = ["ClientOptions", "DetokenizeBody", "GenerationBody", "TokenizeBody", "decode_body"]

BodyT = TypeVar("BodyT")
_NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class GenerationBody(msgspec.Struct):
    """How a reply is made. What is not named here (temperature, ...) is accepted and changes nothing."""

    min_tokens: _NonNegative | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    request_id: str | None = None
    session_id: str | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def kv_cache_report_mode(self) -> ReportMode:
        """What lookups publish. The engine compares with "full"; any other value is as good as none."""
        asked = (self.vllm_xargs or {}).get("kv_cache_report_mode")
        return ReportMode.FULL if asked == ReportMode.FULL.value else ReportMode.INCREMENTAL

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the reply; empty ones end nothing."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in stop if text)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How the engine treats a request, from its body and its headers.

    Args:
        rank: the data-parallel rank asked for, None = any.
        priority: lower is earlier; the header wins over the body.
        session_id: the body's, else the header's, else that among the extra arguments.
    """

    rank: int | None
    priority: int
    session_id: str | None

    @classmethod
    def read(cls, body: GenerationBody, headers: Mapping[str, str], rank: int | None) -> "ClientOptions":
        """Gather them. A priority header that is no integer is ignored."""
        try:
            priority = int(headers.get("X-Vllm-Priority", ""))
        except ValueError:
            priority = body.priority
        extra = (body.vllm_xargs or {}).get("session_id")
        session_id = body.session_id or headers.get("X-Session-ID") or (None if extra is None else str(extra))
        return cls(rank, priority, session_id)


class TokenizeBody(msgspec.Struct):
    """POST /tokenize in its completion form; the chat form is read as a chat request."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[_TokenId]
    model: str | None = None


def decode_body(body: bytes, shape: type[BodyT]) -> BodyT:
    """Read a JSON body.

    Raises:
        BadRequest: not JSON, or a field of the wrong type (named in the message).
    """
    try:
        return msgspec.json.decode(body, type=shape, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request body has the wrong shape: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the request body of {len(body)} bytes is not JSON: {error}") from None
