"""What stands in for NCCL between a trainer of vLLM's kind and our workers: a Gloo group over the same kind of store.

Put in place on both sides: in a server's workers by the plugin for tests (``WP_TEST_VLLM_PLANE=gloo``), in a trainer by
``gloo_trainer``. Everything else on both sides is the real code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weightpush_protocol.transports.groups import GlooGroup

#: Seconds that a trainer waits for its workers; NCCL would wait for ever.
SEND_S = 60.0


class GlooCommunicator:
    """One end of the group: what vLLM's communicator is to a trainer, and ours to a worker. For tensors on the CPU."""

    def __init__(self, address: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self._store: Any = dist.TCPStore(
            address,
            port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            use_libuv=False,
        )
        self._group = GlooGroup(dist.PrefixStore("plane", self._store), address, rank, world_size, timeout_s)
        #: Bytes of each broadcast so far.
        self.sizes: list[int] = []
        #: TRL lets go of what lies below this.
        self.group = mock.Mock()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send, as rank 0."""
        assert src == self.rank == 0
        self._broadcast(tensor, SEND_S)

    def receive(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Receive, as any other rank."""
        self._broadcast(buffer, timeout_s)

    def _broadcast(self, tensor: torch.Tensor, timeout_s: float) -> None:
        raw = tensor.reshape(-1).view(torch.uint8)
        self.sizes.append(raw.numel())
        self._group.broadcast(raw, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        self._group.abort()

    destroy = close


def open_gloo_communicator(init: Any, *, rank: int, device: torch.device, timeout_s: float) -> GlooCommunicator:
    """Take the place of ``weightpush_server.compat.nccl.open_communicator`` in a worker."""
    assert device.type == "cpu"
    return GlooCommunicator(
        init.master_address, init.master_port, rank=rank, world_size=init.world_size, timeout_s=timeout_s
    )


class _NoStream:
    def synchronize(self) -> None:
        """Nothing runs behind the back of a CPU."""


def _open_trainer_end(init_info: Any, rank: int = 0) -> GlooCommunicator:
    found = init_info if isinstance(init_info, dict) else vars(init_info)
    address, port, size = (found[name] for name in ("master_address", "master_port", "world_size"))
    return GlooCommunicator(address, port, rank=rank, world_size=size, timeout_s=SEND_S)


@contextmanager
def gloo_trainer(*more: tuple[Any, str]) -> Iterator[None]:
    """Let vLLM's trainer engine in this process open Gloo groups instead of NCCL ones, on a machine without a GPU.

    ``more``: modules that have imported vLLM's function under a name of their own.
    """
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    places = [(nccl_engine, "open_trainer_endpoint"), *more]
    patches = [mock.patch.object(module, name, _open_trainer_end) for module, name in places]
    patches += [
        mock.patch.object(packed_tensor, "_get_streams", lambda device, count: (_NoStream(),) * count),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(torch.cuda, "current_stream", return_value=_NoStream()),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
