"""A worker's column as bytes, in the Python core of the index. The form stands in `c/dump.c`."""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvatlas._native._pure_column import Column, Entry
from kvatlas._native._pure_doubts import DoubtingState
from kvatlas._native._pure_tokens import little_endian
from kvatlas._native.arguments import (
    DUMP_COUNTING,
    DUMP_ENTRY,
    DUMP_LENGTH,
    DUMP_NOT_EMPTY,
    DUMP_PLANE,
    DUMP_ROOT_KEY,
    DUMP_TWICE,
    MAX_U32,
    dump_refused,
    no_such_plane,
    require_distinct_planes,
)

__all__ = ["DumpingState"]

_HEAD = struct.Struct("<7Q4I")
_OTHER = struct.Struct("<4I")
_USED, _KEYED, _DOUBT, _COPIES = 0x80, 0x40, 0x08, 0x07
_CLAIMED, _CLAIM_SHIFT = 3, 4
_IN_PLANE = 1
_UNSURE, _COUNTING = 1, 2


@dataclass(slots=True)
class _Block:
    """One entry of a dump, with a claim for each plane it has copies in."""

    number: int
    entry: Entry
    claims: dict[int, int]


class DumpingState(DoubtingState):
    """The part of the core's interface that is about a column as bytes."""

    def dump(self, worker: int, /) -> bytes:
        """A worker's column, its numbers of planes as they stand here. Runs that wait for a parent are left out.

        Cost: 17 bytes a block on the device, 16 more for each copy elsewhere; natively 20 ns a block.
        """
        column = self._column(worker)
        blocks = [(number, entry) for number, entry in column.entries.items() if entry.copies]
        others = b"".join(
            _OTHER.pack(
                position, min(copies, MAX_U32), plane, self._claim_in_doubt(worker, entry, plane) if plane else 0
            )
            for position, (_, entry) in enumerate(blocks)
            for plane, copies in sorted(entry.copies.items())
            if plane or copies >= _COPIES
        )
        return b"".join(
            (
                _HEAD.pack(
                    *(column.stored, column.removed, column.unknown_removals, column.unpaired, column.refused),
                    *(column.forgotten, column.root_key),
                    *(len(blocks), len(others) // _OTHER.size, len(column.reported)),
                    _UNSURE * column.unsure | _COUNTING * column.counting,
                ),
                _words(number for number, _ in blocks),
                _words(entry.block_key or 0 for _, entry in blocks),
                bytes(self._mark_of(worker, entry) for _, entry in blocks),
                others,
                _words(column.reported),
                _words(column.reported.values()),
                bytes(self._claims_of(worker, 0, key) for key in column.reported),
            )
        )

    def load(self, worker: int, data: bytes, planes: Sequence[int], /) -> None:
        """Fill a worker's empty column from a dump of either backend: all of it, or nothing.

        Args:
            worker: a worker without blocks, of the same root key and way of counting.
            data: from `dump`.
            planes: the number here of each plane there, 0 for the first.

        Raises:
            IndexStateError: the dump is damaged or of another kind, or the column is not empty.
            MemoryError: it does not fit under the cap (natively only).

        Cost: natively about 300 ns a block.
        """
        column = self._column(worker)
        require_distinct_planes(planes)
        for plane in planes:
            if not 0 <= plane < len(self._planes):
                raise no_such_plane(plane, len(self._planes))
        if column.entries or column.reported:
            raise dump_refused(DUMP_NOT_EMPTY)
        if len(data) < _HEAD.size:
            raise dump_refused(DUMP_LENGTH)
        *counts, root_key, entries, others, reported, flags = _HEAD.unpack_from(data)
        parts = _split(data, entries, others, reported)
        if root_key != column.root_key:
            raise dump_refused(DUMP_ROOT_KEY)
        if flags & ~_UNSURE != _COUNTING * column.counting:
            raise dump_refused(DUMP_COUNTING)
        claims = parts[6]
        if any(claim > _CLAIMED for claim in claims):
            raise dump_refused(DUMP_ENTRY)
        blocks = _read_blocks(parts[0], parts[1], parts[2], parts[3], planes)
        keys = _from_words(parts[4])
        if len({block.number for block in blocks}) != entries or len(set(keys)) != reported:
            raise dump_refused(DUMP_TWICE)
        column.stored, column.removed, column.unknown_removals = counts[:3]
        column.unpaired, column.refused, column.forgotten = counts[3:]
        column.unsure = bool(flags & _UNSURE)
        column.reported = dict(zip(keys, _from_words(parts[5]), strict=True))
        self._take_in(column, worker, blocks)
        for key, claim in zip(keys, claims, strict=True):
            self._claim_as(worker, 0, key, claim)

    def _take_in(self, column: Column, worker: int, blocks: list[_Block]) -> None:
        for block in blocks:
            entry = column.entries[block.number] = block.entry
            column.resident += len(entry.copies)
            column.unkeyed += entry.block_key is None
            column.doubted += entry.in_doubt
            if entry.block_key is None:
                continue
            for plane in entry.copies:
                self._claim_as(worker, plane, entry.block_key, block.claims[plane] if entry.in_doubt else _IN_PLANE)

    def _claim_as(self, worker: int, plane: int, key: int, claims: int) -> None:
        for shadow, holders in enumerate((self._planes[plane], self._shadows[plane])):
            if claims >> shadow & 1:
                self._set(holders, key, worker)

    def _claims_of(self, worker: int, plane: int, key: int) -> int:
        """Bit 0: in the plane; bit 1: in its shadow."""
        return (self._planes[plane].get(key, 0) >> worker & 1) | (self._shadows[plane].get(key, 0) >> worker & 1) << 1

    def _claim_in_doubt(self, worker: int, entry: Entry, plane: int) -> int:
        if not entry.in_doubt or entry.block_key is None or not entry.copies.get(plane):
            return 0
        return self._claims_of(worker, plane, entry.block_key)

    def _mark_of(self, worker: int, entry: Entry) -> int:
        mark = _USED | min(entry.copies.get(0, 0), _COPIES) | self._claim_in_doubt(worker, entry, 0) << _CLAIM_SHIFT
        return mark | (_KEYED if entry.block_key is not None else 0) | (_DOUBT if entry.in_doubt else 0)


def _words(values: Iterable[int]) -> bytes:
    return little_endian(array("Q", list(values)))


def _from_words(data: bytes) -> "array[int]":
    words = array("Q", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _split(data: bytes, entries: int, others: int, reported: int) -> list[bytes]:
    """Handles, keys, marks, others, reported keys, their times, their claims."""
    sizes = (8 * entries, 8 * entries, entries, _OTHER.size * others, 8 * reported, 8 * reported, reported)
    if _HEAD.size + sum(sizes) != len(data):
        raise dump_refused(DUMP_LENGTH)
    parts, at = [], _HEAD.size
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return parts


def _read_blocks(handles: bytes, keys: bytes, marks: bytes, others: bytes, planes: Sequence[int]) -> list[_Block]:
    blocks = []
    elsewhere = list(_OTHER.iter_unpack(others))
    following = 0
    numbers, block_keys = _from_words(handles), _from_words(keys)
    for position, (number, key, mark) in enumerate(zip(numbers, block_keys, marks, strict=True)):
        first = following
        while following < len(elsewhere) and elsewhere[following][0] == position:
            following += 1
        blocks.append(_read_block(number, key, mark, elsewhere[first:following], planes))
    if following != len(elsewhere):
        raise dump_refused(DUMP_ENTRY)
    return blocks


def _read_block(number: int, key: int, mark: int, others: list[tuple[int, ...]], planes: Sequence[int]) -> _Block:
    copies = mark & _COPIES
    keyed, in_doubt = bool(mark & _KEYED), bool(mark & _DOUBT)
    entry = Entry(key if keyed else None, {}, waited=False, in_doubt=in_doubt)
    block = _Block(number, entry, {})
    if copies:
        entry.copies[0] = copies
        block.claims[0] = mark >> _CLAIM_SHIFT & _CLAIMED
    least = 0
    for _, count, plane, claim in others:
        if plane >= len(planes) or (plane == 0) != (planes[plane] == 0):
            raise dump_refused(DUMP_PLANE)
        if plane < least or not count or claim > _CLAIMED or (not plane and count < _COPIES):
            raise dump_refused(DUMP_ENTRY)
        if claim and not (plane and keyed and in_doubt):
            raise dump_refused(DUMP_ENTRY)
        least = plane + 1
        entry.copies[planes[plane]] = count
        if plane:
            block.claims[planes[plane]] = claim
    has_many = bool(others) and others[0][2] == 0
    if not mark & _USED or not entry.copies or (copies == _COPIES) != has_many:
        raise dump_refused(DUMP_ENTRY)
    if mark >> _CLAIM_SHIFT & _CLAIMED and not (keyed and in_doubt and copies):
        raise dump_refused(DUMP_ENTRY)
    return block
