"""A request as the prefix cache sees it: tokens, the hashes of their complete blocks, how far it has been computed."""

from collections.abc import Sequence
from enum import Enum, auto

from kvatlas.hashing import NO_EXTRAS, RequestExtras, VllmHasher

__all__ = ["ReportMode", "Request", "RequestStatus"]


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class ReportMode(Enum):
    """What a lookup publishes: nothing, or the whole chain it hit. Value = the wire's `kv_cache_report_mode`."""

    INCREMENTAL = "incremental"
    FULL = "full"


class Request:
    """Tokens and block hashes of one request. `len(block_hashes) == num_tokens // hash_block_size` at all times.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: the prompt; copied.
        hasher: hashes complete blocks, None when nothing is cached.
        hash_block_size: tokens in a hashed block.
        extras: LoRA, images, salt, embeddings.
        skip_reading_prefix_cache: compute everything (prompt logprobs); its blocks are still cached for others.
        report_mode: a `ReportMode` or its wire text.
        priority: lower runs first (for a scheduler).
        arrival_s: when it came, on the scheduler's clock.
        max_tokens: output limit (for a scheduler), None = no limit.

    Attributes:
        num_computed_tokens: tokens whose KV is, or will be after the scheduled steps, in the request's blocks.
        num_in_flight_tokens: of those, tokens of steps still running: blocks they read must not be freed yet.
        shared_prefix_boundary: length of a prefix others share, worth caching at; 0 = none.
        num_encoder_tokens: length of the encoder's input, for cross attention.
        lora_id, session_id: passed on in events, never hashed.

    Raises:
        HashingError: token ids that cannot be hashed.
    """

    __slots__ = (
        "_hash_block_size", "_hasher", "all_token_ids", "arrival_s", "block_hashes", "extras", "lora_id",
        "max_tokens", "num_computed_tokens", "num_encoder_tokens", "num_in_flight_tokens", "num_preemptions",
        "num_prompt_tokens",
        "priority", "report_mode", "request_id", "session_id", "shared_prefix_boundary", "skip_reading_prefix_cache",
        "status",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - the one record that gathers what a client said; everything after extras is optional
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        hasher: VllmHasher | None,
        hash_block_size: int,
        *,
        extras: RequestExtras = NO_EXTRAS,
        skip_reading_prefix_cache: bool = False,
        report_mode: ReportMode | str = ReportMode.INCREMENTAL,
        priority: int = 0,
        arrival_s: float = 0.0,
        max_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.extras = extras
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.report_mode = ReportMode(report_mode)
        self.priority = priority
        self.arrival_s = arrival_s
        self.max_tokens = max_tokens
        self.lora_id: int | None = None
        self.session_id: str | None = None
        self.status = RequestStatus.WAITING
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_encoder_tokens = 0
        self.shared_prefix_boundary = 0
        self.block_hashes: list[bytes] = []
        self._hasher = hasher
        self._hash_block_size = hash_block_size
        self._hash_complete_blocks()

    @property
    def num_tokens(self) -> int:
        """Prompt and accepted output tokens; drafts and placeholders are not counted."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Accepted output tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter, None for the base model."""
        return self.extras.lora.name if self.extras.lora is not None else None

    def append_output(self, token_ids: int | Sequence[int]) -> None:
        """Accept output tokens and hash the blocks they complete. O(new tokens).

        Raises:
            HashingError: token ids that cannot be hashed.
        """
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
        else:
            self.all_token_ids.extend(token_ids)
        self._hash_complete_blocks()

    def _hash_complete_blocks(self) -> None:
        size = self._hash_block_size
        if self._hasher is None or len(self.all_token_ids) < (len(self.block_hashes) + 1) * size:
            return
        self.block_hashes += self._hasher.extend_chain(self.block_hashes, self.all_token_ids, size, extras=self.extras)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.num_computed_tokens}/{self.num_tokens} tokens, {self.status.name})"
