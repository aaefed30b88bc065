"""The connection to a trainer of vLLM's kind: an NCCL group in which the trainer, rank 0, broadcasts.

Where both ends meet over the trainer's TCPStore, vLLM's own code would unpickle what lies there. Nothing that arrives
is unpickled here: the NCCL id is found in those bytes without running them.
"""

from __future__ import annotations

import pickletools  # Takes a pickle apart for reading; nothing in this module can run one.
import threading
import time
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.compat.messages import UNIQUE_ID_BYTES, InitInfo

#: Where vLLM's trainer puts the NCCL id.
_ID_KEY: Final = "broadcast_from/0/0"
_MAX_PICKLE_BYTES: Final = 4096
_LOOK_S: Final = 0.0005


class Communicator(Protocol):
    """One worker's end of the group."""

    def receive(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Fill ``buffer``, a contiguous tensor on the worker's device, with what rank 0 sends next.

        Raises:
            WeightPushError: ``transport_failed``, or ``deadline_exceeded`` after ``timeout_s`` seconds. The group is of
                no more use then.
        """

    def close(self) -> None:
        """Leave the group, from any thread; a pending ``receive`` ends. Safe to call twice."""


def check_possible(device: torch.device) -> None:
    """Raise ``transport_unavailable`` where a worker on ``device`` can take part in no NCCL group."""
    if device.type != "cuda":
        raise WeightPushError(
            ErrorCode.TRANSPORT_UNAVAILABLE,
            f"trainers of vLLM's kind send over NCCL, and the workers of this server run on {device.type}: push with "
            "weightpush's own client",
        )


def open_communicator(init: InitInfo, *, rank: int, device: torch.device, timeout_s: float) -> Communicator:
    """Join the trainer's group as ``rank``; returns when all members are there.

    Raises:
        WeightPushError: ``transport_unavailable``, ``rendezvous_failed``.
    """
    check_possible(device)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    torch.cuda.set_device(device)  # Of this thread.
    unique_id = init.unique_id
    if unique_id is None:
        unique_id = _id_from_store(init, timeout_s)
    with unpinned_nccl_env():
        group = PyNcclCommunicator.from_unique_id_bytes(unique_id, rank=rank, world_size=init.world_size, device=device)
    return NcclCommunicator(group, device)


class NcclCommunicator:
    """A group of vLLM's own making, with deadlines. ``group``: a ``PyNcclCommunicator``."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._closed = threading.Event()

    def receive(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """See ``Communicator``. Polls: a wait for the GPU cannot be broken off, and the trainer may be gone."""
        deadline = time.monotonic() + timeout_s
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            self._group.broadcast(buffer, src=0, stream=self._stream)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            done.record(self._stream)
        while not done.query():
            if self._closed.is_set():
                raise WeightPushError(ErrorCode.TRANSPORT_FAILED, "the trainer's group was left during a broadcast")
            if time.monotonic() >= deadline:
                raise WeightPushError(
                    ErrorCode.DEADLINE_EXCEEDED, f"the trainer's broadcast did not come within {timeout_s:g} s"
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Leave the group."""
        self._closed.set()
        self._group.destroy()


def _id_from_store(init: InitInfo, timeout_s: float) -> bytes:
    assert init.master_address is not None
    assert init.master_port is not None
    try:
        # With the settings of vLLM's own ends: each member of such a store waits until all have come.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # missing in torch's stubs
            init.master_address,
            init.master_port,
            world_size=init.world_size,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            use_libuv=False,
        )
        found = store.get(_ID_KEY)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise WeightPushError(
            ErrorCode.RENDEZVOUS_FAILED,
            f"no trainer was found at {init.master_address}:{init.master_port} within {timeout_s:g} s: {reason}",
        ) from error
    return find_unique_id(found)


def find_unique_id(text: bytes) -> bytes:
    """Return the NCCL id in a pickled ``ncclUniqueId``: its one string of 128 bytes.

    Raises:
        WeightPushError: ``rendezvous_failed``: these bytes are nothing of the kind.
    """
    strings: list[bytes] = []
    try:
        if len(text) <= _MAX_PICKLE_BYTES:
            strings = [found for _, found, _ in pickletools.genops(text) if isinstance(found, bytes)]
    except ValueError:
        pass  # Told below: what is no pickle holds no id either.
    ids = [found for found in strings if len(found) == UNIQUE_ID_BYTES]
    if len(ids) != 1:
        raise WeightPushError(
            ErrorCode.RENDEZVOUS_FAILED,
            "what lies in the trainer's store is no NCCL id: does a trainer of vLLM's kind run there?",
        )
    return ids[0]
