"""What lands out of shared memory, or of copies: the same model as from anywhere else, whatever happens meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support.toy import CPU, Started, Tensors, checkpoint, cold_start, contents, differing
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.digest_text import raw_of
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest, TensorSpec, build_manifest
from weightpush_protocol.messages import BeginRequest
from weightpush_protocol.transports.collective import CollectiveSender
from weightpush_protocol.transports.frames import frame_bytes, largest_frame, write_digests
from weightpush_protocol.transports.shared_memory import SharedBuffers
from weightpush_protocol.transports.shm_sender import ShmSender
from weightpush_server.progress import ProgressWriter
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.records import ControlRecord, WorkerRecord
from weightpush_server.reload import ReloadSession, finish_reload
from weightpush_server.shared_state import SharedState

A, B = checkpoint(1), checkpoint(2)
EPOCH = 7
WAIT_S = 20.0
NO_POISON: Callable[[torch.Tensor], None] = lambda _: None  # noqa: E731 - reads better than three lines


@pytest.fixture
def progress(tmp_path: Path) -> ProgressWriter:
    control = ControlRecord(instance_id="i", weight_version="v0")
    shared = SharedState.create(tmp_path / "state", workers=1, control=control)
    writer = ProgressWriter(shared, WorkerRecord(rank=0, pid=1, device="cpu", weight_version="v0"))
    writer.begin(EPOCH)
    return writer


def manifest_of(tensors: Tensors) -> Manifest:
    return build_manifest([TensorSpec.of(name, tensor) for name, tensor in tensors.items()], bucket_bytes=400)


@contextmanager
def update(
    live: Started, manifest: Manifest, progress: ProgressWriter, *, planned: bool
) -> Iterator[tuple[ShmSender, UpdateReceiver]]:
    """Open a sender, and a receiver that lands into ``live``."""
    sender = ShmSender(SharedBuffers(2, largest_frame(manifest.buckets)), world_size=2)
    begin = BeginRequest(weight_version="v1", manifest=manifest, transport=sender.config)
    receiver = UpdateReceiver(begin, epoch=EPOCH, rank=0, device=CPU, progress=progress)
    receiver.attach(live.begin(plan=live.plan(B) if planned else None))
    receiver.connect()
    sender.open(WAIT_S)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.stop()


def send(
    sender: ShmSender,
    receiver: UpdateReceiver,
    manifest: Manifest,
    tensors: Tensors,
    number: int,
    scribble: Callable[[torch.Tensor], None] = NO_POISON,
) -> None:
    """Gather, digest and send one bucket; ``scribble`` on it after its digests were taken."""
    entries, nbytes = manifest.bucket_tensors(number), manifest.buckets[number].nbytes
    frame = sender.lend(frame_bytes(nbytes, len(entries)), WAIT_S)
    digests = []
    for spec, offset in entries:
        raw = frame[offset : offset + spec.nbytes]
        raw.view(spec.torch_dtype).view(spec.shape).copy_(tensors[spec.name])
        digests.append(tensor_digest(raw))
    scribble(frame)
    write_digests(frame, nbytes, raw_of(digests))
    receiver.expect(number, {})
    sender.send(number, frame, WAIT_S)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("planned", [True, False], ids=["by plan", "by the model's loaders"])
def test_a_push_out_of_shared_memory_equals_a_cold_start(planned: bool, progress: ProgressWriter) -> None:
    live, wanted = cold_start(A), cold_start(B)
    manifest = manifest_of(B)
    assert len(manifest.buckets) > 3  # Both buffers are used again.
    with update(live, manifest, progress, planned=planned) as (sender, receiver):
        for number in range(len(manifest.buckets)):
            send(sender, receiver, manifest, B, number)
        until(lambda: progress.record.error or progress.record.buckets_done == len(manifest.buckets))
        assert progress.record.error is None
        # Given back, buffers are the trainer's: nothing in the model may still look into them.
        for index in range(2):
            sender._memory.buffer(index, sender._memory.buffer_bytes).fill_(0xFF)
        finish_reload(receiver.session)
    assert differing(contents(live.model), contents(wanted.model)) == []


def land(session: ReloadSession, manifest: Manifest, number: int) -> None:
    bucket, table = manifest.buckets[number], manifest.table(number)
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    for spec, offset in table.entries:
        buffer[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape).copy_(B[spec.name])
    session.land_bucket(buffer, bucket, table.entries, check_wanted=lambda: None)


@pytest.mark.parametrize("seed", range(3))
def test_updates_of_one_plan_know_what_came_twice_and_what_never_came(seed: int) -> None:
    """Buckets that landed together before are known to have no tensor in common; that they all came is not."""
    live, wanted = cold_start(A), cold_start(B)
    plan, chooser = live.plan(B), random.Random(seed)
    specs = [TensorSpec.of(name, tensor) for name, tensor in B.items()]
    manifests = [manifest_of(B), build_manifest(specs, bucket_bytes=700)]
    for turn in range(6):
        manifest = manifests[turn // 2 % 2]
        numbers = list(range(len(manifest.buckets)))
        chooser.shuffle(numbers)
        lost = numbers.pop()
        session = live.begin(plan=plan)
        for number in numbers:
            land(session, manifest, number)
        with pytest.raises(WeightPushError) as missing:
            finish_reload(session)
        assert missing.value.code is ErrorCode.PROOF_FAILED
        names = manifest.table(lost).names
        assert (missing.value.details["tensor"] in names, missing.value.details["missing"]) == (True, len(names))

        session = live.begin(plan=plan)
        for number in numbers:
            land(session, manifest, number)
        again = chooser.choice(numbers)
        with pytest.raises(WeightPushError, match="arrived twice") as twice:
            land(session, manifest, again)
        assert twice.value.code is ErrorCode.LANDING_FAILED
        assert twice.value.details["tensor"] in manifest.table(again).names

        session = live.begin(plan=plan)
        for number in [*numbers, lost]:
            land(session, manifest, number)
        assert len(session.landed) == len(B)
        finish_reload(session)
        assert differing(contents(live.model), contents(wanted.model)) == []


def test_a_loader_that_writes_into_what_it_gets_harms_nobody(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, wanted = cold_start(A), cold_start(B)
    loading = type(live.model).load_weights

    def spoil(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                yield name, tensor.add_(0)  # In place: memory that is mapped for reading would end the process.

        return loading(model, each())

    monkeypatch.setattr(type(live.model), "load_weights", spoil)
    manifest = manifest_of(B)
    with update(live, manifest, progress, planned=False) as (sender, receiver):
        for number in range(len(manifest.buckets)):
            send(sender, receiver, manifest, B, number)
        until(lambda: progress.record.error or progress.record.buckets_done == len(manifest.buckets))
        assert progress.record.error is None
        finish_reload(receiver.session)
    assert differing(contents(live.model), contents(wanted.model)) == []


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_buffer_that_changed_after_its_digest_never_lands(bucket: int, progress: ProgressWriter) -> None:
    """A trainer that fills a buffer again too soon: here with what the model before had in it."""
    live = cold_start(A)
    manifest = manifest_of(B)

    def stale(buffer: torch.Tensor) -> None:
        for spec, offset in manifest.bucket_tensors(bucket):
            buffer[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape).copy_(A[spec.name])

    with update(live, manifest, progress, planned=True) as (sender, receiver):
        for number in range(bucket):
            send(sender, receiver, manifest, B, number)
        send(sender, receiver, manifest, B, bucket, stale)
        until(lambda: progress.record.error)
        error = progress.record.error
        assert error is not None
        assert (error.code, error.details["bucket"]) == (ErrorCode.DIGEST_MISMATCH, bucket)
        first = manifest.bucket_tensors(bucket)[0][0]
        assert error.details["tensor"] == first.name
        assert progress.record.buckets_done == bucket
        assert first.name not in receiver.session.landed
        # The trainer learns it when it wants the next buffer.
        assert sender._waiter.ready(sender._connections(), time.monotonic() + WAIT_S)


def test_a_buffer_is_given_back_only_after_it_has_landed(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = cold_start(A)
    manifest = manifest_of(B)
    order: list[str] = []
    with update(live, manifest, progress, planned=True) as (sender, receiver):
        session = receiver.session
        landing = session.land

        def land(tensors: Iterator[tuple[str, torch.Tensor]], *, read_only: bool) -> None:
            landing(tensors, read_only=read_only)
            time.sleep(0.1)
            order.append("landed")

        monkeypatch.setattr(session, "land", land)
        hear = sender._hear_done

        def heard(rank: int, connection: object) -> None:
            hear(rank, connection)  # type: ignore[arg-type] # passed on as it came
            order.append("given back")

        monkeypatch.setattr(sender, "_hear_done", heard)
        for number in range(4):
            send(sender, receiver, manifest, B, number)
        until(lambda: progress.record.buckets_done == 4)
    assert order[:4] == ["landed", "given back", "landed", "given back"]


def test_the_next_bucket_arrives_while_the_one_before_lands(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a transport that brings copies: two buffers, never a third, and all of it lands in order."""
    live, wanted = cold_start(A), cold_start(B)
    manifest = manifest_of(B)
    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
    begin = BeginRequest(weight_version="v1", manifest=manifest, transport=sender.config)
    receiver = UpdateReceiver(begin, epoch=EPOCH, rank=0, device=CPU, progress=progress)
    receiver.attach(live.begin(plan=live.plan(B)))
    go_on = threading.Event()
    landing = receiver.session.land

    def land(tensors: Iterator[tuple[str, torch.Tensor]], *, read_only: bool) -> None:
        assert go_on.wait(WAIT_S)
        landing(tensors, read_only=read_only)

    monkeypatch.setattr(receiver.session, "land", land)
    receiver.connect()
    sender.open(WAIT_S)
    try:
        for number, bucket in enumerate(manifest.buckets):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            digests = {}
            for spec, offset in manifest.bucket_tensors(number):
                raw = buffer[offset : offset + spec.nbytes]
                raw.view(spec.torch_dtype).view(spec.shape).copy_(B[spec.name])
                digests[spec.name] = tensor_digest(raw)
            receiver.expect(number, digests)
            sender.send(number, buffer, WAIT_S)
            if number == 1:
                until(lambda: receiver._received == 2)
                assert progress.record.buckets_done == 0
                time.sleep(0.05)
                go_on.set()
        until(lambda: progress.record.error or progress.record.buckets_done == len(manifest.buckets))
        assert progress.record.error is None
        assert len(receiver._buffers) == 2
        finish_reload(receiver.session)
    finally:
        go_on.set()
        sender.close()
        receiver.stop()
    assert not receiver.alive
    assert differing(contents(live.model), contents(wanted.model)) == []


def test_what_breaks_in_landing_ends_the_waiting_for_the_next_bucket(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = cold_start(A)
    manifest = manifest_of(B)
    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
    begin = BeginRequest(weight_version="v1", manifest=manifest, transport=sender.config, digest="none")
    receiver = UpdateReceiver(begin, epoch=EPOCH, rank=0, device=CPU, progress=progress)
    receiver.attach(live.begin(plan=live.plan(B)))

    def land(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(receiver.session, "land", land)
    receiver.connect()
    sender.open(WAIT_S)
    try:
        receiver.expect(0, {})
        receiver.expect(1, {})
        sender.send(0, torch.zeros(manifest.buckets[0].nbytes, dtype=torch.uint8), WAIT_S)
        until(lambda: progress.record.error)
        error = progress.record.error
        assert error is not None
        assert (error.code, error.details["bucket"]) == (ErrorCode.LANDING_FAILED, 0)
        assert "no room" in error.message
        until(lambda: not receiver.alive)
        assert progress.record.error == error
    finally:
        sender.close()
        receiver.stop()
