"""What weightpush adds to every vLLM worker: the RPCs of an update.

vLLM mixes ``WeightPushWorkerExtension`` into its worker class, so every attribute carries the prefix ``weightpush_``.
Each RPC answers an envelope ``{"ok": true, ...}`` or ``{"ok": false, "error": {...}}``: an exception that crosses
vLLM's RPC would arrive as text, without its code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import BeginCall, BeginRequest, UpdateMode, VerifyRequest
from weightpush_protocol.status import CopyRole
from weightpush_protocol.transports.base import check_available
from weightpush_protocol.transports.frames import largest_frame
from weightpush_server.ranks import server_rank
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.reload import (
    check_awake,
    check_draft,
    check_reloadable,
    finish_reload,
    foresee_ways,
    start_reload,
)
from weightpush_server.reload.layout import find_layout
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint
from weightpush_server.verify import ServedModel
from weightpush_server.worker_state import WorkerState
from weightpush_server.worker_update import WorkerUpdate

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
            # Without its frames, which would keep what an update holds, and each other, until the next collection.
            failure = error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - the API process must learn what it was, by name
            details = {"exception": type(error).__name__}
            message = f"{method.__name__}: {type(error).__name__}: {error}"
            failure = WeightPushError(ErrorCode.INTERNAL, message, details=details)
        failure.details.setdefault("worker_rank", server_rank(self.vllm_config, self.rank))
        return {"ok": False, "error": failure.body().error.model_dump(mode="json")}

    return enveloped


def _state(worker: Any) -> WorkerState:
    state: WorkerState | None = getattr(worker, "_weightpush_state", None)
    if state is None:
        state = worker._weightpush_state = WorkerState(worker)
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
        layout = find_layout(state.model)
        if state.served is None:
            state.served = ServedModel(state.model)
            state.keep_start()
        state.settle_copies()
        if layout is not None:
            # The usual first begin finds its plan ready.
            state.planner().prepare()
            state.publish_expected()
        state.publish_reloadable()
        return {"rank": state.rank, "fingerprint": state.served.fingerprint}

    @_rpc
    def weightpush_manifest(self) -> dict[str, Any]:
        """Return the checkpoint that this model expects."""
        return {"manifest": _state(self).expected()}

    @_rpc
    def weightpush_facts(self, manifest_digest: str) -> dict[str, Any]:
        """Return what a manifest that was taken before adds up to. Raises ``unknown_manifest``."""
        return {"facts": _state(self).manifests.find(manifest_digest).facts.model_dump()}

    @_rpc
    def weightpush_check(self, epoch: int, begin_json: str) -> dict[str, Any]:
        """Refuse a push that this worker cannot take; return how its tensors would land. Changes no weight."""
        call = BeginCall.model_validate_json(begin_json)
        state = _state(self)
        state.enter(epoch)
        brought = call.manifest
        begin = call.with_manifest(state.manifests.find(call.manifest_digest or "") if brought is None else brought)
        _check_transport(begin, state)
        ways = _admit(state, begin.manifest.tensors, partial=state.partial(begin))
        state.host_copy(begin.manifest.nbytes, staged=begin.mode is UpdateMode.STAGED)
        state.checked = (epoch, begin)
        if brought is not None:
            state.manifests.keep(brought, len(begin_json))
        return {"ways": ways}

    @_rpc
    def weightpush_connect(self, epoch: int) -> dict[str, Any]:
        """Start receiving for the checked update ``epoch``; the rendezvous goes on in the receive thread."""
        state = _state(self)
        if state.checked is None or state.checked[0] != epoch:
            raise WeightPushError(ErrorCode.STALE_UPDATE, f"worker {state.rank} has not checked epoch {epoch}")
        begin = state.checked[1]
        state.checked = None
        state.check_quiet()
        copy = state.host_copy(begin.manifest.nbytes, staged=begin.mode is UpdateMode.STAGED)
        receiver = UpdateReceiver(
            begin, epoch=epoch, rank=state.rank, device=state.device, progress=state.progress, copy=copy
        )
        update = WorkerUpdate(
            epoch,
            begin.manifest.tensors,
            partial=state.partial(begin),
            receiver=receiver,
            copy=copy,
            digests=receiver.digests,
            seconds=receiver.seconds,
        )
        state.start(update, begin.weight_version)
        receiver.connect()
        return {}

    @_rpc
    def weightpush_staged(self, epoch: int) -> dict[str, Any]:
        """Return where the tensors of a staged update lie, if this worker holds them."""
        update = _state(self).current(epoch)
        if update.copy is None:
            return {}
        return {"stored": update.copy.describe().to_json()}

    @_rpc
    def weightpush_room(self, nbytes: int) -> dict[str, Any]:
        """Refuse a staged update of ``nbytes`` bytes that does not fit the budget for host memory."""
        _state(self).host_copy(nbytes, staged=True)
        return {}

    @_rpc
    def weightpush_kept(self, role: str) -> dict[str, Any]:
        """Return where the tensors of a kept copy lie, and its version, if this worker keeps the copies."""
        state = _state(self)
        state.settle_copies()
        if state.copies is None:
            return {}
        version, copy = state.copies.kept(CopyRole(role))
        return {"weight_version": version, "stored": copy.describe().to_json()}

    @_rpc
    def weightpush_stored(
        self, epoch: int, weight_version: str, stored_json: str, begins: bool, restores: str | None = None
    ) -> dict[str, Any]:
        """Let update ``epoch`` land from files, by ``weightpush_land``; refuse what this worker cannot take.

        A staged push runs already. Any other update ``begins`` here; ``restores`` names the kept copy that it is.
        Changes no weight.
        """
        stored = StoredCheckpoint.from_json(stored_json)
        state = _state(self)
        if not begins:
            # Looked at first: the memory of a push that was given up is gone, and its descriptor may be another's.
            update = state.current(epoch)
            update.read_from(OpenCheckpoint(stored), take_digests=False)
            state.foresee(update)
            return {}
        state.enter(epoch)
        ways = _admit(state, stored.specs)
        copy = state.copy_of(stored) if restores is None else None
        update = WorkerUpdate(epoch, stored.specs, copy=copy)
        update.read_from(OpenCheckpoint(stored), take_digests=True)
        state.start(update, weight_version, restores=CopyRole(restores) if restores is not None else None)
        state.foresee(update)
        return {"ways": ways}

    @_rpc
    def weightpush_open(self, epoch: int) -> dict[str, Any]:
        """Give the model its checkpoint layout back. From here on it cannot run."""
        state = _state(self)
        update = state.current(epoch)
        state.check_quiet()
        state.taint(True)
        with update.seconds.booking("open"):
            session = start_reload(
                state.model,
                vllm_config=state.worker.vllm_config,
                device=state.device,
                plan=state.planner().plan(update.specs),
                partial=update.partial,
            )
        update.attach(session)
        return {}

    @_rpc
    def weightpush_land(self, epoch: int) -> dict[str, Any]:
        """Land the stored tensors of an opened update. Returns when all have landed, or nobody wants them any more."""
        state = _state(self)
        update = state.current(epoch)
        workers = state.shared.workers
        with _as_error(ErrorCode.LANDING_FAILED, "landing"):
            update.land(
                device=state.device,
                progress=state.progress,
                check_wanted=lambda: state.check_wanted(epoch),
                is_mine=lambda number: number % workers == state.rank,
                copy_too=update.copy is not None and not update.copy.tensors,
            )
        return {}

    @_rpc
    def weightpush_expect(
        self, epoch: int, bucket: int, digests: dict[str, str], spool: str | None, count: int = 1
    ) -> dict[str, Any]:
        """Announce ``count`` buckets from ``bucket`` on. Returns at once."""
        receiver = _state(self).current(epoch).receiver
        if receiver is None:
            raise WeightPushError(ErrorCode.BUCKET_OUT_OF_ORDER, "a bucket was announced to an update that takes none")
        for number in range(bucket, bucket + count):
            receiver.expect(number, digests, Path(spool) if spool is not None else None)
        return {}

    @_rpc
    def weightpush_close(self, epoch: int) -> dict[str, Any]:
        """Run post-load processing and prove the result."""
        state = _state(self)
        update = state.current(epoch)
        with _as_error(ErrorCode.POSTLOAD_FAILED, "post-load processing"):
            proof = finish_reload(update.opened)
        # Until the commit, what lies in memory is no version at all: nothing of it may be kept by a partial push.
        state.needs_all = True
        if state.served is not None:
            state.served.check_untouched(proof.prints, [unit.path for unit in update.opened.untouched])
        update.proof = proof
        return {
            "fingerprint": proof.fingerprint,
            "tensors": proof.tensors,
            "seconds": update.seconds.with_closing(proof),
        }

    @_rpc
    def weightpush_commit(self, epoch: int, weight_version: str) -> dict[str, Any]:
        """Let the model run again, as ``weight_version``."""
        state = _state(self)
        update = state.current(epoch)
        state.check_wanted(epoch)
        if state.served is None or update.proof is None:
            raise WeightPushError(ErrorCode.INTERNAL, "the update was to be committed before it was closed")
        state.served.commit(update.proof.prints, update.specs, update.digests, partial=update.partial)
        state.needs_all = False
        state.committed = epoch
        if state.worker.vllm_config.lora_config is not None:
            # As vLLM does after its own reloads: adapters are loaded again when they are next asked for.
            state.worker.model_runner.reset_lora_state()
        state.progress.update(weight_version=weight_version)
        state.publish_expected()
        state.taint(False)
        state.retire_update()
        return {}

    @_rpc
    def weightpush_settle(self) -> dict[str, Any]:
        """Free what the last update held, and keep the copy of what was committed, in its place among the copies."""
        state = _state(self)
        if state.update is None:
            state.drop_update()
        state.settle_copies()
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
        """Leave update ``epoch``: stop receiving. An opened model stays tainted until a later update commits.

        Where this worker has committed the update already, but its server has not, the model is tainted again.
        """
        state = _state(self)
        control = state.shared.control()
        if state.committed == epoch and control.committed_epoch != epoch:
            state.needs_all = True
            state.taint(True)
            state.progress.update(weight_version=control.weight_version)
        if state.update is None or state.update.epoch == epoch:
            state.drop_update()
        state.settle_copies()
        if state.copies is not None:
            state.copies.drop(epoch)
        return {"tainted": state.guard.tainted}


@contextmanager
def _as_error(code: ErrorCode, what: str) -> Iterator[None]:
    """Give an exception of the model's own code a code of the contract; it is no fault of the server."""
    try:
        yield
    except WeightPushError:
        raise
    except Exception as error:
        details = {"exception": type(error).__name__}
        raise WeightPushError(code, f"{what} raised {type(error).__name__}: {error}", details=details) from error


def _check_transport(begin: BeginRequest, state: WorkerState) -> None:
    check_available(begin.transport.name, state.device)
    if begin.transport.name != "http" and not begin.manifest.buckets:
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST, f"transport {begin.transport.name} needs the bucket plan in manifest.buckets"
        )
    room = begin.transport.buffer_bytes
    largest = largest_frame(begin.manifest.buckets)
    if begin.transport.name == "shm" and room is not None and largest > room:
        message = f"the largest bucket has {largest} bytes with its digests, the trainer's shared buffers hold {room}"
        raise WeightPushError(ErrorCode.INVALID_REQUEST, message, details={"bytes": largest, "buffer_bytes": room})


def _admit(state: WorkerState, specs: Sequence[TensorSpec], *, partial: bool = False) -> str:
    """Refuse tensors that this worker cannot take now; return how they would land."""
    check_awake(state.worker)
    check_reloadable(state.model, state.worker.vllm_config, planned=True)
    plan = state.planner().admit(specs, partial=partial)
    layout = find_layout(state.model)
    assert layout is not None
    return foresee_ways(layout, plan, specs)
