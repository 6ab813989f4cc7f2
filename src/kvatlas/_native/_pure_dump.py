"""A worker's column as bytes, in the Python core of the index. The form stands in `c/dump.c`."""

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvatlas._native._pure_column import Column, Entry
from kvatlas._native._pure_doubts import DoubtingState
from kvatlas._native._pure_tokens import little_endian
from kvatlas._native.arguments import (
    AGE_BINS,
    DUMP_COUNTING,
    DUMP_ENTRY,
    DUMP_LENGTH,
    DUMP_NOT_EMPTY,
    DUMP_PLANE,
    DUMP_ROOT_KEY,
    DUMP_TWICE,
    MAX_U32,
    USE_BINS,
    age_code,
    age_of_code,
    dump_refused,
    no_such_plane,
    require_distinct_planes,
)

__all__ = ["DumpingState"]

_HEAD = struct.Struct(f"<7Q6I{AGE_BINS}I{USE_BINS}I")
_USE = struct.Struct("<2I")
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
    age: int


class DumpingState(DoubtingState):
    """The part of the core's interface that is about a column as bytes."""

    def dump(self, worker: int, /) -> bytes:
        """A worker's column, its numbers of planes as they stand here. Runs that wait for a parent are left out.

        Cost: 18 bytes a block on the device, 16 more for each copy elsewhere, 8 for each block with a time of use, 1.2
            kB beside; natively 30 ns a block.
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
                    *(len(column.uses), 0, *column.removal_ages, *column.use_ages),
                ),
                _words(number for number, _ in blocks),
                _words(entry.block_key or 0 for _, entry in blocks),
                bytes(self._mark_of(worker, entry) for _, entry in blocks),
                bytes(self._age_code_of(entry) for _, entry in blocks),
                others,
                _words(column.reported),
                _words(column.reported.values()),
                bytes(self._claims_of(worker, 0, key) for key in column.reported),
                b"".join(_USE.pack(known, column.clock - time & MAX_U32) for known, time in column.uses.items()),
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
        head = _HEAD.unpack_from(data)
        counts, (root_key, entries, others, reported, flags, uses, zero) = head[:6], head[6:13]
        parts = _split(data, entries, others, reported, uses)
        if zero:
            raise dump_refused(DUMP_LENGTH)
        if root_key != column.root_key:
            raise dump_refused(DUMP_ROOT_KEY)
        if flags & ~_UNSURE != _COUNTING * column.counting:
            raise dump_refused(DUMP_COUNTING)
        claims, times = parts[7], dict(_USE.iter_unpack(parts[8]))
        if any(claim > _CLAIMED for claim in claims) or 0 in times:
            raise dump_refused(DUMP_ENTRY)
        blocks = _read_blocks(parts[:5], planes)
        keys = _from_words(parts[5])
        if len({block.number for block in blocks}) != entries or len(set(keys)) != reported or len(times) != uses:
            raise dump_refused(DUMP_TWICE)
        column.stored, column.removed, column.unknown_removals = counts[:3]
        column.unpaired, column.refused, column.forgotten = counts[3:]
        column.unsure = bool(flags & _UNSURE)
        column.reported = dict(zip(keys, _from_words(parts[6]), strict=True))
        column.removal_ages, column.use_ages = list(head[13 : 13 + AGE_BINS]), list(head[13 + AGE_BINS :])
        column.uses = {known: column.clock - age for known, age in times.items()}
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
                claims = block.claims[plane] if entry.in_doubt else _IN_PLANE
                self._claim_as(worker, plane, entry.block_key, claims, block.age)

    def _claim_as(self, worker: int, plane: int, key: int, claims: int, age: int = 0) -> None:
        for shadow, holders in enumerate((self._planes[plane], self._shadows[plane])):
            if claims >> shadow & 1:
                self._set(holders, key, worker, age)

    def _age_code_of(self, entry: Entry) -> int:
        """Of its age in stamps; 0 where no plane tells."""
        stamp = self._stamp_of(entry)
        return 0 if stamp == -math.inf else age_code(self._stamp - int(stamp))

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


def _split(data: bytes, entries: int, others: int, reported: int, uses: int) -> list[bytes]:
    """Handles, keys, marks, ages, others, reported keys, their times, their claims, times of use."""
    entry_sizes = (8 * entries, 8 * entries, entries, entries, _OTHER.size * others)
    sizes = (*entry_sizes, 8 * reported, 8 * reported, reported, _USE.size * uses)
    if _HEAD.size + sum(sizes) != len(data):
        raise dump_refused(DUMP_LENGTH)
    parts, at = [], _HEAD.size
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return parts


def _read_blocks(parts: Sequence[bytes], planes: Sequence[int]) -> list[_Block]:
    handles, keys, marks, ages, others = parts
    if any(code >= USE_BINS for code in ages):
        raise dump_refused(DUMP_ENTRY)
    blocks = []
    elsewhere = list(_OTHER.iter_unpack(others))
    following = 0
    numbers, block_keys = _from_words(handles), _from_words(keys)
    for position, (number, key, mark, age) in enumerate(zip(numbers, block_keys, marks, ages, strict=True)):
        first = following
        while following < len(elsewhere) and elsewhere[following][0] == position:
            following += 1
        block = _read_block(number, key, mark, elsewhere[first:following], planes)
        block.age = age_of_code(age)
        blocks.append(block)
    if following != len(elsewhere):
        raise dump_refused(DUMP_ENTRY)
    return blocks


def _read_block(number: int, key: int, mark: int, others: list[tuple[int, ...]], planes: Sequence[int]) -> _Block:
    copies = mark & _COPIES
    keyed, in_doubt = bool(mark & _KEYED), bool(mark & _DOUBT)
    entry = Entry(key if keyed else None, {}, waited=False, in_doubt=in_doubt)
    block = _Block(number, entry, {}, 0)
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
