"""Models and servers that cannot be reloaded, told before anything is touched. Each reason has a code of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.config import StoragePolicy
from weightpush_server.reload.coverage import ByteRanges, strided_ranges
from weightpush_server.reload.fingerprint import tensor_objects
from weightpush_server.reload.layout import (
    ModelLayout,
    SelfCheckOutcome,
    StorageGroup,
    find_layout,
    on_meta,
    registered_slots,
)
from weightpush_server.reload.opening import find_places, overlapping
from weightpush_server.reload.retention import first_lost


def check_reloadable(
    model: nn.Module,
    vllm_config: VllmConfig | None = None,
    *,
    planned: bool = False,
    objects: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Return if ``model`` can be reloaded under ``vllm_config``; changes nothing.

    ``planned``: a plan says where each tensor lands, so the checkpoint's own names need not be known. ``objects``: what
    ``tensor_objects`` finds, where that was asked already.

    Raises:
        WeightPushError: by its code:

            ======================  ===========================================================================
            layout_unknown          no cold start was recorded, or its checkpoint is unknown
            runtime_layout          the weights came processed already: no checkpoint layout was ever there
            online_quantization     processing would quantize bytes that are quantized
            self_check_failed       processing cannot be repeated on this model
            unrecorded_parameter    a checkpoint's name now leads to a parameter that was never recorded
            overlapping_storage     two weights share some of their bytes
            storage_unavailable     under ``strict``, a weight that has no storage of its own any more
            frozen_weights          compilation copies weights into its code (``max_autotune`` on a CPU)
            lora_with_moe           adapters over a mixture of experts
            kv_connector            a second tier of KV that would survive the update
            reload_refused          a weight on the meta device, an exchanged quantization method
            ======================  ===========================================================================
    """
    layout = _recorded(model, planned)
    if (online := quantized_online(model)) is not None:
        # Post-load processing would quantize bytes that are quantized already.
        reason = f"it is quantized while loading ({online[1]}), which is not supported yet"
        raise refusal(ErrorCode.ONLINE_QUANTIZATION, online[0], reason)
    if layout.self_check.outcome is SelfCheckOutcome.FAILED:
        check = layout.self_check
        raise refusal(ErrorCode.SELF_CHECK_FAILED, check.offender, check.reason)
    for path in sorted(layout.on_meta | on_meta(tensor_objects(model) if objects is None else objects) - layout.absent):
        raise refusal(ErrorCode.RELOAD_REFUSED, path, "it has no storage (meta device)")
    for path, module, recorded in layout.quant_methods:
        found = type(getattr(module, "quant_method", None))
        if found is not recorded:
            reason = f"its quantization method was {recorded.__name__} and is {found.__name__} now"
            raise refusal(ErrorCode.RELOAD_REFUSED, path, reason)
    _check_parameters(model, layout)
    _check_storage(layout)
    if vllm_config is not None:
        _check_configuration(vllm_config, layout)


def check_partial(
    layout: ModelLayout, covers: Callable[[StorageGroup], ByteRanges], untouched: Collection[int] = frozenset()
) -> None:
    """Return if an update that writes only what ``covers`` says can be exact; changes nothing.

    ``covers`` gives the bytes that will be written to a group, counted from the group's start. What is left out must
    still hold the bytes that post-load processing saw last, unless it is ``untouched``, by index: then the whole module
    is left out, and still is what processing made of it. Reads what is left out.

    Raises:
        WeightPushError: PARTIAL_REFUSED, naming the first tensor that is neither sent nor still there.
    """
    if layout.from_dummy:
        reason = "the server was started on dummy weights, and no complete update has come yet"
        raise _partial_refused("", f"{reason}. Push the complete checkpoint once")
    lost = first_lost(layout, covers, untouched)
    if lost is None:
        return
    if layout.policy is StoragePolicy.RETAIN:
        reason = "its checkpoint bytes are not at hand (an update failed half way, or none was complete yet)"
    else:
        reason = (
            "post-load processing converted it, so its checkpoint bytes are gone. Send all tensors of the modules that "
            "you send some of, or start the server with --storage-policy retain"
        )
    raise _partial_refused(lost[1], reason)


def _partial_refused(name: str, reason: str) -> WeightPushError:
    return WeightPushError(
        ErrorCode.PARTIAL_REFUSED,
        f"a partial update cannot leave out {name or 'anything'!r}: {reason}",
        details={"tensor": name},
    )


def check_awake(worker: object) -> None:
    """Raise ASLEEP if vLLM's sleep mode has taken the weights of ``worker``, a vLLM worker, away."""
    # The backend is made at the first sleep; on a platform without sleep mode it never is.
    backend = getattr(worker, "_sleep_mode_backend", None)
    if backend is not None and (state := backend.state()) != "RUNNING":
        raise WeightPushError(
            ErrorCode.ASLEEP,
            f"the engine sleeps ({state.lower()}), its weights are not in place: wake it up first, then push",
            details={"sleep_state": state},
        )


def check_draft(model: nn.Module, draft: object) -> None:
    """Refuse a server whose ``draft`` model shares a quantized output head with ``model``.

    An update writes the target alone. Where both run one head, the head's processed form must serve the draft too, and
    a quantized draft reads it by a scheme of its own.

    Raises:
        WeightPushError: DRAFT_SHARES_HEAD.
    """
    if not isinstance(draft, nn.Module) or draft is model:
        return  # Drafts by lookup have no model.
    shared = {id(module) for module in model.modules()} | {id(tensor) for _, tensor in registered_slots(model)}
    for path, module in draft.named_modules():
        if not isinstance(module, ParallelLMHead) or isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            continue
        if id(module) in shared or any(id(tensor) in shared for tensor in module.parameters()):
            raise refusal(
                ErrorCode.DRAFT_SHARES_HEAD,
                path,
                f"the draft model's head ({type(module.quant_method).__name__}) is the target's own. Start with a "
                "draft that has its own head, or one that is not quantized",
            )


def _recorded(model: nn.Module, planned: bool) -> ModelLayout:
    layout = find_layout(model)
    if layout is None or layout.settled is None:
        raise WeightPushError(
            ErrorCode.LAYOUT_UNKNOWN,
            "the cold start of this model was not recorded; start the server with --load-format weightpush",
        )
    if layout.preprocessed:
        raise refusal(
            ErrorCode.RUNTIME_LAYOUT,
            "",
            "its weights came in runtime layout (from a weight cache), so nobody knows their checkpoint layout",
        )
    if layout.checkpoint is None and not planned:
        raise WeightPushError(
            ErrorCode.LAYOUT_UNKNOWN,
            "the tensors of this model's checkpoint are unknown: it was started on dummy weights, and its directory "
            "holds no safetensors file that lists them. Start from a directory with a checkpoint",
        )
    return layout


def quantized_online(model: nn.Module) -> tuple[str, str] | None:
    """Return the first module that vLLM quantizes while loading, and the name of its method; None if there is none."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        config = getattr(method, "quant_config", None)
        nested = getattr(config, "online_quantization_config", None)
        if (
            getattr(method, "uses_meta_device", False)
            or isinstance(method, (OnlineLinearBase, OnlineMoEMethodBase))
            or isinstance(config, OnlineQuantizationConfig)
            or isinstance(nested, OnlineQuantizationConfig)
        ):
            return path, type(method).__name__
    return None


def _check_parameters(model: nn.Module, layout: ModelLayout) -> None:
    unowned: set[str] | None = None
    for slot, _ in registered_slots(model):
        owners = layout.owners.get(slot.full_name)
        if not slot.is_parameter:
            continue
        if owners is None:
            # Rarely needed, and as large as the checkpoint.
            unowned = {spec.name for spec in layout.checkpoint or ()} if unowned is None else unowned
            if slot.full_name not in unowned:
                continue
        # By identity: the name may lead to another module now.
        if all(owner is not slot.module for owner in owners or ()):
            reason = "it was registered after the cold start, so its checkpoint layout is unknown"
            raise refusal(ErrorCode.UNRECORDED_PARAMETER, slot.full_name, reason)


def _check_storage(layout: ModelLayout) -> None:
    for group in layout.groups:
        if (pair := _clashing(group)) is not None:
            reason = f"it shares some of its bytes with {pair[1]!r}, and the checkpoint brings both"
            raise refusal(ErrorCode.OVERLAPPING_STORAGE, pair[0], reason)
    if (groups := overlapping(layout.groups)) is not None:
        reason = f"it has come to share some of its bytes with {groups[1].name!r}"
        raise refusal(ErrorCode.OVERLAPPING_STORAGE, groups[0].name, reason)
    for group, place in zip(layout.groups, find_places(layout.groups), strict=True):
        if place is not None or group.retained is not None:
            continue
        if layout.policy is StoragePolicy.STRICT:
            reason = (
                "its storage is gone or has another size since post-load processing, and --storage-policy strict takes "
                "no other; use scratch or retain"
            )
            raise refusal(ErrorCode.STORAGE_UNAVAILABLE, group.name, reason)
        if group.kept is None and len(group.required) < group.nbytes:
            reason = "it was exchanged since the start, and the checkpoint brings only a part of it"
            raise refusal(ErrorCode.RELOAD_REFUSED, group.name, reason)


def _clashing(group: StorageGroup) -> tuple[str, str] | None:
    """Return two parameters of ``group`` that overlap without being the same bytes. Views in buffers may."""
    parameters = [member for member in group.members if any(slot.is_parameter for slot in member.slots)]
    if len(parameters) < 2:
        return None
    seen: list[tuple[str, ByteRanges]] = []
    for member in parameters:
        covered = ByteRanges()
        covered.add(strided_ranges(member.offset, member.shape, member.stride, member.dtype.itemsize))
        for name, other in seen:
            together = len(ByteRanges([*covered, *other]))
            same = together == len(covered) == len(other)
            if not same and together < len(covered) + len(other):
                return name, member.name
        seen.append((member.name, covered))
    return None


def _check_configuration(vllm_config: VllmConfig, layout: ModelLayout) -> None:
    compilation = vllm_config.compilation_config
    inductor = compilation.inductor_compile_config
    # vLLM's CPU runner freezes the graph whenever inductor is to tune it.
    freezes = inductor.get("max_autotune", False) and vllm_config.device_config.device_type == "cpu"
    if compilation.mode != CompilationMode.NONE and (freezes or inductor.get("freezing", False)):
        option = "max_autotune" if freezes else "freezing"
        reason = f"inductor's option {option} freezes weights into compiled code. Start without it"
        raise refusal(ErrorCode.FROZEN_WEIGHTS, "", reason)
    if vllm_config.lora_config is not None:
        for path, _, recorded in layout.quant_methods:
            if issubclass(recorded, FusedMoEMethodBase):
                reason = "it holds experts, and LoRA is enabled. Start without --enable-lora, or merge the adapter"
                raise refusal(ErrorCode.LORA_WITH_MOE, path, reason)
    if vllm_config.kv_transfer_config is not None:
        connector: Any = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
        if getattr(connector, "reset_cache", None) in (None, KVConnectorBase_V1.reset_cache):
            reason = (
                f"the KV connector {connector.__name__} cannot be told to forget what the old weights computed. Start "
                "without it"
            )
            raise refusal(ErrorCode.KV_CONNECTOR, "", reason)


def refusal(code: ErrorCode, name: str, reason: str) -> WeightPushError:
    """Return the error that says why ``name``, a module or tensor, or ``""`` for all, cannot be reloaded."""
    return WeightPushError(
        code,
        f"{name or 'the model'!r} cannot be reloaded: {reason}. Restart the server to change its weights",
        details={"offender": name},
    )
