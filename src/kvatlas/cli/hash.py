"""`kvatlas hash`: the block hashes an engine computes, to hold against what it publishes."""

import re
from pathlib import Path

import click
import msgspec

from kvatlas.cli.output import print_json
from kvatlas.cli.tokens import read_token_ids
from kvatlas.errors import ConfigError
from kvatlas.hashing import (
    DIALECT_OPTIONS,
    DIALECTS,
    LLMD_ALGOS,
    SGLANG_CHAINS,
    SGLANG_EVENT_FORMATS,
    VLLM_ALGOS,
    HashedBlocks,
    Lora,
    MultimodalItem,
    hash_blocks,
)

__all__ = ["command"]

_LIBRARY_NAMES = {"salt": "cache_salt", "mm": "multimodal"}
"""Where an option of this command is not called as in `hash_blocks`."""

_MM_ITEM = re.compile(r"(.+)@(\d+)\+(\d+)")


class _Row(msgspec.Struct, omit_defaults=True):
    block: int
    first_token: int
    digest: str | None
    hash64: int
    local_hash: int | None = None


class _Report(msgspec.Struct):
    dialect: str
    algo: str
    seed: str | None
    block_size: int
    none_hash: str
    blocks: list[_Row]
    tail_tokens: int


@click.command(name="hash", help=__doc__)
@click.option("--dialect", type=click.Choice(DIALECTS), default="vllm", show_default=True, help="Whose hash.")
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--tokens", default=None, help="Token ids, separated by commas.")
@click.option(
    "--tokens-file",
    type=click.Path(path_type=Path),
    default=None,
    help="File with a JSON array of token ids, or ids separated by commas or white space.",
)
@click.option(
    "--algo",
    type=click.Choice(VLLM_ALGOS + LLMD_ALGOS),
    default=None,
    help="vllm: --prefix-caching-hash-algo [sha256]; llmd: hashAlgorithm [cbor-fnv].",
)
@click.option("--seed", default=None, help="vllm: PYTHONHASHSEED, left out when not set there; llmd: hashSeed.")
@click.option("--lora", default=None, help="vllm, llmd, dynamo: LoRA adapter as NAME; vllm: or as NAME=PATH.")
@click.option("--salt", default=None, help="vllm, sglang, llmd: the request's cache_salt.")
@click.option("--mm", multiple=True, help="vllm, llmd, dynamo: an image as ID@OFFSET+LENGTH, in tokens; repeatable.")
@click.option("--model", default=None, help="llmd: the model's name, where its keys start.")
@click.option("--extra-key", default=None, help="sglang: the request's extra_key.")
@click.option("--lora-id", default=None, help="sglang: the engine's id of the loaded adapter, 32 hex digits.")
@click.option("--event-format", type=click.Choice(SGLANG_EVENT_FORMATS), help="sglang: format of --kv-events-config.")
@click.option("--chain", type=click.Choice(SGLANG_CHAINS), help="sglang: what events name, or keys in storage.")
@click.option("--bigram", is_flag=True, default=None, help="sglang: pairs of tokens, as with EAGLE or MTP.")
@click.option("--namespace", default=None, help="dynamo: the cache namespace.")
@click.option("--image-token", type=int, default=None, help="dynamo: the image token, replaced by pads where --mm is.")
@click.option("--eagle", is_flag=True, default=None, help="dynamo: windows of one token more.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *, dialect: str, block_size: int, tokens: str | None, tokens_file: Path | None, as_json: bool, **given: object
) -> None:
    """Hash token ids block by block."""
    options = _options_of(dialect, given)
    hashed = hash_blocks(dialect, read_token_ids(tokens, tokens_file), block_size, **options)
    if as_json:
        print_json(_report(hashed))
    else:
        _print_text(_report(hashed))


def _options_of(dialect: str, given: dict[str, object]) -> dict[str, object]:
    """The options that were given, as `hash_blocks` takes them.

    Raises:
        ConfigError: one that the dialect does not have, or an image that cannot be read.
    """
    present = {name: value for name, value in given.items() if value is not None and value != ()}
    strange = [name for name in present if _LIBRARY_NAMES.get(name, name) not in DIALECT_OPTIONS[dialect]]
    if strange:
        known = [name for name in given if _LIBRARY_NAMES.get(name, name) in DIALECT_OPTIONS[dialect]]
        raise ConfigError(f"{_flags(strange)} does not belong to --dialect {dialect}; it has {_flags(known)}")
    options = {_LIBRARY_NAMES.get(name, name): value for name, value in present.items()}
    if dialect == "vllm" and "lora" in options:
        name, _, path = str(options["lora"]).partition("=")
        options["lora"] = Lora(name, path or None) if name else None
    if "multimodal" in options:
        options["multimodal"] = tuple(map(_read_mm, given["mm"]))  # type: ignore[call-overload]
    return options


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _read_mm(text: str) -> MultimodalItem:
    match = _MM_ITEM.fullmatch(text)
    if match is None:
        raise ConfigError(f"--mm must be ID@OFFSET+LENGTH such as cat@16+64, in tokens; got {text!r}")
    return MultimodalItem(match[1], int(match[2]), int(match[3]))


def _report(hashed: HashedBlocks) -> _Report:
    rows = [
        _Row(b.block, b.first_token, b.digest.hex() if b.digest else None, b.hash64, b.local_hash)
        for b in hashed.blocks
    ]
    return _Report(
        hashed.dialect, hashed.algo, hashed.seed, hashed.block_size, hashed.root.hex(), rows, hashed.tail_tokens
    )


def _print_text(report: _Report) -> None:
    root = f", NONE_HASH {report.none_hash}" if report.none_hash else ""
    click.echo(f"{report.dialect} {report.algo}, block size {report.block_size}{root}")
    for row in report.blocks:
        digest = f"  {row.digest}" if row.digest else ""
        local = f"  local {row.local_hash}" if row.local_hash is not None else ""
        last_token = row.first_token + report.block_size - 1
        click.echo(f"block {row.block}  tokens {row.first_token}..{last_token}{digest}  published {row.hash64}{local}")
    if report.tail_tokens:
        click.echo(f"{report.tail_tokens} tokens at the end fill no block and are not hashed.")
