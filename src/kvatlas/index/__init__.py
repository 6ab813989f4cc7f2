"""The fleet index: which worker holds which KV-cache block, keyed by content.

Here: the per-worker books that turn engine hashes into block keys and count physical copies, the planes of residency
over the native core, the rules that turn residency into a number of hit tokens, and the memory they may take. Not here:
sockets, clocks, trust, load. Sans-IO, single writer: every call runs on the thread that owns the index.
"""

from kvatlas.index.batches import Applied, IncomingBatch
from kvatlas.index.column_state import ColumnState, ColumnStats, CopyMode
from kvatlas.index.doubts import Healed, Moment
from kvatlas.index.match import GroupProfile, WorkerMatch
from kvatlas.index.memory import MemoryStats
from kvatlas.index.prefix_index import PrefixIndex
from kvatlas.index.recency import BLOCKS_PER_STAMP, RecencyBooks, RecencyCounts
from kvatlas.index.snapshot import (
    SNAPSHOT_VERSION,
    Snapshot,
    SnapshotHead,
    WorkerSnapshot,
    WorkerState,
    read_snapshot,
    write_snapshot,
)
from kvatlas.index.uses import USE_AGE_STARTS, IdlePart, PromptUses, UseCounts

__all__ = [
    "BLOCKS_PER_STAMP",
    "SNAPSHOT_VERSION",
    "USE_AGE_STARTS",
    "Applied",
    "ColumnState",
    "ColumnStats",
    "CopyMode",
    "GroupProfile",
    "Healed",
    "IdlePart",
    "IncomingBatch",
    "MemoryStats",
    "Moment",
    "PrefixIndex",
    "PromptUses",
    "RecencyBooks",
    "RecencyCounts",
    "Snapshot",
    "SnapshotHead",
    "UseCounts",
    "WorkerMatch",
    "WorkerSnapshot",
    "WorkerState",
    "read_snapshot",
    "write_snapshot",
]
