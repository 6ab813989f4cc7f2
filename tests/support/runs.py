"""Runs of batches, the naive way."""

__all__ = ["batches_of", "runs_of"]


def runs_of(batches: list[tuple[int, bytes]]) -> list[tuple[int, list[bytes]]]:
    """Batches that follow one another by number, together. Nothing follows the last number there is."""
    runs: list[tuple[int, list[bytes]]] = []
    for number, payload in batches:
        if runs and number == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(payload)
        else:
            runs.append((number, [payload]))
    return runs


def batches_of(runs: list[tuple[int, list[bytes]]]) -> list[tuple[int, bytes]]:
    """Numbers and payloads, one by one."""
    return [(first + place, payload) for first, payloads in runs for place, payload in enumerate(payloads)]
