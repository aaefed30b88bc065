"""Opening a model, and closing it again: post-load processing as at cold start, and the proof of the result."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload.contexts import loading_context
from weightpush_server.reload.contract import Contract
from weightpush_server.reload.fingerprint import fingerprint, reachable_tensors
from weightpush_server.reload.landing import ReloadSession
from weightpush_server.reload.layout import find_layout
from weightpush_server.reload.opening import open_groups
from weightpush_server.reload.refusals import check_reloadable

#: Set to 1 to fill opened weights with NaN, for tests.
POISON_VARIABLE: Final = "WEIGHTPUSH_POISON"


@dataclass(frozen=True)
class ReloadProof:
    """What a finished update can show.

    Attributes:
        fingerprint: of everything that the model computes with, 64 hex digits.
        tensors: number of tensors that landed.
        bytes: of these tensors.
        seconds_postload: time of post-load processing.
        seconds_proof: time of the checks and the fingerprint.
    """

    fingerprint: str
    tensors: int
    bytes: int
    seconds_postload: float
    seconds_proof: float


def start_reload(
    model: nn.Module, *, vllm_config: VllmConfig, device: torch.device, poison: bool = False
) -> ReloadSession:
    """Open ``model`` for a complete update. Call it on the worker's main thread, with the engine idle.

    From here until :func:`finish_reload` returns, the model computes nonsense. A model that an earlier update left
    open or half written is opened anew. ``poison`` fills what the update must write with NaN or extreme values.

    Raises:
        WeightPushError: LAYOUT_UNKNOWN or RELOAD_REFUSED, before anything is changed; see :func:`check_reloadable`.
    """
    check_reloadable(model)
    layout = find_layout(model)
    assert layout is not None
    poison = poison or os.environ.get(POISON_VARIABLE) == "1"
    if not layout.is_open:
        layout.contract = Contract.of(model)
    layout.is_open = True
    with torch.inference_mode(False):
        opened = open_groups(layout.groups, poison=poison)
    return ReloadSession(model, layout, vllm_config=vllm_config, device=device, opened=opened, poisoned=poison)


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
    with loading_context(session.vllm_config, session.device):
        layout.journal.undo()
        try:
            process_weights_after_loading(model, session.vllm_config.model_config, session.device)
        except Exception as error:
            raise WeightPushError(
                ErrorCode.PROOF_FAILED,
                f"post-load processing raised {type(error).__name__}: {error}. Push again, or restart the server",
                details={"exception": type(error).__name__, "error": str(error)},
            ) from error
        model.eval()
    processed = time.perf_counter()
    assert layout.contract is not None
    with torch.inference_mode(False):
        layout.contract.write_back(model)
    layout.contract.check(model, settled=layout.settled)
    _prove_runtime(model, absent=layout.absent, poisoned=session.poisoned)
    proof = ReloadProof(
        fingerprint=fingerprint(model),
        tensors=len(session.landed),
        bytes=session.nbytes,
        seconds_postload=processed - checked,
        seconds_proof=checked - began + time.perf_counter() - processed,
    )
    layout.is_open = False
    return proof


def _prove_runtime(model: nn.Module, *, absent: frozenset[str], poisoned: bool) -> None:
    for name, tensor in reachable_tensors(model):
        if name in absent:
            continue
        if tensor.is_meta:
            reason = "it has no storage after post-load processing"
        elif poisoned and tensor.is_floating_point() and tensor.float().isnan().any():
            reason = "it holds NaN after a landing onto NaN"
        else:
            continue
        raise WeightPushError(
            ErrorCode.PROOF_FAILED, f"{name!r} could not be proven right: {reason}", details={"tensor": name}
        )
