from __future__ import annotations

import math
import random

import pytest
import torch

from weightpush_protocol import digest as digest_module
from weightpush_protocol.digest import BLOCK_WORDS, SEED, tensor_digest
from weightpush_protocol.dtypes import DTYPE_NAMES, torch_dtype

MASK = 2**64 - 1
BLOCK_BYTES = 8 * BLOCK_WORDS


def splitmix(seed: int, count: int) -> list[int]:
    values = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        value = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
        values.append(value ^ (value >> 31))
    return values


def reference(data: bytes) -> str:
    """The definition in the module's docstring, in plain Python."""

    def mix(value: int) -> int:
        return splitmix((value - 0x9E3779B97F4A7C15) & MASK, 1)[0]

    multipliers = [value | 1 for value in splitmix(SEED, 2 * BLOCK_WORDS)]
    a, b = multipliers[:BLOCK_WORDS], multipliers[BLOCK_WORDS:]
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    root = 0
    blocks = [words[at : at + BLOCK_WORDS] for at in range(0, len(words), BLOCK_WORDS)]
    for block, c in zip(blocks, splitmix(SEED + 1, len(blocks)), strict=True):
        total = 0
        for word, word_a, word_b in zip(block, a, b, strict=False):
            high = word >> 32
            total += word * word_a + (high - 2**32 if high >= 2**31 else high) * word_b
        root += mix(total & MASK) * (c | 1)
    return f"{mix((root + 0x9E3779B97F4A7C15 * len(data)) & MASK):016x}"


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5]
)
def test_follows_its_definition(size: int) -> None:
    data = random_bytes(size)
    assert tensor_digest(data) == reference(bytes(data.tolist()))


def test_splitmix_is_the_published_one() -> None:
    assert splitmix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_is_stable_across_releases() -> None:
    assert tensor_digest(torch.arange(1000, dtype=torch.int32)) == reference(
        b"".join(index.to_bytes(4, "little") for index in range(1000))
    )
    assert tensor_digest(torch.arange(1000, dtype=torch.int32)) == "154f27cbb3acb446"


def test_many_blocks_agree_with_the_definition() -> None:
    # Beyond 64 blocks the root is computed with tensors.
    data = random_bytes(70 * BLOCK_BYTES + 3)
    hashes = digest_module._block_hashes(data[: 70 * BLOCK_BYTES].view(torch.int64))
    assert digest_module._root(hashes) & MASK == (
        sum(
            digest_module._mix(value & MASK) * (c | 1)
            for value, c in zip(hashes.tolist(), splitmix(SEED + 1, 70), strict=True)
        )
        & MASK
    )
    assert digest_module._root(hashes[:64]) & MASK == (
        sum(
            digest_module._mix(value & MASK) * (c | 1)
            for value, c in zip(hashes[:64].tolist(), splitmix(SEED + 1, 64), strict=True)
        )
        & MASK
    )


def test_the_gpu_formula_gives_the_same_hashes() -> None:
    words = random_bytes(5 * BLOCK_BYTES).view(torch.int64)
    a, b = digest_module._block_multipliers(torch.device("cpu"))
    by_kernels = digest_module._sum_products(words.view(5, BLOCK_WORDS), a, b)
    assert torch.equal(by_kernels, digest_module._block_hashes_cpu(words, a, b))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [0, 1, 13, BLOCK_BYTES, 5 * BLOCK_BYTES + 3, 513 * BLOCK_BYTES + 9, 80 * 2**20 + 1])
def test_cpu_and_gpu_agree(size: int) -> None:
    data = random_bytes(size)
    assert tensor_digest(data.cuda()) == tensor_digest(data)
    assert tensor_digest(data.cuda()[1:]) == tensor_digest(data[1:])


def test_multipliers_of_a_block_differ_where_the_proof_needs_it() -> None:
    a, b = ([value & MASK for value in part.tolist()] for part in digest_module._block_multipliers(torch.device("cpu")))
    upper = [((value << 32) + other) & MASK for value, other in zip(a, b, strict=True)]
    assert all(value & 1 for value in a + upper)
    low = [value & (2**33 - 1) for value in a + upper]
    assert len(set(low)) == 2 * BLOCK_WORDS
    # Nor does any pair add up to 0 there: two sign flips in one block are seen as well.
    assert not set(low) & {-value % 2**33 for value in low}


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
    data = random_bytes(9 * BLOCK_BYTES + offset + 3)
    assert tensor_digest(data[offset:]) == tensor_digest(data[offset:].clone())


def test_foreign_memory_that_is_not_aligned() -> None:
    memory = bytearray(random_bytes(2 * BLOCK_BYTES + 20).tolist())
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
    data = random_bytes(3 * BLOCK_BYTES + 5)
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
    count = 2 * BLOCK_BYTES // dtype.itemsize
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


@pytest.mark.parametrize("columns", [8, 1000, BLOCK_BYTES // 4, 3 * BLOCK_BYTES // 4])
def test_two_swapped_rows_are_seen(columns: int) -> None:
    rows = torch.randn(6, columns)
    before = tensor_digest(rows)
    for first in range(6):
        for second in range(first):
            order = list(range(6))
            order[first], order[second] = second, first
            assert tensor_digest(rows[order]) != before


def test_lengths_are_told_apart_even_where_only_zeros_are_missing() -> None:
    lengths = [0, 1, 2, 7, 8, 9, 16, 64, BLOCK_BYTES - 8, BLOCK_BYTES, BLOCK_BYTES + 8]
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
