"""How the tensors of an update land: what ``begin`` answers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from weightpush_protocol.messages import PlanSummary


class Way(StrEnum):
    """How one tensor lands on one rank, as one letter. Of several ranks, the one that comes last here counts."""

    NOWHERE = "n"
    IN_PLACE = "p"
    SCRATCH = "s"
    LOADER = "l"


_ORDER = {way.value: position for position, way in enumerate(Way)}


def summarise(tensors: int, nbytes: int, ways: Sequence[str]) -> PlanSummary:
    """Count each of ``tensors`` tensors of ``nbytes`` bytes once.

    ``ways`` holds one string a rank, with one letter of :class:`Way` a tensor.

    Raises:
        ValueError: a rank answered for another number of tensors.
    """
    if any(len(letters) != tensors for letters in ways):
        raise ValueError(f"the ranks planned {[len(letters) for letters in ways]} tensors, expected {tensors}")
    slowest = ways[0]
    if any(letters != slowest for letters in ways):
        slowest = "".join(max(letters, key=_ORDER.__getitem__) for letters in zip(*ways, strict=True))
    return PlanSummary(
        in_place=slowest.count(Way.IN_PLACE),
        scratch=slowest.count(Way.SCRATCH),
        via_loader=slowest.count(Way.LOADER),
        ignored=slowest.count(Way.NOWHERE),
        bytes=nbytes,
    )
