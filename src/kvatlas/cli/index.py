"""`kvatlas index`: ask a running gateway's index."""

import asyncio
from pathlib import Path

import aiohttp
import click
import msgspec

from kvatlas.cli.output import print_json, print_table
from kvatlas.cli.tokens import read_token_ids
from kvatlas.errors import KvAtlasError, UpstreamConnectError, UpstreamError
from kvatlas.rendering import LocalRenderer

__all__ = ["command"]


class _Hit(msgspec.Struct):
    hit_tokens: int
    trust: str
    tiers: dict[str, int]


class _Answer(msgspec.Struct):
    workers: dict[str, _Hit]


class _ErrorBody(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorBody


@click.group(name="index", help=__doc__)
def command() -> None:
    """Ask a running gateway's index."""


@command.command()
@click.option("--admin", default="http://127.0.0.1:9090", show_default=True, help="Admin URL of the gateway.")
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
    answer = asyncio.run(_ask(admin.rstrip("/"), {"token_ids": token_ids, "lora": lora, "cache_salt": salt}))
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


async def _ask(admin: str, question: dict[str, object]) -> _Answer:
    url = f"{admin}/api/index/query"
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=msgspec.json.encode(question)) as response,
        ):
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UpstreamConnectError(
            f"cannot reach the admin app at {admin}: {error}; is the gateway running, and is --admin its admin port?"
        ) from error
    try:
        if status == 200:
            return msgspec.json.decode(body, type=_Answer)
        raise KvAtlasError(f"{url} answered {status}: {msgspec.json.decode(body, type=_Error).error.message}")
    except msgspec.DecodeError as error:
        raise UpstreamError(
            f"{url} answered {status} with something that is not ours: is --admin the admin port of a kvatlas gateway?"
        ) from error
