"""One event by itself, in any form an engine ever sent: map or array, plain or bigram tokens, known kind or not.

The codec's second path. Each form has a struct of its own, made from the model's fields, so that here too msgspec
does the work, says what is wrong, and builds nothing that the schema does not know.
"""

import re
from typing import Any, Final, cast

import msgspec

from kvatlas.errors import EventDecodeError
from kvatlas.events.model import MAX_TOKEN_ID, AllBlocksCleared, BlockRemoved, BlockStored, Event

__all__ = ["decode_alone"]

_KINDS: Final[dict[str, type[msgspec.Struct]]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_BAD_BYTES: Final = (msgspec.MsgspecError, RecursionError)


def _variant(kind: str, *, array_like: bool, token_ids: Any = None) -> type[msgspec.Struct]:
    """A struct with the fields of a kind, sent as a map or an array, with another type of token ids if given."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(_KINDS[kind]):
        type_ = token_ids if token_ids is not None and field.name == "token_ids" else field.type
        fields.append((field.name, type_) if field.required else (field.name, type_, None))
    return msgspec.defstruct(kind, fields, tag=kind, array_like=array_like, gc=False)


def _decoder(type_: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(type_)


_ArrayStored = _variant("BlockStored", array_like=True)
_ArrayRemoved = _variant("BlockRemoved", array_like=True)
_ArrayCleared = _variant("AllBlocksCleared", array_like=True)
_Pairs = list[tuple[int, int]]


class _MapKind(msgspec.Struct):
    type: str


class _ArrayKind(msgspec.Struct, array_like=True):
    type: str


class _Form:
    """Decoders of one form: events with plain tokens, BlockStored with bigram tokens, and the kind alone."""

    def __init__(self, events: Any, bigram: Any, kind: Any) -> None:
        self.events = _decoder(events).decode
        self.bigram = _decoder(bigram).decode
        self.kind = _decoder(kind).decode


_MAP: Final = _Form(Event, _variant("BlockStored", array_like=False, token_ids=_Pairs), _MapKind)
_ARRAY: Final = _Form(
    _ArrayStored | _ArrayRemoved | _ArrayCleared,
    _variant("BlockStored", array_like=True, token_ids=_Pairs),
    _ArrayKind,
)


def decode_alone(raw: msgspec.Raw) -> Event | None:
    """The event in `raw`; None for a kind we do not know.

    Raises:
        EventDecodeError: it is malformed; the message names the field, what was expected and what was given.
    """
    form = _form_of(raw)
    try:
        return _to_event(form.events(raw))
    except _BAD_BYTES as error:
        kind = _kind_of(form, raw)
        if kind not in _KINDS:
            return None
        message = _with_field_names(str(error), kind)
        if "`array` - at `$.token_ids[0]`" not in message:
            raise EventDecodeError(f"{kind}: {message}") from error
    try:
        return _checked_bigram(cast("BlockStored", _to_event(form.bigram(raw))))
    except _BAD_BYTES as error:
        message = _with_field_names(str(error), kind)
        raise EventDecodeError(f"{kind}: {message}; expected token ids or pairs of them") from error


def _form_of(raw: msgspec.Raw) -> _Form:
    """Map or array, by the first byte. Source: the MessagePack specification's table of formats."""
    head = memoryview(raw)[0]
    if 0x80 <= head <= 0x8F or head in {0xDE, 0xDF}:
        return _MAP
    if 0x90 <= head <= 0x9F or head in {0xDC, 0xDD}:
        return _ARRAY
    raise EventDecodeError(f"expected a map with a `type` or an array that starts with the kind, got byte 0x{head:02x}")


def _kind_of(form: _Form, raw: msgspec.Raw) -> str:
    try:
        return cast("str", form.kind(raw).type)
    except _BAD_BYTES as error:
        raise EventDecodeError(f"{error}; expected the event's kind as a str (`type`, or first element)") from error


def _to_event(decoded: msgspec.Struct) -> Event:
    kind = _KINDS[cast("str", decoded.__struct_config__.tag)]
    return cast("Event", decoded if type(decoded) is kind else kind(*msgspec.structs.astuple(decoded)))


def _with_field_names(message: str, kind: str) -> str:
    """Positions of an array event as the names a reader knows: `$[4]` is `$.block_size`."""
    names = ("type", *_KINDS[kind].__struct_fields__)
    return re.sub(r"\$\[(\d+)\]", lambda at: f"$.{names[int(at[1])]}" if int(at[1]) < len(names) else at[0], message)


def _checked_bigram(event: BlockStored) -> BlockStored:
    for first, second in cast("list[tuple[int, int]]", event.token_ids):
        if not (0 <= first <= MAX_TOKEN_ID and 0 <= second <= MAX_TOKEN_ID):
            raise EventDecodeError(
                f"BlockStored: token_ids: expected ids of 0..{MAX_TOKEN_ID}, got ({first}, {second})"
            )
    return event
