"""KV events as one line of text for a person who looks for a fault."""

from collections.abc import Sequence
from datetime import datetime

from kvatlas.events import AllBlocksCleared, BlockHandle, BlockStored, Event

__all__ = ["describe_event", "wall_time"]

_SHOWN_DIGITS = 12


def wall_time(ts_s: float) -> str:
    """Seconds since the Unix epoch as local time of day with milliseconds; the number itself when it is no time."""
    try:
        return datetime.fromtimestamp(ts_s).astimezone().strftime("%H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"ts {ts_s!r}"


def describe_event(event: Event) -> str:
    """Name, medium, group, number of blocks, first and last hash, then parent and tokens of what was stored.

    A published integer is shown whole, as `kvatlas hash` prints it; of a digest the first 12 hexadecimal digits.
    """
    if isinstance(event, AllBlocksCleared):
        return "cleared: all blocks"
    parts = ["stored " if isinstance(event, BlockStored) else "removed", event.medium or "no medium"]
    if event.group_idx is not None:
        parts.append(f"group {event.group_idx}")
    parts.append(_blocks(event.block_hashes))
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        parts.append("no parent" if parent is None else f"parent {_short(parent)}")
        parts.append(f"{len(event.token_ids)} tokens ({event.block_size} a block)")
        parts += [f"lora {event.lora_name}"] if event.lora_name else []
    return "  ".join(parts)


def _blocks(hashes: Sequence[BlockHandle]) -> str:
    if not hashes:
        return "0 blocks"
    if len(hashes) == 1:
        return f"1 block {_short(hashes[0])}"
    return f"{len(hashes)} blocks {_short(hashes[0])}..{_short(hashes[-1])}"


def _short(handle: BlockHandle) -> str:
    return str(handle) if isinstance(handle, int) else handle.hex()[:_SHOWN_DIGITS]
