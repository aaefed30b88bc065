"""Where the weights of a push come from: a module, a mapping, pairs, or a checkpoint directory.

Every kind becomes a `WeightSource`: specifications first, tensors later, in one order.

==================================== ===========================================================================
``nn.Module``                        its ``state_dict()``: parameters and persistent buffers, never the others
mapping of name to tensor            its items, in its order
iterable of ``(name, tensor)``       read to its end before the push begins: the specifications must be known first.
                                     References are kept, not copies, so each tensor must keep its bytes until the
                                     push ends. A generator that refills one buffer is refused.
``str`` or path                      a directory with a safetensors checkpoint, read tensor by tensor while pushing
==================================== ===========================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from pydantic import ValidationError
from torch import nn

from weightpush_client.checkpoint import CheckpointSource
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec

Weights: TypeAlias = (
    nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str]
)


class WeightSource(Protocol):
    """Tensors of one push under the names that the trainer gives them."""

    @property
    def device(self) -> torch.device:
        """Where most bytes lie."""

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor, in the order of the source."""

    def identity(self, name: str) -> Hashable | None:
        """Return a value that is equal for two names of one tensor (tied weights); None where that cannot be told."""

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order, each valid until the next is asked for."""


def open_source(weights: Weights) -> WeightSource:
    """Return the source of ``weights``.

    Raises:
        WeightPushError: ``weights_rejected``: something in it cannot be pushed; the first offender is named.
        TypeError: ``weights`` is none of the kinds above.
    """
    if isinstance(weights, str | os.PathLike):
        return CheckpointSource(weights)
    if isinstance(weights, nn.Module):
        return TensorSource(weights.state_dict().items())
    if isinstance(weights, Mapping):
        return TensorSource(weights.items())
    if isinstance(weights, Iterable) and not isinstance(weights, torch.Tensor | bytes):
        return TensorSource(weights)
    raise TypeError(
        f"cannot push a {type(weights).__name__}: give a module, a state dict, (name, tensor) pairs or a directory"
    )


class TensorSource:
    """Tensors in memory. Keeps references and never copies; ``requires_grad`` does not matter."""

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._specs: list[TensorSpec] = []
        written: dict[str, int] = {}
        for name, tensor in _checked_pairs(pairs):
            if name in self._tensors:
                raise _rejected(f"the source names tensor {name!r} twice", name)
            self._specs.append(_spec(name, tensor))
            self._tensors[name] = tensor.detach()
            written[name] = _writes(tensor)
        for name, tensor in self._tensors.items():
            if _writes(tensor) != written[name]:
                raise _rejected(
                    f"tensor {name!r} was overwritten after the source yielded it; "
                    "yield tensors that keep their bytes until the push ends, e.g. a clone of a reused buffer",
                    name,
                )

    @property
    def device(self) -> torch.device:
        """Device of the largest tensor."""
        largest = max(self._tensors.values(), key=lambda tensor: tensor.nbytes, default=None)
        return torch.device("cpu") if largest is None else largest.device

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor, in the order of the source."""
        return list(self._specs)

    def identity(self, name: str) -> Hashable | None:
        """Return the memory that the tensor views: equal for two names of the same view, None where it has none."""
        tensor = self._tensors[name]
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

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order."""
        for name in names:
            yield name, self._tensors[name]


def _checked_pairs(pairs: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _rejected(f"item {number} of the source is a {type(pair).__name__}, expected (name, tensor)")
        name, tensor = pair
        if not isinstance(name, str):
            raise _rejected(f"item {number} of the source has a name of type {type(name).__name__}, expected str")
        if not isinstance(tensor, torch.Tensor):
            raise _rejected(
                f"{name!r} is a {type(tensor).__name__}, expected a tensor; leave it out of what you push", name
            )
        yield name, tensor


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    if _is_dtensor(tensor):
        raise _rejected(
            f"tensor {name!r} is a DTensor; sharded trainers are not supported yet: "
            "gather it first (``full_tensor()``, or a full state dict)",
            name,
        )
    if tensor.device.type == "meta":
        raise _rejected(f"tensor {name!r} is on the meta device and has no bytes to push", name)
    if tensor.layout is not torch.strided:
        raise _rejected(f"tensor {name!r} has layout {tensor.layout}, expected a dense tensor", name)
    try:
        return TensorSpec.of(name, tensor)
    except ValueError as error:
        raise _rejected(f"tensor {name!r} cannot be pushed: {_reason(error)}", name) from error


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # Importing torch.distributed.tensor costs seconds; nobody can hold a DTensor who has not imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _writes(tensor: torch.Tensor) -> int:
    # Tensors made under inference_mode do not count writes.
    return 0 if tensor.is_inference() else tensor._version


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(str(problem["msg"]) for problem in error.errors())
    return str(error)


def _rejected(message: str, name: str | None = None) -> WeightPushError:
    details = {} if name is None else {"tensor": name}
    return WeightPushError(ErrorCode.WEIGHTS_REJECTED, message, details=details)
