"""Random requests, each as ours and as vLLM's, and where a scheduler would end their steps. Needs the Python that has vLLM."""

import random
from dataclasses import dataclass

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus as EngineStatus

from kvatlas.hashing import Lora, MultimodalItem, RequestExtras, VllmHasher
from kvatlas.prefix_cache import Request, RequestStatus
from support.prefix_cache_differential_setups import Setup

HASH_SEED = "0"
COMMON_PREFIX_TOKENS = 80
LORA = Lora("adapter", "/models/adapter")
LORA_ID = 3


@dataclass(eq=False)  # one request is one object, whatever it says
class Pair:
    """One request, as either side knows it. Whatever a scheduler changes is changed on both."""

    engine: EngineRequest
    ours: Request

    @property
    def name(self) -> str:
        """Its id."""
        return self.ours.request_id

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have still to be computed."""
        return self.ours.num_tokens - self.ours.num_computed_tokens

    def append(self, token_ids: list[int]) -> None:
        """Accept output tokens."""
        self.engine.append_output_token_ids(token_ids)
        self.ours.append_output(token_ids)

    def run(self, num_computed: int) -> None:
        """It was admitted."""
        self.set_computed(num_computed)
        self.engine.status, self.ours.status = EngineStatus.RUNNING, RequestStatus.RUNNING

    def preempt(self) -> None:
        """It lost its blocks and waits again."""
        self.set_computed(0)
        self.set_in_flight(0)
        self.engine.status, self.ours.status = EngineStatus.PREEMPTED, RequestStatus.PREEMPTED
        for side in (self.engine, self.ours):
            side.num_preemptions += 1

    def set_computed(self, num_tokens: int) -> None:
        """Its blocks hold, or will hold, so many tokens."""
        self.engine.num_computed_tokens = self.ours.num_computed_tokens = num_tokens

    def set_in_flight(self, num_tokens: int) -> None:
        """So many of them belong to steps that still run."""
        self.engine.num_in_flight_tokens = self.ours.num_in_flight_tokens = num_tokens

    def set_boundary(self, num_tokens: int) -> None:
        """A lookup saw a shared prefix of this length."""
        self.engine.shared_prefix_boundary = self.ours.shared_prefix_boundary = num_tokens


class RequestMaker:
    """Draws requests that share prefixes of one text, and differ in what else names their blocks."""

    def __init__(self, rng: random.Random, setup: Setup) -> None:
        self.rng = rng
        self._setup = setup
        self._text = [rng.randrange(5) for _ in range(COMMON_PREFIX_TOKENS)]
        self._count = 0
        init_none_hash(sha256_cbor)
        self._engine_hasher = get_request_block_hasher(setup.hash_block_size, sha256_cbor)
        self._hasher = VllmHasher("sha256_cbor", HASH_SEED)

    def draw(self) -> Pair:
        """The next request."""
        self._count += 1
        rng, limit = self.rng, self._setup.max_model_len
        own = self.tokens(rng.randint(1, 20))
        token_ids = (self._text[: rng.randint(0, min(COMMON_PREFIX_TOKENS, limit - 1))] + own)[:limit]
        extras = RequestExtras(
            LORA if rng.random() < 0.2 else None,
            self._images(len(token_ids)),
            rng.choice((None, None, None, None, "salt", "")),
        )
        return self._build(f"request{self._count}", token_ids, extras)

    def tokens(self, count: int) -> list[int]:
        """Tokens no prefix is likely to share."""
        return [self.rng.randrange(100) for _ in range(count)]

    def _images(self, num_tokens: int) -> tuple[MultimodalItem, ...]:
        """None for most requests, else up to three of a few images."""
        items, position = [], 0
        for _ in range(self.rng.randint(1, 3) if self.rng.random() < 0.2 else 0):
            offset, length = position + self.rng.randint(0, 6), self.rng.randint(1, 12)
            position = offset + length
            if position <= num_tokens:
                items.append(MultimodalItem(f"image{self.rng.randrange(3)}", offset, length))
        return tuple(items)

    def _build(self, name: str, token_ids: list[int], extras: RequestExtras) -> Pair:
        rng, caching = self.rng, self._setup.enable_caching
        full_report, skip_reading = rng.random() < 0.25, rng.random() < 0.1
        images = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=item.identifier,
                mm_position=PlaceholderRange(offset=item.offset_tokens, length=item.length_tokens),
            )
            for item in extras.multimodal
        ]
        engine = EngineRequest(
            name,
            list(token_ids),
            SamplingParams(
                max_tokens=50,
                extra_args={"kv_cache_report_mode": "full"} if full_report else None,
                prompt_logprobs=1 if skip_reading else None,
            ),
            None,
            mm_features=images or None,
            lora_request=LoRARequest(LORA.name, LORA_ID, LORA.path) if extras.lora else None,
            cache_salt=extras.cache_salt,
            block_hasher=self._engine_hasher if caching else None,
            session_id="session" if rng.random() < 0.2 else None,
        )
        ours = Request(
            name,
            token_ids,
            self._hasher if caching else None,
            self._setup.hash_block_size,
            extras=extras,
            skip_reading_prefix_cache=skip_reading,
            report_mode="full" if full_report else "incremental",
        )
        ours.lora_id = LORA_ID if extras.lora else None
        ours.session_id = engine.session_id
        ours.num_encoder_tokens = rng.choice((5, 9))
        return Pair(engine, ours)


@dataclass(frozen=True)
class StepEnds:
    """Where steps of a model with Mamba layers end: where a state is wanted. Other models end them anywhere.

    The managers take this for granted, so random ends would only meet their assertions.
    """

    setup: Setup
    partial_hits: bool

    def length(self, request: Request, start: int, wanted: int) -> int:
        """How many of the wanted tokens after `start` one step computes; 0 = it has to wait."""
        if not self.setup.mamba or self.setup.mamba[0].mode != "align":
            return wanted
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return min(wanted, 1)
        if not self.setup.enable_caching:
            return wanted
        size = max(spec.block_size for spec in self.setup.mamba)
        end = start + wanted
        exports = self._exports_state(start, end, prefill_end, size)
        if end < prefill_end:
            end = min(max(end // size, start // size + 1) * size, prefill_end)
        stops = [self._shared_stop(request, start, size)] if start < request.shared_prefix_boundary < end else []
        if not exports:
            stops += self._resume_stops(request, start, size)
        return min([stop for stop in stops if start < stop < end], default=end) - start

    def _exports_state(self, start: int, end: int, prefill_end: int, size: int) -> bool:
        """The step runs to the prompt's end, and the kernel can hand out the state at the last place to resume from."""
        alignment = self.setup.mamba[0].prefill_checkpoint_alignment
        if alignment is None or end < prefill_end:
            return False
        unit = self.setup.hash_block_size
        place = self._last_resumable(prefill_end, unit if self.partial_hits else size)
        spans_blocks = -(-end // size) - 2 > (start - 1) // size
        reachable = start % unit == 0 and start + unit <= place < end and (place - start) % alignment == 0
        return spans_blocks and reachable

    def _resume_stops(self, request: Request, start: int, size: int) -> list[int]:
        """The end of a block begun, and the last places of the text a resend can start from."""
        last_block = self._last_resumable(request.num_tokens, size)
        stops = [last_block]
        if start % size:
            stops.append((start // size + 1) * size)
        if self.partial_hits:
            tail = self._last_resumable(request.num_prompt_tokens, self.setup.hash_block_size)
            stops += [tail] if last_block < tail < request.num_prompt_tokens else []
        return stops

    def _shared_stop(self, request: Request, start: int, size: int) -> int:
        """Where others' prefix ends: exactly there if a state inside a block can be kept, else at the block before."""
        boundary = request.shared_prefix_boundary
        exact = self.setup.mamba_shared_prefix_checkpoint and self.partial_hits and self.setup.use_eagle
        if exact and boundary <= request.num_prompt_tokens:
            return boundary
        return start + (boundary - start) // size * size

    def _last_resumable(self, num_tokens: int, unit: int) -> int:
        """The longest prefix in whole units a resend can start from; a draft model gives one unit up."""
        if self.setup.use_eagle:
            return max(0, num_tokens // unit * unit - unit)
        return max(0, (num_tokens - 1) // unit * unit)
