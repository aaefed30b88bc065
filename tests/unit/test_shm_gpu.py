"""Buffers on a GPU that trainer and worker share: what is lent arrives, and the memory goes with its process."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest
import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.cuda_memory import HANDLE_BYTES, CudaBuffers, gpu_id, map_gpu_memory
from weightpush_protocol.transports.shared_memory import MemoryRefused
from weightpush_protocol.transports.shm_receiver import ShmReceiver
from weightpush_protocol.transports.shm_sender import ShmSender

WAIT_S = 60.0
NBYTES = 3 * 2**20 + 5

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def _worker(config: TransportConfig, pipe: Connection, numbers: int) -> None:
    receiver = ShmReceiver(config, rank=1)
    try:
        receiver.open(WAIT_S)
        for number in range(numbers):
            borrowed = receiver.borrow(number, NBYTES, WAIT_S)
            pipe.send((str(borrowed.device.type), tensor_digest(borrowed)))
            receiver.give_back(number)
        pipe.recv()
    except WeightPushError as error:
        pipe.send(error.code)
    finally:
        receiver.close()


def _start(config: TransportConfig, numbers: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(config, theirs, numbers), daemon=True)
    process.start()
    return process, ours


@pytest.mark.gpu
@needs_gpu
def test_a_worker_reads_where_the_trainer_gathers() -> None:
    device = torch.device("cuda", 0)
    memory = CudaBuffers(2, NBYTES, device)
    sender = ShmSender(memory, world_size=2)
    process, pipe = _start(sender.config, 5)
    sender.open(WAIT_S)
    for number in range(5):
        lent = sender.lend(NBYTES, WAIT_S)
        assert lent.device == device
        lent.random_(0, 256)
        torch.cuda.synchronize()
        expected = tensor_digest(lent)
        sender.send(number, lent, WAIT_S)
        assert pipe.recv() == ("cuda", expected)
    pipe.send("end")
    process.join(WAIT_S)
    sender.close()


@pytest.mark.gpu
@needs_gpu
def test_the_memory_of_a_killed_trainer_and_a_killed_worker_is_free_again() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.mem_get_info(device)[0]
    memory = CudaBuffers(2, 64 * 2**20, device)
    sender = ShmSender(memory, world_size=2)
    process, _pipe = _start(sender.config, 1)
    sender.open(WAIT_S)
    process.kill()
    process.join(WAIT_S)
    sender.close()
    del sender, memory
    assert torch.cuda.mem_get_info(device)[0] >= before - 2**20


def test_what_is_not_seen_here_is_refused_and_auto_goes_on_without() -> None:
    """The worker's side of a trainer on another GPU: real sockets, no GPU needed."""
    with pytest.raises(MemoryRefused, match="does not see"):
        map_gpu_memory(bytes(HANDLE_BYTES), "5f0e7a3c-0000-0000-0000-000000000000", 1)
    with pytest.raises(MemoryRefused, match="64 bytes, this one 3"):
        map_gpu_memory(b"abc", "x", 1)

    class Elsewhere(CudaBuffers):
        def __init__(self) -> None:
            super(CudaBuffers, self).__init__(1, 4096, torch.zeros(4096, dtype=torch.uint8))
            self.gpu, self.ticket = "5f0e7a3c-0000-0000-0000-000000000000", bytes(HANDLE_BYTES)

    sender = ShmSender(Elsewhere(), world_size=2)
    assert sender.config.gpu is not None
    receiver = ShmReceiver(sender.config, rank=1)
    errors: list[WeightPushError] = []

    def join() -> None:
        with pytest.raises(WeightPushError) as refused:
            receiver.open(WAIT_S)
        errors.append(refused.value)

    joining = threading.Thread(target=join)
    joining.start()
    with pytest.raises(WeightPushError) as told:
        sender.open(WAIT_S)
    joining.join(WAIT_S)
    assert {told.value.code, errors[0].code} == {ErrorCode.TRANSPORT_UNAVAILABLE}
    assert "5f0e7a3c" in told.value.message
    receiver.close()
    sender.close()


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_id(torch.device("cpu")) == ""
