"""What weightpush keeps in a worker process between its RPCs. Belongs to the worker's main thread."""

from __future__ import annotations

import os
from typing import Any, get_args

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import BeginRequest
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_protocol.transports.base import TransportName, check_available
from weightpush_protocol.transports.cuda_memory import gpu_id
from weightpush_protocol.transports.shared_memory import host_id
from weightpush_server.config import ServerConfig
from weightpush_server.expected import ExpectedCheckpoint
from weightpush_server.guard import TaintedGuard
from weightpush_server.hostcopy import HostBudget, HostCopies, HostCopy
from weightpush_server.known_manifests import KnownManifests
from weightpush_server.progress import ProgressWriter
from weightpush_server.ranks import server_rank
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.records import WorkerRecord
from weightpush_server.reload import Planner, check_reloadable
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.rundir import RunDirectory
from weightpush_server.shared_state import SharedState
from weightpush_server.stored import StoredCheckpoint
from weightpush_server.verify import ServedModel
from weightpush_server.worker_update import WorkerUpdate


def usable_transports(device: torch.device) -> list[str]:
    """List the transports that can run on this worker."""
    usable = []
    for name in get_args(TransportName):
        try:
            check_available(name, device)
        except WeightPushError:
            continue
        usable.append(name)
    return usable


class WorkerState:
    """Everything that weightpush keeps in a worker process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.guard = TaintedGuard()
        self.guard.install(worker.model_runner)
        config = ServerConfig.from_environment()
        # vLLM tells its worker the name under which it shares memory, and removes that memory nowhere.
        RunDirectory(config.run_directory).note_segments(os.environ.get("VLLM_DIST_IDENT", ""))
        #: What the model holds was never served as a version: updates must bring all, until one is committed.
        self.needs_all = self.guard.tainted = config.await_weights
        #: Epoch of the update that this worker committed last.
        self.committed = 0
        device = torch.device(worker.device)
        self.device = device
        self.rank = server_rank(worker.vllm_config, worker.rank)
        record = WorkerRecord(
            rank=self.rank,
            pid=os.getpid(),
            device=str(device),
            transports=usable_transports(device),
            host_id=host_id(),
            gpu=gpu_id(device),
            weight_version=config.weight_version,
            tainted=config.await_weights,
        )
        self.shared = SharedState(config.state_file)
        self.progress = ProgressWriter(self.shared, record)
        #: The ``begin`` that was checked last, with its epoch.
        self.checked: tuple[int, BeginRequest] | None = None
        self.manifests = KnownManifests()
        self._expected = ExpectedCheckpoint()
        self.update: WorkerUpdate | None = None
        #: Committed; it only holds memory, which takes longer to give back than the commit itself.
        self._retired: WorkerUpdate | None = None
        self.served: ServedModel | None = None
        #: Copies in host memory; one worker keeps them for its server.
        self.copies: HostCopies | None = None
        if self.rank == 0:
            self.copies = HostCopies(keep=config.keep_previous, budget=HostBudget(config.staging_budget_bytes))
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

    def expected(self) -> str:
        """Return the checkpoint that this model expects, a ``ManifestAnswer`` as JSON; publish its digest.

        Raises:
            WeightPushError: ``layout_unknown``.
        """
        text = self._expected.describe(self.layout(), self.planner().tied())
        if self.progress.record.expects != self._expected.digest:
            self.progress.update(expects=self._expected.digest)
        return text

    def publish_expected(self) -> None:
        """Say in the shared record which checkpoint this model expects, where it expects another one than before."""
        layout = find_layout(self.model)
        if layout is not None and layout.checkpoint is not None and not self._expected.is_known(layout):
            self.expected()

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

    def enter(self, epoch: int) -> None:
        """Turn to update ``epoch``, to which a check belongs. Raises STALE_UPDATE where a later one came before."""
        if epoch < self.epoch:
            raise self._stale(epoch)
        self.epoch = epoch
        if self._retired is not None:
            self.drop_update()
        self.check_quiet()  # Planning puts stand-ins in the model's place; a late landing must not meet them.
        self.settle_copies()

    def current(self, epoch: int) -> WorkerUpdate:
        """Return the running update, if it is ``epoch`` and has no error; else raise STALE_UPDATE, or its error."""
        if self.update is None or self.update.epoch != epoch:
            raise self._stale(epoch)
        if (error := self.progress.record.error) is not None:
            raise WeightPushError.from_detail(error)
        return self.update

    def _stale(self, epoch: int) -> WeightPushError:
        return WeightPushError(
            ErrorCode.STALE_UPDATE, f"worker {self.rank} runs epoch {self.epoch}, the call belongs to {epoch}"
        )

    def check_wanted(self, epoch: int) -> None:
        """Raise ABORTED where the server has given update ``epoch`` up."""
        running = self.shared.control().update
        if running is None or running.epoch != epoch or running.failure is not None:
            raise WeightPushError(ErrorCode.ABORTED, "the update was given up meanwhile")

    def start(self, update: WorkerUpdate, weight_version: str, *, restores: CopyRole | None = None) -> None:
        """Let ``update`` be the one that runs."""
        self.drop_update()
        self.update = update
        self.progress.begin(update.epoch)
        if self.copies is not None:
            optional = find_layout(self.model)
            self.copies.expect(
                update.epoch,
                weight_version,
                update.copy,
                partial=update.partial,
                optional=optional.optional if optional is not None else (),
                restores=restores,
            )

    def foresee(self, update: WorkerUpdate) -> None:
        """Do all for stored tensors that can be done before they land."""
        update.foresee(self.planner().plan(update.specs), self.progress, hurry=self.guard.tainted)

    def retire_update(self) -> None:
        """Let the update that was committed be over; ``drop_update`` frees what it holds."""
        self._retired, self.update = self.update, None

    def drop_update(self) -> None:
        self._note_digests()
        for update in (self.update, self._retired):
            unfinished = update.stop() if update is not None else None
            if unfinished is not None:
                self._unfinished.append(unfinished)
        self.update = self._retired = None

    def _note_digests(self) -> None:
        """Let the copy of what was committed last know its digests; the commit itself does not wait for that."""
        if self._retired is not None and self._retired.copy is not None:
            self._retired.copy.digests = dict(self._retired.digests)

    def keep_start(self) -> None:
        """Keep the copy that the cold start made, if its weights are served."""
        layout = find_layout(self.model)
        if layout is None:
            return
        copy, layout.host_copy = layout.host_copy, None
        if copy is not None and self.copies is not None and self.shared.control().state.serving:
            self.copies.start_with(self.progress.record.weight_version, copy)

    def settle_copies(self) -> None:
        """Keep what the last commit brought, forget what a failed update did, and say so in the shared record."""
        if self.copies is None:
            return
        self._note_digests()
        self.copies.settle(self.shared.control().committed_epoch)
        sizes = self.copies.sizes()
        copies = [CopyStatus(role=role, weight_version=name, bytes=size) for role, (name, size) in sizes.items()]
        self.progress.update(copies=copies)

    def host_copy(self, nbytes: int, *, staged: bool = False) -> HostCopy | None:
        """Return an empty copy for an update of ``nbytes`` if this worker is to have one.

        Raises:
            WeightPushError: ``staging_budget_exceeded``.
        """
        if self.copies is None or not (staged or self.copies.keep):
            return None
        self.copies.check_room(nbytes)
        return HostCopy()

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

    def copy_of(self, stored: StoredCheckpoint) -> HostCopy | None:
        """Return the copy that an update of stored tensors leaves here: what is in memory already stays where it is."""
        if self.copies is None or not self.copies.keep:
            return None
        if all(file.in_memory for file in stored.files):
            return HostCopy.adopt(stored)
        return self.host_copy(stored.nbytes)

    def partial(self, begin: BeginRequest) -> bool:
        """Whether an update may leave tensors out. What was never served is nothing to keep."""
        return begin.partial and not self.needs_all

    def taint(self, tainted: bool) -> None:
        self.guard.tainted = tainted
        self.progress.update(tainted=tainted)
