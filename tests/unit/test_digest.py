from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
import xxhash

from weightpush_protocol import digest as digest_module
from weightpush_protocol.digest import CHUNK_BYTES, raw_digests, tensor_digest
from weightpush_protocol.digest_text import texts
from weightpush_protocol.dtypes import DTYPE_NAMES, torch_dtype

SIZES = [0, 1, 7, 8, 9, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 5]


def bucket_digests(buffer: torch.Tensor, places: Sequence[tuple[int, int]]) -> Sequence[str]:
    return texts(raw_digests(buffer, places))


def reference(data: bytes) -> str:
    """The definition in the module's docstring."""
    if len(data) <= CHUNK_BYTES:
        return f"{xxhash.xxh3_64_intdigest(data):016x}"
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    hashes = b"".join(xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "big") for chunk in chunks)
    return f"{xxhash.xxh3_64_intdigest(hashes, seed=len(data)):016x}"


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_follows_its_definition(size: int) -> None:
    data = random_bytes(size)
    assert tensor_digest(data) == reference(bytes(data.tolist()))


def test_is_stable_across_releases() -> None:
    # The first is the value for nothing that the xxHash project publishes.
    assert tensor_digest(torch.empty(0)) == "2d06800538d394c2"
    assert tensor_digest(torch.arange(1000, dtype=torch.int32)) == "836bcd8c25b77afd"
    assert tensor_digest(torch.arange(100_000, dtype=torch.int32)) == "0fb70a3db697bedf"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_the_gpu_formula_gives_the_same_digests(size: int, offset: int) -> None:
    data = random_bytes(size + offset, seed=size)[offset:]
    assert digest_module._device_digests([data]) == [tensor_digest(data)]


def test_the_gpu_formula_takes_many_tensors_at_once() -> None:
    data = random_bytes(40 * CHUNK_BYTES)
    tensors = [data[start : start + size] for start in (0, 2, 16) for size in SIZES]
    tensors += [data.view(40, -1).t()[: CHUNK_BYTES // 3], torch.full((CHUNK_BYTES,), -1, dtype=torch.int16)]
    assert digest_module._device_digests(tensors) == [tensor_digest(tensor) for tensor in tensors]


@pytest.mark.parametrize("fill", [0, 1, 0x7F, 0x80, 0xFF])
def test_the_gpu_formula_carries_as_the_library_does(fill: int) -> None:
    data = torch.full((CHUNK_BYTES,), fill, dtype=torch.uint8)
    assert digest_module._device_digests([data]) == [tensor_digest(data)]


def test_the_gpu_formula_goes_through_long_tensors_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_DEVICE_RUN", 2 * CHUNK_BYTES)
    data = random_bytes(7 * CHUNK_BYTES + 11)
    for tensor in (data, data[1:], data[: 6 * CHUNK_BYTES].view(3, -1).t()):
        assert digest_module._device_digests([tensor]) == [tensor_digest(tensor)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [*SIZES, 257 * CHUNK_BYTES + 9, 80 * 2**20 + 1])
def test_cpu_and_gpu_agree(size: int) -> None:
    data = random_bytes(size)
    assert tensor_digest(data.cuda()) == tensor_digest(data)
    assert tensor_digest(data.cuda()[1:]) == tensor_digest(data[1:])
    places = [(0, size // 2), (size // 2, size - size // 2)]
    assert bucket_digests(data.cuda(), places) == bucket_digests(data, places)


def test_a_bucket_has_the_digests_of_its_tensors() -> None:
    bucket = random_bytes(5 * CHUNK_BYTES)
    places = [(0, 10), (10, 0), (10, CHUNK_BYTES), (11, 3 * CHUNK_BYTES + 1), (5 * CHUNK_BYTES - 1, 1)]
    expected = [tensor_digest(bucket[offset : offset + size]) for offset, size in places]
    assert bucket_digests(bucket, places) == expected
    assert digest_module._device_digests([bucket[at : at + size] for at, size in places]) == expected
    assert bucket_digests(bucket, []) == []
    assert bucket_digests(bucket[:0], [(0, 0)]) == [tensor_digest(torch.empty(0))]


@pytest.mark.parametrize(
    ("bucket", "places", "message"),
    [
        (torch.zeros(8), [(0, 4)], "uint8 tensor, got torch.float32"),
        (torch.zeros(2, 8, dtype=torch.uint8), [(0, 4)], r"got torch.uint8 \[2, 8\]"),
        (torch.zeros(16, dtype=torch.uint8)[::2], [(0, 4)], "contiguous"),
        (torch.zeros(8, dtype=torch.uint8), [(0, 8), (4, 5)], "bytes 4 to 9 are not in a bucket of 8"),
        (torch.zeros(8, dtype=torch.uint8), [(-4, 2)], "bytes -4 to -2"),
    ],
)
def test_places_outside_of_a_bucket_are_refused(
    bucket: torch.Tensor, places: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bucket_digests(bucket, places)


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES))
def test_equals_the_digest_of_the_raw_bytes(name: str) -> None:
    dtype = torch_dtype(name)
    raw = random_bytes(8 * 33 * 7)
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw.view(dtype).reshape(7, -1)
    assert tensor_digest(tensor) == tensor_digest(raw)
    assert tensor_digest(tensor[0, 0]) == tensor_digest(raw[: dtype.itemsize])
    turned = tensor.t()
    assert not turned.is_contiguous()
    assert tensor_digest(turned) == tensor_digest(turned.contiguous())


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 8])
def test_storage_offsets_do_not_matter(offset: int) -> None:
    data = random_bytes(9 * CHUNK_BYTES + offset + 3)
    assert tensor_digest(data[offset:]) == tensor_digest(data[offset:].clone())


def test_foreign_memory_that_is_not_aligned() -> None:
    memory = bytearray(random_bytes(2 * CHUNK_BYTES + 20).tolist())
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=3)
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[5:1900, 7:],
        lambda t: t.view(2, 1000, 500, 2).permute(3, 1, 0, 2),
        lambda t: t[:1].expand(100, -1),
        lambda t: t.view(1, -1).t()[::2],
    ],
)
def test_strided_tensors(view: object) -> None:
    base = torch.randn(2000, 1000)
    strided = view(base)  # type: ignore[operator]  # a lambda from the parameter list
    assert tensor_digest(strided) == tensor_digest(strided.contiguous())


def test_one_changed_bit_is_seen_wherever_it_is() -> None:
    data = random_bytes(3 * CHUNK_BYTES + 5)
    before = tensor_digest(data)
    chooser = random.Random(1)
    places = [(0, 0), (3, 7), (7, 7), (data.numel() - 1, 7)]
    places += [(chooser.randrange(data.numel()), chooser.randrange(8)) for _ in range(200)]
    for byte, bit in places:
        data[byte] ^= 1 << bit
        assert tensor_digest(data) != before, (byte, bit)
        data[byte] ^= 1 << bit
    assert tensor_digest(data) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float64])
@pytest.mark.parametrize("kind", ["any", "sign only"])
def test_two_swapped_elements_are_seen(dtype: torch.dtype, kind: str) -> None:
    count = 2 * CHUNK_BYTES // dtype.itemsize
    if kind == "any":
        data = random_bytes(count * dtype.itemsize).view(dtype).clone()
    else:
        # Equal but for the highest bit, which a plain sum of products with odd factors does not see.
        data = torch.ones(count, dtype=dtype)
        data[1::2] = -1
    before = tensor_digest(data)
    chooser = random.Random(2)
    pairs = [(0, 1), (0, count - 1), (count // 2 - 1, count // 2)]
    pairs += [(chooser.randrange(count), chooser.randrange(count)) for _ in range(150)]
    for first, second in pairs:
        raw = data.view(torch.uint8).view(count, -1)
        if torch.equal(raw[first], raw[second]):
            continue
        raw[[first, second]] = raw[[second, first]]
        assert tensor_digest(data) != before, (first, second)
        raw[[first, second]] = raw[[second, first]]


@pytest.mark.parametrize("columns", [8, 1000, CHUNK_BYTES // 4, 3 * CHUNK_BYTES // 4])
def test_two_swapped_rows_are_seen(columns: int) -> None:
    rows = torch.randn(6, columns)
    before = tensor_digest(rows)
    for first in range(6):
        for second in range(first):
            order = list(range(6))
            order[first], order[second] = second, first
            assert tensor_digest(rows[order]) != before


def test_lengths_are_told_apart_even_where_only_zeros_are_missing() -> None:
    lengths = [0, 1, 2, 7, 8, 9, 16, 64, CHUNK_BYTES - 8, CHUNK_BYTES, CHUNK_BYTES + 8]
    assert len({tensor_digest(torch.zeros(length, dtype=torch.uint8)) for length in lengths}) == len(lengths)


def test_bit_patterns_count() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.tensor([math.nan])) == tensor_digest(torch.tensor([math.nan]))
    assert tensor_digest(torch.tensor([0x7FC00000])) != tensor_digest(torch.tensor([0x7FC00001]))


def test_no_collision_among_many_similar_tensors() -> None:
    digests = {tensor_digest(torch.full((16,), value, dtype=torch.int64)) for value in range(3000)}
    digests |= {tensor_digest(torch.nn.functional.one_hot(torch.tensor(at), 3000)) for at in range(500)}
    assert len(digests) == 3500


def test_grad_and_default_device_do_not_matter() -> None:
    values = torch.randn(100)
    expected = tensor_digest(values)
    assert tensor_digest(values.clone().requires_grad_()) == expected
    with torch.device("meta"):
        assert tensor_digest(values) == expected
    with torch.inference_mode():
        assert tensor_digest(values) == expected


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), "cannot be pushed"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_has_no_bytes_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_digest(tensor)
