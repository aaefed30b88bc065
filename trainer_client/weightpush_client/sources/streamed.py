"""A source as trainers write it for vLLM's weight-transfer engines: metadata first, then tensors in one order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import torch
from pydantic import ValidationError

from weightpush_client.sources.base import rejected
from weightpush_protocol.dtypes import dtype_name
from weightpush_protocol.manifest import TensorSpec


class Streamed(Protocol):
    """What is asked of such a source: vLLM's ``WeightSource``, as far as one process can read it by itself.

    ``metadata`` gives ``name``, ``dtype`` and ``shape`` of every tensor, and iterating yields ``(name, tensor)`` pairs
    in the same order, anew each time.
    """

    def metadata(self) -> Sequence[Any]:
        """Return what iterating will yield, without yielding it."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Begin a pass."""


def is_streamed(weights: object) -> TypeGuard[Streamed]:
    """Whether ``weights`` is such a source."""
    return callable(getattr(weights, "metadata", None)) and isinstance(weights, Iterable)


class StreamedSource:
    """Tensors of ``weights``, which are read as they are needed and never all at once.

    Raises:
        WeightPushError: ``weights_rejected``: a tensor that cannot be pushed, or has the name of another one, or a
            source of which this process holds a part only.
    """

    ranks = 1

    def __init__(self, weights: Streamed) -> None:
        held_names = getattr(weights, "held_names", None)
        if callable(held_names) and held_names() is not None:
            raise rejected(
                "this process holds only some of the source's tensors; give each rank's module to a pusher with "
                "process_group=, or gather the weights first"
            )
        self._weights = weights
        self._specs: dict[str, TensorSpec] = {}
        for entry in weights.metadata():
            spec = _spec_of(entry)
            if spec.name in self._specs:
                raise rejected(f"the source names tensor {spec.name!r} twice", spec.name)
            self._specs[spec.name] = spec

    @cached_property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        for _, tensor in self._weights:
            return tensor.device
        return torch.device("cpu")

    def specs(self) -> list[TensorSpec]:
        """Return the source's metadata, in its order."""
        return list(self._specs.values())

    def identity(self, name: str) -> Hashable | None:
        """Return None: whether two tensors are one cannot be told before they are there."""
        return None

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order. Those that come before their turn are kept until then.

        Raises:
            WeightPushError: ``weights_rejected``: the source yields other tensors than its metadata says.
        """
        waiting: dict[str, torch.Tensor] = {}
        wanted = set(names)
        passing = iter(self._weights)
        for name in names:
            while name not in waiting:
                found, tensor = self._next(passing, name)
                if found in wanted:
                    waiting[found] = tensor
            wanted.discard(name)
            yield name, waiting.pop(name)

    def _next(self, passing: Iterator[tuple[str, torch.Tensor]], name: str) -> tuple[str, torch.Tensor]:
        try:
            found, tensor = next(passing)
        except StopIteration:
            raise rejected(f"the source ended before {name!r}, which its metadata names", name) from None
        spec = self._specs.get(found)
        if spec is None:
            raise rejected(f"the source yields {found!r}, which its metadata does not name", found)
        if (tensor.dtype, tuple(tensor.shape)) != (spec.torch_dtype, spec.shape):
            raise rejected(
                f"the source yields {found!r} as {tensor.dtype} {list(tensor.shape)}, its metadata says {spec.dtype} "
                f"{list(spec.shape)}",
                found,
            )
        return found, tensor

    def close(self) -> None:
        """Do nothing: a pass that is broken off is the source's own affair."""


def _spec_of(entry: Any) -> TensorSpec:
    try:
        return TensorSpec(name=entry.name, dtype=dtype_name(entry.dtype), shape=tuple(entry.shape))
    except ValidationError as error:
        reason = "; ".join(str(problem["msg"]) for problem in error.errors())
    except ValueError as error:
        reason = str(error)
    raise rejected(f"tensor {entry.name!r} cannot be pushed: {reason}", str(entry.name))
