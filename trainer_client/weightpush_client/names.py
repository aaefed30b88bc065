"""Names of tensors as wrappers spell them, brought back to the names of the checkpoint.

Training code wraps modules, and each wrapper leaves a component in the names of ``state_dict()``:

================================ ====================================================
``_orig_mod``                    ``torch.compile``, anywhere in the path
``_fsdp_wrapped_module``         FSDP, anywhere
``_checkpoint_wrapped_module``   activation checkpointing, anywhere
``module``                       DDP and DataParallel: leading; elsewhere only where the server knows the rest
``base_model.model``             PEFT: leading, only where the server knows the rest
``base_layer``                   PEFT, anywhere, only where the server knows the rest
================================ ====================================================

A name that the server knows is never changed. Adapters (``lora_A``...) keep theirs, and the server refuses them.

What no rule can know, the user's own `Names` says, before any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from pydantic import ValidationError

from weightpush_client.sources.base import WeightSource, rejected
from weightpush_client.wrappers import WRAPPERS, without_wrappers
from weightpush_protocol.manifest import TensorSpec

#: New names of tensors: a mapping from the names that change, or a function of each name (without its wrappers). None
#: leaves a tensor out.
Names: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]


def checkpoint_name(name: str, known: Container[str]) -> str:
    """Return the first spelling of ``name`` that is in ``known``, else ``name`` without what is surely a wrapper."""
    for spelling in _spellings(name):
        if spelling in known:
            return spelling
    return without_wrappers(name)


def _spellings(name: str) -> Iterator[str]:
    yield name
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    yield bare
    yield without_wrappers(name)
    parts = [part for part in bare.split(".") if part != "module"]
    yield ".".join(parts)
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    yield ".".join(part for part in parts if part != "base_layer")


class RenamedSource:
    """A source under the names that its user gives, see `Names`.

    Raises:
        WeightPushError: ``weights_rejected``: a key of the mapping is no tensor, a name is no text, or two are one.
    """

    def __init__(self, source: WeightSource, names: Names) -> None:
        self._source = source
        specs = source.specs()
        if isinstance(names, Mapping):
            known = {spelling for spec in specs for spelling in (spec.name, without_wrappers(spec.name))}
            if unknown := next((name for name in names if name not in known), None):
                raise rejected(f"names maps {unknown!r}, which is no tensor of what is pushed", unknown)
        self._original: dict[str, str] = {}
        self._specs: list[TensorSpec] = []
        for spec in specs:
            name = _given(spec.name, names)
            if name is None:
                continue
            if not isinstance(name, str):
                raise rejected(
                    f"names gave {name!r} for {spec.name!r}, expected the name of a tensor or None to leave it out",
                    spec.name,
                )
            if name in self._original:
                raise rejected(f"names gave {name!r} for both {self._original[name]!r} and {spec.name!r}", spec.name)
            self._original[name] = spec.name
            try:
                self._specs.append(TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape))
            except ValidationError as error:
                reason = "; ".join(str(problem["msg"]) for problem in error.errors())
                raise rejected(f"names gave {name!r} for {spec.name!r}: {reason}", spec.name) from error

    @property
    def device(self) -> torch.device:
        """Where most bytes lie."""
        return self._source.device

    @property
    def ranks(self) -> int:
        """How many processes must read together."""
        return self._source.ranks

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor that was not left out."""
        return list(self._specs)

    def identity(self, name: str) -> Hashable | None:
        """Return what tells tied weights."""
        return self._source.identity(self._original[name])

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order."""
        originals = [self._original[name] for name in names]
        cast = {self._original[name]: dtype for name, dtype in (sent or {}).items()}
        for name, (_, tensor) in zip(names, self._source.tensors(originals, cast), strict=True):
            yield name, tensor

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _given(name: str, names: Names) -> Any:
    bare = without_wrappers(name)
    if isinstance(names, Mapping):
        return names[name] if name in names else names.get(bare, name)
    return names(bare)
