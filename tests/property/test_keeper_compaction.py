"""The compacted stream against the whole one: a fresh index must answer every prompt alike, now and later on."""

import tempfile
from collections import Counter
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import CopyMode, PrefixIndex
from kvatlas.keeper import CopyCounting, compact
from kvatlas.prefix_cache import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvatlas.stream import Journal
from support.prefix_cache_groups import Cache

SIZE = 4
FULL, WINDOW, MAMBA = FullAttentionSpec(4), SlidingWindowSpec(4, 8), MambaSpec(8)


def indexed(payloads, mode=CopyMode.COUNT):
    """A fresh index that applied these batches."""
    index = PrefixIndex(BlockKeyHasher(7))
    index.add_worker("w", copy_mode=mode)
    for payload in payloads:
        index.ingest("w", payload)
    return index


def compacted(payloads, counting=CopyCounting.COUNT):
    """The batches that stand for these in a new life."""
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder), "engine", segment_bytes=2_000) as journal:
        for number, payload in enumerate(payloads):
            journal.append(number, number, payload)
        target = journal.successor()
        done = compact(journal.extents(), journal.next_seq, target, counting)
        assert not done.is_lossy
        journal.adopt(target)
        records = list(journal.read_from(0))
        assert [record.seq for record in records] == list(range(done.batches))
        return [record.payload for record in records]


def answers(index, prompts):
    """What the index says of each prompt: tokens held in each medium."""
    matches = [index.match(prompt).get("w") for prompt in prompts]
    return [{medium: tokens for medium, tokens in match.tiers.items() if tokens} if match else {} for match in matches]


def agree(fresh, whole, batches):
    """Whether a fresh index answers as the whole stream's.

    An index that is told to clear forgets what waits for a parent, copies outside the device included; the keeper does
    not. So after a clear the fresh index may claim more: never less, and outside the device never more than is true.
    """
    ours, theirs = answers(fresh, PROMPTS), answers(whole, PROMPTS)
    if not any(isinstance(event, AllBlocksCleared) for batch in batches for event in batch):
        return ours == theirs
    truth = [{"GPU": len(prompt), "CPU": on_cpu(batches, prompt)} for prompt in PROMPTS]
    return all(
        claim.get(medium, 0) <= our.get(medium, 0) <= true[medium]
        for our, claim, true in zip(ours, theirs, truth, strict=True)
        for medium in ("GPU", "CPU")
    )


def on_cpu(batches, prompt):
    """Leading tokens of a prompt in host memory, by plain counting."""
    copies = Counter()
    for event in (event for batch in batches for event in batch if getattr(event, "medium", None) == "CPU"):
        for each in event.block_hashes:
            copies[each] = copies[each] + 1 if isinstance(event, BlockStored) else max(copies[each] - 1, 0)
    held = takewhile(lambda each: copies[each], chain(prompt))
    return SIZE * len(list(held))


def handle(tokens):
    """A hash that is the content, so that equal prefixes have equal hashes."""
    return bytes(tokens)


def chain(tokens):
    return [handle(tokens[: end + SIZE]) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


TEXTS = [[first, *rest] for first in (1, 2) for rest in ([9] * 19, [9] * 7 + [8] * 12)]
PROMPTS = [text[:end] for text in TEXTS for end in (5, 9, 13, 17, 20)]
PLANES = [("GPU", None, None, None), ("CPU", None, None, None), ("GPU", 1, "sliding_window", 8)]


@st.composite
def stored(draw):
    """Part of a text's chain in one plane: as it is, masked, or as a placeholder."""
    text = draw(st.sampled_from(TEXTS))
    hashes = chain(text)
    start = draw(st.integers(0, len(hashes) - 1))
    end = draw(st.integers(start + 1, len(hashes)))
    medium, group, kind, window = draw(st.sampled_from(PLANES))
    event = BlockStored(
        hashes[start:end],
        hashes[start - 1] if start else None,
        text[start * SIZE : end * SIZE],
        SIZE,
        medium=medium,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )
    form = draw(st.sampled_from(["whole", "whole", "whole", "masked", "placeholder"]))
    if form == "masked" and kind:
        return msgspec.structs.replace(event, block_hashes=event.block_hashes[1:])
    if form == "placeholder" and medium == "CPU":
        return BlockStored(event.block_hashes[:1], None, [], 0, medium=medium)
    return event


@st.composite
def removed(draw):
    """One or several blocks leave one plane, resident or not."""
    hashes = draw(st.lists(st.sampled_from([each for text in TEXTS for each in chain(text)]), min_size=1, max_size=4))
    medium, group, _, _ = draw(st.sampled_from(PLANES))
    return BlockRemoved(hashes, medium, group)


events = st.one_of(stored(), stored(), removed(), removed(), st.just(AllBlocksCleared()))
streams = st.lists(st.lists(events, min_size=1, max_size=4), max_size=12)


def encoded(batches):
    return [encode_batch(EventBatch(float(number), batch, 0)) for number, batch in enumerate(batches)]


@given(streams, streams)
@settings(deadline=None)
def test_a_compacted_stream_means_what_the_whole_one_meant(past, future):
    """Whatever was stored, copied, masked, orphaned, removed and cleared: same answers, at once and after more events."""
    payloads, later = encoded(past), encoded(future)
    whole, fresh = indexed(payloads), indexed(compacted(payloads))
    assert agree(fresh, whole, past)
    for number, payload in enumerate(later, start=1):
        whole.ingest("w", payload)
        fresh.ingest("w", payload)
        assert agree(fresh, whole, past + future[:number])


@given(streams, streams)
@settings(deadline=None, max_examples=50)
def test_the_same_holds_for_engines_that_announce_again(past, future):
    """With `set` a repeated store is nothing new, in the keeper as in the index."""
    payloads, later = encoded(past), encoded(future)
    whole = indexed(payloads, CopyMode.SET)
    fresh = indexed(compacted(payloads, CopyCounting.SET), CopyMode.SET)
    assert agree(fresh, whole, past)
    for number, payload in enumerate(later, start=1):
        whole.ingest("w", payload)
        fresh.ingest("w", payload)
        assert agree(fresh, whole, past + future[:number])


@given(streams, streams)
@settings(deadline=None, max_examples=50)
def test_a_compacted_stream_can_be_compacted_again(past, future):
    """A second compaction knows as much as the first one said."""
    payloads = encoded(past)
    once = compacted(payloads)
    twice = compacted([*once, *encoded(future)])
    whole = indexed([*payloads, *encoded(future)])
    assert agree(indexed(twice), whole, past + future)


@pytest.mark.parametrize(
    "specs", [(FULL,), (WINDOW,), (MAMBA,), (FULL, WINDOW), (FULL, MAMBA), (WINDOW, SlidingWindowSpec(4, 17))], ids=str
)
@given(rng=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=10)
def test_a_real_caches_events_compact_to_the_same_answers(specs, rng):
    """Engine-side caches under pressure, of one and of several groups: no answer differs from the whole stream's."""
    cache = Cache(*specs, num_blocks=rng.randint(14, 40))
    texts = [[rng.randint(0, 1) for _ in range(60)] for _ in range(3)]
    batches = []
    for number in range(rng.randint(5, 40)):
        text = rng.choice(texts)[: rng.randint(9, 40)] + [rng.randint(2, 9) for _ in range(rng.randint(0, 9))]
        request = cache.request(f"r{number}", text)
        if cache.admit(request) is not None:
            cache.manager.free(request)
        cache.manager.release_block_copies(cache.manager.take_block_copies())
        batches.append(list(cache.manager.take_events()))
    payloads = encoded(batches)
    short = compacted(payloads)
    # Block sizes first: an index that learns of a smaller one in the middle forgets what it knew.
    whole = indexed([*teaching(batches), *payloads])
    fresh = indexed(short)
    prompts = [text[:end] for text in texts for end in (5, 12, 17, 24, 33, 41, 60)]
    assert answers(fresh, prompts) == answers(whole, prompts)


def teaching(batches):
    """Every kind of store once, and taken back."""
    kinds = {}
    for event in (event for batch in batches for event in batch if isinstance(event, BlockStored)):
        kinds.setdefault((event.group_idx, event.block_size, bool(event.block_hashes)), event)
    both = [
        each for event in kinds.values() for each in (event, BlockRemoved(event.block_hashes, "GPU", event.group_idx))
    ]
    return encoded([both])
