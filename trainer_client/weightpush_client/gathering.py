"""How the tensors of a bucket get into its buffer, and their digests: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch
from torch._utils import _flatten_dense_tensors

from weightpush_client.align import Outgoing
from weightpush_client.copies import Copy, Entry, Joined, Program
from weightpush_client.sources import WeightSource
from weightpush_client.sources.resident import ResidentSource
from weightpush_protocol.digest_text import DIGEST_BYTES
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import DigestKind

#: What comes tensor by tensor is hashed after so many bytes: then it is still in the processor's second cache.
_CACHED_BYTES: Final = 512 * 1024
#: Takes the digests of the places in a buffer, eight bytes each.
Hashing: TypeAlias = Callable[[torch.Tensor, Sequence[tuple[int, int]]], bytes]


class Gatherer(Protocol):
    """Fills buffers with buckets, in order."""

    def fill(self, number: int, buffer: torch.Tensor) -> bytes:
        """Fill ``buffer`` with bucket ``number``; return its digests, eight bytes each, as the tensors lie there.

        Nothing is returned where the update has no digests.

        Raises:
            WeightPushError: ``weights_rejected``: a tensor is not what the manifest declares.
            BaseException: whatever the source raises.
        """


class AtOnce:
    """Fills buffers in host memory by a program; ``check`` raises when nobody wants them any more."""

    def __init__(
        self, program: Program, source: ResidentSource, digest: DigestKind, hashing: Hashing, check: Callable[[], None]
    ) -> None:
        self._program = program
        self._leaves = source.leaves
        self._hashing = hashing if digest is not DigestKind.NONE else None
        self._check = check

    def fill(self, number: int, buffer: torch.Tensor) -> bytes:
        """Fill ``buffer`` with bucket ``number``, see `Gatherer`."""
        digests = []
        typed: dict[torch.dtype, torch.Tensor] = {}
        for window in self._program.buckets[number]:
            for copy in window.copies:
                target = typed.get(copy.dtype)
                if target is None:
                    whole = buffer.numel() // copy.dtype.itemsize * copy.dtype.itemsize
                    target = typed[copy.dtype] = buffer[:whole].view(copy.dtype)
                self._copy(copy, target)
            if self._hashing is not None:
                digests.append(self._hashing(buffer, window.places))
            self._check()
        return b"".join(digests)

    def _copy(self, copy: Copy, target: torch.Tensor) -> None:
        """Copy to ``target``, the buffer in the right dtype. Casts on the way, equal to ``tensor.to(dtype)``."""
        if isinstance(copy, Joined):
            joined = _flatten_dense_tensors([self._leaves[leaf] for leaf in copy.leaves])  # type: ignore[no-untyped-call]  # untyped in torch
            target[copy.start : copy.end].copy_(joined)
            return
        leaf = self._leaves[copy.leaf]
        source = leaf.as_strided(copy.shape, copy.stride, int(leaf.storage_offset()) + copy.offset)
        start = int(target.storage_offset()) + copy.to
        target.as_strided(copy.shape, copy.to_stride, start).copy_(source)


class OneByOne:
    """Fills buffers with the tensors of ``source``, each as it comes, which may be on another device."""

    def __init__(
        self,
        source: WeightSource,
        outgoing: Sequence[Outgoing],
        manifest: Manifest,
        digest: DigestKind,
        hashing: Hashing,
        check: Callable[[], None],
    ) -> None:
        self._outgoing = outgoing
        self._manifest = manifest
        self._hashing = hashing if digest is not DigestKind.NONE else None
        self._check = check
        self._tensors = source.tensors(
            [item.held.name for item in outgoing], {item.held.name: item.sent.torch_dtype for item in outgoing}
        )

    def fill(self, number: int, buffer: torch.Tensor) -> bytes:
        """Fill ``buffer`` with bucket ``number``, see `Gatherer`."""
        bucket = self._manifest.buckets[number]
        taken: dict[int, bytes] = {}
        waiting: list[Entry] = []
        nbytes = 0
        # A bucket is a contiguous run of the manifest, laid out in another order.
        for index, offset in sorted(zip(bucket.tensors, bucket.offsets, strict=True)):
            tensor = self._next(index)
            spec = self._manifest.tensors[index]
            entry = Entry(index, offset, spec.nbytes)
            if entry.nbytes:
                view = buffer[offset : offset + entry.nbytes].view(spec.torch_dtype).view(spec.shape)
                # Casts, gathers strided views and crosses devices in one pass; equal to tensor.to(dtype).
                view.copy_(tensor)
            waiting.append(entry)
            nbytes += entry.nbytes
            # A GPU copies later than it is told to.
            if nbytes >= _CACHED_BYTES and not buffer.is_cuda:
                self._hash(buffer, waiting, taken)
                waiting, nbytes = [], 0
            self._check()
        if buffer.is_cuda:
            # The sending thread has a stream of its own.
            torch.cuda.current_stream(buffer.device).synchronize()
        self._hash(buffer, waiting, taken)
        return b"".join([taken[index] for index in bucket.tensors]) if self._hashing is not None else b""

    def _hash(self, buffer: torch.Tensor, entries: Sequence[Entry], taken: dict[int, bytes]) -> None:
        if self._hashing is not None:
            raw = self._hashing(buffer, [(entry.offset, entry.nbytes) for entry in entries])
            for number, entry in enumerate(entries):
                taken[entry.number] = raw[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]

    def _next(self, index: int) -> torch.Tensor:
        held, sent = self._outgoing[index].held, self._outgoing[index].sent
        where = f"tensor {index + 1} of {len(self._outgoing)}"
        try:
            name, tensor = next(self._tensors)
        except StopIteration:
            raise _diverged(f"the source ended before {where}, {held.name!r}", held.name) from None
        # It may have been cast on the way already.
        dtype_fits = tensor.dtype in {held.torch_dtype, sent.torch_dtype}
        if (name, tuple(tensor.shape)) != (held.name, held.shape) or not dtype_fits:
            raise _diverged(
                f"{where} changed since the push began: declared {held.name!r} {held.dtype} {list(held.shape)}, "
                f"found {name!r} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
                held.name,
            )
        return tensor


def _diverged(message: str, name: str) -> WeightPushError:
    return WeightPushError(ErrorCode.WEIGHTS_REJECTED, message, details={"tensor": name})
