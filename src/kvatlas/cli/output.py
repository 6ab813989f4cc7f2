"""How commands print: tables for people, one JSON document for programs."""

import sys
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table

__all__ = ["console", "print_json", "print_table"]

_PIPED_WIDTH = 200
"""Columns when nobody watches: nothing that is read by a program may be cut."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_json(value: object) -> None:
    """Write one JSON document with a newline to standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Write a table; the first `left` columns are text, all others are set right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
