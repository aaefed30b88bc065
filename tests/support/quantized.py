"""Tiny checkpoints in the quantized formats of real ones, rounded by hand from a dense random checkpoint.

Each scheme replaces the weight of every linear layer by the tensors that its format has, and says so in
``config.json``. Embeddings, norms, routers and the head stay dense, as published checkpoints have them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from support.tiny import tiny_model

#: Wide enough for blocks of 128 in every projection, also the smallest one.
_DENSE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": _DENSE,
    "qwen3_moe": {
        **_DENSE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
_GROUP: Final = 64
_BLOCK: Final = 128
#: Order in which AWQ packs eight values into a word.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def quantized_checkpoint(model_type: str, scheme: str, seed: int, root: Path) -> Path:
    """Return the directory of a ``model_type`` checkpoint in ``scheme``, made below ``root`` on the first call."""
    target = root / f"{model_type}-{scheme}-{seed}"
    if target.is_dir():
        return target
    dense = root / f"{model_type}-dense-{seed}"
    if not dense.is_dir():
        tiny_model().make_tiny_checkpoint(dense, config=MODELS[model_type], model_type=model_type, seed=seed)
    quantize, config = SCHEMES[scheme]
    building = root / f".{target.name}"
    shutil.copytree(dense, building)
    tensors: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if ".layers." in name and tensor.ndim == 2 and not name.endswith(".gate.weight"):
            prefix = name.removesuffix("weight")
            # Inputs of norms have unit scale; a static scale is made to differ from layer to layer.
            generator = torch.Generator().manual_seed(seed * 1000 + len(tensors))
            spread = 0.03 + 0.03 * torch.rand(1, generator=generator)
            tensors |= {prefix + part: value.contiguous() for part, value in quantize(tensor.float(), spread)}
        else:
            tensors[name] = tensor
    if scheme.endswith("_kv"):
        for layer in range(MODELS[model_type]["num_hidden_layers"]):
            for number, part in enumerate(("k_scale", "v_scale")):
                value = torch.tensor(0.02 * (1 + seed + layer + number))
                tensors[f"model.layers.{layer}.self_attn.{part}"] = value
    save_file(tensors, building / "model.safetensors", {"format": "pt"})
    if scheme == "awq" and model_type != "llama":
        # AWQ names what it leaves alone by substrings, and this one would also fit gate_up_proj.
        config = {**config, "modules_to_not_convert": ["mlp.gate"]}
    settings = json.loads((dense / "config.json").read_text())
    (building / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    building.rename(target)
    return target


Parts = Iterator[tuple[str, torch.Tensor]]
Quantize = Callable[[torch.Tensor, torch.Tensor], Parts]


def _int8(*, static: bool, symmetric: bool) -> Quantize:
    def quantize(weight: torch.Tensor, spread: torch.Tensor) -> Parts:
        scale = weight.abs().amax(1, keepdim=True) / 127
        yield "weight", (weight / scale).round().to(torch.int8)
        yield "weight_scale", scale
        if static:
            yield "input_scale", spread
            if not symmetric:
                yield "input_zero_point", torch.tensor([int(spread * 200) - 9], dtype=torch.int8)

    return quantize


def _groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 4-bit values from -8 to 7 ``[out, in]`` and scales ``[out, in / group]``."""
    grouped = weight.view(weight.shape[0], -1, _GROUP)
    scale = grouped.abs().amax(2) / 7
    return (grouped / scale[..., None]).round().clamp(-8, 7).view_as(weight).to(torch.int64), scale


def _pack(values: torch.Tensor) -> torch.Tensor:
    """Pack eight 4-bit values of the last dimension into an int32 word, the first in the lowest bits."""
    words = values.reshape(*values.shape[:-1], -1, 8) << (4 * torch.arange(8))
    packed = words.sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _w4a16(weight: torch.Tensor, spread: torch.Tensor) -> Parts:
    values, scale = _groups(weight)
    yield "weight_packed", _pack(values + 8)
    yield "weight_scale", scale.to(torch.bfloat16)
    yield "weight_shape", torch.tensor(weight.shape, dtype=torch.int64)


def _awq(weight: torch.Tensor, spread: torch.Tensor) -> Parts:
    values, scale = _groups(weight)
    order = torch.tensor([8 * start + lane for start in range(weight.shape[0] // 8) for lane in _AWQ_ORDER])
    zeros = torch.full((scale.shape[1], weight.shape[0]), 8)
    yield "qweight", _pack((values + 8).T[:, order])
    yield "qzeros", _pack(zeros[:, order])
    yield "scales", scale.T.to(torch.float16)


def _gptq(weight: torch.Tensor, spread: torch.Tensor) -> Parts:
    values, scale = _groups(weight)
    yield "qweight", _pack(values + 8).T
    yield "qzeros", _pack(torch.full((scale.shape[1], weight.shape[0]), 7))
    yield "scales", scale.T.to(torch.float16)
    yield "g_idx", (torch.arange(weight.shape[1]) // _GROUP).to(torch.int32)


def _fp8_block(weight: torch.Tensor, spread: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    blocks = weight.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    yield "weight", (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    yield "weight_scale_inv", scale


def _compressed(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def _int8_config(*, static: bool, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    strategy = "tensor" if static else "token"
    inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": not static}
    return _compressed("int-quantized", weights, inputs)


def _with_kv_cache(config: dict[str, Any]) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return {**config, "kv_cache_scheme": scheme}


_W4: Final = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
_FP8: Final = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}

#: How weights are rounded, and the ``quantization_config`` that tells it. ``_kv`` brings scales of the cache, which
#: needs ``kv_cache_dtype="fp8"``; ``_kv_unscaled`` has that cache and leaves its scales to vLLM.
SCHEMES: Final[dict[str, tuple[Quantize, dict[str, Any]]]] = {
    "int8_dynamic": (_int8(static=False, symmetric=True), _int8_config(static=False, symmetric=True)),
    "int8_dynamic_asymmetric": (_int8(static=False, symmetric=False), _int8_config(static=False, symmetric=False)),
    "int8_kv": (
        _int8(static=False, symmetric=True),
        _with_kv_cache(_int8_config(static=False, symmetric=True)),
    ),
    "int8_kv_unscaled": (
        _int8(static=False, symmetric=True),
        _with_kv_cache(_int8_config(static=False, symmetric=True)),
    ),
    "int8_static": (_int8(static=True, symmetric=True), _int8_config(static=True, symmetric=True)),
    "int8_static_asymmetric": (_int8(static=True, symmetric=False), _int8_config(static=True, symmetric=False)),
    "w4a16": (_w4a16, _compressed("pack-quantized", {**_W4, "dynamic": False}, None)),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
            "modules_in_block_to_quantize": None,
            "dynamic": {r"-:.*mlp\.gate$": {}},
        },
    ),
    "fp8_block": (_fp8_block, {**_FP8, "ignored_layers": []}),
    "fp8_block_kv": (_fp8_block, {**_FP8, "ignored_layers": []}),
}
