"""What every index of this kind is asked once: loss, restarts, copies, holes, orphans, tiers, windows; the right answers.

Batches go through a publisher's outlet with faults, a subscriber and a source into the index, in virtual time.
"""

import pytest

from kvatlas.chaos import Timeline, VirtualSubscriber
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvatlas.fleet import EventSource, Trust, TrustState
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.simulator import FaultPlan, FaultyStream, Restart, parse_faults
from kvatlas.stream import SubscriberConfig

BLOCK = 4
PROMPT = [*range(100, 116), 1]
"""Four blocks and a token."""


def stored(first: int, count: int = 1, *, medium: str = "GPU", **fields: object) -> BlockStored:
    """Blocks of the prompt, named by their place in it, from 1 on."""
    return BlockStored(
        block_hashes=list(range(first + 1, first + count + 1)),
        parent_block_hash=first or None,
        token_ids=PROMPT[first * BLOCK : (first + count) * BLOCK],
        block_size=BLOCK,
        medium=medium,
        **fields,
    )


def removed(*places: int, medium: str = "GPU", group_idx: int | None = None) -> BlockRemoved:
    return BlockRemoved([place + 1 for place in places], medium=medium, group_idx=group_idx)


class Desk:
    """One engine's stream and all that follows it, up to the index."""

    def __init__(
        self,
        *faults: str,
        replay: bool = True,
        buffer_steps: int = 100,
        index: PrefixIndex | None = None,
        worker: str = "w",
    ) -> None:
        self.timeline = Timeline()
        self.plan = FaultPlan(parse_faults(faults), clock=self.timeline.clock)
        self.stream = FaultyStream(self.plan, buffer_steps=buffer_steps)
        self.index = index or PrefixIndex(BlockKeyHasher(seed=1))
        self.worker = worker
        self.index.add_worker(worker, block_size=BLOCK)
        self.index.set_capacity(worker, 64)
        self.trust = TrustState()
        source = EventSource(worker, self.index, self.trust, self.timeline.clock)
        config = SubscriberConfig(endpoint="live", replay_endpoint="replay" if replay else None)
        self.subscriber = VirtualSubscriber(config, self.stream, source, self.timeline)
        self.subscriber.start()
        self.wait(0.1)

    def publish(self, *events: Event) -> None:
        """The engine's next batch, and a moment for what follows from it."""
        payload = encode_batch(EventBatch(self.plan.wall_s(), list(events), 0))
        self.subscriber.take(self.stream.publish(payload))
        self.wait(0.2)

    def wait(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now_s + seconds)

    def restart(self, *, overtaking: bool = False) -> None:
        """Another life, and the connection to it."""
        self.subscriber.take(self.stream.restart(Restart(down_s=0.1, overtaking=overtaking)))
        self.wait(0.2)
        self.subscriber.take(self.stream.due())
        self.wait(0.5)

    @property
    def claims(self) -> list[int]:
        """Of the four blocks: 2 = surely held, 1 = in doubt, 0 = not; without credit all 0."""
        claims = list(self.index.claims(self.worker, PROMPT))
        return claims if self.trust.level.is_credited else [0] * len(claims)

    @property
    def hit_blocks(self) -> int:
        return self.index.match(PROMPT)[self.worker].hit_blocks


def test_a_lost_removal_without_replay() -> None:
    """The next batch shows the hole: from then on nothing from before it is claimed in full, and reports mend it."""
    desk = Desk("drop:from=1,count=1", replay=False)
    desk.publish(stored(0, 4))
    desk.publish(removed(3))
    assert desk.claims == [2, 2, 2, 2], "nobody can know yet"
    desk.publish()
    assert (desk.claims, desk.trust.level) == ([1, 1, 1, 1], Trust.PARTIAL)
    desk.index.heal("w", PROMPT, 12, desk.index.moment("w"), claimed_tokens=16)
    assert desk.claims == [2, 2, 2, 0]


def test_a_lost_removal_with_replay() -> None:
    """The next batch shows the hole, and replay fills it."""
    desk = Desk("drop:from=1,count=1")
    desk.publish(stored(0, 4))
    desk.publish(removed(3))
    desk.publish()
    assert (desk.claims, desk.trust.level) == ([2, 2, 2, 0], Trust.SYNCED)


def test_a_lost_last_removal_is_found_by_a_poll() -> None:
    """No batch follows: the tail is asked for after five seconds of quiet."""
    desk = Desk("drop:from=1,count=1")
    desk.publish(stored(0, 4))
    desk.publish(removed(3))
    desk.wait(4.0)
    assert desk.claims == [2, 2, 2, 2]
    desk.wait(1.0)
    assert desk.claims == [2, 2, 2, 0]


def test_a_gap_with_replay_is_applied_once() -> None:
    """0..4 came, then 8; replay returns 5..8: the state is that of 0..8, each applied once."""
    desk = Desk("drop:from=5,count=3")
    for _ in range(5):
        desk.publish()
    desk.publish(stored(0, 2))
    desk.publish(stored(2))
    desk.publish(removed(2))
    desk.publish(stored(2, 2))
    assert (desk.claims, desk.trust.level) == ([2, 2, 2, 2], Trust.SYNCED)
    assert desk.index.stats("w").stored_blocks == 5


def test_a_gap_past_the_replay_buffer() -> None:
    """What the publisher no longer has is lost: nothing from before is claimed in full, what is stored later is."""
    desk = Desk("drop:from=1,count=6", buffer_steps=2)
    desk.publish(stored(0, 2))
    desk.publish(removed(1))
    for _ in range(6):
        desk.publish()
    assert (desk.claims, desk.trust.level) == ([1, 1, 0, 0], Trust.PARTIAL)
    desk.publish(stored(1, 3))
    assert desk.claims == [1, 2, 2, 2]


def test_a_restart_with_number_zero() -> None:
    """0..2, then 0 with a new store: only the new store counts, with a replay endpoint or without."""
    for replay in (True, False):
        desk = Desk(replay=replay)
        desk.publish(stored(0, 4))
        desk.publish()
        desk.publish()
        desk.restart()
        desk.publish(stored(0, 1))
        assert (desk.claims, desk.trust.level) == ([2, 0, 0, 0], Trust.SYNCED)


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_hidden_by_overtaking(*, replay: bool) -> None:
    """The new life's number fits the old one's: replay's other bytes unmask it, and without replay all is in doubt."""
    desk = Desk(replay=replay)
    desk.publish(stored(0, 4))
    desk.restart(overtaking=True)
    desk.publish(BlockStored([50], None, [7] * BLOCK, BLOCK, medium="GPU"))
    assert desk.claims == ([0, 0, 0, 0] if replay else [1, 1, 1, 1])
    assert desk.trust.level is (Trust.SYNCED if replay else Trust.PARTIAL)


def test_a_publisher_that_is_gone() -> None:
    """No connection, no credit."""
    desk = Desk()
    desk.publish(stored(0, 4))
    desk.subscriber.take(desk.stream.restart(Restart(down_s=100.0)))
    assert (desk.claims, desk.trust.level) == ([0, 0, 0, 0], Trust.STALE)
    assert desk.trust.level.credit(16, 0) == 0.0


def test_the_same_hash_stored_twice_and_removed_once() -> None:
    """Two physical copies: the first removal leaves one, the second none, a third changes nothing."""
    desk = Desk()
    desk.publish(stored(0, 2))
    desk.publish(stored(1))
    hits = []
    for _ in range(3):
        desk.publish(removed(1))
        hits.append(desk.hit_blocks)
    assert hits == [2, 1, 1]


def test_a_hole_in_the_middle_and_its_mending() -> None:
    """Block 2 of 4 is evicted: the hit ends before it; stored again, the two behind it count again."""
    desk = Desk()
    desk.publish(stored(0, 4))
    desk.publish(removed(1))
    assert (desk.claims, desk.hit_blocks) == ([2, 0, 2, 2], 1)
    desk.publish(stored(1))
    assert (desk.claims, desk.hit_blocks) == ([2, 2, 2, 2], 4)


def test_an_unknown_parent() -> None:
    """A store under a parent nobody announced matches nothing, at the root least of all, until the parent comes."""
    desk = Desk()
    desk.publish(stored(2, 2))
    assert desk.claims == [0, 0, 0, 0]
    assert desk.index.match([*PROMPT[8:16], 1])["w"].hit_blocks == 0
    desk.publish(stored(0, 2))
    assert (desk.claims, desk.hit_blocks) == ([2, 2, 2, 2], 4)


def test_a_copy_in_host_memory_outlives_that_on_the_device() -> None:
    """The device's removal ends the device's claim; the other medium's is told apart."""
    desk = Desk()
    desk.publish(stored(0, 4), stored(0, 4, medium="CPU"))
    desk.publish(removed(0, 1, 2, 3))
    match = desk.index.match(PROMPT)["w"]
    assert (match.hit_tokens, match.other_tiers) == (0, {"CPU": 16})
    desk.publish(removed(3, medium="CPU"))
    assert desk.index.match(PROMPT)["w"].other_tiers == {"CPU": 12}


def test_a_sliding_window_group() -> None:
    """A window of eight tokens needs the last two blocks only; without them the hit shrinks to where it has them."""
    window: dict[str, object] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 8,
    }
    desk = Desk()
    desk.publish(stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"), stored(0, 4, **window))
    desk.publish(removed(0, 1, group_idx=1))
    assert desk.hit_blocks == 4
    desk.publish(removed(3, group_idx=1))
    assert desk.hit_blocks == 0
    desk.publish(stored(3, **window))
    assert desk.hit_blocks == 4


def test_a_clear_and_a_removal_touch_nobody_else() -> None:
    """Two workers hold the same blocks: what one gives up the other keeps, and nothing goes below none."""
    index = PrefixIndex(BlockKeyHasher(seed=1))
    a, b = Desk(index=index, worker="a"), Desk(index=index, worker="b")
    for desk in (a, b):
        desk.publish(stored(0, 4))
    a.publish(removed(3))
    a.publish(removed(3))
    assert (a.claims, b.claims) == ([2, 2, 2, 0], [2, 2, 2, 2])
    a.publish(AllBlocksCleared())
    assert (a.claims, b.claims) == ([0, 0, 0, 0], [2, 2, 2, 2])
    assert index.stats("a").resident_now == 0


def test_a_worker_that_is_replaced_starts_empty() -> None:
    """Its address comes back as another pod: nothing of the old one is left, and the other worker keeps all."""
    index = PrefixIndex(BlockKeyHasher(seed=1))
    old, other = Desk(index=index, worker="a"), Desk(index=index, worker="b")
    for desk in (old, other):
        desk.publish(stored(0, 4))
    index.remove_worker("a")
    new = Desk(index=index, worker="a")
    assert new.claims == [0, 0, 0, 0]
    new.publish(stored(0, 1))
    assert (new.claims, other.claims) == ([2, 0, 0, 0], [2, 2, 2, 2])
