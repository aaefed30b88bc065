from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import weightpush_protocol.manifest as manifest_module
from weightpush_protocol.dtypes import (
    DTYPE_NAMES,
    dtype_name,
    itemsize,
    name_of_safetensors_code,
    safetensors_code,
    torch_dtype,
)
from weightpush_protocol.manifest import (
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    BucketSpec,
    Manifest,
    ManifestProblem,
    ProblemKind,
    TensorSpec,
    build_manifest,
    compare_manifest,
    layout_bucket,
    name_offenders,
    plan_buckets,
    prefix_hint,
)
from weightpush_protocol.messages import BeginRequest
from weightpush_protocol.transports.base import TransportConfig


def spec(name: str, dtype: str = "bfloat16", *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


MIXED = [
    spec("a", "bfloat16", 3, 5),
    spec("b", "float32", 7),
    spec("c", "uint8", 3),
    spec("d", "bfloat16", 1),
    spec("e", "float32", 2, 2),
    spec("f", "int64"),
    spec("g", "bool", 0, 4),
]


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES))
def test_dtype_names_go_both_ways(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name
    assert name_of_safetensors_code(safetensors_code(name)) == name
    assert itemsize(name) == torch.empty((), dtype=torch_dtype(name)).element_size()


def test_dtypes_that_cannot_travel() -> None:
    for dtype in (torch.complex64, torch.quint8):
        with pytest.raises(ValueError, match=f"{dtype} cannot be pushed"):
            dtype_name(dtype)


def test_spec_of_a_tensor() -> None:
    described = TensorSpec.of("w", torch.zeros(3, 4, dtype=torch.float16))
    assert described == spec("w", "float16", 3, 4)
    assert (described.numel, described.nbytes, described.torch_dtype) == (12, 24, torch.float16)
    assert TensorSpec.of("s", torch.tensor(1.0)).numel == 1
    assert spec("z", "float32", 0, 5).nbytes == 0


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"dtype": "float128"}, "dtype"),
        ({"shape": [-1]}, "shape"),
        ({"shape": [1] * (MAX_DIMENSIONS + 1)}, "shape"),
        ({"name": ""}, "name"),
        ({"name": "n" * (MAX_NAME_LENGTH + 1)}, "name"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_specs(fields: dict[str, object], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TensorSpec.model_validate({"name": "w", "dtype": "float32", "shape": [1], **fields})
    assert caught.value.errors()[0]["loc"][0] == place


def test_a_bucket_is_laid_out_widest_first_without_holes() -> None:
    bucket = layout_bucket(range(len(MIXED)), MIXED)
    assert [MIXED[index].name for index in bucket.tensors] == ["f", "b", "e", "a", "d", "c", "g"]
    assert bucket.offsets == (0, 8, 36, 52, 82, 84, 87)
    assert bucket.nbytes == 87


@pytest.mark.parametrize("bucket_bytes", [1, 8, 30, 60, 1000])
def test_plans_cover_everything_once_in_order(bucket_bytes: int) -> None:
    plan = plan_buckets(MIXED, bucket_bytes)
    assert sorted(index for bucket in plan for index in bucket.tensors) == list(range(len(MIXED)))
    runs = [sorted(bucket.tensors) for bucket in plan]
    assert [index for run in runs for index in run] == list(range(len(MIXED)))
    for bucket in plan:
        assert bucket.nbytes <= bucket_bytes or len([i for i in bucket.tensors if MIXED[i].nbytes]) == 1
    # As few as contiguous runs allow: no bucket could have taken the first tensor of the next.
    for run, following in pairwise(runs):
        assert sum(MIXED[index].nbytes for index in [*run, following[0]]) > bucket_bytes


def test_random_plans_are_valid_manifests_whose_views_are_aligned() -> None:
    chooser = random.Random(3)
    names = sorted(DTYPE_NAMES)
    for _ in range(50):
        tensors = [spec(f"t{i}", chooser.choice(names), chooser.randrange(9)) for i in range(chooser.randrange(1, 40))]
        manifest = build_manifest(tensors, chooser.randrange(1, 200))
        for number, bucket in enumerate(manifest.buckets):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for tensor, offset in manifest.bucket_tensors(number):
                view = buffer[offset : offset + tensor.nbytes].view(tensor.torch_dtype)
                assert view.numel() == tensor.numel
        assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_bucket_size_must_be_positive(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets(MIXED, bucket_bytes)


PAIR = (spec("x", "float32", 2), spec("y", "bfloat16", 3))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([((0,), (0,), 8)], "'y' lies in 0 buckets"),
        ([((0, 1), (0, 8), 14), ((1,), (0,), 6)], "'y' lies in 2 buckets"),
        ([((0, 1, 7), (0, 8, 14), 14)], "names tensor 7"),
        ([((0, 1), (0,), 14)], "2 tensors and 1 offsets"),
        ([((0, 1), (0, 10), 16)], "'y' starts at byte 10, expected 8"),
        ([((0, 1), (0, 4), 10)], "'y' starts at byte 4, expected 8"),
        ([((1, 0), (0, 6), 14)], "'x' is not aligned"),
        ([((0, 1), (0, 8), 15)], "says 15 bytes, its tensors have 14"),
    ],
)
def test_bad_bucket_plans(buckets: list[tuple[tuple[int, ...], tuple[int, ...], int]], message: str) -> None:
    plan = tuple(BucketSpec(tensors=tensors, offsets=offsets, nbytes=size) for tensors, offsets, size in buckets)
    with pytest.raises(ValidationError, match=message):
        Manifest(tensors=PAIR, buckets=plan)


def test_a_manifest_is_looked_at_once_and_every_other_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    check = manifest_module._check_bucket

    def counted(number: int, *rest: Any) -> None:
        looked.append(number)
        check(number, *rest)

    def message(of: Manifest) -> BeginRequest:
        return BeginRequest(weight_version="v", manifest=of, transport=TransportConfig(name="http"))

    monkeypatch.setattr(manifest_module, "_check_bucket", counted)
    manifest = Manifest(tensors=PAIR, buckets=plan_buckets(PAIR))
    assert looked == [0]
    for _ in range(2):
        assert message(manifest).manifest is manifest
    assert looked == [0]
    # What was not made by the front door, or made out of it, was not looked at.
    changed = (BucketSpec(tensors=(0, 1), offsets=(0, 10), nbytes=16),)
    for other in (
        manifest.model_copy(update={"buckets": changed}),
        Manifest.model_construct(tensors=PAIR, buckets=changed),
    ):
        for _ in range(2):
            with pytest.raises(ValidationError, match="'y' starts at byte 10, expected 8"):
                message(other)
    with pytest.raises(ValidationError, match="frozen"):
        manifest.buckets = changed  # type: ignore[misc]  # it is read-only


def test_digest_names_the_manifest() -> None:
    manifest = build_manifest(MIXED, 30)
    assert manifest.digest() == build_manifest(list(MIXED), 30).digest()
    assert len(manifest.digest()) == 64
    changed = [
        build_manifest(MIXED, 60),
        build_manifest(MIXED[::-1], 30),
        build_manifest([*MIXED[:-1], spec("g", "bool", 0, 5)], 30),
        Manifest(tensors=tuple(MIXED)),
    ]
    assert len({manifest.digest(), *(other.digest() for other in changed)}) == 5
    assert manifest.nbytes == 87


EXPECTED = [spec("a", "bfloat16", 2, 3), spec("b", "float32", 4), spec("s", "float32")]


def problems(offered: list[TensorSpec], **options: object) -> list[tuple[ProblemKind, str]]:
    return [(item.kind, item.name) for item in compare_manifest(EXPECTED, offered, **options)]  # type: ignore[arg-type]  # options by keyword


def test_the_same_in_any_order_is_right() -> None:
    assert problems(EXPECTED[::-1]) == []


@pytest.mark.parametrize(
    ("offered", "found"),
    [
        ([], [(ProblemKind.EMPTY, "")]),
        (EXPECTED[:2], [(ProblemKind.MISSING, "s")]),
        ([*EXPECTED, spec("n", "float32", 1)], [(ProblemKind.UNKNOWN, "n")]),
        ([*EXPECTED, EXPECTED[0]], [(ProblemKind.DUPLICATE, "a")]),
        ([spec("a", "bfloat16", 3, 2), *EXPECTED[1:]], [(ProblemKind.SHAPE, "a")]),
        ([spec("a", "float16", 2, 3), *EXPECTED[1:]], [(ProblemKind.DTYPE, "a")]),
        ([spec("a", "bfloat16", 2, 3, 1), *EXPECTED[1:]], [(ProblemKind.SHAPE, "a")]),
        (
            [spec("b", "float64", 4), spec("n"), spec("n"), spec("s", "float32")],
            [
                (ProblemKind.DTYPE, "b"),
                (ProblemKind.UNKNOWN, "n"),
                (ProblemKind.DUPLICATE, "n"),
                (ProblemKind.MISSING, "a"),
            ],
        ),
    ],
)
def test_every_difference_is_named(offered: list[TensorSpec], found: list[tuple[ProblemKind, str]]) -> None:
    assert problems(offered) == found


def test_scalars_may_come_as_one_element() -> None:
    assert problems([*EXPECTED[:2], spec("s", "float32", 1)]) == []
    assert problems([*EXPECTED[:2], spec("s", "float32", 1, 1)]) == [(ProblemKind.SHAPE, "s")]


def test_optional_tensors_may_stay_away_but_must_fit() -> None:
    optional = {"head": spec("head", "bfloat16", 5)}
    assert problems(EXPECTED, optional=optional) == []
    assert problems([*EXPECTED, spec("head", "bfloat16", 5)], optional=optional) == []
    assert problems([*EXPECTED, spec("head", "bfloat16", 6)], optional=optional) == [(ProblemKind.SHAPE, "head")]
    # Also where it is among the expected ones.
    assert problems(EXPECTED[:2], optional={"s": EXPECTED[2]}) == []


def test_problems_read_well() -> None:
    texts = [str(item) for item in compare_manifest(EXPECTED, [spec("a", "bfloat16", 9), spec("n", "int8", 1)])]
    assert texts == [
        "wrong_shape: a (expected [2, 3], given [9])",
        "unknown: n (given int8 [1])",
        "missing: b (expected float32 [4])",
        "missing: s (expected float32 [])",
    ]
    assert str(compare_manifest(EXPECTED, [])[0]) == "empty_manifest"


def _problem(kind: ProblemKind, name: str) -> ManifestProblem:
    return ManifestProblem(kind=kind, name=name)


def test_no_kind_of_problem_hides_another() -> None:
    problems = [_problem(ProblemKind.UNKNOWN, f"u{n}") for n in range(30)]
    problems += [_problem(ProblemKind.MISSING, f"m{n}") for n in range(3)]
    named = [problem.name for problem in name_offenders(problems)]
    assert len(named) == 20
    assert named[-3:] == ["m0", "m1", "m2"]
    assert named[:2] == ["u0", "u1"]
    assert name_offenders(problems[:5]) == problems[:5]


def test_a_common_prefix_is_pointed_out() -> None:
    names = ["a.weight", "b.a.weight", "b.bias"]
    missing = [_problem(ProblemKind.MISSING, name) for name in names]
    unknown = [_problem(ProblemKind.UNKNOWN, f"actor.{name}") for name in names]
    assert "'actor.': strip it" in (prefix_hint(missing + unknown) or "")
    swapped = [_problem(ProblemKind.MISSING, p.name) for p in unknown]
    assert "'actor.': add it" in (prefix_hint(swapped + [_problem(ProblemKind.UNKNOWN, name) for name in names]) or "")
    assert prefix_hint(missing[:2] + unknown[1:]) is None
    assert prefix_hint(missing) is None
    assert prefix_hint([]) is None
    family = [_problem(ProblemKind.MISSING, f"model.{name}") for name in names]
    member = [_problem(ProblemKind.UNKNOWN, f"model.language_model.{name}") for name in names]
    assert prefix_hint(family + member) == (
        "the names begin with 'model.language_model.' where this model has 'model.': rename them"
    )
    # A part of the model alone: every name that came has its place, others are missing as well.
    assert "'model.': add it" in (prefix_hint([*family, *(_problem(ProblemKind.UNKNOWN, n) for n in names[:2])]) or "")
    assert prefix_hint([_problem(ProblemKind.MISSING, "a.x"), _problem(ProblemKind.UNKNOWN, "b.y")]) is None
    head, norm = (ProblemKind.UNKNOWN, "value_head.weight"), (ProblemKind.MISSING, "model.norm.weight")
    assert prefix_hint([_problem(*head), _problem(*norm)]) is None
