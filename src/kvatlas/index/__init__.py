"""The fleet index: which worker holds which KV-cache block, keyed by content.

Here: the map from block keys to workers, the per-worker books that turn engine hashes into block keys and count
physical copies, and the rules that turn residency into a number of hit tokens. Not here: sockets, clocks, trust,
load. Sans-IO, single writer: every call runs on the thread that owns the index.
"""

from kvatlas.index.column import ColumnStats, CopyMode
from kvatlas.index.match import GroupProfile, WorkerMatch
from kvatlas.index.prefix_index import PrefixIndex

__all__ = ["ColumnStats", "CopyMode", "GroupProfile", "PrefixIndex", "WorkerMatch"]
