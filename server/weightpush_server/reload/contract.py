"""What must not change from one update to the next: names, shapes, dtypes and strides of all registered tensors and,
on a GPU, the address of everything that a captured CUDA graph may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload.fingerprint import tensor_objects
from weightpush_server.reload.storage import storage_id

#: Types of devices whose graphs keep addresses. On a CPU nothing is pinned: native kernels keep raw pointers into the
#: tensors that built them, and writing into older ones would tear the two apart.
PIN_DEVICES: Final = frozenset({"cuda"})


@dataclass(frozen=True)
class TensorFacts:
    """What a tensor looks like from outside. Strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} strides {list(self.stride)} on {self.device}"


@dataclass(frozen=True)
class Contract:
    """The facts of all registered tensors by name, and the tensors whose addresses are pinned by their path."""

    facts: dict[str, TensorFacts]
    pinned: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        pin_devices: frozenset[str] = PIN_DEVICES,
        objects: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> Contract:
        """Describe ``model`` as it is now. Tensors on ``pin_devices`` (device types) keep their addresses.

        ``objects``: what :func:`tensor_objects` finds, where that was asked already.
        """
        return cls(
            facts={name: TensorFacts.of(tensor) for name, tensor in registered(model).items()},
            # Detached: a pinned alias must not change when post-load processing rebinds the object's data.
            pinned={
                path: tensor.detach()
                for path, tensor in (tensor_objects(model) if objects is None else objects)
                if tensor.device.type in pin_devices
            },
        )

    def write_back(self, model: nn.Module) -> int:
        """Bring every pinned tensor that moved back to its address, with its new content; return how many moved.

        Raises:
            WeightPushError: PROOF_FAILED where a pinned tensor is gone, has another layout, or shares its old address
                with one whose content is now another (weights that were tied and no longer are).
        """
        if not self.pinned:
            return 0
        now = dict(tensor_objects(model))
        occupied: dict[int, tuple[str, int]] = {}
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path, old in self.pinned.items():
            new = now.get(path)
            if new is None or TensorFacts.of(new) != TensorFacts.of(old):
                found = TensorFacts.of(new) if new is not None else "nothing"
                raise _broken(path, f"expected {TensorFacts.of(old)} at its old address, found {found}")
            owner, source = occupied.setdefault(old.data_ptr(), (path, new.data_ptr()))
            if source != new.data_ptr() and old.numel():
                raise _broken(path, f"it shared its address with {owner!r}, and the two differ now")
            if new.data_ptr() != old.data_ptr():
                moves.append((new, old))
        targets = {storage_id(old) for _, old in moves}
        with torch.no_grad():
            # A result may lie where another one goes: processing can swap two weights, or pass storage on.
            sources = [new.clone() if storage_id(new) in targets else new for new, _ in moves]
            for content, (new, old) in zip(sources, moves, strict=True):
                old.copy_(content)
                new.data = old
        return len(moves)

    def check(self, model: nn.Module, *, settled: Contract | None = None) -> None:
        """Raise PROOF_FAILED for the first registered tensor that appeared, vanished or changed its layout.

        A tensor that the runtime exchanged since the cold start may also be as it was then, in ``settled``.
        """
        now = registered(model)
        for name in sorted(self.facts.keys() | now.keys()):
            expected = self.facts.get(name)
            found = TensorFacts.of(now[name]) if name in now else None
            if expected != found and (settled is None or settled.facts.get(name) != found):
                raise _broken(name, f"expected {expected or 'nothing'}, found {found or 'nothing'}")
        for path, old in self.pinned.items():
            if path in now and now[path].data_ptr() != old.data_ptr():
                raise _broken(path, "its address moved")


def registered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name; a shared one under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _broken(name: str, what: str) -> WeightPushError:
    return WeightPushError(
        ErrorCode.PROOF_FAILED,
        f"tensor {name!r} is not as before the update: {what}. Restart the server on the new checkpoint.",
        details={"tensor": name},
    )
