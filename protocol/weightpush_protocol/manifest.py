"""What an update consists of: tensor specifications, the bucket plan, and their comparison with what a server expects.

The trainer computes order and bucket cuts once and sends them; the server checks them and never derives its own.
Inside a bucket tensors lie as in a safetensors file: without holes, wider dtypes first, so that every tensor starts
at a multiple of its element size and can be viewed in place. Order within one element size is manifest order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Annotated, Any, Final, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from weightpush_protocol.dtypes import DTYPE_NAMES, dtype_name, itemsize, torch_dtype
from weightpush_protocol.places import Places

MAX_NAME_LENGTH: Final = 512
MAX_DIMENSIONS: Final = 16
MAX_TENSORS: Final = 500_000
#: Largest size of a tensor and of an update, in bytes: beyond what 64-bit counters hold with room to spare.
MAX_BYTES: Final = 2**60
DEFAULT_BUCKET_BYTES: Final = 256 * 2**20
#: How many offenders an error names; the rest is counted.
NAMED_OFFENDERS: Final = 20


class TensorSpec(BaseModel):
    """One tensor of a checkpoint: name, dtype (wire name) and shape (elements per dimension)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$")]
    dtype: str
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_BYTES)], ...],
        Field(max_length=MAX_DIMENSIONS),
    ]

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPE_NAMES:
            raise ValueError(f"unknown dtype {value!r}; known are {', '.join(sorted(DTYPE_NAMES))}")
        return value

    @model_validator(mode="after")
    def _size_is_sane(self) -> TensorSpec:
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"tensor {self.name!r} would have more than {MAX_BYTES} bytes")
        return self

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor``. Raises ``ValueError`` where its dtype cannot travel."""
        return cls(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * itemsize(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return torch_dtype(self.dtype)


class BucketSpec(BaseModel):
    """One bucket: positions of its tensors in the manifest, the byte offset of each, and the size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    offsets: tuple[Annotated[int, Field(ge=0, le=MAX_BYTES)], ...]
    nbytes: Annotated[int, Field(ge=0, le=MAX_BYTES)]


class ManifestFacts(BaseModel):
    """What a manifest adds up to: numbers of tensors and buckets, bytes of all and of the largest bucket."""

    model_config = ConfigDict(frozen=True)

    tensors: int
    nbytes: int
    buckets: int
    largest_bucket: int


class BucketTable(NamedTuple):
    """One bucket's tensors in the order of its specification.

    ``entries``: each with its byte offset; ``names``: their names; ``places``: byte offset and size of each.
    """

    entries: tuple[tuple[TensorSpec, int], ...]
    names: tuple[str, ...]
    places: Places

    @classmethod
    def of(cls, entries: Sequence[tuple[TensorSpec, int]]) -> BucketTable:
        """Return the table of ``entries``."""
        return cls(
            tuple(entries),
            tuple(spec.name for spec, _ in entries),
            Places((offset, spec.nbytes) for spec, offset in entries),
        )


class Manifest(BaseModel):
    """All tensors of an update in order, and the buckets that they travel in.

    ``buckets`` may be empty for the ``http`` transport: then each request body is a bucket of the sender's choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: Annotated[tuple[TensorSpec, ...], Field(max_length=MAX_TENSORS)]
    buckets: tuple[BucketSpec, ...] = ()

    @model_validator(mode="after")
    def _buckets_cover_tensors_once(self) -> Manifest:
        # Called again for every message that is made with this object, which cannot have changed since.
        if "_sound" not in self.__dict__:
            self._check_buckets()
            self.__dict__["_sound"] = True
        return self

    def _check_buckets(self) -> None:
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"the tensors would have more than {MAX_BYTES} bytes together")
        if not self.buckets:
            return
        placed = Counter(index for bucket in self.buckets for index in bucket.tensors)
        for index, spec in enumerate(self.tensors):
            if placed[index] != 1:
                raise ValueError(f"tensor {spec.name!r} lies in {placed[index]} buckets, expected exactly one")
        if len(placed) != len(self.tensors):
            raise ValueError(f"a bucket names tensor {max(placed)}, but the manifest has {len(self.tensors)}")
        for number, bucket in enumerate(self.buckets):
            _check_bucket(number, bucket, [self.tensors[index] for index in bucket.tensors])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def facts(self) -> ManifestFacts:
        """What it adds up to."""
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        return ManifestFacts(
            tensors=len(self.tensors), nbytes=self.nbytes, buckets=len(self.buckets), largest_bucket=largest
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which what was worked out of the original is worked out anew."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("nbytes", "facts", "_sha256", "_tables", "_sound"):
            copied.__dict__.pop(name, None)
        return copied

    def bucket_tensors(self, number: int) -> list[tuple[TensorSpec, int]]:
        """Return the tensors of bucket ``number``, each with its byte offset."""
        return list(self.table(number).entries)

    def table(self, number: int) -> BucketTable:
        """Return what bucket ``number`` holds, worked out once: pushes of one manifest ask for it again and again."""
        table = self._tables.get(number)
        if table is None:
            bucket = self.buckets[number]
            table = self._tables[number] = BucketTable.of(
                [(self.tensors[index], offset) for index, offset in zip(bucket.tensors, bucket.offsets, strict=True)]
            )
        return table

    @cached_property
    def _tables(self) -> dict[int, BucketTable]:
        return {}

    def digest(self) -> str:
        """Return a name for this manifest, 64 hex digits: SHA-256 of its JSON in ASCII, keys sorted, without spaces."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        text = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _check_bucket(number: int, bucket: BucketSpec, specs: Sequence[TensorSpec]) -> None:
    if len(bucket.offsets) != len(specs):
        raise ValueError(f"bucket {number} has {len(specs)} tensors and {len(bucket.offsets)} offsets")
    end = 0
    for spec, offset in sorted(zip(specs, bucket.offsets, strict=True), key=lambda pair: (pair[1], pair[0].nbytes)):
        if offset != end:
            raise ValueError(f"bucket {number}: {spec.name!r} starts at byte {offset}, expected {end}")
        if offset % itemsize(spec.dtype):
            raise ValueError(f"bucket {number}: {spec.name!r} is not aligned to its {spec.dtype} elements")
        end = offset + spec.nbytes
    if end != bucket.nbytes:
        raise ValueError(f"bucket {number} says {bucket.nbytes} bytes, its tensors have {end}")


def layout_bucket(indices: Sequence[int], tensors: Sequence[TensorSpec]) -> BucketSpec:
    """Lay out the tensors at ``indices`` as one bucket: wider dtypes first, without holes."""
    ordered = sorted(indices, key=lambda index: -itemsize(tensors[index].dtype))
    offsets = []
    end = 0
    for index in ordered:
        offsets.append(end)
        end += tensors[index].nbytes
    return BucketSpec(tensors=tuple(ordered), offsets=tuple(offsets), nbytes=end)


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[BucketSpec, ...]:
    """Cut ``tensors`` into contiguous runs of at most ``bucket_bytes`` bytes.

    A tensor larger than that travels in a bucket of its own.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    runs: list[list[int]] = []
    filled = 0
    for index, spec in enumerate(tensors):
        if not runs or filled + spec.nbytes > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += spec.nbytes
    return tuple(layout_bucket(run, tensors) for run in runs)


def build_manifest(tensors: Iterable[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
    """Make the manifest of an update with its bucket plan. For the same tensors as before it is the one of before."""
    global _last_built
    specs = tuple(tensors)
    key = bucket_bytes, tuple((spec.name, spec.dtype, spec.shape) for spec in specs)
    last = _last_built
    if last is None or last[0] != key:
        last = _last_built = key, Manifest(tensors=specs, buckets=plan_buckets(specs, bucket_bytes))
    return last[1]


#: What a trainer pushes is the same every time, and making and naming it takes 10 microseconds a tensor.
_last_built: tuple[object, Manifest] | None = None


class ProblemKind(StrEnum):
    """How an offered tensor can differ from what the server expects."""

    EMPTY = "empty_manifest"
    UNKNOWN = "unknown"
    MISSING = "missing"
    DUPLICATE = "duplicate"
    SHAPE = "wrong_shape"
    DTYPE = "wrong_dtype"


class ManifestProblem(BaseModel):
    """One difference between an offered manifest and the expected one."""

    model_config = ConfigDict(frozen=True)

    kind: ProblemKind
    name: str
    expected: str | None = None
    given: str | None = None

    def __str__(self) -> str:
        text = f"{self.kind.value}: {self.name}" if self.name else self.kind.value
        if self.expected is not None and self.given is not None:
            text += f" (expected {self.expected}, given {self.given})"
        elif self.expected is not None:
            text += f" (expected {self.expected})"
        elif self.given is not None:
            text += f" (given {self.given})"
        return text


def _same_shape(expected: tuple[int, ...], given: tuple[int, ...]) -> bool:
    # vLLM's loaders take a scalar as [] and as [1] alike.
    return expected == given or {expected, given} == {(), (1,)}


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def compare_manifest(
    expected: Sequence[TensorSpec],
    offered: Sequence[TensorSpec],
    *,
    optional: Mapping[str, TensorSpec] | None = None,
) -> list[ManifestProblem]:
    """List every way in which ``offered`` is not exactly the checkpoint ``expected``, in order of the offer.

    ``optional`` names tensors that may come or stay away (a tied ``lm_head``): if they come, shape and dtype must fit.
    """
    optional = optional or {}
    if not offered:
        return [ManifestProblem(kind=ProblemKind.EMPTY, name="")]
    known = {**optional, **{spec.name: spec for spec in expected}}
    problems: list[ManifestProblem] = []
    seen: set[str] = set()
    for spec in offered:
        wanted = known.get(spec.name)
        if spec.name in seen:
            problems.append(ManifestProblem(kind=ProblemKind.DUPLICATE, name=spec.name, given=_describe(spec)))
            continue
        seen.add(spec.name)
        if wanted is None:
            problems.append(ManifestProblem(kind=ProblemKind.UNKNOWN, name=spec.name, given=_describe(spec)))
        elif not _same_shape(wanted.shape, spec.shape):
            problems.append(_mismatch(ProblemKind.SHAPE, spec.name, list(wanted.shape), list(spec.shape)))
        elif wanted.dtype != spec.dtype:
            problems.append(_mismatch(ProblemKind.DTYPE, spec.name, wanted.dtype, spec.dtype))
    problems.extend(
        ManifestProblem(kind=ProblemKind.MISSING, name=spec.name, expected=_describe(spec))
        for spec in expected
        if spec.name not in seen and spec.name not in optional
    )
    return problems


def name_offenders(problems: Sequence[ManifestProblem], limit: int = NAMED_OFFENDERS) -> list[ManifestProblem]:
    """Choose at most ``limit`` problems to show: of each kind in turn, so that no kind hides another."""
    by_kind: dict[ProblemKind, list[ManifestProblem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    taken = [problem for turn in zip_longest(*by_kind.values()) for problem in turn if problem is not None][:limit]
    order = {id(problem): position for position, problem in enumerate(problems)}
    return sorted(taken, key=lambda problem: order[id(problem)])


def prefix_hint(problems: Sequence[ManifestProblem]) -> str | None:
    """Say so where unknown and missing names differ in how they begin: by a wrapper, a parent module, another family.

    All names of one side must have their counterpart on the other.
    """
    unknown = {problem.name for problem in problems if problem.kind is ProblemKind.UNKNOWN}
    missing = {problem.name for problem in problems if problem.kind is ProblemKind.MISSING}
    for few, many, swapped in ((missing, unknown, False), (unknown, missing, True)):
        anchor = min(few, default="")
        for name in sorted(many) if anchor else []:
            ours, theirs = _beginnings(anchor, name)
            # Nearly every name ends in "weight": one part in common says nothing.
            shared = anchor.removeprefix(ours)
            if "." in shared and all(one.startswith(ours) and theirs + one.removeprefix(ours) in many for one in few):
                return _advise(theirs, ours) if swapped else _advise(ours, theirs)
    return None


def _beginnings(first: str, second: str) -> tuple[str, str]:
    """Return what precedes the last parts that two dotted names have in common."""
    common = 0
    for one, other in zip(reversed(first.split(".")), reversed(second.split(".")), strict=False):
        if one != other:
            break
        common += len(one) + 1
    return first[: max(len(first) - common + 1, 0)], second[: max(len(second) - common + 1, 0)]


def _advise(expected: str, given: str) -> str:
    if expected and given:
        return f"the names begin with {given!r} where this model has {expected!r}: rename them"
    prefix, advice = (given, "strip it") if given else (expected, "add it")
    return f"the names differ by the prefix {prefix!r}: {advice}, or push another module of the model"


def _mismatch(kind: ProblemKind, name: str, expected: Any, given: Any) -> ManifestProblem:
    return ManifestProblem(kind=kind, name=name, expected=str(expected), given=str(given))
