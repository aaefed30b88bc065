"""What every source of weights offers, and how it says no."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from pydantic import ValidationError

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec


class WeightSource(Protocol):
    """Tensors of one push under the names that the trainer gives them."""

    @property
    def device(self) -> torch.device:
        """Where most bytes lie."""

    @property
    def ranks(self) -> int:
        """How many of the trainer's processes must read together, each of them alike; 1 where one is enough."""

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor, in the order of the source, without gathering any."""

    def identity(self, name: str) -> Hashable | None:
        """Return a value that is equal for two names of one tensor (tied weights); None where that cannot be told."""

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order, each valid until the next is asked for.

        One that will be cast to ``sent[name]`` may come in that dtype already: a shard is cheaper to cast than the
        whole. Otherwise it comes in the dtype of its specification.
        """

    def close(self) -> None:
        """Give up what reading holds, also where it was broken off, and keep other ranks from waiting for it."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the specification of ``tensor``; a DTensor's shape is the global one.

    Raises:
        WeightPushError: ``weights_rejected``: it cannot be pushed.
    """
    if tensor.device.type == "meta":
        raise rejected(f"tensor {name!r} is on the meta device and has no bytes to push", name)
    if tensor.layout is not torch.strided:
        raise rejected(f"tensor {name!r} has layout {tensor.layout}, expected a dense tensor", name)
    try:
        return TensorSpec.of(name, tensor)
    except ValueError as error:
        raise rejected(f"tensor {name!r} cannot be pushed: {_reason(error)}", name) from error


def memory_of(tensor: torch.Tensor) -> Hashable | None:
    """Return the memory that ``tensor`` views: equal for two views of the same elements, None where it has none."""
    storage = tensor.untyped_storage().data_ptr()
    if tensor.numel() == 0 or storage == 0:
        return None
    return (
        tensor.device,
        storage,
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def rejected(message: str, name: str | None = None) -> WeightPushError:
    """Return the error that refuses weights; ``name`` is the offender."""
    details = {} if name is None else {"tensor": name}
    return WeightPushError(ErrorCode.WEIGHTS_REJECTED, message, details=details)


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(str(problem["msg"]) for problem in error.errors())
    return str(error)
