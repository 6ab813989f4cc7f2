"""Where a later request can resume: the prefix lengths whose blocks and states are worth keeping."""

__all__ = ["checkpoint_position", "replay_boundaries"]


def replay_boundaries(num_prompt_tokens: int, scheduler_block_size: int, *, use_eagle: bool) -> list[int]:
    """Return the prefix lengths at which a request that starts with this prompt can resume, ascending.

    Without a draft model that is the whole prompt but its last token. With one, the resend of the prompt and a longer
    prompt end on different blocks when the prompt ends with a block, and both give one block up.

    Source: vLLM 0.32.0 kv_cache_coordinator.replay_boundaries.
    """
    if not use_eagle:
        return [num_prompt_tokens - 1]
    resend, extension = ((tokens // scheduler_block_size - 1) * scheduler_block_size
                         for tokens in (num_prompt_tokens - 1, num_prompt_tokens))  # fmt: skip
    return sorted({max(resend, 0), max(extension, 0)})


def checkpoint_position(num_tokens: int, hash_block_size: int, *, gives_up: bool) -> int:
    """Return the longest prefix of a prompt whose state a resend can use; 0 = none.

    A resend computes the last token again. With a draft model it gives one hashed block up instead.

    Source: vLLM 0.32.0 kv_cache_interface.get_mamba_prefill_checkpoint_position.
    """
    limit = num_tokens if gives_up else num_tokens - 1
    position = limit // hash_block_size * hash_block_size
    return max(0, position - hash_block_size if gives_up else position)
