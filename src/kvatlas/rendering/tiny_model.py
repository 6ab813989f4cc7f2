"""A small tokenizer with a chat template, made on the spot: for demos, simulated engines and tests.

What is written is a real model folder as far as text is concerned (`tokenizer.json`, `tokenizer_config.json`): a
byte-level BPE trained on a corpus that is generated here, so nothing is downloaded. The same arguments give the same
bytes on every machine.
"""

import json
import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvatlas.errors import ConfigError

__all__ = ["TINY_CHAT_TEMPLATE", "write_tiny_model"]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
_BYTE_ALPHABET = 256
_MIN_VOCAB = _BYTE_ALPHABET + len(_SPECIAL_TOKENS)
_MODEL_MAX_TOKENS = 1_048_576

TINY_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'You may call these tools:\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}
{{- message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

# Where words end before merging. It is Qwen2's rule because the engines that serve this tokenizer in tests have a Qwen2
# configuration, and transformers 5 then puts Qwen2's rule in the place of whatever tokenizer.json says.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ONSETS = ("b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "st", "tr", "ch", "th")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "n", "r", "s", "t", "l", "nd", "ng")
_COMMON_WORDS = """
the of and to in is that it for you was with on as are this be have from or by not what all were when we there can an
your which their if will each about how up out them then she many some so these would other into has more two like him
see time could no make than first been its who now people my made over did down only way find use may water long little
system user assistant tool model token cache prefix block engine request answer question please write explain
"""


def write_tiny_model(directory: str | Path, *, vocab_size: int = 1000, seed: int = 0) -> Path:
    """Write a small byte-level BPE tokenizer with a ChatML-like chat template.

    The folder loads with `LocalRenderer.load` and with the transformers library (`Qwen2Tokenizer`).

    Args:
        directory: made when missing; files of the same names are overwritten.
        vocab_size: number of token ids, all bytes and three special tokens included (>= 259). Training stops
            earlier when the corpus has no pair left to merge.
        seed: another seed makes other words, hence other merges.

    Returns:
        The directory.

    Raises:
        ConfigError: `vocab_size` is too small.

    Cost: about 0.3 s.
    """
    if vocab_size < _MIN_VOCAB:
        raise ConfigError(
            f"a byte-level vocabulary needs at least {_MIN_VOCAB} tokens, vocab_size={vocab_size} was given"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _train(vocab_size, seed).save(str(folder / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True} for index, token in enumerate(_SPECIAL_TOKENS)
        },
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": TINY_CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": _MODEL_MAX_TOKENS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def _train(vocab_size: int, seed: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return tokenizer


def _corpus(seed: int) -> list[str]:
    """Sentences of made-up and common words with a Zipf-like frequency: enough pairs for some thousand merges."""
    rng = random.Random(seed)
    words = _COMMON_WORDS.split()
    while len(words) < 4000:
        syllables = rng.randint(1, 3)
        words.append("".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)))
    weights = [1.0 / rank for rank in range(1, len(words) + 1)]
    sentences = []
    for _ in range(2000):
        chosen = rng.choices(words, weights, k=rng.randint(5, 20))
        sentences.append(" ".join(chosen).capitalize() + rng.choice((". ", "? ", ", ", ":\n", ".\n\n")))
    sentences.extend(f'{{"name": "{rng.choice(words)}", "value": {rng.randint(0, 9999)}}}' for _ in range(200))
    return sentences
