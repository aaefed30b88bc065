"""The models that are measured: random weights in the layouts of real architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

#: Beside which the tokenizer of the examples has 98 tokens; the rest of the embedding is never looked up.
_VOCABULARY: Final = 98


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the benchmark: ``key`` names it in results, ``what`` describes it in one line."""

    key: str
    what: str
    model_type: str
    config: Mapping[str, Any] = field(repr=False)


def _common(hidden: int, layers: int, *, heads: int, head_dim: int, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def dense(key: str, what: str, *, hidden: int, layers: int, intermediate: int, vocabulary: int = _VOCABULARY) -> Model:
    """Return a dense model: Qwen3 with untied embeddings, since vLLM's own reload is wrong on tied ones."""
    common = _common(hidden, layers, heads=max(1, hidden // 64), head_dim=128, vocabulary=vocabulary)
    return Model(key, what, "qwen3", {**common, "intermediate_size": intermediate})


def moe(key: str, what: str, *, hidden: int, layers: int, experts: int, expert_width: int) -> Model:
    """Return a mixture of experts, Qwen3-MoE: three tensors an expert and layer."""
    common = _common(hidden, layers, heads=max(1, hidden // 64), head_dim=64, vocabulary=_VOCABULARY)
    return Model(
        key,
        what,
        "qwen3_moe",
        {
            **common,
            "intermediate_size": expert_width,
            "moe_intermediate_size": expert_width,
            "num_experts": experts,
            "num_experts_per_tok": 2,
        },
    )


#: What competitors are compared on.
COMPARED: Final = (
    dense("dense", "dense, Qwen3, 0.5 B parameters", hidden=1024, layers=28, intermediate=3072, vocabulary=32000),
    moe("moe", "mixture of experts, Qwen3-MoE, 128 experts", hidden=512, layers=8, experts=128, expert_width=128),
)
#: One architecture in four sizes: wider layers, the same tensors.
SIZES: Final = tuple(
    dense(f"bytes-{width}", f"dense, {width} wide", hidden=1024, layers=8, intermediate=width)
    for width in (512, 2048, 4608, 9728)
)
#: The same bytes in 100, 1,000, 5,000 and 20,000 tensors: more and smaller experts.
COUNTS: Final = tuple(
    moe(f"count-{experts}", f"{experts} experts of {width}", hidden=128, layers=4, experts=experts, expert_width=width)
    for experts, width in ((5, 10656), (80, 672), (416, 128), (1664, 32))
)
#: What several servers are pushed at once.
FLEET: Final = SIZES[0]
FLEET_SIZES: Final = (1, 2, 4)

#: What a partial push brings, by the beginnings of the names; of a model with eight layers.
PARTED: Final = SIZES[-1]
PARTS: Final = {
    "all of it": [""],
    "half of the layers": [f"model.layers.{number}." for number in range(4)],
    "one layer": ["model.layers.0."],
    "the attention of one layer": ["model.layers.0.self_attn."],
    "a norm": ["model.norm."],
}

#: The same ones, as small as they can be: to see that the command runs.
TINY_COMPARED: Final = (
    dense("dense", "dense, tiny", hidden=128, layers=2, intermediate=128),
    moe("moe", "mixture of experts, tiny", hidden=128, layers=2, experts=8, expert_width=32),
)


def make_model(model: Model, seed: int) -> torch.nn.Module:
    """Return ``model`` in bf16 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # Made by transformers' own initialisation: noise in matrices, ones in norms.
        made: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # of transformers
            AutoConfig.for_model(model.model_type, dtype="bfloat16", **model.config)
        )
    finally:
        torch.set_default_dtype(default)
    return made.eval()


def change_weights(model: torch.nn.Module) -> None:
    """Make other weights out of the model's own, in place and cheaply."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()


def save_model(model: torch.nn.Module, directory: Path) -> None:
    """Write a checkpoint that vLLM can be started on, tokenizer included."""
    from tiny_model import make_tokenizer

    model.save_pretrained(directory)  # type: ignore[operator]  # transformers' own, which is untyped
    make_tokenizer().save_pretrained(directory)
