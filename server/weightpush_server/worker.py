"""What weightpush adds to every vLLM worker: the RPCs of an update.

vLLM mixes ``WeightPushWorkerExtension`` into its worker class, so every attribute carries the prefix ``weightpush_``.
Each RPC answers an envelope ``{"ok": true, ...}`` or ``{"ok": false, "error": {...}}``: an exception that crosses
vLLM's RPC would arrive as text, without its code.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import BeginRequest, ManifestAnswer, UpdateMode, VerifyRequest
from weightpush_protocol.transports.base import check_available
from weightpush_server.config import ServerConfig
from weightpush_server.guard import TaintedGuard
from weightpush_server.progress import ProgressWriter
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.records import WorkerRecord
from weightpush_server.reload import (
    Planner,
    ReloadProof,
    check_awake,
    check_draft,
    check_reloadable,
    finish_reload,
    start_reload,
)
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.shared_state import SharedState
from weightpush_server.verify import ServedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_P = ParamSpec("_P")
_Envelope = dict[str, Any]


def _rpc(
    method: Callable[Concatenate[Any, _P], dict[str, Any]],
) -> Callable[Concatenate[Any, _P], _Envelope]:
    """Turn the result or the exception of an RPC method into an envelope."""

    @functools.wraps(method)
    def enveloped(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Envelope:
        try:
            return {"ok": True, **method(self, *args, **kwargs)}
        except WeightPushError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the API process must learn what it was, by name
            details = {"exception": type(error).__name__}
            message = f"{method.__name__}: {type(error).__name__}: {error}"
            failure = WeightPushError(ErrorCode.INTERNAL, message, details=details)
        failure.details.setdefault("worker_rank", server_rank(self.vllm_config, self.rank))
        return {"ok": False, "error": failure.body().error.model_dump(mode="json")}

    return enveloped


def server_rank(vllm_config: VllmConfig, rank: int) -> int:
    """Return the position of a worker among all workers of its server: engine by engine, as on the data plane."""
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + rank


def usable_transports(device: torch.device) -> list[str]:
    """List the transports that can run on this worker."""
    usable = []
    for name in ("nccl", "gloo", "http"):
        try:
            check_available(name, device)
        except WeightPushError:
            continue
        usable.append(name)
    return usable


class _WorkerState:
    """Everything that weightpush keeps in a worker process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.guard = TaintedGuard()
        self.guard.install(worker.model_runner)
        config = ServerConfig.from_environment()
        device = torch.device(worker.device)
        self.device = device
        self.rank = server_rank(worker.vllm_config, worker.rank)
        record = WorkerRecord(
            rank=self.rank,
            pid=os.getpid(),
            device=str(device),
            transports=usable_transports(device),
            weight_version=config.weight_version,
        )
        self.progress = ProgressWriter(SharedState(config.state_file), record)
        self.receiver: UpdateReceiver | None = None
        self.served: ServedModel | None = None
        self.closed: ReloadProof | None = None
        self._unfinished: list[UpdateReceiver] = []
        self.epoch = 0
        self._planner: Planner | None = None

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.worker.get_model()
        return model

    def layout(self) -> ModelLayout:
        layout = find_layout(self.model)
        if layout is None or layout.checkpoint is None:
            raise WeightPushError(
                ErrorCode.LAYOUT_UNKNOWN,
                "this server does not know which tensors its checkpoint has: start it on a directory with safetensors "
                "files, or with a load format that reads a checkpoint",
            )
        return layout

    def planner(self) -> Planner:
        """Return what plans this model's updates. Raises LAYOUT_UNKNOWN where no cold start was recorded."""
        if self._planner is None:
            layout = find_layout(self.model)
            if layout is None:
                raise WeightPushError(
                    ErrorCode.LAYOUT_UNKNOWN,
                    "the cold start of this model was not recorded; start the server with --load-format weightpush",
                )
            self._planner = Planner(
                self.model, layout, vllm_config=self.worker.vllm_config, device=torch.device(self.device)
            )
        return self._planner

    def publish_reloadable(self) -> None:
        """Say in the shared record whether this model can take updates, and why not."""
        layout, refused = find_layout(self.model), None
        try:
            check_reloadable(self.model, self.worker.vllm_config, planned=True)
        except WeightPushError as error:
            refused = error.body().error
        self.progress.update(
            self_check=layout.self_check.outcome.value if layout is not None else None, reload_refused=refused
        )

    def current(self, epoch: int) -> UpdateReceiver:
        if self.receiver is None or self.receiver.epoch != epoch:
            raise WeightPushError(
                ErrorCode.STALE_UPDATE, f"worker {self.rank} runs epoch {self.epoch}, the call belongs to {epoch}"
            )
        if (error := self.progress.record.error) is not None:
            raise WeightPushError.from_detail(error)
        return self.receiver

    def drop_receiver(self) -> None:
        if self.receiver is not None:
            self.receiver.stop()
            if self.receiver.alive:
                self._unfinished.append(self.receiver)
            self.receiver = None

    def check_quiet(self) -> None:
        """Refuse as long as a thread of an earlier update may still write into the model."""
        self._unfinished = [receiver for receiver in self._unfinished if receiver.alive]
        if self._unfinished:
            epochs = [receiver.epoch for receiver in self._unfinished]
            raise WeightPushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                f"worker {self.rank} is still busy with a bucket of update epoch {epochs[0]}, which was given up: push "
                "again in a moment",
                details={"epochs": epochs},
            )

    def taint(self, tainted: bool) -> None:
        self.guard.tainted = tainted
        self.progress.update(tainted=tainted)


def _state(worker: Any) -> _WorkerState:
    state: _WorkerState | None = getattr(worker, "_weightpush_state", None)
    if state is None:
        state = worker._weightpush_state = _WorkerState(worker)
    return state


class WeightPushWorkerExtension:
    """RPCs, in the order of an update. All run on the worker's main thread."""

    @_rpc
    def weightpush_describe(self) -> dict[str, Any]:
        """Introduce this worker in the shared record, and return the fingerprint of what it serves."""
        state = _state(self)
        get_draft_model = getattr(state.worker.model_runner, "get_draft_model", None)
        if get_draft_model is not None:
            check_draft(state.model, get_draft_model())
        if state.served is None:
            state.served = ServedModel(state.model)
        if find_layout(state.model) is not None:
            # The usual first begin finds its plan ready.
            state.planner().prepare()
        state.publish_reloadable()
        return {"rank": state.rank, "fingerprint": state.served.fingerprint}

    @_rpc
    def weightpush_manifest(self) -> dict[str, Any]:
        """Return the checkpoint that this model expects."""
        layout = _state(self).layout()
        answer = ManifestAnswer(
            tensors=list(layout.checkpoint or ()),
            optional=list(layout.optional.values()),
            tied=_state(self).planner().tied(),
        )
        return {"manifest": answer.model_dump_json()}

    @_rpc
    def weightpush_check(self, begin_json: str) -> dict[str, Any]:
        """Refuse an update that this worker cannot take. Changes nothing."""
        begin = BeginRequest.model_validate_json(begin_json)
        state = _state(self)
        state.check_quiet()  # Planning puts stand-ins in the model's place; a late landing must not meet them.
        _check_begin(begin, state)
        return {"tensors": len(begin.manifest.tensors)}

    @_rpc
    def weightpush_connect(self, epoch: int, begin_json: str) -> dict[str, Any]:
        """Start receiving for update ``epoch``; the rendezvous goes on in the receive thread."""
        state = _state(self)
        state.drop_receiver()
        state.check_quiet()
        state.epoch = epoch
        state.progress.begin(epoch)
        state.receiver = UpdateReceiver(
            BeginRequest.model_validate_json(begin_json),
            epoch=epoch,
            rank=state.rank,
            device=state.device,
            progress=state.progress,
        )
        state.receiver.connect()
        return {}

    @_rpc
    def weightpush_open(self, epoch: int) -> dict[str, Any]:
        """Give the model its checkpoint layout back. From here on it cannot run."""
        state = _state(self)
        receiver = state.current(epoch)
        state.check_quiet()
        state.taint(True)
        tensors = receiver.begin.manifest.tensors
        session = start_reload(
            state.model,
            vllm_config=state.worker.vllm_config,
            device=state.device,
            plan=state.planner().plan(tensors),
            partial=receiver.begin.partial,
        )
        receiver.attach(session)
        return {"ways": session.ways(tensors)}

    @_rpc
    def weightpush_expect(self, epoch: int, bucket: int, digests: dict[str, str], spool: str | None) -> dict[str, Any]:
        """Announce bucket ``bucket``. Returns at once."""
        _state(self).current(epoch).expect(bucket, digests, Path(spool) if spool is not None else None)
        return {}

    @_rpc
    def weightpush_close(self, epoch: int) -> dict[str, Any]:
        """Run post-load processing and prove the result."""
        state = _state(self)
        state.closed = proof = finish_reload(state.current(epoch).session)
        return {
            "fingerprint": proof.fingerprint,
            "tensors": proof.tensors,
            "seconds_postload": proof.seconds_postload,
            "seconds_proof": proof.seconds_proof,
        }

    @_rpc
    def weightpush_commit(self, epoch: int, weight_version: str) -> dict[str, Any]:
        """Let the model run again, as ``weight_version``."""
        state = _state(self)
        receiver, proof = state.current(epoch), state.closed
        if state.served is None or proof is None:
            raise WeightPushError(ErrorCode.INTERNAL, "the update was to be committed before it was closed")
        state.served.commit(
            proof.prints, receiver.begin.manifest.tensors, receiver.digests, partial=receiver.begin.partial
        )
        state.closed = None
        if state.worker.vllm_config.lora_config is not None:
            # As vLLM does after its own reloads: adapters are loaded again when they are next asked for.
            state.worker.model_runner.reset_lora_state()
        state.progress.update(weight_version=weight_version)
        state.taint(False)
        state.drop_receiver()
        return {}

    @_rpc
    def weightpush_verify(self, request_json: str) -> dict[str, Any]:
        """Compare the model in memory with the last commit, and that with a checkpoint. Changes nothing."""
        state = _state(self)
        if state.guard.tainted or state.served is None:
            raise WeightPushError(ErrorCode.NOT_SERVING, "the weights are being replaced; verify when it serves again")
        request = VerifyRequest.model_validate_json(request_json)
        version = state.progress.record.weight_version
        report = state.served.report(state.model, request, rank=state.rank, weight_version=version)
        return {"report": report.model_dump_json()}

    @_rpc
    def weightpush_abandon(self, epoch: int) -> dict[str, Any]:
        """Leave update ``epoch``: stop receiving. An opened model stays tainted until a later update commits."""
        state = _state(self)
        if state.receiver is not None and state.receiver.epoch == epoch:
            state.drop_receiver()
        return {"tainted": state.guard.tainted}


def _check_begin(begin: BeginRequest, state: _WorkerState) -> None:
    if begin.mode is UpdateMode.STAGED:
        raise WeightPushError(ErrorCode.RELOAD_REFUSED, "this server has no staged mode yet; begin with mode 'direct'")
    check_awake(state.worker)
    check_reloadable(state.model, state.worker.vllm_config, planned=True)
    state.planner().admit(begin.manifest.tensors, partial=begin.partial)
    check_available(begin.transport.name, state.device)
    if begin.transport.name != "http" and not begin.manifest.buckets:
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST, f"transport {begin.transport.name} needs the bucket plan in manifest.buckets"
        )
