"""Sources whose tensors lie whole in the trainer's own memory, push after push, in the same way.

What a trainer pushes changes in its bytes only. So what a source looks like is kept from one push to the next, and no
tensor with it: a `Skeleton`. The next push holds what it is given against it, which takes a tenth of a microsecond a
tensor instead of fifty, and gets a source that knows where every tensor lies before it is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from weightpush_client.sources.base import memory_of
from weightpush_client.sources.groups import WholeTensor
from weightpush_client.sources.looks import Looks, is_plain
from weightpush_client.sources.pieces import Node, PieceSource
from weightpush_protocol.manifest import TensorSpec

_CPU = torch.device("cpu")


class Place(NamedTuple):
    """A tensor as a view of a leaf, one of the tensors that the trainer gave: ``offset`` counts from its first element.

    ``whole``: it is that leaf itself.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """What a source looks like, without its tensors.

    Attributes:
        specs: of what it yields, in order; ``places``: where each lies, by name.
        model: the module that it is of, or None where it is of a mapping or of pairs.
        names, looks: of the leaves.
    """

    specs: Sequence[TensorSpec]
    places: Mapping[str, Place]
    model: weakref.ref[nn.Module] | None
    names: Sequence[str]
    looks: Looks

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """Of the leaves."""
        return self.looks.dtypes

    @classmethod
    def of(cls, source: PieceSource, leaves: Mapping[str, torch.Tensor], model: nn.Module | None) -> Skeleton | None:
        """Return the skeleton of ``source``, which was made of ``leaves``; None where not all of it lies in them."""
        if not all(isinstance(group, WholeTensor) for group in source.groups):
            return None
        if not all(map(is_plain, leaves.values())):
            return None
        numbers = {name: number for number, name in enumerate(leaves)}
        tensors = list(leaves.values())
        specs, places = source.specs(), {}
        for name, tensor in source.tensors([spec.name for spec in specs]):
            place = _place(source.node(name), tensor, numbers, tensors)
            if place is None:
                source.close()
                return None
            places[name] = place
        return cls(
            specs,
            places,
            None if model is None else weakref.ref(model),
            list(leaves),
            Looks(tensors),
        )

    def fits(self, names: Sequence[str], leaves: Sequence[object]) -> bool:
        """Whether ``leaves`` are in everything but their bytes, and where these lie, those that it was made of."""
        return names == self.names and self.looks.match(leaves)


def _place(
    node: Node, tensor: torch.Tensor, numbers: Mapping[str, int], leaves: Sequence[torch.Tensor]
) -> Place | None:
    """Return where ``tensor``, which was made as ``node`` says, lies in ``leaves``; None where it is computed."""
    if node.leaf is not None:
        number = numbers[node.leaf]
        return Place(number, 0, tuple(tensor.shape), tensor.stride(), True)
    view = node.view
    if view is None or not (leaf := leaves[numbers[view.leaf]]).is_contiguous():
        return None
    found = leaf.detach().as_strided(view.shape, view.stride, int(leaf.storage_offset()) + view.offset)
    # How it is made was seen on tensors without data. So it is looked at once on data, too.
    if found.shape != tensor.shape or found.dtype is not tensor.dtype or not _same_bytes(found, tensor):
        return None
    return Place(numbers[view.leaf], view.offset, view.shape, view.stride, False)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.view(width), other.view(width))


class ResidentSource:
    """A source of which everything is known: ``leaves`` are in the order of the ``skeleton`` that they fit."""

    ranks = 1
    device = _CPU

    def __init__(self, skeleton: Skeleton, leaves: Sequence[torch.Tensor]) -> None:
        self.skeleton = skeleton
        self.leaves = leaves

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor."""
        return list(self.skeleton.specs)

    def identity(self, name: str) -> Hashable | None:
        """Return the memory that the tensor views, where it is one of the leaves."""
        place = self.skeleton.places[name]
        return memory_of(self.leaves[place.leaf]) if place.whole else None

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names`` where they lie."""
        for name in names:
            place = self.skeleton.places[name]
            leaf = self.leaves[place.leaf].detach()
            start = int(leaf.storage_offset()) + place.offset
            yield name, leaf if place.whole else leaf.as_strided(place.shape, place.stride, start)

    def close(self) -> None:
        """Do nothing: it holds what the trainer holds."""
