"""A seeded multi-turn load: conversations that share system prompts and grow turn by turn, as chat traffic does."""

import random
from dataclasses import dataclass

__all__ = ["Conversation", "ConversationSettings", "make_conversations"]

_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ra", "se", "ti", "vu", "za", "chi", "dro", "fen", "gal")


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """Shape of the load. Words are about two to three tokens each with a small tokenizer.

    Attributes:
        conversations: how many run in all.
        turns: questions per conversation.
        system_prompts: how many different system prompts they share.
        system_words, user_words: length of a system prompt and of a question; questions vary by half around it.
        reply_tokens: tokens asked for per reply.
        think_s: mean pause between a reply and the next question.
        ramp_s: conversations begin evenly spread over this time.
    """

    conversations: int = 48
    turns: int = 5
    system_prompts: int = 6
    system_words: int = 60
    user_words: int = 60
    reply_tokens: int = 48
    think_s: float = 0.3
    ramp_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user's questions, with the pause before each (the first one's is the start offset)."""

    name: str
    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]
    reply_tokens: int


def make_conversations(settings: ConversationSettings, seed: int) -> tuple[Conversation, ...]:
    """The load of a seed: equal arguments give equal conversations."""
    rng = random.Random(seed)
    systems = [_words(rng, settings.system_words) for _ in range(settings.system_prompts)]
    return tuple(_conversation(rng, settings, number, systems) for number in range(settings.conversations))


def _conversation(rng: random.Random, settings: ConversationSettings, number: int, systems: list[str]) -> Conversation:
    lengths = [max(1, round(settings.user_words * rng.uniform(0.5, 1.5))) for _ in range(settings.turns)]
    start_s = settings.ramp_s * number / max(1, settings.conversations)
    pauses_s = [start_s, *(settings.think_s * rng.uniform(0.5, 1.5) for _ in range(settings.turns - 1))]
    return Conversation(
        name=f"c{number}",
        system=rng.choice(systems),
        questions=tuple(_words(rng, length) for length in lengths),
        pauses_s=tuple(pauses_s),
        reply_tokens=settings.reply_tokens,
    )


def _words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))
