"""A worker's part in a trainer's broadcasts: what is kept, what is thrown away, and that everything is received."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.compat.messages import InitInfo
from weightpush_server.compat.transfer import Collection, Transfer
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.records import ControlRecord, WorkerRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.stored import OpenCheckpoint

EPOCH = 3


class Trainer:
    """The trainer's end: bytes that are broadcast, one by one."""

    def __init__(self) -> None:
        self.sent: queue.Queue[bytes | Exception] = queue.Queue()
        self.received: list[int] = []
        self.left = threading.Event()
        self.joining: Exception | None = None

    def open(self, init: InitInfo, **_: Any) -> Trainer:
        if self.joining is not None:
            raise self.joining
        return self

    def send(self, tensors: list[torch.Tensor]) -> None:
        """Broadcast tensors packed together."""
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self.sent.put(torch.cat(raw).numpy().tobytes())

    def receive(self, buffer: torch.Tensor, timeout_s: float) -> None:
        data = self.sent.get(timeout=timeout_s)
        if isinstance(data, Exception):
            raise data
        assert len(data) == buffer.numel()
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.received.append(len(data))

    def close(self) -> None:
        self.left.set()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def shared(tmp_path: Path) -> SharedState:
    control = ControlRecord(instance_id="i", weight_version="v0")
    return SharedState.create(tmp_path / "state", workers=1, control=control)


@pytest.fixture
def transfer(trainer: Trainer, shared: SharedState) -> Iterator[Transfer]:
    progress = ProgressWriter(shared, WorkerRecord(rank=0, pid=1, device="cpu", weight_version="v0"))
    progress.begin(EPOCH)
    init = InitInfo(
        master_address="h", master_port=1, rank_offset=1, world_size=2, packed=True, packed_buffer_size_bytes=30
    )
    transfer = Transfer(
        init, rank=0, device=torch.device("cpu"), progress=progress, open_communicator=trainer.open, timeout_s=1
    )
    yield transfer
    transfer.stop()


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def record(shared: SharedState) -> WorkerRecord:
    found = shared.worker(0)
    assert found is not None
    return found


def specs_of(tensors: dict[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())


def kept(collection: Collection) -> dict[str, torch.Tensor]:
    assert collection.copy is not None
    source = OpenCheckpoint(collection.copy.describe())
    return {tensor.spec.name: source.read(tensor).clone() for tensor in source.stored.tensors}


#: The second one is not aligned behind the first.
TENSORS = {
    "odd": torch.arange(5, dtype=torch.uint8),
    "weight": torch.randn(4, 2),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
}


def test_tensors_are_kept_as_they_were_sent(transfer: Transfer, trainer: Trainer, shared: SharedState) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    collection = Collection(EPOCH, HostCopy())
    transfer.receive(specs_of(TENSORS), timeout_s=30, collection=collection)
    assert transfer.busy
    trainer.send([TENSORS["odd"], TENSORS["weight"]])
    trainer.send([TENSORS["scalar"], TENSORS["empty"]])
    until(lambda: record(shared).buckets_done == 1)
    assert (record(shared).tensors_done, record(shared).bytes_done, record(shared).error) == (4, 39, None)
    until(lambda: not transfer.busy)
    assert kept(collection).keys() == TENSORS.keys()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in kept(collection).items())
    assert collection.copy is not None
    assert collection.copy.digests == {name: tensor_digest(tensor) for name, tensor in TENSORS.items()}


def test_a_trainer_may_compute_in_another_floating_dtype(
    transfer: Transfer, trainer: Trainer, shared: SharedState
) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    collection = Collection(EPOCH, HostCopy(), {"weight": "bfloat16", "odd": "bfloat16"})
    some = {name: TENSORS[name] for name in ("odd", "weight")}
    transfer.receive(specs_of(some), timeout_s=30, collection=collection)
    trainer.send(list(some.values()))
    until(lambda: record(shared).buckets_done == 1)
    found = kept(collection)
    assert torch.equal(found["weight"], TENSORS["weight"].to(torch.bfloat16))
    assert torch.equal(found["odd"], TENSORS["odd"])  # No number of that kind: not ours to convert.
    assert collection.specs["weight"].dtype == "bfloat16"


def test_what_is_refused_is_received_all_the_same(transfer: Transfer, trainer: Trainer, shared: SharedState) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    collection = Collection(EPOCH, HostCopy())
    refusal = WeightPushError(ErrorCode.MANIFEST_REJECTED, "no such tensor")
    transfer.receive(specs_of(TENSORS), timeout_s=30, collection=collection, refusal=refusal)
    trainer.send([TENSORS["odd"], TENSORS["weight"]])
    assert record(shared).error is None  # The trainer is still at it.
    trainer.send([TENSORS["scalar"], TENSORS["empty"]])
    until(lambda: record(shared).error is not None)
    error = record(shared).error
    assert error is not None
    assert (error.code, error.details["worker_rank"]) == (ErrorCode.MANIFEST_REJECTED, 0)
    assert (trainer.received, collection.specs, record(shared).buckets_done) == ([37, 2], {}, 0)
    # The group is as good as before; nobody's tensors are thrown away in silence.
    transfer.receive(specs_of({"a": TENSORS["odd"]}), timeout_s=30)
    trainer.send([TENSORS["odd"]])
    until(lambda: not transfer.busy)
    assert transfer.joined


def test_a_tensor_that_cannot_be_kept_does_not_stop_the_rest(
    transfer: Transfer, trainer: Trainer, shared: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    collection = Collection(EPOCH, HostCopy())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    assert collection.copy is not None
    monkeypatch.setattr(collection.copy, "add", full)
    transfer.receive(specs_of(TENSORS), timeout_s=30, collection=collection)
    trainer.send([TENSORS["odd"], TENSORS["weight"]])
    trainer.send([TENSORS["scalar"], TENSORS["empty"]])
    until(lambda: record(shared).error is not None)
    error = record(shared).error
    assert error is not None
    assert (error.code, "No space left" in error.message) == (ErrorCode.LANDING_FAILED, True)
    assert trainer.received == [37, 2]
    assert transfer.joined


def test_a_broadcast_that_breaks_ends_the_membership(transfer: Transfer, trainer: Trainer, shared: SharedState) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    transfer.receive(specs_of(TENSORS), timeout_s=30, collection=Collection(EPOCH, HostCopy()))
    trainer.send([TENSORS["odd"], TENSORS["weight"]])
    trainer.sent.put(RuntimeError("connection reset by peer"))
    until(lambda: record(shared).error is not None)
    error = record(shared).error
    assert error is not None
    assert (error.code, "connection reset" in error.message) == (ErrorCode.TRANSPORT_FAILED, True)
    assert trainer.left.is_set()  # So that the others do not wait for this end.
    assert (transfer.joined, transfer.busy) == (False, False)
    assert transfer.error is not None


@pytest.mark.parametrize("problem", [WeightPushError(ErrorCode.TRANSPORT_UNAVAILABLE, "no GPU"), OSError("no route")])
def test_who_cannot_join_says_why(transfer: Transfer, trainer: Trainer, problem: Exception) -> None:
    trainer.joining = problem
    transfer.start()
    until(lambda: transfer.error is not None)
    assert transfer.error is not None
    assert str(problem).removesuffix(" [transport_unavailable]") in transfer.error.message
    assert not transfer.joined


def test_leaving_ends_the_thread(transfer: Transfer, trainer: Trainer) -> None:
    transfer.start()
    until(lambda: transfer.joined)
    transfer.stop()
    assert not transfer.joined
    assert trainer.left.is_set()
    assert not transfer._thread.is_alive()
