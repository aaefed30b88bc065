"""vLLM's own trainer engine and HTTP client, unchanged, over Gloo; as a program, a trainer that can be killed.

::

    python -m support.vllm_trainer URL TOKEN CHECKPOINT STOP_AFTER

sends the first STOP_AFTER tensors, says so, and waits for its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import torch
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from support.gloo_plane import gloo_trainer
from support.raw import read_tensors
from support.server import ServerProcess, free_port

TESTS = Path(__file__).resolve().parents[1]


class TensorSource(WeightSource):
    """Tensors in memory, as vLLM's engines take them. ``fail_at``: raise instead of giving the tensor of this name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, fail_at: str | None = None) -> None:
        self.tensors = dict(tensors)
        self.fail_at = fail_at

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if name == self.fail_at:
                raise RuntimeError(f"the trainer ran out of memory at {name}")
            yield name, tensor


@contextmanager
def credentials(url: str, token: str | None, folder: Path) -> Iterator[None]:
    """Let clients of this process that know of no token send it, as ``requests`` finds it in the file NETRC."""
    if token is None:
        yield
        return
    file = folder / "netrc"
    file.write_text(f"machine {urlsplit(url).hostname} login trainer password {token}\n")
    file.chmod(0o600)
    with mock.patch.dict(os.environ, {"NETRC": str(file)}):
        yield


@contextmanager
def trainer_engine(
    url: str, source: Any, *, workers: int = 1, client: Any = None, packed: bool = True, buffer_bytes: int = 40_000
) -> Iterator[NCCLTrainerWeightTransferEngine]:
    """Connect vLLM's engine to the server at ``url``, through vLLM's HTTP client unless ``client`` is another one."""
    with gloo_trainer():
        engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                rank=0,
                master_address="127.0.0.1",
                master_port=free_port(),
                world_size=workers + 1,
                packed=packed,
                packed_buffer_size_bytes=buffer_bytes,
            ),
            client=HTTPVLLMWeightSyncClient(url) if client is None else client,
            source=source,
        )
        try:
            yield engine
        finally:
            engine.shutdown()


def start(server: ServerProcess, checkpoint: Path, stop_after: int) -> subprocess.Popen[str]:
    """Start the program below; returns when it has sent what it shall send."""
    command = [sys.executable, "-m", "support.vllm_trainer", server.url, server.token or "", str(checkpoint)]
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent / "examples"), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*command, str(stop_after)], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "waiting\n":
            return process
    raise RuntimeError(f"the trainer ended with {process.wait()}")


class _Stopping(TensorSource):
    def __init__(self, tensors: Mapping[str, torch.Tensor], stop_after: int) -> None:
        super().__init__(tensors)
        self._stop_after = stop_after

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().__iter__()):
            if number == self._stop_after:
                print("waiting", flush=True)
                time.sleep(600)
            yield pair


def _main(url: str, token: str, checkpoint: str, stop_after: str) -> None:
    import tempfile

    source = _Stopping(read_tensors(Path(checkpoint)), int(stop_after))
    with (
        tempfile.TemporaryDirectory() as folder,
        credentials(url, token or None, Path(folder)),
        trainer_engine(url, source, packed=False) as engine,
    ):
        engine.send_weights()


if __name__ == "__main__":
    _main(*sys.argv[1:])
