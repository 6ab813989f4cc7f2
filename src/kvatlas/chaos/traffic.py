"""The load: multi-turn conversations in token ids, with shared beginnings, in bursts with quiet spells between."""

import random
from dataclasses import dataclass, field

__all__ = ["Traffic", "TrafficConfig", "Turn"]

_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """Shape of the load. Lengths vary by half around their mean.

    Attributes:
        conversations: how many are held at a time; one that ends makes room for a new one.
        turns: most questions in one.
        systems: different beginnings; each conversation begins with one of them.
        system_tokens, question_tokens, reply_tokens: mean lengths.
        requests_per_s: mean rate in a burst, of the whole fleet.
        burst_s, quiet_s: how long bursts and the spells without any request between them last.
    """

    conversations: int
    turns: int = 5
    systems: int = 6
    system_tokens: int = 192
    question_tokens: int = 96
    reply_tokens: int = 8
    requests_per_s: float = 4.0
    burst_s: float = 20.0
    quiet_s: float = 8.0


@dataclass(slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        conversation: its number.
        token_ids: the prompt: all that was said so far and the new question.
        max_tokens: length of the reply.
    """

    conversation: int
    token_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class _Conversation:
    token_ids: list[int]
    turns_left: int
    is_open: bool = False


@dataclass(slots=True)
class Traffic:
    """Draws the next request and the time until it comes. Equal seeds and equal calls give equal requests."""

    config: TrafficConfig
    seed: int
    _rng: random.Random = field(init=False)
    _systems: list[list[int]] = field(init=False)
    _held: dict[int, _Conversation] = field(init=False, default_factory=dict)
    _begun: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Fix the beginnings that conversations share."""
        self._rng = random.Random(f"traffic/{self.seed}")
        self._systems = [self._tokens(self.config.system_tokens) for _ in range(self.config.systems)]

    def pause_s(self, now_s: float) -> float:
        """Seconds from now until the next request: exponential within a burst, never within a quiet spell."""
        config = self.config
        gap_s = self._rng.expovariate(config.requests_per_s)
        cycle_s = config.burst_s + config.quiet_s
        into_s = (now_s % cycle_s) + gap_s
        return gap_s if into_s < config.burst_s else max(gap_s, cycle_s - now_s % cycle_s)

    def next_turn(self) -> Turn:
        """A question in a conversation that waits for none, of those held."""
        config = self.config
        free = [number for number, held in self._held.items() if not held.is_open]
        if not free or len(self._held) < config.conversations:
            number = self._begun
            self._begun += 1
            turns = self._rng.randint(1, 2 * config.turns - 1)
            self._held[number] = _Conversation(list(self._rng.choice(self._systems)), turns)
        else:
            number = self._rng.choice(free)
        held = self._held[number]
        held.is_open = True
        held.token_ids += self._tokens(config.question_tokens)
        low = max(1, config.reply_tokens // 2)
        return Turn(number, list(held.token_ids), self._rng.randint(low, low + config.reply_tokens))

    def answered(self, turn: Turn, reply: list[int]) -> None:
        """The reply came; a conversation whose last it was ends."""
        held = self._held[turn.conversation]
        held.is_open = False
        held.token_ids += reply
        held.turns_left -= 1
        if held.turns_left <= 0:
            del self._held[turn.conversation]

    def _tokens(self, mean: int) -> list[int]:
        count = self._rng.randint(max(1, mean // 2), mean + mean // 2)
        return self._rng.choices(range(_VOCABULARY), k=count)
