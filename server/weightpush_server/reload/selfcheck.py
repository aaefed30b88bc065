"""Whether post-load processing of a model can be repeated: tried once, right after the cold start, before it serves.

The model is opened, gets the bytes that loading had put there, and is processed again: everything that it computes with
must be as it was. This finds, on models that nobody has looked at, what makes a second run differ from the first: a
guard that the journal does not see, a conversion that does not start from the checkpoint's bytes alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from vllm.config import VllmConfig

from weightpush_protocol.errors import WeightPushError
from weightpush_server.reload.contract import Contract
from weightpush_server.reload.fingerprint import TensorPrint, tensor_prints
from weightpush_server.reload.layout import ModelLayout, SelfCheck, SelfCheckOutcome
from weightpush_server.reload.memory import free_bytes
from weightpush_server.reload.postload import open_model, process
from weightpush_server.reload.seal import Seal
from weightpush_server.reload.storage import release_memory

#: Memory that must be free, in multiples of the weights: their copy, and the second result beside the first.
_ROOM: Final = 2


def has_room(model: nn.Module, device: torch.device) -> bool:
    """Whether there is memory for the self-check of a loaded ``model`` on ``device``."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *model.buffers()]
        if not tensor.is_meta
    }
    return _ROOM * sum(storages.values()) <= free_bytes(device)


def check_repeatable(
    model: nn.Module, layout: ModelLayout, *, vllm_config: VllmConfig, device: torch.device
) -> SelfCheck:
    """Process a freshly started ``model`` once more, from the copies of ``hold_loaded``, and compare; drop the copies.

    After a failure the model is not fit to serve: load it again.
    """
    prints, contract = tensor_prints(model), Contract.of(model, pin_devices=layout.pin_devices)
    try:
        opened = open_model(model, layout)
        opened.take_all()
        with torch.inference_mode(False), torch.no_grad():
            for group in layout.groups:
                if group.shadow is not None:
                    opened.take(group).bytes().copy_(group.shadow)
                    group.shadow = None
        process(model, layout, opened, vllm_config=vllm_config, device=device)
        contract.check(model)
    except WeightPushError as error:
        offender = str(error.details.get("tensor", error.details.get("offender", "")))
        reason = f"repeating its post-load processing failed: {error.message}"
        return SelfCheck(SelfCheckOutcome.FAILED, offender, reason)
    finally:
        for group in layout.groups:
            group.shadow = None
        release_memory(device)
    difference = _first_difference(prints, tensor_prints(model))
    if difference is not None:
        name, was, found = difference
        reason = f"repeating post-load processing changed it: it held {was} after the start, and {found} after that"
        return SelfCheck(SelfCheckOutcome.FAILED, name, reason)
    layout.is_open = False
    layout.seal = Seal(layout)
    return SelfCheck(SelfCheckOutcome.PASSED)


def _first_difference(
    before: dict[str, TensorPrint], after: dict[str, TensorPrint]
) -> tuple[str, TensorPrint | None, TensorPrint | None] | None:
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            return name, before.get(name), after.get(name)
    return None
