"""What lies where in a trainer's broadcasts. Both ends work it out from the same list of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightpush_protocol.manifest import TensorSpec


@dataclass(frozen=True)
class Chunk:
    """One broadcast of ``nbytes`` bytes: tensors one behind the other, each with its byte offset, without padding.

    So a tensor behind one of odd size is not aligned.
    """

    entries: tuple[tuple[TensorSpec, int], ...]
    nbytes: int


def cut_chunks(specs: Sequence[TensorSpec], *, packed_bytes: int | None) -> Iterator[Chunk]:
    """Yield the broadcasts that bring ``specs``, in order.

    ``packed_bytes``: a chunk ends with the tensor that takes it beyond so many bytes; ``None``: each tensor comes by
    itself.
    """
    entries: list[tuple[TensorSpec, int]] = []
    nbytes = 0
    for spec in specs:
        entries.append((spec, nbytes))
        nbytes += spec.nbytes
        if packed_bytes is None or nbytes > packed_bytes:
            yield Chunk(tuple(entries), nbytes)
            entries, nbytes = [], 0
    if entries:
        yield Chunk(tuple(entries), nbytes)
