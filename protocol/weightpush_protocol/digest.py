"""A digest of a tensor's bytes that CPU and GPU compute alike, at memory speed.

The digest tells transport and bookkeeping faults: a changed bit, swapped elements or rows, a truncated tail, the bytes
of another push. It is not a MAC: whoever wants to can forge it.

**Definition** (for other implementations)

1. The bytes of the contiguous tensor (little-endian elements) are cut into chunks of ``CHUNK_BYTES``; the last one may
   be shorter. The hash of a chunk is its XXH3-64 with seed 0, as published by the xxHash project.
2. The digest of a tensor of at most one chunk is the hash of its bytes.
3. Otherwise it is the XXH3-64, with the tensor's size in bytes as seed, of the hashes of its chunks, each written as 8
   bytes, the highest first.

It is shown as 16 hexadecimal digits.

**What it catches.** Anything, but for one case in about 2^64: XXH3 passes the tests of avalanche and collisions of its
suite (SMHasher) at all lengths, and the length is part of every hash. Inside a chunk more is certain. Eight 64-bit
accumulators take in 64 bytes at a time; each 64-bit word is added as it is to one of them, and to its neighbour as the
product of its halves, with positions told apart by different keys; after each KiB an accumulator goes through a
bijection. So a change of any one bit, byte or aligned 64-bit word always leaves another state, and only the last
folding of 512 bits into 64 can hide it. Bit patterns whose difference is a power of two, such as flipped signs, are no
weak spot, as they were for sums of products modulo 2^64.

**Cost.** On a CPU one read of the tensor: 17 GB/s on one core of an AMD EPYC, where copying runs at 9 GB/s, and two
microseconds for a small tensor. Other threads may run meanwhile: each chunk is large enough for the library to release
the interpreter; large tensors are hashed by several (:mod:`weightpush_protocol.threads`). On a GPU the whole chunks are
hashed by some ten kernels that read or write them, and 5 small ones for each KiB of a chunk; :func:`raw_digests` does
the latter for all tensors of a bucket together. Their tails, below one chunk, are copied to the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import torch
import xxhash

from weightpush_protocol.dtypes import dtype_name
from weightpush_protocol.memory import bytes_under
from weightpush_protocol.places import PlaceRun, Places
from weightpush_protocol.threads import in_threads

CHUNK_BYTES: Final = 128 * 1024
_WORD_BYTES: Final = 8
#: Bytes that are copied at once where they are not contiguous or not aligned: on a CPU they stay in its cache, a GPU
#: must have enough to do. Multiples of a chunk.
_HOST_RUN: Final = 4 * CHUNK_BYTES
_DEVICE_RUN: Final = 256 * CHUNK_BYTES


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of ``tensor``'s bytes, 16 hexadecimal digits.

    Takes any shape, stride and storage offset. Bit patterns count: -0.0 and 0.0 differ, equal NaNs are equal. Shape and
    dtype do not: a tensor and the ``uint8`` view of its bytes have the same digest. On a GPU the result is waited for.

    Raises:
        ValueError: the dtype cannot travel, or the tensor has no bytes here (sparse, meta).
    """
    dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"a digest needs a dense tensor with storage, got {tensor.layout} on {tensor.device}")
    _check_byte_order()
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            return _device_digests([tensor])[0]
        if tensor.is_contiguous() and not tensor.is_neg():
            return _host_digest(bytes_under(tensor.view(-1).view(torch.uint8)))
        hashes = [_host_hashes(bytes_under(run)) for run in _runs(tensor, _HOST_RUN)]
    return _digest(b"".join(hashes), tensor.numel() * tensor.element_size())


def raw_digests(buffer: torch.Tensor, places: Sequence[tuple[int, int]]) -> bytes:
    """Return the digests of the bytes at ``places``, pairs of offset and size, in ``buffer``, a 1-d uint8 tensor.

    Each is what :func:`tensor_digest` says of these bytes, as eight bytes; all together take far fewer calls of torch.

    Raises:
        ValueError: ``buffer`` is something else, or a place lies beyond its end.
    """
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"a bucket is a contiguous 1-d uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
    places = places if isinstance(places, Places) else Places(places)
    if (outside := places.first_outside(buffer.numel())) is not None:
        raise ValueError(f"bytes {outside[0]} to {sum(outside)} are not in a bucket of {buffer.numel()}")
    _check_byte_order()
    with torch.no_grad():
        if buffer.device.type != "cpu":
            digests = _device_digests([buffer[offset : offset + nbytes] for offset, nbytes in places])
            return bytes.fromhex("".join(digests))
        memory = bytes_under(buffer.detach())
    return b"".join([_run_digests(memory, run) for run in places.runs])


def _run_digests(memory: memoryview, run: PlaceRun) -> bytes:
    start, nbytes, count = run
    hash_of = xxhash.xxh3_64_digest
    if nbytes > CHUNK_BYTES:

        def digests(starts: Sequence[int]) -> bytes:
            return b"".join([hash_of(_host_hashes(memory[at : at + nbytes]), seed=nbytes) for at in starts])

        total = nbytes * count
        return b"".join(in_threads(digests, range(start, start + total, nbytes), nbytes=total))
    if count == 1:
        digest: bytes = hash_of(memory[start : start + nbytes])
        return digest
    # No step of Python, and nothing that has to be fetched from memory, for a tensor: hashing it takes no longer.
    starts, ends = (range(first, first + nbytes * count, nbytes) for first in (start, start + nbytes))
    return b"".join(map(hash_of, map(memory.__getitem__, map(slice, starts, ends))))


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise ValueError("digests are defined for little-endian machines only")


def _digest(hashes: bytes, nbytes: int) -> str:
    """Return the digest of a tensor of ``nbytes`` bytes from the joined hashes of its chunks."""
    if nbytes > CHUNK_BYTES:
        return xxhash.xxh3_64_hexdigest(hashes, seed=nbytes)
    return hashes.hex() if nbytes else xxhash.xxh3_64_hexdigest(b"")


# On a CPU


def _host_digest(memory: memoryview) -> str:
    nbytes = len(memory)
    if nbytes <= CHUNK_BYTES:
        return xxhash.xxh3_64_hexdigest(memory)
    return _digest(_host_hashes(memory), nbytes)


def _host_hashes(memory: memoryview) -> bytes:
    hash_of = xxhash.xxh3_64_digest

    def hashes(starts: Sequence[int]) -> bytes:
        return b"".join([hash_of(memory[at : at + CHUNK_BYTES]) for at in starts])

    return b"".join(in_threads(hashes, range(0, len(memory), CHUNK_BYTES), nbytes=len(memory)))


# On other devices: XXH3 of whole chunks, by operators that every device has

_MASK_32: Final = 2**32 - 1
_STRIPE_WORDS: Final = 8
_BLOCK_STRIPES: Final = 16
_CHUNK_BLOCKS: Final = CHUNK_BYTES // (_WORD_BYTES * _STRIPE_WORDS * _BLOCK_STRIPES)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_AVALANCHE: Final = 0x165667919E3779F9
#: The key that the specification of XXH3 prints.
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _secret_words(offset: int, count: int) -> list[int]:
    return [_signed(int.from_bytes(_SECRET[at : at + 8], "little")) for at in range(offset, offset + 8 * count, 8)]


def _signed(value: int) -> int:
    """Return the number that int64 has for the lower 64 bits of ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


@lru_cache(maxsize=32)
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a chunk is mixed with: its words' keys, the scrambling key, the folding key, the first state."""
    stripes = [_secret_words(8 * number, _STRIPE_WORDS) for number in range(_BLOCK_STRIPES)]
    last = len(_SECRET) - 8 * _STRIPE_WORDS
    ending = [*stripes[:-1], _secret_words(last - 7, _STRIPE_WORDS)]
    words = torch.tensor([*[stripes] * (_CHUNK_BLOCKS - 1), ending], dtype=torch.int64, device=device)
    rest = (_secret_words(last, _STRIPE_WORDS), _secret_words(11, _STRIPE_WORDS), [_signed(value) for value in _START])
    scramble, fold, start = (torch.tensor(value, dtype=torch.int64, device=device) for value in rest)
    return words, scramble, fold, start


def _device_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of tensors on one device that is no CPU (though it may be one), with one wait for all."""
    sums: list[torch.Tensor] = []
    tails: list[torch.Tensor] = []
    shares: list[tuple[int, int, int]] = []
    for tensor in tensors:
        chunks = tail = 0
        for run in _runs(tensor, _DEVICE_RUN):
            whole = run.numel() // CHUNK_BYTES
            if whole:
                sums.append(_block_sums(run[: whole * CHUNK_BYTES].view(torch.int64)))
            if run.numel() % CHUNK_BYTES:
                # A run may be overwritten by the next one.
                tails.append(run[whole * CHUNK_BYTES :].clone())
                tail = tails[-1].numel()
            chunks += whole
        shares.append((chunks, tail, tensor.numel() * tensor.element_size()))
    hashes = _chunk_hashes(torch.cat(sums)).cpu() if sums else torch.empty(0, dtype=torch.int64)
    # Highest byte first.
    swapped = hashes.view(torch.uint8).view(-1, _WORD_BYTES).flip(1).contiguous().view(-1)
    whole_chunks = bytes_under(swapped)
    left = torch.cat(tails).cpu() if tails else torch.empty(0, dtype=torch.uint8)
    rest = bytes_under(left)
    digests = []
    chunk = end = 0
    for chunks, tail, nbytes in shares:
        parts = bytes(whole_chunks[8 * chunk : 8 * (chunk + chunks)]) + _host_hashes(rest[end : end + tail])
        digests.append(_digest(parts, nbytes))
        chunk, end = chunk + chunks, end + tail
    return digests


def _block_sums(words: torch.Tensor) -> torch.Tensor:
    """Return what each block of each chunk adds to the 8 accumulators: int64, chunks x blocks x 8."""
    keys = _keys(words.device)[0]
    data = words.view(-1, _CHUNK_BLOCKS, _BLOCK_STRIPES, _STRIPE_WORDS)
    mixed = data ^ keys
    products = (mixed & _MASK_32) * (mixed >> 32).bitwise_and_(_MASK_32)
    plain = data.sum(dim=2)
    # Each word itself goes to the accumulator beside that of its product.
    return products.sum(dim=2).add_(plain.view(-1, _CHUNK_BLOCKS, _STRIPE_WORDS // 2, 2).flip(-1).view_as(plain))


def _chunk_hashes(sums: torch.Tensor) -> torch.Tensor:
    """Return XXH3-64 of each chunk from its block sums, as the bits of int64."""
    _, scramble, fold, start = _keys(sums.device)
    state = start.expand(sums.shape[0], _STRIPE_WORDS)
    for block in range(_CHUNK_BLOCKS - 1):
        state = state + sums[:, block]
        state = state.bitwise_xor(_shifted(state, 47)).bitwise_xor_(scramble).mul_(_PRIME32[0])
    pairs = ((state + sums[:, -1]) ^ fold).view(-1, _STRIPE_WORDS // 2, 2)
    value = _folded_products(pairs[..., 0], pairs[..., 1]).sum(dim=1) + _signed(CHUNK_BYTES * _PRIME64[0])
    value = value.bitwise_xor(_shifted(value, 37)) * _AVALANCHE
    return value.bitwise_xor(_shifted(value, 32))


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    # int64 shifts carry the sign along; the mask makes it a shift of unsigned bits.
    return (value >> by).bitwise_and_(2 ** (64 - by) - 1)


def _folded_products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the upper half of each unsigned 128-bit product, xor its lower half."""
    (low, high), (low_, high_) = ((value & _MASK_32, _shifted(value, 32)) for value in (one, other))
    first, second = low * low_, high * low_
    # No carry is lost: a product of 32-bit numbers leaves room for two more of them.
    middle = _shifted(first, 32) + (second & _MASK_32) + low * high_
    return (high * high_ + _shifted(second, 32) + _shifted(middle, 32)) ^ (one * other)


# Bytes in order


def _runs(tensor: torch.Tensor, capacity: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``tensor`` as contiguous, aligned 1-d uint8 tensors, each but the last a multiple of a chunk.

    A yielded tensor may be overwritten when the next one is asked for. Copies take ``capacity`` bytes.
    """
    size = tensor.numel() * tensor.element_size()
    capacity = min(capacity, size)
    scratch: torch.Tensor | None = None
    filled = 0
    for piece in _pieces(tensor, capacity):
        start = 0
        while start < piece.numel():
            if filled == 0 and _aligned(piece):
                left = piece.numel() - start
                ready = min(left - left % CHUNK_BYTES, _DEVICE_RUN)
                if ready:
                    yield piece[start : start + ready]
                    start += ready
                    continue
            if scratch is None:
                scratch = torch.empty(capacity, dtype=torch.uint8, device=tensor.device)
            count = min(piece.numel() - start, capacity - filled)
            scratch[filled : filled + count].copy_(piece[start : start + count])
            start += count
            filled += count
            if filled == capacity:
                yield scratch
                filled = 0
    if scratch is not None and filled:
        yield scratch[:filled]


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``tensor`` in order as contiguous 1-d uint8 tensors; copies hold at most ``limit`` bytes."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() and not tensor.is_neg():
        yield tensor.view(-1).view(torch.uint8)
        return
    size = tensor.numel() * tensor.element_size()
    if size <= limit:
        yield tensor.contiguous().resolve_neg().view(-1).view(torch.uint8)
        return
    row_bytes = size // tensor.shape[0]
    if row_bytes > limit or tensor.shape[0] == 1:
        for row in tensor:
            yield from _pieces(row, limit)
        return
    step = limit // row_bytes
    for start in range(0, tensor.shape[0], step):
        yield from _pieces(tensor[start : start + step], limit)


def _aligned(piece: torch.Tensor) -> bool:
    # `view` checks the offset in the storage; a storage over foreign memory may itself start anywhere.
    return piece.storage_offset() % _WORD_BYTES == 0 and piece.data_ptr() % _WORD_BYTES == 0
