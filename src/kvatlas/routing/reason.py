"""Why a worker was chosen, in one sentence for a person; made when somebody asks, from what a decision keeps."""

from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate

__all__ = ["reason_of", "reason_without_index"]


def reason_of(
    prompt_tokens: int,
    candidates: Sequence[Candidate],
    scores: Sequence[float],
    score_unit: str,
    best: int,
    *,
    alone: bool,
) -> str:
    """What the chosen worker has, or why the longest match lost.

    Args:
        candidates: the chosen one and the longest match at least.
        scores: theirs.
        best: which of them was chosen.
        alone: it was the only one.
    """
    chosen = candidates[best]
    if alone:
        return f"{chosen.worker_id} is the only eligible worker"
    longest = max(range(len(candidates)), key=lambda index: (candidates[index].believed_tokens, index == best))
    match = candidates[longest]
    if match.believed_tokens == 0:
        return f"no worker holds this prefix; {chosen.worker_id} has the best place ({_load(chosen)})"
    if chosen.believed_tokens == match.believed_tokens:
        return f"{chosen.worker_id} holds {chosen.hit_tokens} of {prompt_tokens} tokens, no worker holds more"
    doubt = f" at confidence {match.confidence:.2f}" if match.confidence < 1.0 else ""
    return (
        f"{match.worker_id} holds {match.hit_tokens} of {prompt_tokens} tokens{doubt} and lost: it scores "
        f"{scores[longest]:.4g} {score_unit} ({_load(match)}) against "
        f"{scores[best]:.4g} {score_unit} of {chosen.worker_id}, "
        f"which holds {chosen.hit_tokens} ({_load(chosen)})"
    )


def reason_without_index(why: str, chosen: Candidate) -> str:
    """The same for a request whose hits are not known."""
    return f"routed without the index ({why}); {chosen.worker_id} has {_load(chosen)}"


def _load(candidate: Candidate) -> str:
    return (
        f"{candidate.queued_prefill_tokens} tokens queued, {candidate.running_requests} running, "
        f"{candidate.waiting_requests} waiting"
    )
