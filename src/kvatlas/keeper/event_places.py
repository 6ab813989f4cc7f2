"""Events of a journal by their place, and parts of them as events of their own."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from kvatlas.errors import IndexStateError
from kvatlas.events import BlockHandle, BlockStored, EventBatch, decode_batch
from kvatlas.keeper.residency import Place, is_sliceable
from kvatlas.stream import read_records

__all__ = ["EventReader", "Run", "part_of", "same_kind"]

_CACHED_BATCHES = 256
_MAX_RUN_BLOCKS = 512


class EventReader:
    """Reads events back from the journal's files; usable as a context manager.

    Args:
        paths: the files, as `Place.file` counts them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._handles = [os.open(path, os.O_RDONLY) for path in paths]
        self._cache: OrderedDict[tuple[int, int], EventBatch] = OrderedDict()

    def stored(self, packed: int) -> tuple[BlockStored, int]:
        """The store event at a place, and which of its blocks is meant.

        Raises:
            IndexStateError: the journal's file changed or is damaged there.

        Cost: decoding the batch it is in, unless that is one of the last 256.
        """
        place = Place.unpack(packed)
        event = self._batch(place.file, place.offset).events[place.event]
        if not isinstance(event, BlockStored):
            raise IndexStateError(f"expected a BlockStored at {place} of the journal, found {type(event).__name__}")
        return event, place.block

    def _batch(self, file: int, offset: int) -> EventBatch:
        batch = self._cache.get((file, offset))
        if batch is None:
            handle = self._handles[file]
            record = next(read_records(handle, offset, os.fstat(handle).st_size), None)
            if record is None:
                raise IndexStateError(f"the journal is damaged at offset {offset} of its file {file}")
            batch = decode_batch(record.payload).batch
            self._cache[file, offset] = batch
            if len(self._cache) > _CACHED_BATCHES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end((file, offset))
        return batch

    def close(self) -> None:
        """Close the files."""
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_of(event: BlockStored, numbers: Sequence[int]) -> BlockStored:
    """An event that stores only some blocks of another one, in a form engines publish.

    One block of an event whose hashes and tokens pair goes with its own tokens and parent. Where they do not pair
    (masked groups, placeholders) the tokens stay as they are: fewer hashes than tokens prove nothing either.
    """
    if is_sliceable(event) and len(numbers) == 1:
        run = Run(event, numbers[0])
        return run.event()
    hashes = [event.block_hashes[number] for number in numbers]
    extras = None if event.extra_keys is None else [_extra(event, number) for number in numbers]
    tokens = event.token_ids
    if event.block_size and len(hashes) * event.block_size == len(tokens) and not is_sliceable(event):
        tokens = []
    return msgspec.structs.replace(event, block_hashes=hashes, extra_keys=extras, token_ids=tokens)


def same_kind(first: BlockStored, second: BlockStored) -> bool:
    """Whether two events differ in nothing but their blocks."""
    return _kind(first) == _kind(second)


def _kind(event: BlockStored) -> tuple[object, ...]:
    return (
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.extra_keys is None,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
        event.session_id,
        event.cache_salt,
    )


class Run:
    """Consecutive blocks of one chain, collected from events of one kind.

    Args:
        event: where the first block comes from.
        number: which of its blocks.
    """

    __slots__ = ("_extras", "_hashes", "_parent", "_template", "_tokens")

    def __init__(self, event: BlockStored, number: int) -> None:
        self._template = event
        self._parent = event.block_hashes[number - 1] if number else event.parent_block_hash
        self._hashes: list[BlockHandle] = []
        self._tokens: list[Any] = []
        self._extras: list[tuple[Any, ...] | None] = []
        self._add(event, number)

    @property
    def num_tokens(self) -> int:
        """Tokens collected so far."""
        return len(self._tokens)

    def extend(self, event: BlockStored, number: int) -> bool:
        """Take one more block if it follows the last and is of the kind; whether it was taken."""
        parent = event.block_hashes[number - 1] if number else event.parent_block_hash
        if parent is None or parent != self._hashes[-1] or len(self._hashes) >= _MAX_RUN_BLOCKS:
            return False
        if event is not self._template and not same_kind(event, self._template):
            return False
        self._add(event, number)
        return True

    def event(self) -> BlockStored:
        """What was collected, as one event."""
        return msgspec.structs.replace(
            self._template,
            block_hashes=self._hashes,
            parent_block_hash=self._parent,
            token_ids=self._tokens,
            extra_keys=None if self._template.extra_keys is None else self._extras,
        )

    def _add(self, event: BlockStored, number: int) -> None:
        size = event.block_size
        self._hashes.append(event.block_hashes[number])
        self._tokens.extend(event.token_ids[number * size : (number + 1) * size])
        self._extras.append(_extra(event, number))


def _extra(event: BlockStored, number: int) -> tuple[Any, ...] | None:
    extras = event.extra_keys
    return extras[number] if extras is not None and number < len(extras) else None
