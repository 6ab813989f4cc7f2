"""Prompts of token ids for real engines, and what a gateway knows, promises and gets for them."""

import random
import urllib.request
from dataclasses import dataclass

from support.real_vllm import BLOCK_SIZE_TOKENS, MODEL_NAME, VOCAB_SIZE, RealVllm
from support.serve import Gateway, post_json

BLOCKS_PER_PROMPT = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt through the gateway.

    Attributes:
        sure_tokens: worker id -> what the index claimed without doubt, just before.
        predicted_tokens: the promise, None where there was none.
        cached_tokens: the engine's report.
    """

    worker: str
    sure_tokens: dict[str, int]
    predicted_tokens: int | None
    cached_tokens: int

    @property
    def is_overclaimed(self) -> bool:
        """Whether more was promised, or held for certain, than the engine reports."""
        return max(self.predicted_tokens or 0, self.sure_tokens[self.worker]) > self.cached_tokens


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids of the tiny vocabulary, its three special ones left out."""
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def make_prompts(seed: str, count: int, blocks: int = BLOCKS_PER_PROMPT) -> list[list[int]]:
    """Prompts that share nothing: whole blocks and five tokens more, so that all the blocks can be hit."""
    rng = random.Random(seed)
    return [random_tokens(rng, blocks * BLOCK_SIZE_TOKENS + 5) for _ in range(count)]


def send_direct(engine: RealVllm, prompts: list[list[int]]) -> list[int]:
    """Prompts to the engine itself, past the gateway; the cached tokens it reports of each."""
    reports = []
    for prompt in prompts:
        status, answer = engine.call("POST", "/v1/completions", _body(prompt))
        assert status == 200, answer
        reports.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return reports


def claimed_tokens(gateway: Gateway, prompt: list[int]) -> dict[str, int]:
    """What the index claims without doubt: worker id -> tokens."""
    status, _, answer = post_json(gateway.admin_url + "/api/index/query", {"token_ids": prompt})
    assert status == 200, answer
    return {worker: hit["hit_tokens"] for worker, hit in answer["workers"].items()}


def send(gateway: Gateway, prompt: list[int]) -> Answer:
    """One prompt through the gateway."""
    sure = claimed_tokens(gateway, prompt)
    status, headers, answer = post_json(gateway.base_url + "/v1/completions", _body(prompt))
    assert status == 200, answer
    predicted = headers.get("x-kvatlas-predicted-tokens")
    return Answer(
        worker=headers["x-kvatlas-worker"],
        sure_tokens=sure,
        predicted_tokens=None if predicted is None else int(predicted),
        cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def metric(gateway: Gateway, sample: str) -> float:
    """One sample of the gateway's metrics page, named as it stands there with its labels."""
    with urllib.request.urlopen(gateway.admin_url + "/metrics", timeout=10) as response:
        page = response.read().decode()
    for line in page.splitlines():
        if line.startswith(sample + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no sample {sample!r} in\n{page}")


def _body(prompt: list[int]) -> dict[str, object]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
