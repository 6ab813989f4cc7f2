"""Tokenising a text in pieces gives the ids of the whole, whatever stands around the cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.rendering.model_files import find_model_files
from kvatlas.rendering.text_tokenizer import TextTokenizer
from kvatlas.rendering.tiny_model import write_tiny_model

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FRAGMENTS = st.one_of(st.sampled_from([*MARKS, "<|im_", "end|>", "<|", " ", "\n", "the water"]), st.text(max_size=8))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tiny model's tokenizer."""
    return TextTokenizer(find_model_files(write_tiny_model(tmp_path_factory.mktemp("model"))))


@given(fragments=st.lists(FRAGMENTS, max_size=20))
def test_pieces_have_the_ids_of_the_whole(tokenizer, fragments):
    """Broken marks, spaces and any Unicode beside a mark change nothing."""
    text = "".join(fragments)
    pieces = tokenizer.cut(text)
    assert "".join(pieces) == text
    assert all(piece.endswith(MARKS) for piece in pieces[:-1])
    joined = [token for ids in tokenizer.encode_many(pieces, add_special_tokens=False) for token in ids]
    assert joined == tokenizer.encode(text, add_special_tokens=False)


@given(texts=st.lists(st.text(max_size=200), max_size=6))
def test_many_texts_are_tokenised_as_one_by_one(tokenizer, texts):
    """The batch path of long texts and the plain path of short ones agree."""
    one_by_one = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert tokenizer.encode_many(texts, add_special_tokens=True) == one_by_one
