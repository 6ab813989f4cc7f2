"""An engine's KV event stream kept beside it: journaled, compacted, served on to any number of subscribers.

What batches mean is known here only as far as compaction needs it; trust, keys and routing are not. Sockets and files
are `kvatlas.stream`'s.
"""

from kvatlas.keeper.compaction import Compaction, compact, read_residency, resident_events
from kvatlas.keeper.event_places import EventReader
from kvatlas.keeper.keeper import Keeper, KeeperConfig, KeeperCounters
from kvatlas.keeper.residency import Block, Copies, CopyCounting, Residency
from kvatlas.keeper.status_page import KeeperStatus, StatusPage, start_status_page

__all__ = [
    "Block",
    "Compaction",
    "Copies",
    "CopyCounting",
    "EventReader",
    "Keeper",
    "KeeperConfig",
    "KeeperCounters",
    "KeeperStatus",
    "Residency",
    "StatusPage",
    "compact",
    "read_residency",
    "resident_events",
    "start_status_page",
]
