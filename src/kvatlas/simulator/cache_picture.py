"""A prefix cache as text: whose table holds which blocks, who is free in which order, and what can be found.

A block is a box with its number and the name of its content. Contents are named in the order they appear, A, B, C,
..., so that equal content has one name wherever it lies. Made for small pools; nothing is wider than 100 columns.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.prefix_cache import Block, KVCacheManager

__all__ = ["WIDTH", "ContentNames", "draw_cache"]

WIDTH = 100
_LABEL_WIDTH = 9
_ALPHABET = 26


class ContentNames:
    """Short names for block hashes: A to Z, then A1 to Z1, and so on."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    def name(self, digest: bytes) -> str:
        """The name of a content, a new one if it has none."""
        if digest not in self._names:
            turn, letter = divmod(len(self._names), _ALPHABET)
            self._names[digest] = chr(ord("A") + letter) + (str(turn) if turn else "")
        return self._names[digest]


@dataclass(frozen=True, slots=True)
class _Cell:
    """One block of a table: its number, "--" for a position that needs no memory, and its content's name."""

    number: str
    content: str

    @property
    def text(self) -> str:
        return f" {self.number} {self.content}".rstrip() + " "


def draw_cache(cache: KVCacheManager, request_ids: Sequence[str], names: ContentNames) -> list[str]:
    """Draw block tables, free queue and hash map.

    Args:
        cache: a small one.
        request_ids: whose tables to draw.
        names: of contents; those seen for the first time get one.

    Returns:
        Lines of at most `WIDTH` columns.

    Cost: O(blocks of the pool).
    """
    blocks: Sequence[Block] = cache._pool.blocks  # a picture shows what callers need not see
    groups = len(cache.config.groups)
    lines = []
    for request_id in request_ids:
        for group_id, table in enumerate(cache.block_ids(request_id)):
            if table:
                label = request_id if groups == 1 else f"{request_id}/{group_id}"
                lines += _boxes(label, [_cell(blocks[block_id], names) for block_id in table])
    free = [_cell(blocks[block_id], names).text.strip() for block_id in cache.free_block_ids()]
    lines += _row("free", " · ".join(free) or "nothing")
    for group_id in range(groups):
        label = "map" if groups == 1 else f"map/{group_id}"
        found: dict[str, list[str]] = {}
        for block in blocks:
            if block.digest is not None and block.group_id == group_id:
                found.setdefault(names.name(block.digest), []).append(str(block.block_id))
        entries = [f"{name}={'+'.join(numbers)}" for name, numbers in sorted(found.items(), key=_by_age)]
        lines += _row(label, "  ".join(entries) or "empty")
    return lines


def _by_age(entry: tuple[str, object]) -> tuple[int, str]:
    name = entry[0]
    return int(name[1:] or 0), name[0]


def _cell(block: Block, names: ContentNames) -> _Cell:
    if block.is_null:
        return _Cell("--", "")
    return _Cell(str(block.block_id), "" if block.digest is None else names.name(block.digest))


def _boxes(label: str, cells: Sequence[_Cell]) -> list[str]:
    """A table as boxes, in several rows when it is long."""
    lines: list[str] = []
    row: list[_Cell] = []
    width = _LABEL_WIDTH + 1
    for cell in (*cells, None):
        if cell is None or width + len(cell.text) + 1 > WIDTH:
            lines += _box_row("" if lines else label, row)
            row, width = [], _LABEL_WIDTH + 1
        if cell is not None:
            row.append(cell)
            width += len(cell.text) + 1
    return lines


def _box_row(label: str, cells: Sequence[_Cell]) -> list[str]:
    bars = ["─" * len(cell.text) for cell in cells]
    indent = " " * _LABEL_WIDTH
    return [
        f"{indent}┌{'┬'.join(bars)}┐",
        f"{label[: _LABEL_WIDTH - 1]:<{_LABEL_WIDTH}}│{'│'.join(cell.text for cell in cells)}│",
        f"{indent}└{'┴'.join(bars)}┘",
    ]


def _row(label: str, text: str) -> list[str]:
    """A labelled line, wrapped under itself."""
    wrapped = textwrap.wrap(text, WIDTH - _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
    indents = [f"{label:<{_LABEL_WIDTH}}", *[" " * _LABEL_WIDTH] * len(wrapped)]
    return [indent + line for indent, line in zip(indents, wrapped, strict=False)]
