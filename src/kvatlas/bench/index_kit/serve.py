"""Answers of a measuring process: one JSON line asks, one answers; what libraries print goes to stderr."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["answer_all", "serve"]


def serve(answer: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """Answer the commands on stdin, on what was stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer_all(answer, sys.stdin, answers)


def answer_all(answer: Callable[[dict[str, Any]], dict[str, float]], questions: TextIO, answers: TextIO) -> None:
    """Answer every line of a stream."""
    for line in questions:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
