"""Checkpoints that are quantized already are pushed in their own format, and end where a cold start ends, bit for bit.

Post-load processing of quantized layers consumes scales, packs weights into native handles and keeps raw pointers; the
cold start is the oracle as in ``test_reload_engine``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine import engine, push, read, snapshot
from support.quantized import quantized_checkpoint
from support.tiny import checkpoint
from weightpush_protocol.errors import WeightPushError
from weightpush_server.reload import check_reloadable
from weightpush_server.reload.fingerprint import fingerprint

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels for this format need a CPU with AMX tiles"
)


pytestmark = pytest.mark.usefixtures("in_process")


def _round_trip(model_type: str, scheme: str, root: Path, **options: Any) -> None:
    directories = {seed: quantized_checkpoint(model_type, scheme, seed, root) for seed in (1, 2)}
    if "_kv" in scheme:
        options["kv_cache_dtype"] = "fp8"
    with engine(directories[2], **options) as started:
        cold_b = snapshot(started)
    a, b = read(directories[1]), read(directories[2])
    with engine(directories[1], **options) as live:
        cold_a = snapshot(live)
        assert cold_a.tokens != cold_b.tokens
        scales = [name for name in cold_a.differing(cold_b) if name.endswith("attn._k_scale")]
        assert len(scales) == (2 if scheme.endswith("_kv") else 0)
        one_each = [[pair] for pair in b]
        for tensors, cold, cuts in ((b, cold_b, None), (a, cold_a, None), (a, cold_a, None), (b, cold_b, one_each)):
            assert push(live, tensors, cuts=cuts).tensors == len(tensors)
            found = snapshot(live)
            assert found.differing(cold) == []
            assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)


@pytest.mark.case("C29", "C31", "C32", "C39")
@pytest.mark.parametrize(
    "scheme",
    [
        "int8_dynamic",
        "int8_static_asymmetric",
        "w4a16",
        "awq",
        "gptq",
        "int8_kv",
        "int8_kv_unscaled",
        pytest.param("int8_dynamic_asymmetric", marks=pytest.mark.slow),
        pytest.param("int8_static", marks=pytest.mark.slow),
        pytest.param("fp8_block", marks=needs_amx),
        pytest.param("fp8_block_kv", marks=[needs_amx, pytest.mark.slow]),
    ],
)
def test_a_dense_model(scheme: str, root: Path) -> None:
    _round_trip("llama", scheme, root)


@needs_amx
@pytest.mark.case("C31", "C51", "C91")
@pytest.mark.parametrize("scheme", ["int8_dynamic", "awq", "gptq", "fp8_block"])
def test_a_model_with_experts(scheme: str, root: Path) -> None:
    _round_trip("qwen3_moe", scheme, root)


@needs_amx
@pytest.mark.case("C95")
def test_what_is_quantized_while_loading_is_refused_untouched(root: Path) -> None:
    with engine(checkpoint("qwen3_moe", 1, root), quantization="int8_per_channel_weight_only") as live:
        before = fingerprint(live.model)
        with pytest.raises(WeightPushError, match="quantized while loading"):
            check_reloadable(live.model)
        assert fingerprint(live.model) == before


@pytest.mark.case("C95")
def test_online_quantization_that_quantizes_nothing_is_no_reason_to_refuse(root: Path) -> None:
    """On CPU this scheme leaves dense layers alone, so the model is an ordinary one."""
    a, b = checkpoint("qwen3", 1, root), checkpoint("qwen3", 2, root)
    with engine(b, quantization="int8_per_channel_weight_only") as started:
        cold_b = snapshot(started)
    with engine(a, quantization="int8_per_channel_weight_only") as live:
        push(live, read(b))
        assert snapshot(live).differing(cold_b) == []


@pytest.mark.case("C27")
def test_scales_are_not_left_out(root: Path) -> None:
    """A push without one scale is not complete, whatever the scale had become by processing."""
    a, b = (quantized_checkpoint("llama", "int8_static_asymmetric", seed, root) for seed in (1, 2))
    missing = "model.layers.1.mlp.down_proj.input_scale"
    with engine(a) as live:
        with pytest.raises(WeightPushError) as caught:
            push(live, [pair for pair in read(b) if pair[0] != missing])
        assert caught.value.details["tensor"] == missing
        push(live, read(b))
