"""Tiny random LoRA adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from support.engine import read

RANK: Final = 8
_TARGETS: Final = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(base: Path, directory: Path, *, seed: int) -> Path:
    """Write an adapter for the projections of the checkpoint ``base``, strong enough to change answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in read(base):
        module = name.removesuffix(".weight")
        if module.endswith(_TARGETS):
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 2
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(_TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
