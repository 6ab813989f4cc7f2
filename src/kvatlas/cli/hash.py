"""`kvatlas hash`: the block hashes an engine computes, to hold against what it publishes."""

from pathlib import Path

import click
import msgspec

from kvatlas.cli.output import print_json
from kvatlas.cli.tokens import read_token_ids
from kvatlas.hashing import VLLM_ALGOS, Lora, RequestExtras, VllmHasher, hash64

__all__ = ["command"]


class _Row(msgspec.Struct):
    block: int
    first_token: int
    digest: str
    hash64: int


class _Report(msgspec.Struct):
    dialect: str
    algo: str
    seed: str | None
    block_size: int
    none_hash: str
    blocks: list[_Row]
    tail_tokens: int


@click.command(name="hash", help=__doc__)
@click.option("--dialect", type=click.Choice(["vllm"]), default="vllm", show_default=True, help="Whose hash.")
@click.option(
    "--algo",
    type=click.Choice(list(VLLM_ALGOS)),
    default="sha256",
    show_default=True,
    help="The engine's --prefix-caching-hash-algo.",
)
@click.option("--seed", default=None, help="The engine's PYTHONHASHSEED; leave out when it is not set there.")
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--tokens", default=None, help="Token ids, separated by commas.")
@click.option(
    "--tokens-file",
    type=click.Path(path_type=Path),
    default=None,
    help="File with a JSON array of token ids, or ids separated by commas or white space.",
)
@click.option("--lora", default=None, help="LoRA adapter as NAME or NAME=PATH; the engine hashes both.")
@click.option("--salt", default=None, help="The request's cache_salt.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    dialect: str,
    algo: str,
    seed: str | None,
    block_size: int,
    tokens: str | None,
    tokens_file: Path | None,
    lora: str | None,
    salt: str | None,
    as_json: bool,
) -> None:
    """Hash token ids block by block."""
    token_ids = read_token_ids(tokens, tokens_file)
    hasher = VllmHasher(algo, seed)
    name, _, path = (lora or "").partition("=")
    extras = RequestExtras(lora=Lora(name, path or None) if name else None, cache_salt=salt)
    digests = hasher.hash_tokens(token_ids, block_size, extras=extras)
    rows = [_Row(i, i * block_size, digest.hex(), hash64(digest)) for i, digest in enumerate(digests)]
    report = _Report(dialect, algo, seed, block_size, hasher.none_hash.hex(), rows, len(token_ids) % block_size)
    if as_json:
        print_json(report)
        return
    click.echo(f"{dialect} {algo}, block size {block_size}, NONE_HASH {report.none_hash}")
    for row in rows:
        click.echo(
            f"block {row.block}  tokens {row.first_token}..{row.first_token + block_size - 1}"
            f"  {row.digest}  published {row.hash64}"
        )
    if report.tail_tokens:
        click.echo(f"{report.tail_tokens} tokens at the end fill no block and are not hashed.")
