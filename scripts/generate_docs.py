"""Write the generated tables of docs/: commands, settings, metrics, errors. `--check` only says what is stale.

A table stands between `<!-- generated NAME -->` and `<!-- end -->`; everything around it is written by hand.
"""

import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
from click.testing import CliRunner

from kvatlas import errors
from kvatlas.admin import METRICS
from kvatlas.cli.main import COMMANDS, cli
from kvatlas.config import ServeConfig, WorkerConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- generated (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table(struct: type[msgspec.Struct]) -> str:
    """Name, type, default and meaning of every field."""
    hints = typing.get_type_hints(struct, include_extras=True)
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{field.name}` | {_type_name(hints[field.name])} | {_default(field)} | {_meaning(hints[field.name])} |"
        for field in msgspec.structs.fields(struct)
    ]
    return "\n".join(rows) + "\n"


def metrics_table() -> str:
    """Every metric of the admin port."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.help} |" for m in METRICS]
    return "\n".join(rows) + "\n"


def errors_table() -> str:
    """Every error class with its code and HTTP status."""
    rows = ["| code | HTTP status | class | meaning |", "|---|---|---|---|"]
    for name in errors.__all__:
        cls = getattr(errors, name)
        if not isinstance(cls, type):
            continue
        rows.append(f"| `{cls.code}` | {cls.http_status} | `{name}` | {(cls.__doc__ or '').strip().splitlines()[0]} |")
    return "\n".join(rows) + "\n"


def commands_help() -> str:
    """`--help` of every command, in order."""
    parts = []
    for path, command in _walk_commands():
        context = click.Context(
            command, info_name=" ".join(["kvatlas", *path]), terminal_width=100, help_option_names=["-h", "--help"]
        )
        parts.append(f"### kvatlas {' '.join(path)}\n\n```\n{command.get_help(context).strip()}\n```\n")
    return "\n" + "\n".join(parts) + "\n"


def cache_trace() -> str:
    """The picture of `kvatlas sim --trace-cache`, as it is printed."""
    printed = CliRunner().invoke(cli, ["sim", "--trace-cache"], catch_exceptions=False).output
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return f"\n```\n{lines}\n```\n\n"


TABLES: dict[str, Callable[[], str]] = {
    "serve_settings": lambda: settings_table(ServeConfig),
    "worker_settings": lambda: settings_table(WorkerConfig),
    "metrics": metrics_table,
    "errors": errors_table,
    "commands": commands_help,
    "cache_trace": cache_trace,
}


def render(text: str) -> str:
    """A page with its generated blocks made anew."""

    def fill(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]]() + match[3]

    return _BLOCK.sub(fill, text)


def stale_pages() -> list[Path]:
    """Pages whose generated blocks are not what the code says now."""
    return [page for page in sorted(DOCS.glob("*.md")) if render(page.read_text()) != page.read_text()]


def _walk_commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if command is None:
            raise LookupError(f"command {name} is listed and cannot be found")
        yield (name,), command
        if isinstance(command, click.Group):
            for sub_name, sub in command.commands.items():
                yield (name, sub_name), sub


def _type_name(hint: object) -> str:
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    args = typing.get_args(hint)
    if type(None) in args:
        return " or ".join(_type_name(arg) for arg in args if arg is not type(None)) + ", optional"
    if typing.get_origin(hint) in (tuple, list):
        return f"list of {_type_name(args[0])}"
    if typing.get_origin(hint) is dict:
        return f"map {_type_name(args[0])} -> {_type_name(args[1])}"
    return getattr(hint, "__name__", str(hint))


def _meaning(hint: object) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        for meta in reversed(typing.get_args(hint)[1:]):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
        return _meaning(typing.get_args(hint)[0])
    return ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    return "-" if field.default in (None, (), "") else f"`{field.default}`"


def main() -> int:
    """Write stale pages, or with `--check` name them and return 1."""
    stale = stale_pages()
    for page in stale:
        if "--check" in sys.argv:
            print(f"{page.name} is stale: run scripts/generate_docs.py")  # noqa: T201 - a script talks
        else:
            page.write_text(render(page.read_text()))
            print(f"{page.name} written")  # noqa: T201 - a script talks
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
