"""In which order batches apply, what is missing, what is lost, and when another publisher life began.

The publisher numbers its batches from 0 and keeps the last ones for replay; that is all it gives us. There is no life
id and no word of what a slow reader missed. `SequenceTracker` is fed what arrives on the two channels and answers
with steps: apply this, ask for that, this is lost, forget everything. Its rules:

* The live channel keeps order. A number that comes again with other bytes, or goes back, is another life.
* While a replay runs, live batches are held, so that nothing newer overtakes what the replay still brings.
* A replay asks from the last batch we applied, not from the one after: the same bytes prove that it is the same life.
  If none is remembered, because more than that were given up after it, the answer is as good as another life's.
* The end marker proves nothing: a replay loses batches in its middle. Only an unbroken row of numbers proves.
* What a replay starts above is gone for good once it ended (until then it may still come live). What it skips is asked
  for again, a few times, and then is gone too.
* After a reconnect the life is unproven: nothing applies until a replay proves it or the numbers go on without a break.
* A tracker may take up a stream where a snapshot left it, as after a reconnect. If the publisher then no longer has our
  last batch, its life cannot be proven either way: that is a loss, so what was learnt is doubted and not forgotten.
"""

import math

from kvatlas._native import accept_run
from kvatlas.events.digest_ring import DigestRing
from kvatlas.events.steps import (
    Apply,
    AskReplay,
    Lost,
    NewLife,
    Step,
    StreamPosition,
    TrackerLimits,
    batch_time,
    payload_digest,
)

__all__ = ["SequenceTracker"]


class SequenceTracker:
    """The order of one publisher's stream. Feed it in arrival order and carry out the steps it returns, in order.

    `can_replay` False means that the publisher has no replay endpoint: every hole is then lost at once. `resume_at` is
    where a snapshot left the stream.
    """

    __slots__ = (
        "_asked_last",
        "_attempts",
        "_can_replay",
        "_digests",
        "_heard",
        "_held",
        "_held_bytes",
        "_last",
        "_last_ts",
        "_limits",
        "_live_seq",
        "_live_ts",
        "_overflow_seq",
        "_replay_works",
        "_resumed",
        "_settled",
        "_started",
        "_starts_at",
        "_token",
        "_tokens",
        "_verified",
        "duplicates",
        "stale",
    )

    def __init__(
        self, *, can_replay: bool, limits: TrackerLimits | None = None, resume_at: StreamPosition | None = None
    ) -> None:
        self._limits = limits or TrackerLimits()
        self._can_replay = can_replay
        self._started = False
        self._tokens = 0
        self._token: int | None = None  # of the replay that runs
        self._heard = False  # whether that replay brought anything yet
        self._starts_at = 0  # where it started, when that was above what we asked for
        self._asked_last = -1  # the last applied batch when it was asked for
        self._replay_works = False  # whether any replay ever brought a batch
        self.duplicates = 0
        """Batches dropped because they had been applied before."""
        self.stale = 0
        """Batches dropped because they belong to a life that is over."""
        self._reset()
        if resume_at is not None:
            self._resume(resume_at)

    def _reset(self) -> None:
        self._last = -1
        self._last_ts = -math.inf
        self._digests = DigestRing(self._limits.remembered)
        self._verified = True  # that the publisher is still the one whose batches we applied
        self._settled = False
        self._attempts = 0
        self._token = None
        self._resumed = False  # whether our last batch stands in a snapshot and was not seen since
        self._forget_held()

    def _resume(self, position: StreamPosition) -> None:
        self._started = self._resumed = True
        self._verified = False
        self._digests.note(position.seq - 1, position.seq, position.digest)
        self._last = position.seq
        self._last_ts = -math.inf if position.ts is None else position.ts

    def _forget_held(self) -> None:
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._overflow_seq = -1  # highest batch refused for want of room
        self._live_seq = -1
        self._live_ts = -math.inf

    @property
    def last_seq(self) -> int:
        """Number of the last batch applied or given up; -1 at the start of a life."""
        return self._last

    @property
    def is_live(self) -> bool:
        """Whether all up to `last_seq` was applied or reported lost, and nothing known of is missing."""
        return self._settled and not self._has_hole()

    @property
    def held_batches(self) -> int:
        """Batches that wait for others."""
        return len(self._held)

    @property
    def replay_token(self) -> int | None:
        """Token of the replay whose answers are awaited, None when none runs."""
        return self._token

    # -- what the subscriber tells --

    def connected(self) -> list[Step]:
        """The live channel is up, for the first time or again. Call it before feeding what came over it."""
        steps: list[Step] = []
        again = self._started and self._last >= 0
        self._started = True
        self._forget_held()
        self._attempts = 0
        if again:
            self._verified = False
            self._settled = False
        if self._can_replay:
            self._ask(steps)
        elif again:
            steps.append(Lost(self._last + 1, None))
        return steps

    def probe(self) -> list[Step]:
        """The stream is quiet: ask whether its tail was lost or its life changed. Nothing to do while a replay runs."""
        steps: list[Step] = []
        if self._can_replay and self._token is None:
            self._attempts = 0
            self._ask(steps)
        return steps

    def accept_run(self, first_seq: int, payloads: list[bytes]) -> int:
        """Take the leading live batches of a run that simply follow, to be applied now; the rest goes to `live`.

        Args:
            first_seq: number of the first batch.
            payloads: batches numbered from there on without a hole.

        Returns:
            How many. Natively 0.1 us each.
        """
        if first_seq != self._last + 1 or self._token is not None or self._live_seq > self._last or not payloads:
            return 0
        self._digests.make_room(self._last, self._last + len(payloads))
        count, ts = accept_run(payloads, first_seq, self._last_ts, self._digests.words, self._can_replay)
        if count:
            self._last = self._live_seq = self._last + count
            self._last_ts = self._live_ts = ts
            self._verified = self._settled = True
            self._resumed = False
        return count

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """A batch from the live channel. O(1) unless it ends a wait."""
        steps: list[Step] = []
        if self.accept_run(seq, [payload]):
            return [Apply(seq, payload)]
        ts = batch_time(payload)
        if seq <= self._last or seq <= self._live_seq:
            reason = self._why_other_life(seq, payload, ts)
            if reason is None:
                return steps
            self._begin_life(steps, reason, ask=seq > 0)
            if self.accept_run(seq, [payload]):
                steps.append(Apply(seq, payload))
                return steps
        self._live_seq, self._live_ts = seq, ts
        if self._token is not None:
            self._hold(seq, payload)
            self._advance(steps)
        elif self._can_replay:
            self._settled = False
            self._attempts = 0  # what earlier questions did not bring has nothing to do with this hole
            self._hold(seq, payload)
            self._ask(steps)
        else:
            self._hold(seq, payload)
            self._give_up(steps)
        return steps

    def replayed(self, token: int, seq: int, payload: bytes) -> list[Step]:
        """A batch that answers the replay `token`. Answers to an abandoned question are dropped."""
        steps: list[Step] = []
        if token != self._token:
            return steps
        first, self._heard = not self._heard, True
        self._replay_works = True
        if seq <= self._last:
            self._compare(steps, seq, payload)
        elif not self._verified and not self._may_go_on(steps, seq, batch_time(payload)):
            self._begin_life(steps, f"after a reconnect the publisher starts at batch {seq}, ours was {self._last}")
        elif self._held.get(seq, payload) != payload:
            self._begin_life(steps, f"batch {seq} came live and replayed with different bytes")
        else:
            if first:
                self._starts_at = seq
                if self._last < 0:
                    self._lose_until(steps, seq)
            if seq == self._last + 1:
                self._unhold(seq)
                self._apply(steps, seq, payload, batch_time(payload))
            elif seq > self._last:
                self._hold(seq, payload)
            self._advance(steps)
        return steps

    def replay_ended(self, token: int, *, complete: bool) -> list[Step]:
        """The replay `token` is over: by its end marker (`complete`), or by a timeout or a lost connection."""
        steps: list[Step] = []
        if token != self._token:
            return steps
        if complete and not self._heard and self._publisher_restarted():
            self._begin_life(steps, f"the publisher no longer has batch {self._last}, which we applied")
            return steps
        self._token = None
        if complete and self._starts_at > self._last + 1:
            self._lose_until(steps, self._starts_at)
            self._advance(steps)
        self._attempts = 0 if self._last > self._asked_last else self._attempts + 1
        exhausted = self._attempts >= self._limits.max_attempts
        if self._has_hole():
            if exhausted:
                self._give_up(steps)
            else:
                self._ask(steps)
        elif complete:
            self._settled = True
        elif not self._settled:
            if not exhausted:
                self._ask(steps)
            else:
                self._attempts = 0
                if not self._verified:
                    steps.append(Lost(self._last + 1, None))
        return steps

    # -- judging --

    def _why_other_life(self, seq: int, payload: bytes, ts: float) -> str | None:
        """Why a live number that does not rise is another life; None for one that changes nothing, which is counted."""
        held, digest = self._held.get(seq), self._digests.find(self._last, seq)
        if held == payload or (held is None and digest == payload_digest(payload)):
            self.duplicates += 1
            return None
        # Older than what we have, on the same connection: a straggler. After a reconnect nothing old can come.
        newest_ts = max(self._last_ts, self._live_ts)
        if self._verified and ts < newest_ts:
            self.stale += 1
            return None
        if held is not None or digest is not None:
            return f"batch {seq} came again with other bytes"
        return f"numbers went back to {seq} after {max(self._last, self._live_seq)}"

    def _compare(self, steps: list[Step], seq: int, payload: bytes) -> None:
        """A replayed batch that we should know."""
        digest = self._digests.find(self._last, seq)
        if digest is None:
            return
        if digest != payload_digest(payload):
            self._begin_life(steps, f"batch {seq} was replayed with other bytes than we applied")
            return
        self.duplicates += 1
        self._verified, self._resumed = True, False
        self._advance(steps)

    def _may_go_on(self, steps: list[Step], seq: int, ts: float) -> bool:
        """Whether what starts at `seq` may follow what a snapshot says; what is then lost, or may be, is reported."""
        if not self._resumed or ts < self._last_ts:
            return False
        if seq == self._last + 1:
            steps.append(Lost(seq, None))
        self._verified, self._resumed = True, False
        return True

    def _publisher_restarted(self) -> bool:
        """Whether an empty replay tells of a restart: a publisher keeps its last batch, and ours was asked for."""
        if self._last < 0:
            return False
        return not self._verified or (self._replay_works and not self._has_hole())

    def _has_hole(self) -> bool:
        return bool(self._held) or self._overflow_seq > self._last

    # -- moving on --

    def _begin_life(self, steps: list[Step], reason: str, *, ask: bool = True) -> None:
        if self._last >= 0:
            steps.append(NewLife(reason))
        self._reset()
        if ask and self._can_replay:
            self._ask(steps)

    def _ask(self, steps: list[Step]) -> None:
        self._tokens += 1
        self._token = self._tokens
        self._heard = False
        self._starts_at = 0
        self._asked_last = self._last
        known = self._digests.newest(self._last)
        if known is None and self._last >= 0:
            self._verified = False  # no answer can prove that it is the same life
        steps.append(AskReplay(self._tokens, max(self._last, 0) if known is None else known, self._attempts))

    def _hold(self, seq: int, payload: bytes) -> None:
        if seq in self._held:
            return
        limits = self._limits
        if len(self._held) >= limits.max_held_batches or self._held_bytes + len(payload) > limits.max_held_bytes:
            self._overflow_seq = max(self._overflow_seq, seq)
            return
        self._held[seq] = payload
        self._held_bytes += len(payload)

    def _advance(self, steps: list[Step], *, certain: bool = False) -> None:
        """Apply what is held and next. A batch older than the one before may be of a dead life: it waits."""
        while self._verified and (payload := self._held.get(self._last + 1)) is not None:
            seq, ts = self._last + 1, batch_time(payload)
            if ts < self._last_ts and not certain:
                return
            self._unhold(seq)
            self._apply(steps, seq, payload, ts)

    def _unhold(self, seq: int) -> None:
        self._held_bytes -= len(self._held.pop(seq, b""))

    def _apply(self, steps: list[Step], seq: int, payload: bytes, ts: float) -> None:
        self._digests.note(self._last, seq, payload_digest(payload))
        self._last, self._last_ts, self._resumed = seq, ts, False
        if seq == self._live_seq:
            self._settled = True  # an unbroken row up to the newest live batch proves as much as an end marker
        steps.append(Apply(seq, payload))

    def _lose(self, steps: list[Step], last_seq: int) -> None:
        steps.append(Lost(self._last + 1, last_seq))
        self._digests.pass_by(self._last, last_seq)
        self._last = last_seq

    def _lose_until(self, steps: list[Step], seq: int) -> None:
        """Give up what is below `seq` and not held; what is held applies. Afterwards `seq` is next, or applied too."""
        self._drop_stale()
        while True:
            self._advance(steps, certain=True)
            if self._last + 1 >= seq:
                return
            self._lose(steps, min((held for held in self._held if held < seq), default=seq) - 1)

    def _give_up(self, steps: list[Step]) -> None:
        """Nobody returns what is missing: report it and go on with what is held."""
        first_seq = min(self._held, default=self._overflow_seq)
        oldest_ts = min(map(batch_time, self._held.values()), default=self._last_ts)
        if not self._verified and not self._may_go_on(steps, first_seq, oldest_ts):
            held, held_bytes, overflow_seq = self._held, self._held_bytes, self._overflow_seq
            reason = f"after a reconnect batch {first_seq} came, our last was {self._last}"
            self._begin_life(steps, reason, ask=False)
            self._held, self._held_bytes, self._overflow_seq = held, held_bytes, overflow_seq
        self._drop_stale()
        self._lose_until(steps, max(self._last, self._overflow_seq, *self._held) + 1)
        self._attempts = 0
        self._settled = True

    def _drop_stale(self) -> None:
        """Forget held batches older than what was applied and unknown to the replay: a life now over sent them."""
        if not self._can_replay:
            return
        stale = [seq for seq, payload in self._held.items() if batch_time(payload) < self._last_ts]
        for seq in stale:
            self._unhold(seq)
        if stale:
            self.stale += len(stale)
            self._live_seq, self._live_ts = self._last, self._last_ts
