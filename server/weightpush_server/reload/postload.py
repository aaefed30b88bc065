"""Opening a model, and closing it again: post-load processing as at cold start, and the proof of the result."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from weightpush_server.reload.contexts import loading_context, telling_of_processing, unproven
from weightpush_server.reload.contract import Contract
from weightpush_server.reload.fingerprint import (
    TensorPrint,
    combine_prints,
    prints_of,
    reachable_tensors,
    tensor_objects,
)
from weightpush_server.reload.landing import ReloadSession
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.reload.modulewise import (
    Unit,
    groups_of,
    left_alone,
    not_again,
    owners_of,
    plan_units,
)
from weightpush_server.reload.opening import Opened, open_groups
from weightpush_server.reload.plan import Plan
from weightpush_server.reload.refusals import check_reloadable
from weightpush_server.reload.retention import after_processing, before_processing
from weightpush_server.reload.seal import Seal
from weightpush_server.reload.storage import release_memory
from weightpush_server.reload.wrappers import unwrapped

#: Set to 1 to fill opened weights with NaN, for tests.
POISON_VARIABLE: Final = "WEIGHTPUSH_POISON"


@dataclass(frozen=True)
class ReloadProof:
    """What a finished update can show.

    Attributes:
        fingerprint: of everything that the model computes with, 64 hex digits.
        prints: of each tensor of it, by path.
        tensors: number of tensors that landed.
        bytes: of these tensors.
        seconds_postload: time of post-load processing.
        seconds_early: the part of it that was done while tensors landed.
        seconds_proof: time of the checks and the fingerprint.
    """

    fingerprint: str
    prints: dict[str, TensorPrint]
    tensors: int
    bytes: int
    seconds_postload: float
    seconds_early: float
    seconds_proof: float


def start_reload(
    model: nn.Module,
    *,
    vllm_config: VllmConfig,
    device: torch.device,
    poison: bool = False,
    partial: bool = False,
    plan: Plan | None = None,
) -> ReloadSession:
    """Open ``model`` for an update. Call it on the worker's main thread, with the engine idle.

    From here until :func:`finish_reload` returns, the model computes nonsense. A model that an earlier update left
    open or half written is opened anew. A ``partial`` update may leave out what is still there from the last one, and
    leaves modules of which it brings nothing as they are; any other must be complete. ``poison`` fills what the update
    must write with NaN or extreme values. Without a ``plan`` the model's own loaders land everything.

    Raises:
        WeightPushError: one of the refusals of :func:`check_reloadable`, before anything is changed.
    """
    objects = tensor_objects(model)
    check_reloadable(model, vllm_config, planned=plan is not None, objects=objects)
    layout = find_layout(model)
    assert layout is not None
    poison = poison or os.environ.get(POISON_VARIABLE) == "1"
    units = plan_units(layout, plan, vllm_config)
    untouched = left_alone(layout, units) if partial else ()
    opened = open_model(
        model, layout, poison=poison, partial=partial, units=units.all, untouched=untouched, objects=objects
    )
    return ReloadSession(
        model,
        layout,
        vllm_config=vllm_config,
        device=device,
        opened=opened,
        poisoned=poison,
        partial=partial,
        plan=plan,
        units=units,
        untouched=untouched,
    )


def open_model(
    model: nn.Module,
    layout: ModelLayout,
    *,
    poison: bool = False,
    partial: bool = False,
    units: Collection[Unit] = (),
    untouched: Collection[Unit] = (),
    objects: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> Opened:
    """Give ``model`` its checkpoint layout back, and the plain attributes of before post-load processing.

    The modules of ``units`` keep their attributes until they are closed: the memory of what was packed then goes to
    what is packed next. Those that are ``untouched`` stay as they are. ``objects``: what ``tensor_objects`` finds,
    where it was asked already.
    """
    if not layout.is_open:
        layout.contract = Contract.of(model, pin_devices=layout.pin_devices, objects=objects)
    layout.is_open = True
    without = groups_of(untouched)
    if layout.seal is not None:
        layout.seal.break_all(layout, without=without)
    opened = open_groups(layout.groups, poison=poison, partial=partial, without=without)
    # Weights that are plain attributes must be the objects that loaders fill, not what processing made of them.
    layout.journal.undo(without=owners_of((*units, *untouched)))
    return opened


def finish_reload(session: ReloadSession) -> ReloadProof:
    """Process the landed weights as at cold start and prove the result. Call it on the worker's main thread.

    Raises:
        WeightPushError: PROOF_FAILED, naming the first offender, or the error that ended the session's landing. The
            model stays open then, and must not serve.
    """
    model, layout = session.model, session.layout
    began = time.perf_counter()
    session.prove_landed()
    if layout.from_dummy:
        session.learn_required()
    session.seal()
    checked = time.perf_counter()
    closer = session.closer
    done = (*closer.closed, *session.untouched)
    process(model, layout, session.opened, vllm_config=session.vllm_config, device=session.device, done=done)
    processed = time.perf_counter()
    assert layout.contract is not None
    layout.contract.check(model, settled=layout.settled)
    reachable = list(reachable_tensors(model))
    _prove_runtime(reachable, absent=layout.absent, poisoned=session.poisoned)
    prints = prints_of(reachable)
    proof = ReloadProof(
        fingerprint=combine_prints(prints),
        prints=prints,
        tensors=len(session.landed),
        bytes=session.nbytes,
        seconds_postload=closer.seconds + processed - checked,
        seconds_early=closer.seconds,
        seconds_proof=checked - began + time.perf_counter() - processed,
    )
    layout.is_open = False
    layout.seal = Seal(layout)
    return proof


def process(
    model: nn.Module,
    layout: ModelLayout,
    opened: Opened,
    *,
    vllm_config: VllmConfig,
    device: torch.device,
    done: Collection[Unit] = (),
) -> None:
    """Run post-load processing on an open model as at cold start; give back what it moved and what it freed.

    The units that are ``done`` have been processed, in this update or before it, and stay as they are.

    Raises:
        WeightPushError: PROOF_FAILED, if processing raised, or a tensor whose address must stay cannot stay there.
    """
    assert layout.contract is not None
    held = before_processing(layout, opened, groups_of(done))
    opened.let_go()
    with loading_context(vllm_config, device), unwrapped(model, layout), not_again(done):
        layout.journal.undo(without=owners_of(done))
        with telling_of_processing():
            process_weights_after_loading(model, vllm_config.model_config, device)
        model.eval()
    with torch.inference_mode(False):
        layout.contract.write_back(model)
    after_processing(layout, held)
    held.clear()
    release_memory(device)


def _prove_runtime(reachable: Iterable[tuple[str, torch.Tensor]], *, absent: frozenset[str], poisoned: bool) -> None:
    for name, tensor in reachable:
        if name in absent:
            continue
        if tensor.is_meta:
            reason = "it has no storage after post-load processing"
        elif poisoned and tensor.is_floating_point() and tensor.float().isnan().any():
            reason = "it holds NaN after a landing onto NaN"
        else:
            continue
        raise unproven(name, reason)
