"""What a pusher keeps of the weights that it pushed last: how they lie, none of their bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weightpush_client.sources import Weights, open_source
from weightpush_client.sources.base import WeightSource
from weightpush_client.sources.fsdp import fsdp_units
from weightpush_client.sources.peft import has_adapters
from weightpush_client.sources.pieces import PieceSource
from weightpush_client.sources.resident import ResidentSource, Skeleton


class SourceKeeper:
    """Opens the weights of one push after the other; belongs to whoever pushes, one push at a time."""

    def __init__(self) -> None:
        self._skeleton: Skeleton | None = None
        #: Names of the leaves of which nothing can be kept: it need not be tried again.
        self._hopeless: list[str] | None = None

    def open(self, weights: Weights) -> WeightSource:
        """Return the source of ``weights``, see `open_source`; one that looks like the last in a moment.

        Raises:
            WeightPushError, TypeError: see `open_source`.
        """
        found = _leaves(weights)
        if found is None:
            return open_source(weights)
        names, leaves = list(found), list(found.values())
        model = weights if isinstance(weights, nn.Module) else None
        kept = self._skeleton
        if kept is not None and (None if kept.model is None else kept.model()) is model and kept.fits(names, leaves):
            return ResidentSource(kept, leaves)
        source = open_source(weights)
        if not all([isinstance(leaf, torch.Tensor) for leaf in leaves]):
            return source
        self._skeleton = None
        if isinstance(source, PieceSource) and (model is None or names != self._hopeless):
            self._skeleton = Skeleton.of(source, dict(zip(names, leaves, strict=True)), model)
            self._hopeless = names if self._skeleton is None else None
        return source if self._skeleton is None else ResidentSource(self._skeleton, leaves)


def _leaves(weights: Weights) -> Mapping[str, torch.Tensor] | None:
    """Return what ``weights`` hold by themselves, tensors or not, if that can be said without communicating."""
    if isinstance(weights, nn.Module):
        return None if fsdp_units(weights) or has_adapters(weights) else weights.state_dict()
    if type(weights) is dict:
        return weights
    return dict(weights) if isinstance(weights, Mapping) else None
