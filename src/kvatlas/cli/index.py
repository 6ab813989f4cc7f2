"""`kvatlas index`: ask a running gateway's index, and keep it in files."""

from pathlib import Path

import click
import msgspec

from kvatlas.cli.admin_client import admin_option, ask_admin
from kvatlas.cli.output import print_json, print_table
from kvatlas.cli.snapshot import dump, load, show
from kvatlas.cli.tokens import read_token_ids
from kvatlas.rendering import LocalRenderer

__all__ = ["command"]


class _Hit(msgspec.Struct):
    hit_tokens: int
    trust: str
    tiers: dict[str, int]


class _Answer(msgspec.Struct):
    workers: dict[str, _Hit]


@click.group(name="index", help=__doc__)
def command() -> None:
    """Ask a running gateway's index, and keep it in files."""


for _snapshot_command in (dump, load, show):
    command.add_command(_snapshot_command)


@command.command()
@admin_option
@click.option("--tokens", default=None, help="Token ids, separated by commas.")
@click.option("--tokens-file", type=click.Path(path_type=Path), default=None, help="File with token ids.")
@click.option("--text", default=None, help="A prompt, tokenised with --tokenizer.")
@click.option("--tokenizer", default=None, help="Folder or hub name of the tokenizer for --text.")
@click.option("--lora", default=None, help="Name of the LoRA adapter.")
@click.option("--salt", default=None, help="The request's cache_salt.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def query(
    *,
    admin: str,
    tokens: str | None,
    tokens_file: Path | None,
    text: str | None,
    tokenizer: str | None,
    lora: str | None,
    salt: str | None,
    as_json: bool,
) -> None:
    """Print how much of a prompt each worker holds."""
    token_ids = _token_ids(tokens, tokens_file, text, tokenizer)
    question = {"token_ids": token_ids, "lora": lora, "cache_salt": salt}
    answer = ask_admin(admin, "/api/index/query", _Answer, question=question)
    if as_json:
        print_json(answer)
        return
    rows = [
        [worker, str(hit.hit_tokens), hit.trust, ", ".join(f"{tier} {n}" for tier, n in sorted(hit.tiers.items()))]
        for worker, hit in sorted(answer.workers.items(), key=lambda item: -item[1].hit_tokens)
    ]
    print_table(f"{len(token_ids)} tokens", ["worker", "hit tokens", "trust", "tiers"], rows)


def _token_ids(tokens: str | None, tokens_file: Path | None, text: str | None, tokenizer: str | None) -> list[int]:
    if text is None:
        return read_token_ids(tokens, tokens_file)
    if tokenizer is None:
        raise click.UsageError("--text needs --tokenizer FOLDER")
    return LocalRenderer.load(tokenizer).tokenize(text)
