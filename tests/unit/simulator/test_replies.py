"""What the simulated model says, and its text."""

import pytest

from kvatlas.errors import ConfigError
from kvatlas.rendering import LocalRenderer, write_tiny_model
from kvatlas.simulator import ReplySampler, ReplyVocabulary, SamplingParams
from kvatlas.simulator.reply_text import ReplyText

WORDS = range(10, 50)
EOS = 9


def tokens(sampler, prompt, count, **params):
    """The first `count` tokens of a reply."""
    reply = sampler.reply_to(prompt, SamplingParams(**params))
    return [reply.token_id(index) for index in range(count)]


class TestReplySampler:
    """Which tokens a prompt gets."""

    def test_same_prompt_same_reply(self):
        """Two engines with the same seed reply alike; prompt, choice and seeds each change the reply."""
        one, two = ReplySampler(WORDS, eos_token_id=EOS), ReplySampler(WORDS, eos_token_id=EOS)
        base = tokens(one, [1, 2, 3], 50)
        assert base == tokens(two, [1, 2, 3], 50)
        assert set(base) <= set(WORDS)
        others = [
            tokens(one, [1, 2, 4], 50),
            tokens(one, [1, 2, 3], 50, choice=1),
            tokens(one, [1, 2, 3], 50, seed=7),
            tokens(ReplySampler(WORDS, eos_token_id=EOS, seed=1), [1, 2, 3], 50),
        ]
        assert all(base != other for other in others)

    def test_indexes_can_be_read_again(self):
        """A preempted request asks for the same index twice and gets the same token, in any order."""
        reply = ReplySampler(WORDS, eos_token_id=EOS).reply_to([5], SamplingParams(ignore_eos=True))
        late = reply.token_id(300)
        first = [reply.token_id(index) for index in range(301)]
        assert first[300] == late
        assert first == [reply.token_id(index) for index in range(301)]

    def test_replies_end_by_themselves(self):
        """Between half and one and a half times the mean, the end of text comes, unless it is ignored or too early."""
        sampler = ReplySampler(WORDS, eos_token_id=EOS, mean_tokens=20)
        lengths = {tokens(sampler, [number], 40).index(EOS) for number in range(100)}
        assert 10 <= min(lengths) < max(lengths) <= 30
        assert EOS not in tokens(sampler, [1], 500, ignore_eos=True)
        assert tokens(sampler, [1], 60, min_tokens=50).index(EOS) == 50

    def test_no_end_of_text_token(self):
        """A vocabulary without one never ends a reply."""
        assert set(tokens(ReplySampler(WORDS, eos_token_id=None, mean_tokens=4), [1], 99)) <= set(WORDS)

    def test_no_words(self):
        """Nothing to say is a configuration error."""
        with pytest.raises(ConfigError, match="usable word"):
            ReplySampler((), eos_token_id=EOS)


class TestVocabulary:
    """Replies that come back as text must be the tokens that were cached."""

    def test_replies_survive_the_round_trip(self, tmp_path):
        """Text of a reply, tokenised again after a chat turn's opening, is the reply's tokens."""
        renderer = LocalRenderer.load(write_tiny_model(tmp_path))
        vocabulary = ReplyVocabulary.find(range(renderer.tokenizer.vocab_size), renderer.detokenize, renderer.tokenize)
        assert len(vocabulary.texts) > 50
        reply = tokens(ReplySampler(tuple(vocabulary.texts), eos_token_id=None), [1, 2, 3], 200)
        opening = "<|im_start|>assistant\n"
        whole = renderer.tokenize(opening + vocabulary.text_of(reply) + "<|im_end|>")
        head = renderer.tokenize(opening)
        assert whole[: len(head)] == head
        assert whole[len(head) : -1] == reply


class TestReplyText:
    """Stop strings."""

    VOCABULARY = ReplyVocabulary({1: " one", 2: " two", 3: " three", EOS: ""})

    def test_without_stop_strings(self):
        """Text comes as soon as its tokens do."""
        text = ReplyText(self.VOCABULARY)
        assert [text.push((1,), is_last=False), text.push((2, EOS), is_last=True)] == [" one", " two"]

    def test_stop_over_two_tokens(self):
        """A stop string spread over tokens ends the text before it; what could begin one is held back."""
        text = ReplyText(self.VOCABULARY, ["e two"])
        pieces = [text.push((1,), is_last=False), text.push((2,), is_last=False)]
        assert "".join(pieces) == " on"
        assert text.stop_reason == "e two"

    def test_stop_string_can_be_kept(self):
        """`include_stop_str_in_output` leaves it in, and what follows it out."""
        text = ReplyText(self.VOCABULARY, ["tw"], keep_stop=True)
        assert text.push((1, 2, 3), is_last=False) == " one tw"

    def test_held_text_comes_at_the_end(self):
        """When the reply ends without the stop string, nothing is lost."""
        text = ReplyText(self.VOCABULARY, ["never seen"])
        assert text.push((1,), is_last=False) + text.push((3,), is_last=True) == " one three"
        assert text.stop_reason is None
