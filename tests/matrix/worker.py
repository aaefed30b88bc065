"""What the matrix asks of vLLM's workers. Runs in the worker process, on every rank."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from support.engine import land, probe_layers, read
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import BeginRequest
from weightpush_server.progress import ProgressWriter
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.records import ControlRecord, WorkerRecord
from weightpush_server.reload import Planner, ReloadSession, finish_reload, start_reload
from weightpush_server.reload.fingerprint import reachable_tensors
from weightpush_server.reload.layout import find_layout
from weightpush_server.shared_state import SharedState

#: All buckets are there within this; the longest of them has thousands of bytes.
_LANDED_S: Final = 60.0


class MatrixExtension:
    """RPCs beside vLLM's own; every attribute carries the prefix ``matrix_``."""

    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    matrix_receiver: UpdateReceiver
    matrix_progress: ProgressWriter

    def matrix_state(self) -> dict[str, str]:
        """Return a digest of every reachable tensor, layout included, and of every packed layer's answer to noise."""
        model = self.model_runner.get_model()
        tensors = {path: tensor.detach() for path, tensor in reachable_tensors(model)}
        return {name: _digest(tensor) for name, tensor in (*tensors.items(), *probe_layers(model))}

    def matrix_push(self, directory: str, planned: bool) -> dict[str, int]:
        """Push a checkpoint from its directory, by plan or by the model's loaders; return bytes landed in each way."""
        tensors = read(Path(directory))
        session = _open(self, [TensorSpec.of(name, tensor) for name, tensor in tensors], planned)
        for start in range(0, len(tensors), 7):
            land(session, tensors[start : start + 7])
        return _finish(session, {name: tensor.nbytes for name, tensor in tensors})

    def matrix_begin(self, begin_json: str, planned: bool) -> None:
        """Open the model for a push by a trainer's process, and join it, as a worker of a server does."""
        begin = BeginRequest.model_validate_json(begin_json)
        with tempfile.TemporaryDirectory() as folder:
            control = ControlRecord(instance_id="matrix", weight_version="A")
            shared = SharedState.create(Path(folder) / "state", workers=1, control=control)
        record = WorkerRecord(rank=0, pid=1, device=str(self.device), weight_version="A")
        self.matrix_progress = ProgressWriter(shared, record)
        self.matrix_progress.begin(1)
        self.matrix_receiver = UpdateReceiver(
            begin, epoch=1, rank=self.rank, device=torch.device(self.device), progress=self.matrix_progress
        )
        self.matrix_receiver.attach(_open(self, begin.manifest.tensors, planned))
        self.matrix_receiver.connect()

    def matrix_expect(self, number: int, digests: dict[str, str]) -> None:
        """Announce bucket ``number``."""
        self.matrix_receiver.expect(number, digests)

    def matrix_finish(self) -> dict[str, int]:
        """Wait until all buckets have landed, and finish; return bytes landed in each way."""
        manifest = self.matrix_receiver.begin.manifest
        deadline = time.monotonic() + _LANDED_S
        while (record := self.matrix_progress.record).buckets_done < len(manifest.buckets):
            if record.error is not None:
                raise WeightPushError.from_detail(record.error)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{record.buckets_done} of {len(manifest.buckets)} buckets landed")
            time.sleep(0.002)
        self.matrix_receiver.stop()
        return _finish(self.matrix_receiver.session, {spec.name: spec.nbytes for spec in manifest.tensors})

    def matrix_layerwise(self, directory: str) -> None:
        """Let vLLM reload by itself, layer by layer, from a checkpoint directory."""
        self.model_runner.reload_weights(weights_path=directory)


def _open(worker: MatrixExtension, specs: Sequence[TensorSpec], planned: bool) -> ReloadSession:
    model, device = worker.model_runner.get_model(), torch.device(worker.device)
    layout = find_layout(model)
    assert layout is not None
    plan = None
    if planned:
        plan = Planner(model, layout, vllm_config=worker.vllm_config, device=device).admit(specs)
    return start_reload(model, vllm_config=worker.vllm_config, device=device, poison=True, plan=plan)


def _finish(session: ReloadSession, sizes: dict[str, int]) -> dict[str, int]:
    proof = finish_reload(session)
    assert proof.tensors == len(sizes)
    plan = session.plan
    by_loader = sum(nbytes for name, nbytes in sizes.items() if plan is None or name in plan.via_loader)
    return {"bytes": proof.bytes, "by_loader": by_loader}


def _digest(tensor: torch.Tensor) -> str:
    facts = f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} "
    if tensor.is_meta:
        return facts + "meta"
    raw = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return facts + hashlib.blake2b(raw, digest_size=8).hexdigest()
