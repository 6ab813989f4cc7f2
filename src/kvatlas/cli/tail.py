"""`kvatlas events tail`: a live KV event stream, a line for each event."""

import asyncio

import click
import msgspec

from kvatlas.cli.event_text import describe_event, wall_time
from kvatlas.clock import SystemClock
from kvatlas.config import is_endpoint
from kvatlas.errors import ConfigError, EventDecodeError
from kvatlas.events import decode_batch
from kvatlas.stream import StreamCounters, StreamStatus, SubscriberConfig, ZmqEventSubscriber

__all__ = ["tail"]

_QUIET_S = 3.0


@click.command()
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
    """Print the live stream at ENDPOINT (tcp://HOST:PORT): batches in order, gaps, new lives. Ctrl-C ends it.

    A line has the batch's time, its number, the data-parallel rank, the event, medium, KV cache group, the first and
    last block hash, the parent's hash and the number of tokens.
    """
    _check_endpoint("ENDPOINT", endpoint)
    if replay_endpoint is not None:
        _check_endpoint("--replay", replay_endpoint)
    config = SubscriberConfig(endpoint=endpoint, replay_endpoint=replay_endpoint, topic=topic)
    asyncio.run(_tail(config, count, as_json=as_json))


def _check_endpoint(name: str, text: str) -> None:
    if "*" in text or not is_endpoint(text):
        shown = f"; try tcp://{text}" if is_endpoint(f"tcp://{text}") else ""
        raise ConfigError(f"{name} {text!r} cannot be connected to: expected tcp://HOST:PORT{shown}")


async def _tail(config: SubscriberConfig, count: int | None, *, as_json: bool) -> None:
    printer = _Printer(count, as_json=as_json)
    subscriber = ZmqEventSubscriber(config, printer, SystemClock())
    running = asyncio.create_task(subscriber.run())
    done = asyncio.create_task(printer.done.wait())
    quiet = asyncio.create_task(_tell_when_quiet(config, subscriber.counters))
    await asyncio.wait({running, done}, return_when=asyncio.FIRST_COMPLETED)
    subscriber.close()
    done.cancel()
    quiet.cancel()
    await running


async def _tell_when_quiet(config: SubscriberConfig, counters: StreamCounters) -> None:
    """Say once what an empty screen means."""
    await asyncio.sleep(_QUIET_S)
    if counters.batches:
        return
    if not counters.connections:
        text = f"no connection to {config.endpoint} yet: does the engine bind there? Trying on"
    else:
        topic = f" of topic {config.topic!r}" if config.topic else ""
        text = f"connected to {config.endpoint}, waiting: no batch{topic} yet. Engines publish when their cache changes"
    click.echo(f"kvatlas: {text}", err=True)


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
            self._line({"seq": seq, "error": error.message}, f"batch {seq}  {error.message}")
        else:
            batch = decoded.batch
            rank = "-" if batch.data_parallel_rank is None else batch.data_parallel_rank
            head = f"{wall_time(batch.ts)}  batch {seq}  rank {rank}"
            for event in batch.events:
                self._line(
                    {"seq": seq, "ts": batch.ts, "rank": batch.data_parallel_rank, "event": event},
                    f"{head}  {describe_event(event)}",
                )
            for bad in decoded.malformed:
                self._line({"seq": seq, "error": bad.message}, f"{head}  {bad.message}")
            if not self._as_json and not batch.events and not decoded.malformed:
                click.echo(f"{head}  no event")
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self.done.set()

    def _line(self, record: dict[str, object], text: str) -> None:
        click.echo(msgspec.json.encode(record).decode() if self._as_json else text)
