"""Predictions held against what engines report: the proof of everything else."""

from dataclasses import dataclass

__all__ = ["PredictionAudit"]


@dataclass(slots=True)
class PredictionAudit:
    """Predicted against reported `cached_tokens` of one worker. Counters only grow."""

    compared: int = 0
    equal: int = 0
    over: int = 0
    """The index claimed more than the engine had."""
    under: int = 0
    unreported: int = 0
    """Promises that could not be checked: the answer carried no count (e.g. a stream without `include_usage`)."""
    parity_mismatches: int = 0
    """Answers whose `usage.prompt_tokens` is not our own count: another template or tokenizer than the engine's."""
    predicted_tokens: int = 0
    reported_tokens: int = 0

    def record(self, predicted_tokens: int, reported_tokens: int) -> None:
        """Compare one prediction, made when the request was sent, with the engine's own count."""
        self.compared += 1
        self.predicted_tokens += predicted_tokens
        self.reported_tokens += reported_tokens
        if predicted_tokens == reported_tokens:
            self.equal += 1
        elif predicted_tokens > reported_tokens:
            self.over += 1
        else:
            self.under += 1
