"""A trainer's environment with what we ask for and no more: torch does not bring numpy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from support.contract_server import TOKEN, ContractServer, ReceiverProcess
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.memory import bytes_under
from weightpush_protocol.transports.shared_memory import host_id

WEIGHTS = {
    "small": torch.arange(7, dtype=torch.float32),
    # Larger than a chunk of the digest, with a rest.
    "large": torch.arange(100_003, dtype=torch.bfloat16),
    "strided": torch.arange(60.0).view(10, 6).t(),
    "empty": torch.empty(0, 3),
}

_TRAINER = """
import sys
sys.modules["numpy"] = None
import torch
from weightpush_client import WeightPusher
weights = {
    "small": torch.arange(7, dtype=torch.float32),
    "large": torch.arange(100_003, dtype=torch.bfloat16),
    "strided": torch.arange(60.0).view(10, 6).t(),
    "empty": torch.empty(0, 3),
}
url, token, transport = sys.argv[1:]
with WeightPusher(url, token=token, transport=transport) as pusher:
    print(pusher.push(weights, weight_version="v1").transport)
"""


@pytest.fixture
def worker() -> Iterator[ReceiverProcess]:
    worker = ReceiverProcess()
    yield worker
    worker.close()


@pytest.mark.parametrize("transport", ["http", "gloo", "shm"])
def test_a_trainer_without_numpy_pushes(worker: ReceiverProcess, transport: str) -> None:
    specs = [TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()]
    server = ContractServer(specs, workers=[worker], transports=("gloo", "http", "shm"), host_id=host_id())
    command = [sys.executable, "-W", "ignore", "-c", _TRAINER, server.url, TOKEN, transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    server.close()
    assert done.stdout.split() == [transport], done.stderr


def test_the_bytes_under_a_tensor() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    assert bytes(bytes_under(raw)) == bytes(range(256))
    assert bytes(bytes_under(raw[3:5])) == b"\3\4"
    assert bytes(bytes_under(raw[:0])) == b""
    with pytest.raises(TypeError, match="read-only"):
        bytes_under(raw)[0] = 1
    for wrong in (raw.view(16, 16), raw[::2], raw.to(torch.int8)):
        with pytest.raises(ValueError, match="contiguous 1-d uint8"):
            bytes_under(wrong)


def test_the_digests_of_another_device_are_the_same_without_numpy() -> None:
    """What a GPU would compute, by the same operators on this CPU."""
    from weightpush_protocol.digest import _device_digests

    tensors = [*WEIGHTS.values(), torch.arange(300_000, dtype=torch.int64)]
    assert _device_digests(tensors) == [tensor_digest(tensor) for tensor in tensors]
