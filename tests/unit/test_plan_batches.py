"""Buckets that land in few strided copies end as the same bytes as tensors that land one by one."""

from __future__ import annotations

import random

import pytest
import torch

from weightpush_protocol.manifest import TensorSpec, layout_bucket
from weightpush_server.reload.batch import Batch, make_batch
from weightpush_server.reload.program import Buffer, Kind, Program, Replayer, Step, View, strided
from weightpush_server.reload.storage import Place

SOURCE = Buffer(Kind.SOURCE, 0)


def group(number: int) -> Buffer:
    return Buffer(Kind.GROUP, number)


def copy(number: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Program:
    """Return the program that copies a whole contiguous tensor to a strided place."""
    whole = View.of(SOURCE, torch.empty(shape, dtype=dtype, device="meta"))
    return Program((Step(View(group(number), dtype, offset, shape, stride), whole),), {}, (number,))


def experts(count: int, rows: int, columns: int) -> tuple[list[TensorSpec], dict[str, Program]]:
    """Return gate and up projections, which land in one weight ``[count, 2 rows, columns]``, and down projections."""
    specs, programs = [], {}
    row = 2 * columns
    for number in range(count):
        for place, part in enumerate(("gate", "up")):
            name = f"experts.{number}.{part}"
            specs.append(TensorSpec(name=name, dtype="bfloat16", shape=(rows, columns)))
            offset = number * 2 * rows * row + place * rows * row
            programs[name] = copy(0, offset, (rows, columns), (columns, 1), torch.bfloat16)
        name = f"experts.{number}.down"
        specs.append(TensorSpec(name=name, dtype="bfloat16", shape=(columns, rows)))
        programs[name] = copy(1, number * columns * rows * 2, (columns, rows), (rows, 1), torch.bfloat16)
    return specs, programs


def entries_of(specs: list[TensorSpec]) -> list[tuple[TensorSpec, int]]:
    bucket = layout_bucket(range(len(specs)), specs)
    return [(specs[index], offset) for index, offset in zip(bucket.tensors, bucket.offsets, strict=True)]


def batch_of(specs: list[TensorSpec], programs: dict[str, Program]) -> Batch:
    return make_batch(programs, {spec.name: spec for spec in specs}, entries_of(specs))


def landed(specs: list[TensorSpec], programs: dict[str, Program], sizes: list[int], *, batched: bool) -> list[bytes]:
    """Return the bytes of all groups after a bucket of noise has landed."""
    entries = entries_of(specs)
    nbytes = sum(spec.nbytes for spec in specs)
    # As a receiver's buffer: not at the start of its storage.
    noise = torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    buffer = noise[64:]
    places = [Place(torch.zeros(size, dtype=torch.uint8).untyped_storage(), 0, size) for size in sizes]
    replayer = Replayer(places.__getitem__)
    rest = entries
    if batched:
        batch = batch_of(specs, programs)
        rest = list(batch.rest)
        for _, source, target in batch.moves:
            view = strided(buffer.untyped_storage(), source.dtype, 64 + source.offset, source.shape, source.stride)
            replayer.move(view, target)
    for spec, offset in rest:
        tensor = buffer[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
        replayer.run(programs[spec.name], tensor)
    return [bytes(place.bytes().tolist()) for place in places]


def test_experts_of_a_layer_land_in_three_copies() -> None:
    specs, programs = experts(32, 4, 6)
    batch = batch_of(specs, programs)
    assert (len(batch.moves), batch.rest) == (3, ())
    assert batch.names == {spec.name for spec in specs}
    assert batch.nbytes == sum(spec.nbytes for spec in specs)
    sizes = [32 * 8 * 6 * 2, 32 * 6 * 4 * 2]
    assert landed(specs, programs, sizes, batched=True) == landed(specs, programs, sizes, batched=False)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_order_the_bytes_are_the_same(seed: int) -> None:
    specs, programs = experts(9, 2, 3)
    chooser = random.Random(seed)
    chooser.shuffle(specs)
    specs = specs[: chooser.randrange(1, len(specs))]
    sizes = [9 * 4 * 3 * 2, 9 * 3 * 2 * 2]
    assert landed(specs, programs, sizes, batched=True) == landed(specs, programs, sizes, batched=False)


def test_casts_and_transposes_are_joined_as_they_are() -> None:
    specs = [TensorSpec(name=f"t{number}", dtype="float32", shape=(3, 5)) for number in range(6)]
    programs = {}
    for number, spec in enumerate(specs):
        source = View(SOURCE, torch.float32, 0, (5, 3), (1, 5))
        target = View(group(0), torch.bfloat16, number * 30, (5, 3), (3, 1))
        programs[spec.name] = Program((Step(target, source),), {}, (0,))
    assert len(batch_of(specs, programs).moves) == 1
    assert landed(specs, programs, [6 * 30], batched=True) == landed(specs, programs, [6 * 30], batched=False)


def test_parts_of_one_tensor_may_go_to_several_places() -> None:
    """A packed projection that a loader splits: every tensor has two copies."""
    specs = [TensorSpec(name=f"qkv.{number}", dtype="float32", shape=(4, 2)) for number in range(5)]
    programs = {}
    for number, spec in enumerate(specs):
        steps = []
        for half in range(2):
            source = View(SOURCE, torch.float32, half * 16, (2, 2), (2, 1))
            steps.append(Step(View(group(half), torch.float32, number * 16, (2, 2), (2, 1)), source))
        programs[spec.name] = Program(tuple(steps), {}, (0, 1))
    batch = batch_of(specs, programs)
    assert (len(batch.moves), batch.rest) == (2, ())
    assert landed(specs, programs, [80, 80], batched=True) == landed(specs, programs, [80, 80], batched=False)


def test_what_is_more_than_copies_stays_alone() -> None:
    f32 = torch.float32
    source = View(SOURCE, f32, 0, (4,), (1,))
    half = View(SOURCE, f32, 0, (2,), (1,))
    temporary = Buffer(Kind.TEMPORARY, 0)

    def at(offset: int, size: int = 4) -> View:
        return View(group(0), f32, offset, (size,), (1,))

    programs = {
        "filled": Program((Step(at(0, 8), None, 1.0), Step(at(0), source)), {}, (0,)),
        "by way of": Program(
            (Step(View(temporary, f32, 0, (4,), (1,)), source), Step(at(32), View(temporary, f32, 0, (4,), (1,)))),
            {0: 16},
            (0,),
        ),
        "twice": Program((Step(at(48), source), Step(at(56, 2), half)), {}, (0,)),
        "plain": Program((Step(at(64), source),), {}, (0,)),
        "nowhere": Program((), {}, ()),
        "other": Program((Step(at(80), source),), {}, (0,)),
    }
    specs = [TensorSpec(name=name, dtype="float32", shape=(4,)) for name in [*programs, "unplanned"]]
    expected = {spec.name: spec for spec in specs}
    expected["other"] = TensorSpec(name="other", dtype="float32", shape=(2, 2))
    batch = make_batch(programs, expected, entries_of(specs))
    assert batch.names == {"plain", "nowhere"}
    assert [spec.name for spec, _ in batch.rest] == ["filled", "by way of", "twice", "other", "unplanned"]
    assert [move.name for move in batch.moves] == ["plain"]


def test_empty_tensors_need_no_copy() -> None:
    specs = [TensorSpec(name=f"t{number}", dtype="float32", shape=(0, 4)) for number in range(3)]
    programs = {spec.name: copy(0, 0, (0, 4), (4, 1), torch.float32) for spec in specs}
    batch = batch_of(specs, programs)
    assert (batch.moves, len(batch.names), batch.nbytes) == ((), 3, 0)
