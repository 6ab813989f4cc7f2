"""Write the weights and config of a two-layer Qwen2 model that vLLM serves on a CPU within seconds.

    .venv-real/bin/python tests/support/make_tiny_vllm_model.py DIRECTORY [--vocab-size 1000] [--seed 0]

Runs with the Python that has torch and safetensors, not with kvatlas's own: the tokenizer of the same folder is written by
`kvatlas.rendering.write_tiny_model` in a step of its own. The weights are random but seeded: the text means nothing, the KV cache
does exactly what it does for a large model.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN = 256
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
MLP = 512
MAX_POSITIONS = 32_768
WEIGHT_SCALE = 0.05


def config(vocab_size: int) -> dict[str, object]:
    """The Hugging Face config of the model; no end-of-sequence id, so the tokenizer's alone decides."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def weights(vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Seeded normal weights under the names Qwen2 checkpoints use."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * WEIGHT_SCALE).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = ones(HIDDEN)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones(HIDDEN)
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = normal(rows, HIDDEN)
            tensors[f"{prefix}.self_attn.{name}.bias"] = normal(rows)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = normal(HIDDEN, query)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = normal(MLP, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = normal(MLP, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = normal(HIDDEN, MLP)
    return tensors


def main() -> None:
    """Write `config.json` and `model.safetensors` into the folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(options.vocab_size, options.seed), options.directory / "model.safetensors", {"format": "pt"})
    (options.directory / "config.json").write_text(json.dumps(config(options.vocab_size), indent=2) + "\n")


if __name__ == "__main__":
    main()
