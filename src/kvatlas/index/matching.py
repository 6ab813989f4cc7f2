"""Matching a prompt: which workers hold how much of it, by the rules of each worker's KV cache groups."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from kvatlas._native import IndexCore
from kvatlas.hashing import BlockKeyHasher, RequestExtras
from kvatlas.index.column import WorkerColumn
from kvatlas.index.match import WorkerMatch, joint_hit_blocks, max_hit_blocks
from kvatlas.index.planes import DEFAULT_MEDIUM, DEVICE_PLANE, Planes

__all__ = ["PromptMatcher", "asked_bits", "match_columns", "named"]

_EVERYBODY = b"\xff" * 512
_FIRST_BLOCKS = 32
_DOUBTED, _SURE = 1, 2
"""What the core says of a claim."""
_SURE_ONLY = bytes((0, 0, 1)) + bytes(253)


def named(columns: Mapping[str, WorkerColumn], worker_ids: Iterable[str] | None) -> Mapping[str, WorkerColumn]:
    """The columns of these workers, as far as they exist; None: of all."""
    if worker_ids is None:
        return columns
    return {worker_id: columns[worker_id] for worker_id in worker_ids if worker_id in columns}


def asked_bits(columns: Mapping[str, WorkerColumn], worker_ids: Iterable[str] | None) -> bytes:
    """One bit for each of these workers, lowest first, in whole 8-byte words; None: one for everybody."""
    return _EVERYBODY if worker_ids is None else _words_of(_bits_of(named(columns, worker_ids).values()))


def _bits_of(columns: Iterable[WorkerColumn]) -> int:
    bits = 0
    for column in columns:
        bits |= column.bit
    return bits


def _words_of(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 63) // 64 * 8, "little")


def match_columns(
    core: IndexCore,
    planes: Planes,
    hasher: BlockKeyHasher,
    token_ids: Sequence[int],
    extras: RequestExtras,
    columns: Mapping[str, WorkerColumn],
) -> dict[str, WorkerMatch]:
    """The match of every worker whose block size is known; those of one block size and root key in one walk."""
    found: dict[str, WorkerMatch] = {}
    for (size, root_key), together in _alike(columns).items():
        matches = PromptMatcher(core, planes, hasher, token_ids, extras, size, root_key).match(together)
        if len(together) == len(columns):
            return matches
        found.update(matches)
    return found


def _alike(columns: Mapping[str, WorkerColumn]) -> Mapping[tuple[int, int], Mapping[str, WorkerColumn]]:
    """Columns by block size and root key; in most fleets all have the same."""
    kinds = [(column.block_size, column.root_key) for column in columns.values()]
    if kinds and kinds[0][0] is not None and kinds.count(kinds[0]) == len(kinds):
        return {(kinds[0][0], kinds[0][1]): columns}
    alike: dict[tuple[int, int], dict[str, WorkerColumn]] = {}
    for (size, root_key), (worker_id, column) in zip(kinds, columns.items(), strict=True):
        if size is not None:
            alike.setdefault((size, root_key), {})[worker_id] = column
    return alike


class PromptMatcher:
    """Finds one prompt in the columns of workers that share a block size and a root key.

    Args:
        token_ids: the prompt, int[num_tokens].
        extras: LoRA, images, salt: part of what a block's content is.
    """

    __slots__ = ("_core", "_extras", "_hasher", "_keys", "_limit", "_planes", "_root_key", "_token_ids", "block_size")

    def __init__(
        self,
        core: IndexCore,
        planes: Planes,
        hasher: BlockKeyHasher,
        token_ids: Sequence[int],
        extras: RequestExtras,
        block_size: int,
        root_key: int,
    ) -> None:
        self._core = core
        self._planes = planes
        self._hasher = hasher
        self._token_ids = token_ids
        self._extras = extras
        self.block_size = block_size
        self._root_key = root_key
        self._limit = max_hit_blocks(len(token_ids), block_size)
        self._keys: array[int] | None = None

    def match(self, columns: Mapping[str, WorkerColumn]) -> dict[str, WorkerMatch]:
        """Each worker's match; 0 tokens is an answer too."""
        size = self.block_size
        bits = 0
        for column in columns.values():
            if column.groups.only_full:
                bits |= column.bit
        blocks_of = (self._find(DEVICE_PLANE, bits) if bits else {}).get
        found = {}
        tiered = {}
        doubtful = {}
        for worker_id, column in columns.items():
            held = blocks_of(worker_id, 0) if column.groups.only_full else self._joint_hit(column, _SURE)
            found[worker_id] = WorkerMatch(held * size, held, size, column.is_exact)
            if column.other_media:
                tiered[worker_id] = column
            if column.doubts.has_business:
                doubtful[worker_id] = column
        if doubtful:
            self._add_doubted(doubtful, found)
        if tiered:
            self._add_tiers(tiered, found)
        return found

    def _add_tiers(self, columns: Mapping[str, WorkerColumn], found: Mapping[str, WorkerMatch]) -> None:
        for medium in {medium for column in columns.values() for medium in column.other_media}:
            plane = self._planes.known((medium, 0))
            having = {worker_id: column for worker_id, column in columns.items() if medium in column.other_media}
            in_medium = {} if plane is None else self._find(plane, _bits_of(having.values()))
            for worker_id in having:
                found[worker_id].other_tiers[medium] = in_medium.get(worker_id, 0) * self.block_size

    def _add_doubted(self, columns: Mapping[str, WorkerColumn], found: Mapping[str, WorkerMatch]) -> None:
        simple = {worker_id: column for worker_id, column in columns.items() if column.groups.only_full}
        blocks = self._find(DEVICE_PLANE, _bits_of(simple.values()), doubted=True) if simple else {}
        for worker_id, column in columns.items():
            match = found[worker_id]
            held = blocks.get(worker_id, 0) if worker_id in simple else self._joint_hit(column, _DOUBTED)
            match.doubted_tokens = held * self.block_size - match.hit_tokens

    def _find(self, plane: int, bits: int, *, doubted: bool = False) -> dict[str, int]:
        """Leading blocks held by the workers of these bits."""
        asked = _words_of(bits)
        if self._extras.is_empty:
            return self._core.find_tokens(
                plane, self._token_ids, self.block_size, self._root_key, self._limit, asked, doubted=doubted
            )
        return self._find_with_extras(plane, asked, doubted=doubted)

    def _find_with_extras(self, plane: int, asked: bytes, *, doubted: bool) -> dict[str, int]:
        """Hashed in growing steps, no further than needed: extra keys cost more than tokens."""
        source = self._hasher.iter_chain_from(self._root_key, self._token_ids, self.block_size, extras=self._extras)
        keys = array("Q")
        while True:
            step = min(max(len(keys), _FIRST_BLOCKS), self._limit - len(keys))
            keys.extend(islice(source, step))
            found = self._core.find(plane, keys, asked, doubted=doubted)
            if len(keys) >= self._limit or max(found.values(), default=0) < len(keys):
                return found

    def all_keys(self) -> "array[int]":
        """Keys of all blocks that an engine may reuse."""
        if self._keys is None and self._extras.is_empty:
            self._keys = self._hasher.block_keys(self._root_key, self._token_ids, self.block_size, ())
            del self._keys[self._limit :]
        elif self._keys is None:
            source = self._hasher.iter_chain_from(self._root_key, self._token_ids, self.block_size, extras=self._extras)
            self._keys = array("Q", islice(source, self._limit))
        return self._keys

    def _joint_hit(self, column: WorkerColumn, least: int) -> int:
        profiles = column.groups.profiles
        rows = {profile.group_id: self._held(column, profile.group_id, least) for profile in profiles}
        full = self._limit
        for profile in profiles:
            if profile.is_full and profile.block_size in {None, self.block_size}:
                hole = rows[profile.group_id].find(0)
                full = min(full, self._limit if hole < 0 else hole)
        return joint_hit_blocks(profiles, full, lambda group, block: rows[group][block] != 0, self.block_size)

    def _held(self, column: WorkerColumn, group_id: int, least: int) -> bytes:
        """One byte for each block: not 0 when it is held with at least this certainty."""
        plane = self._planes.known((DEFAULT_MEDIUM, group_id))
        if plane is None:
            return bytes(self._limit)
        held = self._core.held(plane, column.number, self.all_keys())
        return held if least == _DOUBTED else held.translate(_SURE_ONLY)
