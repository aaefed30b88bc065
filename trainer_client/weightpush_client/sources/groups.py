"""How trainers hold their tensors, and how each kind is gathered.

A group is what can only be gathered together: one tensor, or all parameters of an FSDP1 unit. Its specifications are
known without gathering. Where ``ranks`` is above 1, `Group.gather` is a collective call: all ranks must make it, in the
same order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from weightpush_client.sources.base import memory_of, rejected, spec_of
from weightpush_protocol.manifest import TensorSpec


class Group(Protocol):
    """Tensors that are gathered together."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Name, dtype and global shape of each."""

    @property
    def ranks(self) -> int:
        """How many processes must gather together; 1 where nothing is communicated."""

    @property
    def device(self) -> torch.device:
        """Where this process holds its part."""

    def identity(self, name: str) -> Hashable | None:
        """Return a value that is equal for two names of one tensor; None where that cannot be told."""

    def check(self) -> None:
        """Look whether this process still holds what `specs` says, without communicating.

        Raises:
            WeightPushError: ``weights_rejected``: it does not.
        """

    def gather(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Return the whole tensors by name, valid inside the context. They may come in ``dtype`` where it is given."""


def group_of(name: str, tensor: torch.Tensor) -> Group:
    """Return ``tensor`` as a group of its own.

    Raises:
        WeightPushError: ``weights_rejected``: it cannot be pushed.
    """
    return ShardedTensor(name, tensor) if _is_dtensor(tensor) else WholeTensor(name, tensor)


class WholeTensor:
    """A tensor that this process holds whole. Keeps a reference; ``requires_grad`` does not matter."""

    ranks = 1

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.specs = (spec_of(name, tensor),)
        self._tensor = tensor.detach()

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self._tensor.device

    def identity(self, name: str) -> Hashable | None:
        """Return the memory that the tensor views."""
        return memory_of(self._tensor)

    def check(self) -> None:
        """Do nothing: the stream compares what it reads."""

    @contextmanager
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Return the tensor itself."""
        yield {self.specs[0].name: self._tensor}


class ShardedTensor:
    """A DTensor (FSDP2, tensor parallelism, meshes of several dimensions), of which each rank holds a part."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.specs = (spec_of(name, tensor),)
        self._tensor = tensor.detach()
        self._local_shape = tuple(self._tensor.to_local().shape)

    @property
    def ranks(self) -> int:
        """How many ranks hold different parts."""
        mesh, placements = self._tensor.device_mesh, self._tensor.placements
        sizes = [mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
        return math.prod(sizes)

    @property
    def device(self) -> torch.device:
        """Device on which parts are gathered: that of the mesh, even where parts are kept in host memory."""
        local: torch.device = self._tensor.to_local().device
        mesh_type = self._tensor.device_mesh.device_type
        return local if local.type == mesh_type else torch.device(mesh_type)

    def identity(self, name: str) -> Hashable | None:
        """Return the memory of this rank's part; None where it has none."""
        memory = memory_of(self._tensor.to_local())
        return None if memory is None else (memory, tuple(self._tensor.shape), self._tensor.placements)

    def check(self) -> None:
        """Look whether this rank's part is as large as it was: nobody can gather it otherwise."""
        found = tuple(self._tensor.to_local().shape)
        if found != self._local_shape:
            name = self.specs[0].name
            raise rejected(
                f"this rank's part of {name!r} changed since the push began: {self._local_shape}, found {found}", name
            )

    @contextmanager
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Return the whole tensor, put together on every rank."""
        tensor = self._tensor
        if dtype is not None and not any(placement.is_partial() for placement in tensor.placements):
            # Each element comes from one rank, so casting first gives the same, for less memory and traffic.
            tensor = tensor.to(dtype)
        if tensor.device.type != tensor.device_mesh.device_type:
            tensor = tensor.to(tensor.device_mesh.device_type)
        yield {self.specs[0].name: tensor.full_tensor()}


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # Importing torch.distributed.tensor costs seconds; nobody can hold a DTensor who has not imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
