"""Batches in the order they came, those that follow one another by number together."""

from typing import TypeAlias

__all__ = ["Run", "append_batch"]

Run: TypeAlias = tuple[int, list[bytes]]
"""The number of the first batch, and the payloads of all, numbered from there on without a hole."""


def append_batch(runs: list[Run], seq: int, payload: bytes) -> None:
    """Add the batch that came next: to the last run if it continues it, else as a run of its own. O(1)."""
    if runs:
        first_seq, payloads = runs[-1]
        if seq == first_seq + len(payloads):
            payloads.append(payload)
            return
    runs.append((seq, [payload]))
