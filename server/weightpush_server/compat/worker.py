"""What every vLLM worker can do beside the RPCs of an update, where vLLM's own routes are served: see ``transfer``."""

from __future__ import annotations

from typing import Any

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.manifest import ManifestProblem, ProblemKind, TensorSpec, compare_manifest
from weightpush_server.compat import nccl
from weightpush_server.compat.messages import InitInfo, UpdateInfo
from weightpush_server.compat.transfer import Collection, Transfer
from weightpush_server.reload import check_awake, check_reloadable
from weightpush_server.reload.admission import rejected
from weightpush_server.reload.layout import find_layout
from weightpush_server.worker import WeightPushWorkerExtension, _admit, _rpc, _state
from weightpush_server.worker_state import WorkerState
from weightpush_server.worker_update import WorkerUpdate


class _Membership:
    """This worker's part in a trainer's group, and in the round that runs."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        self.collection: Collection | None = None


def _membership(worker: Any) -> _Membership:
    found: _Membership | None = getattr(worker, "_weightpush_membership", None)
    if found is None:
        found = worker._weightpush_membership = _Membership()
    return found


class VllmWorkerExtension(WeightPushWorkerExtension):
    """RPCs, in the order of a round. All run on the worker's main thread."""

    @_rpc
    def weightpush_vllm_join(self, init_json: str, timeout_s: float) -> dict[str, Any]:
        """Begin to join a trainer's group, and leave the one of before."""
        state, membership = _state(self), _membership(self)
        membership_before, membership.transfer = membership.transfer, None
        if membership_before is not None:
            membership_before.stop()
        transfer = Transfer(
            InitInfo.model_validate_json(init_json),
            rank=state.rank,
            device=state.device,
            progress=state.progress,
            open_communicator=nccl.open_communicator,
            timeout_s=timeout_s,
        )
        transfer.start()
        membership.transfer = transfer
        return {}

    @_rpc
    def weightpush_vllm_group(self) -> dict[str, Any]:
        """Return how this worker stands with its trainer's group."""
        transfer = _membership(self).transfer
        if transfer is None:
            return {"member": False, "joined": False, "busy": False, "problem": None}
        error = transfer.error
        problem = None if error is None else error.model_dump(mode="json")
        return {"member": True, "joined": transfer.joined, "busy": transfer.busy, "problem": problem}

    @_rpc
    def weightpush_vllm_leave(self) -> dict[str, Any]:
        """Leave the trainer's group, if this worker is in one."""
        membership = _membership(self)
        transfer, membership.transfer = membership.transfer, None
        if transfer is not None:
            transfer.stop()
        return {}

    @_rpc
    def weightpush_vllm_start(self, epoch: int) -> dict[str, Any]:
        """Begin to collect for update ``epoch``; refuse what can be known before any tensor is. Changes no weight."""
        state, membership = _state(self), _membership(self)
        state.enter(epoch)
        check_awake(state.worker)
        check_reloadable(state.model, state.worker.vllm_config, planned=True)
        layout = find_layout(state.model)
        assert layout is not None
        checkpoint = layout.checkpoint or ()
        copy = state.host_copy(sum(spec.nbytes for spec in checkpoint), staged=True)
        known = [*checkpoint, *layout.optional.values()]
        membership.collection = Collection(epoch, copy, {spec.name: spec.dtype for spec in known})
        # Its version is known at the end, and said once more there.
        state.start(WorkerUpdate(epoch, (), copy=copy), weight_version="")
        return {}

    @_rpc
    def weightpush_vllm_receive(self, epoch: int | None, info_json: str, timeout_s: float) -> dict[str, Any]:
        """Take part in the broadcasts that bring the tensors of a call, keep them for update ``epoch``, and say how
        much that is. Returns at once.

        Whatever is wrong with them goes into this worker's record when they are through, and they are thrown away;
        without an ``epoch`` they are thrown away in silence.
        """
        state, membership = _state(self), _membership(self)
        transfer, collection = membership.transfer, membership.collection
        if transfer is None or not transfer.joined:
            raise _no_group(transfer)
        specs = UpdateInfo.model_validate_json(info_json).specs or transfer.specs
        if not specs:
            raise WeightPushError(ErrorCode.INVALID_REQUEST, "no tensors were named, and none before that are meant")
        if epoch is None or collection is None or collection.epoch != epoch:
            transfer.receive(specs, timeout_s=timeout_s)
        else:
            refusal = _refusal(state, collection, specs)
            transfer.receive(specs, timeout_s=timeout_s, collection=collection, refusal=refusal)
        return {"tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs)}

    @_rpc
    def weightpush_vllm_collected(self, epoch: int, weight_version: str) -> dict[str, Any]:
        """Refuse what update ``epoch`` has collected unless it is a whole checkpoint; return where it lies, if here."""
        state, collection = _state(self), _membership(self).collection
        update = state.current(epoch)
        if collection is None or collection.epoch != epoch:
            raise WeightPushError(ErrorCode.STALE_UPDATE, f"worker {state.rank} collects nothing for epoch {epoch}")
        update.specs = tuple(collection.specs.values())
        _admit(state, update.specs)
        if state.copies is not None:
            layout = find_layout(state.model)
            optional = layout.optional if layout is not None else ()
            state.copies.expect(epoch, weight_version, update.copy, optional=optional)
        collection.drop()
        return {} if update.copy is None else {"stored": update.copy.describe().to_json()}

    def weightpush_abandon(self, epoch: int) -> dict[str, Any]:
        """As for any update; what its round has collected is let go of."""
        collection = _membership(self).collection
        if collection is not None and collection.epoch == epoch:
            collection.drop()
        return super().weightpush_abandon(epoch)

    @_rpc
    def weightpush_vllm_relabel(self, weight_version: str) -> dict[str, Any]:
        """Call the weights that are served ``weight_version``."""
        state = _state(self)
        state.settle_copies()
        if state.copies is not None:
            state.copies.relabel(weight_version)
            state.settle_copies()
        state.progress.update(weight_version=weight_version)
        return {}


def _no_group(transfer: Transfer | None) -> WeightPushError:
    error = None if transfer is None else transfer.error
    if error is None:
        return WeightPushError(
            ErrorCode.TRANSPORT_UNAVAILABLE,
            "no trainer is connected: POST /init_weight_transfer_engine first, while the trainer joins its group",
        )
    return WeightPushError(
        ErrorCode.TRANSPORT_UNAVAILABLE,
        f"the connection to the trainer is broken ({error.message}): connect again with /init_weight_transfer_engine",
        details={"cause": ErrorDetail.model_dump(error, mode="json")},
    )


def _refusal(state: WorkerState, collection: Collection, specs: tuple[TensorSpec, ...]) -> WeightPushError | None:
    """Return what can be said against ``specs`` before they arrive. What is missing is known at the end alone."""
    layout = find_layout(state.model)
    if layout is None or layout.checkpoint is None:
        return None
    kept = [collection.kept_as(spec) for spec in specs]
    found = compare_manifest(layout.checkpoint, kept, optional=layout.optional)
    # Names that the checkpoint lacks may be another layout of it: that is judged by bytes, once all are known.
    problems = [problem for problem in found if problem.kind not in (ProblemKind.MISSING, ProblemKind.UNKNOWN)]
    problems += [
        ManifestProblem(kind=ProblemKind.DUPLICATE, name=spec.name, given=f"{spec.dtype} {list(spec.shape)}")
        for spec in kept
        if spec.name in collection.specs
    ]
    return rejected(problems) if problems else None
