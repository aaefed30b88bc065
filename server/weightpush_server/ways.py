"""How the tensors of an update land: what ``begin`` answers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import PlanSummary


class Way(StrEnum):
    """How one tensor lands on one rank, as one letter. Of several ranks, the one that comes last here counts."""

    NOWHERE = "n"
    IN_PLACE = "p"
    SCRATCH = "s"
    LOADER = "l"


_ORDER = {way.value: position for position, way in enumerate(Way)}


def summarise(specs: Sequence[TensorSpec], ways: Sequence[str]) -> PlanSummary:
    """Count each tensor once. ``ways`` holds one string a rank, with one letter of :class:`Way` a tensor.

    Raises:
        ValueError: a rank answered for another number of tensors.
    """
    counts = dict.fromkeys(_ORDER, 0)
    for letters in zip(specs, *ways, strict=True):
        counts[max(letters[1:], key=_ORDER.__getitem__)] += 1
    return PlanSummary(
        in_place=counts[Way.IN_PLACE],
        scratch=counts[Way.SCRATCH],
        via_loader=counts[Way.LOADER],
        ignored=counts[Way.NOWHERE],
        bytes=sum(spec.nbytes for spec in specs),
    )
