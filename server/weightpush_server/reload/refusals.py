"""Models that cannot be reloaded, told before anything is touched."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload.layout import ModelLayout, find_layout, on_meta
from weightpush_server.reload.opening import find_places


def check_reloadable(model: nn.Module) -> None:
    """Return if ``model`` can be reloaded; changes nothing.

    Raises:
        WeightPushError: LAYOUT_UNKNOWN where no cold start was recorded or its checkpoint is unknown; RELOAD_REFUSED
            for online quantization, weights without storage, and layers whose quantization method was exchanged.
    """
    layout = find_layout(model)
    if layout is None or layout.settled is None:
        raise WeightPushError(
            ErrorCode.LAYOUT_UNKNOWN,
            "the cold start of this model was not recorded; start the server with --load-format weightpush",
        )
    if layout.checkpoint is None:
        raise WeightPushError(
            ErrorCode.LAYOUT_UNKNOWN,
            "the tensors of this model's checkpoint are unknown: it was started on dummy weights, and its directory "
            "holds no safetensors file that lists them. Start from a directory with a checkpoint",
        )
    for path, module in model.named_modules():
        _check_quantization(path, getattr(module, "quant_method", None))
    _check_storage(model, layout)
    for path, module, recorded in layout.quant_methods:
        found = type(getattr(module, "quant_method", None))
        if found is not recorded:
            raise _refused(path, f"its quantization method was {recorded.__name__} and is {found.__name__} now")
    for group, place in zip(layout.groups, find_places(layout.groups), strict=True):
        if place is None and group.kept is None and len(group.required) < group.nbytes:
            raise _refused(group.name, "it was exchanged since the start, and the checkpoint brings only a part of it")


def _check_quantization(path: str, method: object) -> None:
    config = getattr(method, "quant_config", None)
    nested = getattr(config, "online_quantization_config", None)
    online = (
        getattr(method, "uses_meta_device", False)
        or isinstance(method, (OnlineLinearBase, OnlineMoEMethodBase))
        or isinstance(config, OnlineQuantizationConfig)
        or isinstance(nested, OnlineQuantizationConfig)
    )
    if online:
        # Post-load processing would quantize bytes that are quantized already.
        raise _refused(path, f"it is quantized while loading ({type(method).__name__}), which is not supported yet")


def _check_storage(model: nn.Module, layout: ModelLayout) -> None:
    for path in sorted(layout.on_meta | on_meta(model) - layout.absent):
        raise _refused(path, "it has no storage (meta device)")


def _refused(name: str, reason: str) -> WeightPushError:
    return WeightPushError(
        ErrorCode.RELOAD_REFUSED,
        f"{name or 'the model'!r} cannot be reloaded: {reason}. Restart the server to change its weights",
        details={"offender": name},
    )
