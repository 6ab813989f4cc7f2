"""`kvatlas events`: look at KV event streams."""

import asyncio
from pathlib import Path

import click
import msgspec

from kvatlas.cli.output import print_json
from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError, EventDecodeError
from kvatlas.events import decode_batch
from kvatlas.replay import Difference, replay_recording
from kvatlas.stream import StreamStatus, SubscriberConfig, ZmqEventSubscriber

__all__ = ["command"]


class _ReplayJson(msgspec.Struct):
    compared: int
    equal: int
    differences: list[Difference]
    events: int
    gaps: int
    requests: int
    malformed: int
    known_from_line: int | None


@click.group(name="events", help=__doc__)
def command() -> None:
    """Look at KV event streams."""


@command.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(*, recording: Path, as_json: bool) -> None:
    """Feed RECORDING to the index and predict cached_tokens of each request just before it was sent.

    Exit code 1 when a prediction differs from what the engine reported, or nothing could be compared.
    """
    try:
        report = replay_recording(recording)
    except OSError as error:
        raise ConfigError(f"cannot read the recording {recording}: {error.strerror}") from error
    shown = _ReplayJson(
        report.compared,
        report.equal,
        report.differences,
        report.events,
        report.gaps,
        report.requests,
        report.malformed,
        report.known_from_line,
    )
    if as_json:
        print_json(shown)
    else:
        share = 100 * report.equal / report.compared if report.compared else 0.0
        click.echo(
            f"requests {report.requests}, events {report.events}, gaps {report.gaps}, malformed {report.malformed}"
        )
        click.echo(
            f"compared {report.compared} (from line {report.known_from_line}), equal {report.equal} ({share:.1f} %)"
        )
        for difference in report.differences:
            click.echo(
                f"  line {difference.line}: predicted {difference.predicted}, engine reported {difference.reported}"
            )
    if not report.compared or report.differences:
        raise click.exceptions.Exit(1)


@command.command()
@click.argument("endpoint")
@click.option(
    "--replay",
    "replay_endpoint",
    default=None,
    help="ROUTER endpoint of the same publisher, to start at batch 0 and to mend gaps.",
)
@click.option("--topic", default="", help="Topic prefix to subscribe to; empty takes all.")
@click.option("--count", type=click.IntRange(min=1), default=None, help="Stop after this many batches.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def tail(*, endpoint: str, replay_endpoint: str | None, topic: str, count: int | None, as_json: bool) -> None:
    """Print the live stream at ENDPOINT (tcp://HOST:PORT): batches in order, gaps, new lives. Ctrl-C ends it."""
    try:
        asyncio.run(
            _tail(
                SubscriberConfig(endpoint=endpoint, replay_endpoint=replay_endpoint, topic=topic),
                count,
                as_json=as_json,
            )
        )
    except KeyboardInterrupt:
        click.echo()


async def _tail(config: SubscriberConfig, count: int | None, *, as_json: bool) -> None:
    printer = _Printer(count, as_json=as_json)
    subscriber = ZmqEventSubscriber(config, printer, SystemClock())
    running = asyncio.create_task(subscriber.run())
    done = asyncio.create_task(printer.done.wait())
    await asyncio.wait({running, done}, return_when=asyncio.FIRST_COMPLETED)
    subscriber.close()
    done.cancel()
    await running


class _Printer:
    """Writes what a subscriber delivers, a line each."""

    def __init__(self, count: int | None, *, as_json: bool) -> None:
        self.done = asyncio.Event()
        self._left = count
        self._as_json = as_json

    def on_life(self, reason: str) -> None:
        self._line({"life": reason}, f"-- new life: {reason}")

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self._line(
            {"gap": [first_seq, last_seq]}, f"-- lost: batches {first_seq}..{'?' if last_seq is None else last_seq}"
        )

    def on_status(self, status: StreamStatus, reason: str) -> None:
        self._line({"status": status, "reason": reason}, f"-- {status}: {reason}")

    def on_batch(self, seq: int, payload: bytes) -> None:
        if self.done.is_set():
            return
        try:
            decoded = decode_batch(payload)
        except EventDecodeError as error:
            self._line({"seq": seq, "error": error.message}, f"{seq}: {error.message}")
        else:
            batch = decoded.batch
            for event in batch.events:
                name = type(event).__name__
                hashes = list(getattr(event, "block_hashes", ()))
                text = f"{seq}: {name} {len(hashes)} blocks" if hashes else f"{seq}: {name}"
                self._line({"seq": seq, "ts": batch.ts, "rank": batch.data_parallel_rank, "event": event}, text)
            for bad in decoded.malformed:
                self._line({"seq": seq, "error": bad.message}, f"{seq}: {bad.message}")
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self.done.set()

    def _line(self, record: dict[str, object], text: str) -> None:
        click.echo(msgspec.json.encode(record).decode() if self._as_json else text)
