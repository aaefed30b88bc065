"""Anything at all where a manifest, a bucket or a message is expected: refused by name, or right; never a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from weightpush_protocol.dtypes import DTYPE_NAMES, itemsize
from weightpush_protocol.errors import ErrorBody, ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest, TensorSpec, build_manifest, compare_manifest
from weightpush_protocol.messages import AbortRequest, BeginRequest, FinishRequest, StreamRequest, VerifyRequest
from weightpush_protocol.status import Status
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.http import (
    digests_from_metadata,
    digests_to_metadata,
    encode_header,
    header_bytes,
    parse_header,
)

bounded = settings(max_examples=200, deadline=None, derandomize=True)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=30)
shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
specs = st.builds(TensorSpec, name=names, dtype=st.sampled_from(sorted(DTYPE_NAMES)), shape=shapes)
distinct_specs = st.lists(specs, max_size=12, unique_by=lambda spec: spec.name)


@given(json_values)
@bounded
@pytest.mark.parametrize(
    "model",
    [
        AbortRequest,
        BeginRequest,
        FinishRequest,
        StreamRequest,
        VerifyRequest,
        Manifest,
        TransportConfig,
        Status,
        ErrorBody,
    ],
)
def test_no_message_takes_nonsense_or_breaks_on_it(model: type[BaseModel], value: Any) -> None:
    if model is VerifyRequest and value == {}:
        return  # To look without comparing.
    for read in (lambda: model.model_validate(value), lambda: model.model_validate_json(json.dumps(value))):
        with pytest.raises(ValidationError):
            read()


def refusal(call: Callable[[], object]) -> WeightPushError | None:
    """Return the error with which a bucket is refused, None if it is taken; anything else goes on."""
    try:
        call()
    except WeightPushError as error:
        return error
    return None


def changed(value: Any, choose: random.Random) -> Any:
    """Return a JSON value with one thing in it replaced, dropped, doubled or nested."""
    if isinstance(value, dict) and value and choose.random() < 0.8:
        key = choose.choice(sorted(value))
        if choose.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: changed(value[key], choose)}
    if isinstance(value, list) and value and choose.random() < 0.8:
        at = choose.randrange(len(value))
        if choose.random() < 0.2:
            return value[:at] + value[at + 1 :]
        if choose.random() < 0.2:
            return [*value, value[at]]
        return [*value[:at], changed(value[at], choose), *value[at + 1 :]]
    return choose.choice(
        [
            None,
            True,
            -1,
            0,
            2**31,
            2**63,
            10**30,
            0.5,
            "",
            "x",
            "\0",
            "a" * 600,
            "../../x",
            [],
            [value],
            {},
            {"a": value},
        ]
    )


@given(distinct_specs, st.integers(1, 4000), st.integers(0, 2**32))
@bounded
def test_a_changed_begin_is_refused_or_still_makes_sense(tensors: list[TensorSpec], bucket: int, seed: int) -> None:
    begin = {
        "update_id": "u",
        "weight_version": "v",
        "manifest": build_manifest(tensors, bucket).model_dump(mode="json"),
        "transport": {"name": "gloo", "host": "h", "port": 1, "world_size": 2, "key": "0" * 32},
        "deadlines": {"lease_s": 5},
    }
    BeginRequest.model_validate_json(json.dumps(begin))
    try:
        request = BeginRequest.model_validate_json(json.dumps(changed(begin, random.Random(seed))))
    except ValidationError:
        return
    manifest = request.manifest
    if manifest.buckets:
        placed = [spec.name for number in range(len(manifest.buckets)) for spec, _ in manifest.bucket_tensors(number)]
        assert sorted(placed) == sorted(spec.name for spec in manifest.tensors)


@given(distinct_specs, st.integers(1, 4000))
@bounded
def test_a_bucket_plan_covers_every_byte_once(tensors: list[TensorSpec], bucket: int) -> None:
    manifest = build_manifest(tensors, bucket)
    again = Manifest.model_validate_json(manifest.model_dump_json())
    assert (again, again.digest()) == (manifest, manifest.digest())
    seen: list[str] = []
    for number, plan in enumerate(manifest.buckets):
        covered = bytearray(plan.nbytes)
        for spec, offset in manifest.bucket_tensors(number):
            assert offset % itemsize(spec.dtype) == 0
            assert not any(covered[offset : offset + spec.nbytes])
            covered[offset : offset + spec.nbytes] = b"\1" * spec.nbytes
            seen.append(spec.name)
        assert all(covered)
        assert (
            plan.nbytes <= bucket
            or len(plan.tensors) == 1
            or plan.nbytes == max(spec.nbytes for spec, _ in manifest.bucket_tensors(number))
        )
    assert seen == [manifest.tensors[index].name for plan in manifest.buckets for index in plan.tensors]
    assert sorted(seen) == sorted(spec.name for spec in tensors)


@given(distinct_specs, st.lists(specs, max_size=12))
@bounded
def test_a_comparison_names_exactly_what_differs(expected: list[TensorSpec], offered: list[TensorSpec]) -> None:
    problems = compare_manifest(expected, offered)
    assert all(str(problem) for problem in problems)
    if not problems:
        assert {spec.name for spec in offered} == {spec.name for spec in expected}
    if expected:
        assert compare_manifest(expected, expected) == []


@given(st.binary(max_size=400), st.integers(0, 10**9))
@bounded
def test_any_bytes_are_refused_as_a_bucket(data: bytes, total: int) -> None:
    for call in (lambda: header_bytes(data), lambda: parse_header(data, total_bytes=total)):
        error = refusal(call)
        if error is None:
            assert len(data) >= 8
        else:
            assert error.code is ErrorCode.BUCKET_MISMATCH
            assert len(error.message) < 2000


@given(json_values)
@bounded
def test_any_json_is_refused_as_a_header_or_describes_the_whole_body(value: Any) -> None:
    text = json.dumps(value).encode()
    data = len(text).to_bytes(8, "little") + text
    error = refusal(lambda: parse_header(data, total_bytes=len(data)))
    if error is None:
        header = parse_header(data, total_bytes=len(data))
        assert sum(spec.nbytes for spec, _ in header.entries) == header.data_bytes == 0
    else:
        assert error.code is ErrorCode.BUCKET_MISMATCH


@given(distinct_specs, st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_bucket_with_some_bytes_changed_is_refused_or_whole(tensors: list[TensorSpec], seed: int, count: int) -> None:
    manifest = build_manifest(tensors, 2**40)
    if not manifest.buckets:
        return
    entries = manifest.bucket_tensors(0)
    digests = {spec.name: "0" * 16 for spec in tensors}
    header = bytearray(encode_header(entries, digests_to_metadata(0, digests)))
    total = len(header) + manifest.buckets[0].nbytes
    assert parse_header(bytes(header), total_bytes=total).data_bytes == manifest.buckets[0].nbytes
    choose = random.Random(seed)
    for _ in range(count):
        at = choose.randrange(len(header))
        match choose.randrange(3):
            case 0:
                header[at] ^= 1 << choose.randrange(8)
            case 1:
                del header[at]
            case _:
                header.insert(at, choose.randrange(256))
    error = refusal(lambda: digests_from_metadata(parse_header(bytes(header), total_bytes=total).metadata))
    if error is not None:
        assert error.code is ErrorCode.BUCKET_MISMATCH
        assert error.body().model_dump_json()
        return
    parsed = parse_header(bytes(header), total_bytes=total)
    end = 0
    for spec, offset in parsed.entries:
        assert offset == end
        end += spec.nbytes
    assert end == parsed.data_bytes == total - parsed.data_start
