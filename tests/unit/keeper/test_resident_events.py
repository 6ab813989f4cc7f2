"""Residency and the events that stand for it: exactly the resident blocks, parents first, as the engine said them."""

import pytest

from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.keeper import EventReader, read_residency, resident_events
from kvatlas.stream import Journal

SIZE = 2


def stored(hashes, parent=None, medium="GPU", **fields):
    """A store whose tokens are its hashes, twice each."""
    tokens = fields.pop("token_ids", [each for each in hashes for _ in range(SIZE)])
    return BlockStored(list(hashes), parent, tokens, fields.pop("block_size", SIZE), medium=medium, **fields)


def removed(*hashes, medium="GPU", **fields):
    return BlockRemoved(list(hashes), medium, **fields)


def remaining(folder, *batches):
    """The events that stand for these batches."""
    with Journal(folder, "engine", segment_bytes=300) as journal:
        for number, events in enumerate(batches):
            journal.append(number, number, encode_batch(EventBatch(float(number), list(events), 0)))
        extents = journal.extents()
        residency = read_residency(extents, journal.next_seq)
        with EventReader([extent.path for extent in extents]) as reader:
            return list(resident_events(residency, reader))


def copies_after(events):
    """(medium, group, hash) -> copies, by plain counting; and that each parent came before its child."""
    copies, seen = {}, {None}
    for event in events:
        keys = [(event.medium, event.group_idx, each) for each in event.block_hashes]
        for key in keys:
            copies[key] = copies.get(key, 0) + (1 if isinstance(event, BlockStored) else -1)
        if isinstance(event, BlockStored):
            assert event.parent_block_hash in seen
            seen.update(event.block_hashes)
    assert min(copies.values(), default=0) >= 0
    return {key: count for key, count in copies.items() if count}


def test_a_chain_comes_back_in_one_event(tmp_path):
    """Blocks stored one by one, in several batches, are one run: parent of the first, tokens of all."""
    (event,) = remaining(tmp_path, [stored([1])], [stored([2], 1)], [stored([3, 4], 2)])
    assert event == stored([1, 2, 3, 4])


def test_removed_blocks_are_not_there_and_branches_follow_their_parent(tmp_path):
    """Two prompts with one prefix, one of them cut short."""
    events = remaining(tmp_path, [stored([1, 2, 3])], [stored([7, 8], 1)], [removed(3)])
    assert copies_after(events) == {("GPU", None, each): 1 for each in (1, 2, 7, 8)}
    assert sum(len(event.block_hashes) for event in events) == 4


def test_copies_count_in_each_medium_and_group(tmp_path):
    """Three copies less one are two; host memory and another group are counted for themselves."""
    other = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    events = remaining(
        tmp_path,
        [stored([1, 2]), stored([1, 2]), stored([1], medium="CPU"), stored([1, 2], **other)],
        [stored([1]), removed(1), removed(1, group_idx=1), removed(9), removed(1, medium="CPU")],
    )
    assert copies_after(events) == {("GPU", None, 1): 2, ("GPU", None, 2): 2, ("GPU", 1, 2): 1}


def test_content_of_a_parent_that_is_gone_is_told_and_taken_back(tmp_path):
    """Otherwise nobody could know what the child is."""
    events = remaining(tmp_path, [stored([1, 2, 3])], [removed(1, 2)])
    assert events[0] == stored([1, 2, 3])
    assert copies_after(events) == {("GPU", None, 3): 1}


def test_a_chain_whose_end_is_gone_is_not_told(tmp_path):
    """What no resident block hangs from is forgotten."""
    assert copies_after(events := remaining(tmp_path, [stored([1, 2, 3])], [removed(2, 3)])) == {("GPU", None, 1): 1}
    assert events == [stored([1])]


def test_everything_an_event_says_of_its_blocks_is_kept(tmp_path):
    """LoRA, extra keys of each block, group, kind, window, locality, ownership, session, raw hashes."""
    first = stored(
        [b"a" * 32, b"b" * 32],
        token_ids=[1, 2, 3, 4],
        lora_id=3,
        lora_name="adapter",
        extra_keys=[("adapter", "salt"), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
        ownership="disk",
        session_id="s",
    )
    second = stored([b"c" * 32], b"b" * 32, token_ids=[5, 6], extra_keys=[(("image", 1),)], group_idx=0)
    events = remaining(tmp_path, [first, second])
    assert [event for event in events if len(event.block_hashes) == 2][-1] == BlockStored(
        first.block_hashes, None, [1, 2, 3, 4], SIZE, 3, "GPU", "adapter",
        [("adapter", "salt"), None], 0, "full_attention", None, "LOCAL", "disk", "s",
    )  # fmt: skip
    assert events[-1] == second


def test_placeholders_and_masked_stores_keep_a_form_that_proves_nothing(tmp_path):
    """An offloading placeholder has no tokens; a masked store has more tokens than hashes, and still has."""
    placeholder = stored([5], medium="CPU", token_ids=[], block_size=0)
    masked = stored([3, 4], 9, token_ids=[1, 2, 3, 4, 5, 6], group_idx=1, kv_cache_spec_kind="sliding_window")
    events = remaining(tmp_path, [placeholder, masked], [removed(3, group_idx=1)])
    assert placeholder in events
    (left,) = [event for event in events if event.block_hashes == [4]]
    assert left.token_ids == [1, 2, 3, 4, 5, 6]
    assert left.parent_block_hash == 9


def test_a_group_without_blocks_is_still_announced(tmp_path):
    """That it holds nothing decides what a hit is: its kind is taught by a store that is taken back."""
    mamba = stored([8], group_idx=1, kv_cache_spec_kind="mamba", token_ids=[8, 8])
    bare = stored([], 1, group_idx=2, kv_cache_spec_kind="sliding_window", token_ids=[2, 2])
    events = remaining(tmp_path, [stored([1], group_idx=0), mamba, bare], [removed(8, group_idx=1)])
    assert {event.kv_cache_spec_kind for event in events if isinstance(event, BlockStored)} == {
        None, "mamba", "sliding_window",
    }  # fmt: skip
    assert bare in events
    assert [key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes] == [1, 8]


def test_a_clear_empties_the_device_only(tmp_path):
    """Host and disk copies outlive it; on SGLang pinned memory does not."""
    media = ("GPU", "CPU_PINNED", "CPU", "disk")
    events = remaining(tmp_path, [stored([1], medium=medium) for medium in media], [AllBlocksCleared()])
    held = copies_after(events)
    assert held == {("CPU", None, 1): 1, ("disk", None, 1): 1}


def test_blocks_that_hang_from_each_other_end(tmp_path):
    """A hostile circle of parents is written once and nothing loops."""
    events = remaining(tmp_path, [stored([1], 2), stored([2], 1), stored([3], 3)])
    assert sorted(each for event in events for each in event.block_hashes) == [1, 2, 3]


def test_a_loss_is_remembered_until_everything_is_cleared(tmp_path):
    """Missing numbers, bad batches, bad events and batches of another rank all count; a clear of all starts afresh."""
    good = encode_batch(EventBatch(1.0, [stored([1])], 0))
    bad_event = encode_batch(EventBatch(1.0, [stored([1], token_ids=["x"])], 0))
    foreign = encode_batch(EventBatch(1.0, [stored([1])], 3))
    clear = encode_batch(EventBatch(1.0, [AllBlocksCleared()], 0))
    cases = [
        ([(0, good), (1, good)], False),
        ([(0, good), (2, good)], True),
        ([(1, good)], True),
        ([(0, b"junk")], True),
        ([(0, bad_event)], True),
        ([(0, good), (1, foreign)], True),
        ([(1, good), (2, clear)], False),
    ]
    for number, (batches, is_lossy) in enumerate(cases):
        with Journal(tmp_path / str(number), "engine") as journal:
            for seq, payload in batches:
                journal.append(seq, seq, payload)
            assert read_residency(journal.extents(), journal.next_seq).is_lossy is is_lossy, batches
            assert read_residency(journal.extents(), journal.next_seq + 1).is_lossy


def test_a_file_damaged_meanwhile_is_an_error_not_a_guess(tmp_path):
    """Content that cannot be read back is never left out silently."""
    with Journal(tmp_path, "engine") as journal:
        journal.append(0, 0, encode_batch(EventBatch(1.0, [stored([1])], 0)))
        extents = journal.extents()
        residency = read_residency(extents, 1)
        with extents[0].path.open("r+b") as file:
            file.seek(extents[0].end - 3)
            file.write(b"???")
        with EventReader([extents[0].path]) as reader, pytest.raises(IndexStateError, match="damaged at offset"):
            list(resident_events(residency, reader))
