"""DeepSpeed ZeRO-3: each parameter is gathered by itself, with DeepSpeed's own ``GatheredParameters``."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightpush_client.sources.base import spec_of


def is_zero3(parameter: torch.Tensor) -> bool:
    """Return whether DeepSpeed has partitioned ``parameter`` (what it adds to one says so)."""
    return hasattr(parameter, "ds_id")


class PartitionedParameter:
    """A parameter of which each rank holds a flat part."""

    def __init__(self, name: str, parameter: Any) -> None:
        self._parameter = parameter
        whole = torch.empty(1, dtype=parameter.dtype).expand(tuple(self._parameter.ds_shape))
        self.specs = (spec_of(name, whole),)

    @property
    def ranks(self) -> int:
        """How many ranks hold a part."""
        group = getattr(self._parameter, "ds_process_group", None)
        if group is None:
            return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        ranks: int = group.size()
        return ranks

    @property
    def device(self) -> torch.device:
        """Device on which the parameter is gathered."""
        return torch.device(self._parameter.device)

    def identity(self, name: str) -> Hashable | None:
        """Return DeepSpeed's number of the parameter."""
        return ("ds_id", self._parameter.ds_id)

    def check(self) -> None:
        """Do nothing: shapes are fixed when DeepSpeed partitions a parameter."""

    @contextmanager
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Gather the parameter, and partition it again when the context ends."""
        zero = importlib.import_module("deepspeed").zero
        # No rank modifies it, so nothing is broadcast when it is partitioned again.
        with zero.GatheredParameters([self._parameter], modifier_rank=None):
            yield {self.specs[0].name: self._parameter.data}
