"""Byte ranges against a byte-by-byte model, and what the recorder sees of real operators."""

from __future__ import annotations

import random

import pytest
import torch

from weightpush_server.reload.coverage import ByteRanges, WriteLog, WriteRecorder, covered_ranges
from weightpush_server.reload.storage import StorageRef, byte_range, extent, storage_bytes


def _set(*ranges: tuple[int, int]) -> ByteRanges:
    return ByteRanges(ranges)


def _bytes_of(tensor: torch.Tensor) -> set[int]:
    """The bytes of its storage that ``tensor`` covers, found by writing them."""
    raw = storage_bytes(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes())
    raw.zero_()
    ones = torch.full((tensor.numel() * tensor.element_size(),), 0xFF, dtype=torch.uint8).view(tensor.dtype)
    tensor.copy_(ones.view(tensor.shape))
    return set(raw.nonzero().flatten().tolist())


def test_ranges_are_merged_sorted_and_without_empty_ones() -> None:
    assert list(_set((10, 20), (0, 5), (5, 7), (15, 30), (40, 40))) == [(0, 7), (10, 30)]
    assert len(_set((0, 7), (3, 9))) == 9
    assert list(_set()) == []


@pytest.mark.parametrize("seed", range(20))
def test_ranges_agree_with_a_set_of_bytes(seed: int) -> None:
    rng = random.Random(seed)

    def ranges() -> tuple[ByteRanges, set[int]]:
        result, model = ByteRanges(), set[int]()
        for _ in range(rng.randrange(12)):
            start = rng.randrange(100)
            end = start + rng.randrange(12)
            result.add(torch.tensor([[start, end]]))
            model |= set(range(start, end))
        return result, model

    (have, have_bytes), (wanted, wanted_bytes) = ranges(), ranges()
    assert len(have) == len(have_bytes)
    assert {byte for start, end in have for byte in range(start, end)} == have_bytes
    assert have.first_missing(wanted) == min(wanted_bytes - have_bytes, default=None)
    low, high = sorted((rng.randrange(110), rng.randrange(110)))
    part = {byte - low for byte in have_bytes if low <= byte < high}
    assert {byte for start, end in have.within(low, high) for byte in range(start, end)} == part


def test_many_ranges_are_merged_on_the_way() -> None:
    ranges = ByteRanges()
    for row in range(3):
        starts = torch.arange(4000) * 30 + row * 10
        ranges.add(torch.stack([starts, starts + 10], dim=1))
    assert list(ranges) == [(0, 120_000)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base.t(),
        lambda base: base[2:5],
        lambda base: base[:, 3:7],
        lambda base: base[1:8:3, ::2],
        lambda base: base.t()[4:6],
        lambda base: base.view(4, 2, 12).transpose(0, 2)[1:5, :, 2:],
        lambda base: base[0, :0],
        lambda base: base[3, 4],
    ],
)
def test_covered_ranges_of_a_view_are_the_bytes_it_writes(view, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]  # lambdas
    tensor = view(torch.zeros(8, 12, dtype=dtype))
    ranges = ByteRanges()
    ranges.add(covered_ranges(tensor))
    expected = _bytes_of(tensor)
    assert {byte for start, end in ranges for byte in range(start, end)} == expected
    start, end = byte_range(tensor)
    assert end - start == extent(tensor.shape, tensor.stride(), dtype.itemsize)
    if expected:
        assert (start, end) == (min(expected), max(expected) + 1)


def test_recorder_sees_overwrites_and_nothing_else() -> None:
    log = WriteLog()
    weight = torch.nn.Parameter(torch.empty(8, 4))
    outside = torch.empty(8, 4)
    outside.fill_(1)
    with torch.no_grad(), WriteRecorder(log):
        weight.data.narrow(0, 2, 3).copy_(torch.ones(3, 4))
        weight.data[7:].fill_(0)
        weight.data[0].mul_(2)
        weight.data[1].index_put_((torch.tensor([0]),), torch.tensor([1.0]))
    outside.zero_()
    row = 4 * weight.element_size()
    assert list(log.ranges(weight.untyped_storage())) == [(2 * row, 5 * row), (7 * row, 8 * row)]
    assert len(log.ranges(outside.untyped_storage())) == 0


def test_recorder_does_not_credit_a_dead_storage_to_its_successor() -> None:
    log = WriteLog()
    for _ in range(50):
        with WriteRecorder(log):
            temporary = torch.empty(1000)
            temporary.fill_(1)
        address = temporary.data_ptr()
        del temporary
        successor = torch.empty(1000)
        assert len(log.ranges(successor.untyped_storage())) == 0
        if successor.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator never gave an address out again")
    log.forget_dead()
    assert len(log.ranges(successor.untyped_storage())) == 0


def test_storage_reference_tells_death() -> None:
    tensor = torch.empty(3)
    reference = StorageRef(tensor.untyped_storage())
    assert reference.alive
    del tensor
    assert not reference.alive
