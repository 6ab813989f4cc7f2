"""All batches of a journal in fewer: the blocks still resident, parent before child, and nothing else.

Applied to an empty index, the result means what the whole stream means. To that end it says more than what is
resident: which kinds of groups the engine has (a group without blocks matters, too), and content of blocks that are
gone but that resident ones hang from, each stored and removed again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvatlas.errors import IndexStateError
from kvatlas.events import BlockHandle, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvatlas.keeper.event_places import EventReader, Run, part_of
from kvatlas.keeper.residency import Block, CopyCounting, Residency, is_sliceable
from kvatlas.stream import NO_ENGINE_SEQ, Extent, Segment, read_extent

__all__ = ["Compaction", "compact", "empty_batch", "read_residency", "resident_events"]

_BATCH_EVENTS = 256
_BATCH_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction wrote: how many batches, of how many resident blocks, and whether a loss is marked in it."""

    batches: int
    blocks: int
    is_lossy: bool


def empty_batch(ts: float, rank: int | None) -> bytes:
    """A batch that says nothing. Engines publish none: its number is what matters."""
    return encode_batch(EventBatch(ts, [], rank))


def read_residency(
    extents: Sequence[Extent],
    next_seq: int,
    counting: CopyCounting = CopyCounting.COUNT,
    *,
    is_called_off: Callable[[], bool] = lambda: False,
) -> Residency:
    """What the batches of a journal below `next_seq` left resident. Missing numbers make it lossy.

    Cost: about 10 us a batch and 2 us a block.

    Raises:
        OSError: a file cannot be read.
        IndexStateError: it was called off.
    """
    residency = Residency(counting)
    expected = 0
    for number, extent in enumerate(extents):
        for record in read_extent(extent):
            _go_on_unless(is_called_off)
            if record.seq != expected:
                residency.lost()
            expected = record.seq + 1
            residency.apply(record.payload, number, record.start)
    if expected != next_seq:
        residency.lost()
    return residency


def compact(
    extents: Sequence[Extent],
    next_seq: int,
    target: Segment,
    counting: CopyCounting,
    *,
    is_called_off: Callable[[], bool] = lambda: False,
) -> Compaction:
    """Write the resident blocks of a journal to the first segment of its next life, numbers from 0.

    A loss shows as a missing number behind the blocks, before an empty batch. May run on a thread of its own.

    Raises:
        OSError: a file cannot be read or written.
        IndexStateError: a file is damaged, or it was called off.
    """
    residency = read_residency(extents, next_seq, counting, is_called_off=is_called_off)
    seq = 0
    with EventReader([extent.path for extent in extents]) as reader:
        for events in _in_batches(resident_events(residency, reader)):
            _go_on_unless(is_called_off)
            target.append(seq, NO_ENGINE_SEQ, encode_batch(EventBatch(residency.ts, events, residency.rank)))
            seq += 1
    if residency.is_lossy:
        target.append(seq + 1, NO_ENGINE_SEQ, empty_batch(residency.ts, residency.rank))
        seq += 1
    target.sync()
    return Compaction(seq, len(residency.blocks), residency.is_lossy)


def resident_events(residency: Residency, reader: EventReader) -> Iterator[Event]:
    """The events that make an empty cache hold what is resident."""
    yield from _teach(residency, reader)
    chain = _chain_order(residency)
    yield from _runs(reader, [(block.content, 1) for block in chain if block.content is not None])
    yield from _further_copies(residency, reader, chain)
    yield from _take_back(chain, reader)


def _go_on_unless(is_called_off: Callable[[], bool]) -> None:
    if is_called_off():
        raise IndexStateError("the compaction was called off")


def _in_batches(events: Iterator[Event]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    tokens = 0
    for event in events:
        batch.append(event)
        tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(batch) >= _BATCH_EVENTS or tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _teach(residency: Residency, reader: EventReader) -> Iterator[Event]:
    """One event of each kind ever seen, taken back at once: which groups there are, and their block sizes."""
    if len(residency.profiles) == 1 and residency.blocks:
        return
    for place in residency.profiles.values():
        event, _ = reader.stored(place)
        if not event.block_hashes:
            yield event
            continue
        sample = part_of(event, [0])
        yield sample
        yield _removal(sample, sample.block_hashes)


def _chain_order(residency: Residency) -> list[Block]:
    """Resident blocks of known content and what they hang from, each behind its parent, chains in one piece."""
    needed = {block.handle: block for block in residency.resident() if block.content is not None}
    for block in list(needed.values()):
        above = block.parent
        while above is not None and above.content is not None and above.handle not in needed:
            needed[above.handle] = above
            above = above.parent
    children: dict[BlockHandle, list[Block]] = {}
    roots: list[Block] = []
    for block in needed.values():
        parent = block.parent_handle
        if parent is None or parent not in needed:
            roots.append(block)
        else:
            children.setdefault(parent, []).append(block)
    order: list[Block] = []
    left = dict(needed)
    while left:
        # Blocks that hang from each other in a circle have no root: any of them will do.
        stack = roots[::-1] or [next(iter(left.values()))]
        roots = []
        while stack:
            block = stack.pop()
            if left.pop(block.handle, None) is None:
                continue
            order.append(block)
            stack.extend(reversed(children.get(block.handle, ())))
    return order


def _runs(reader: EventReader, places: Sequence[tuple[int, int]]) -> Iterator[BlockStored]:
    """The blocks at these places, each as often as it says, those that follow each other in one event."""
    repeat = 0
    while places:
        run: Run | None = None
        for place, _ in places:
            event, number = reader.stored(place)
            if run is not None and run.num_tokens < _BATCH_TOKENS and run.extend(event, number):
                continue
            if run is not None:
                yield run.event()
            run = Run(event, number)
        if run is not None:
            yield run.event()
        repeat += 1
        places = [(place, times) for place, times in places if times > repeat]


def _further_copies(residency: Residency, reader: EventReader, chain: Sequence[Block]) -> Iterator[BlockStored]:
    """Copies in other planes, second copies, and blocks of unknown content."""
    plain: list[tuple[int, int]] = []
    opaque: dict[int, dict[int, int]] = {}
    blocks = [block for block in chain if block.copies]
    blocks += [block for block in residency.resident() if block.content is None]
    for block in blocks:
        for copies in block.copies:
            told = block.content is not None and copies.plane == block.home
            times = copies.count - told
            if not times:
                continue
            event, number = reader.stored(copies.place)
            if is_sliceable(event):
                plain.append((copies.place, times))
            else:
                opaque.setdefault(copies.place - number, {})[number] = times
    yield from _runs(reader, plain)
    for place, wanted in opaque.items():
        event, _ = reader.stored(place)
        for repeat in range(max(wanted.values())):
            yield part_of(event, sorted(number for number, times in wanted.items() if times > repeat))


def _take_back(chain: Sequence[Block], reader: EventReader) -> Iterator[BlockRemoved]:
    """Removals of what was stored only for its content."""
    for block in reversed(chain):
        if block.content is not None and block.in_plane(block.home) is None:
            event, _ = reader.stored(block.content)
            yield _removal(event, [block.handle])


def _removal(event: BlockStored, handles: Sequence[BlockHandle]) -> BlockRemoved:
    return BlockRemoved(
        list(handles), event.medium, event.group_idx, locality=event.locality, ownership=event.ownership
    )
