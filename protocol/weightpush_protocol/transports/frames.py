"""A bucket and the digests of its tensors in one piece of memory, as the shm transport shows it.

::

    bucket | zero to seven bytes | eight bytes for each tensor: its digest, in the order in which they lie in the bucket

So nothing about a bucket has to travel in a call of its own: workers are told at once how many frames will come. Eight
bytes are the sixteen hexadecimal digits of a digest, read as bytes; they mean nothing where the update has no digests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightpush_protocol.digest_text import DIGEST_BYTES
from weightpush_protocol.manifest import BucketSpec


def frame_bytes(nbytes: int, tensors: int) -> int:
    """Return the size of the frame of a bucket of ``nbytes`` bytes with so many ``tensors``."""
    return _start(nbytes) + DIGEST_BYTES * tensors


def largest_frame(buckets: Sequence[BucketSpec]) -> int:
    """Return the size of the largest frame of ``buckets``; 0 where there are none."""
    return max((frame_bytes(bucket.nbytes, len(bucket.tensors)) for bucket in buckets), default=0)


def write_digests(frame: torch.Tensor, nbytes: int, digests: bytes) -> None:
    """Write ``digests``, eight bytes each, behind the ``nbytes`` bytes of a bucket at the start of ``frame``.

    ``frame`` is a 1-d uint8 tensor.
    """
    if digests:
        raw = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
        frame[_start(nbytes) : _start(nbytes) + len(digests)].copy_(raw)


def read_digests(frame: torch.Tensor, nbytes: int, tensors: int) -> bytes:
    """Return what :func:`write_digests` wrote for a bucket of ``nbytes`` bytes with so many ``tensors``."""
    raw = bytearray(DIGEST_BYTES * tensors)
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(frame[_start(nbytes) : frame_bytes(nbytes, tensors)])
    return bytes(raw)


def _start(nbytes: int) -> int:
    return -(-nbytes // DIGEST_BYTES) * DIGEST_BYTES
