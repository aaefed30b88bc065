"""What tensors look like, all but their bytes and where these lie, for comparison with the tensors of the next push."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

_KINDS = frozenset({torch.Tensor, nn.Parameter})


def is_plain(tensor: object) -> bool:
    """Whether it is an ordinary, dense tensor on the CPU, of a kind whose views show the bytes of their memory."""
    return (
        type(tensor) in _KINDS
        and isinstance(tensor, torch.Tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


class _Guards(Protocol):
    def check(self, *tensors: object) -> bool:
        """Whether all are as those that it was made of."""


class Looks:
    """Shapes, strides and dtypes of ``tensors``, all of which are plain. Holds no tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._guards = _guards(tensors)

    def match(self, tensors: Sequence[object]) -> bool:
        """Whether ``tensors`` are plain and look the same, one by one."""
        if len(tensors) != len(self.shapes):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        # Guards also compare what does not matter, such as whether gradients are wanted.
        found: list[torch.Tensor] = []
        if not self._match_one_by_one(tensors, found):
            return False
        self._guards = _guards(found)
        return True

    def _match_one_by_one(self, tensors: Sequence[object], found: list[torch.Tensor]) -> bool:
        # In one pass: with thousands of tensors each pass has to fetch them from memory again.
        for tensor, shape, stride, dtype in zip(tensors, self.shapes, self.strides, self.dtypes, strict=True):
            if (
                not is_plain(tensor)
                or not isinstance(tensor, torch.Tensor)
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.stride() != stride
            ):
                return False
            found.append(tensor)
        return True


# What torch's compiler compares tensors with takes a tenth of a microsecond for each, a fifth of a loop here. It is no
# public part of torch, so it is tried out first: without it, or where it does not see a difference, it is not used.


def _guards(tensors: Sequence[torch.Tensor]) -> _Guards | None:
    return _make_guards(tensors) if guards_can_be_relied_on() else None


def _make_guards(tensors: Sequence[torch.Tensor]) -> _Guards | None:
    try:
        from torch._C._dynamo.guards import TensorGuards

        # A dimension that is not given may be any other one.
        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        guards: _Guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards if guards.check(*tensors) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


class _OfAnotherKind(torch.Tensor):
    """A tensor that may mean anything by its bytes."""


@cache
def guards_can_be_relied_on() -> bool:
    """Whether they see all the differences that matter here."""
    like, last = torch.zeros(4, 6, device="cpu"), torch.zeros(3, device="cpu", dtype=torch.int32)
    guards = _make_guards([like, last])
    if guards is None or not guards.check(torch.ones_like(like), torch.ones_like(last)):
        return False
    others = [
        torch.zeros(4, 7, device="cpu"),
        torch.zeros(24, device="cpu"),
        torch.zeros(4, 6, 1, device="cpu"),
        torch.zeros(6, 4, device="cpu").t(),
        torch.zeros(4, 12, device="cpu")[:, ::2],
        torch.zeros(6, device="cpu").expand(4, 6),
        torch.zeros(4, 6, device="cpu", dtype=torch.float64),
        torch.zeros(4, 6, device="cpu", dtype=torch.int32),
        torch.zeros(4, 6, device="meta"),
        torch.zeros(4, 6, device="cpu").to_sparse(),
        torch._neg_view(like),
        like.as_subclass(_OfAnotherKind),
        None,
    ]
    return not any(guards.check(other, last) or guards.check(like, other) for other in others)
