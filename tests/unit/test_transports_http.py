from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.dtypes import DTYPE_NAMES, torch_dtype
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec, build_manifest
from weightpush_protocol.transports.http import (
    digests_from_metadata,
    digests_to_metadata,
    encode_header,
    header_bytes,
    parse_header,
)


def every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{name}": torch.randint(0, 2, (3, 8), dtype=torch.uint8, generator=generator).view(torch_dtype(name))
        for name in sorted(DTYPE_NAMES)
    }
    return {**tensors, "scalar": torch.tensor(1.5), "none": torch.zeros(0, 4), "bytes": torch.arange(3).to(torch.uint8)}


def body_of(header: Any, data: bytes = b"", *, raw: bool = False) -> bytes:
    text = header if raw else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_our_body_is_a_safetensors_file() -> None:
    tensors = every_dtype()
    manifest = build_manifest(TensorSpec.of(name, tensor) for name, tensor in tensors.items())
    data = torch.zeros(manifest.buckets[0].nbytes, dtype=torch.uint8)
    for spec, offset in manifest.bucket_tensors(0):
        data[offset : offset + spec.nbytes] = tensors[spec.name].reshape(-1).view(torch.uint8)
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    header = encode_header(manifest.bucket_tensors(0), digests_to_metadata(7, digests))
    assert len(header) % 8 == 0
    body = header + bytes(data.tolist())

    loaded = safetensors.torch.load(body)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert tensor_digest(loaded[name]) == digests[name]

    parsed = parse_header(memoryview(body), total_bytes=len(body))
    assert parsed.entries == tuple(sorted(manifest.bucket_tensors(0), key=lambda pair: (pair[1], pair[0].nbytes)))
    assert (parsed.data_start, parsed.data_bytes) == (len(header), data.numel())
    assert digests_from_metadata(parsed.metadata) == (7, digests)


def test_a_file_that_safetensors_wrote_parses(tmp_path: Path) -> None:
    tensors = every_dtype()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    body = path.read_bytes()
    parsed = parse_header(body[: header_bytes(body[:8])], total_bytes=len(body))
    assert {spec.name: spec for spec, _ in parsed.entries} == {
        name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()
    }
    for spec, offset in parsed.entries:
        at = parsed.data_start + offset
        assert body[at : at + spec.nbytes] == bytes(tensors[spec.name].reshape(-1).view(torch.uint8).tolist())
    assert parsed.metadata == {"format": "pt"}
    assert digests_from_metadata(parsed.metadata) == (None, {})


def test_an_empty_file_parses() -> None:
    body = encode_header([], {})
    assert parse_header(body, total_bytes=len(body)).entries == ()


@pytest.mark.parametrize(
    ("header", "data", "message", "tensor"),
    [
        ({"w": entry("F4")}, b"1234", "'w' has dtype 'F4', which cannot be pushed", "w"),
        ({"w": entry(["F32"])}, b"1234", "'w' has dtype", "w"),
        ({"w": entry("C64", (1,), (0, 8))}, b"12345678", "'w' has dtype 'C64'", "w"),
        ({"w": entry(shape=(2,))}, b"1234", r"'w': float32 \[2\] takes 8 bytes, given 4 bytes", "w"),
        ({"w": entry(offsets=(4, 0))}, b"1234", "given offsets 4 to 0", "w"),
        ({"w": entry(shape=(-1,))}, b"1234", "'w': shape must be", "w"),
        ({"w": entry(shape=(True,))}, b"1234", "'w': shape must be", "w"),
        ({"w": entry(shape=(1.0,))}, b"1234", "'w': shape must be", "w"),
        ({"w": entry(shape="1")}, b"1234", "'w': shape must be", "w"),
        ({"w": entry(shape=(1,) * 17)}, b"1234", "'w': shape:", "w"),
        ({"w": entry(shape=(2**30, 2**20))}, b"1234", "takes .* bytes, given 4", "w"),
        ({"w": entry(shape=(2**62, 2**62))}, b"1234", "shape", "w"),
        ({"w": entry(offsets=(0, 4, 8))}, b"1234", "data_offsets must be two", "w"),
        ({"w": entry(offsets=(-4, 0))}, b"1234", "data_offsets must be two", "w"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"1234", "must have exactly", "w"),
        ({"w": {**entry(), "more": 1}}, b"1234", "must have exactly", "w"),
        ({"w": 3}, b"1234", "must have exactly", "w"),
        ({"": entry()}, b"1234", "name", ""),
        ({"n" * 600: entry()}, b"1234", "name", "n" * 512),
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "'b' at byte 2 overlaps .* ends at 4", "b"),
        ({"a": entry(), "b": entry()}, b"1234", "overlaps the one before", "b"),
        ({"a": entry(), "b": entry(offsets=(5, 9))}, b"123456789", "'b' at byte 5 leaves a hole", "b"),
        ({"a": entry(offsets=(4, 8))}, b"12345678", "'a' at byte 4 leaves a hole", "a"),
        ({"a": entry()}, b"123", "after the last tensor, 'a', .* end at byte 4, but the body has 3", "a"),
        ({"a": entry()}, b"12345", "end at byte 4, but the body has 5", "a"),
        ({}, b"1", "end at byte 0, but the body has 1", None),
        ({"__metadata__": {"k": 1}}, b"", "entry 'k' must be a string", None),
        ({"__metadata__": []}, b"", "must be an object of strings", None),
        ([], b"", "not a JSON object", None),
    ],
)
def test_bad_headers(header: Any, data: bytes, message: str, tensor: str | None) -> None:
    body = body_of(header, data)
    with pytest.raises(WeightPushError, match=message) as caught:
        parse_header(body, total_bytes=len(body))
    assert caught.value.code is ErrorCode.BUCKET_MISMATCH
    assert caught.value.details.get("tensor") == tensor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"w": 1, "w": 2}', "has 'w' twice"),
        (b'{"w": {"dtype": "F32", "dtype": "F32"}}', "has 'dtype' twice"),
        (b'{"\xff": 1}', "not UTF-8 at byte 2"),
        (b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "refused"),
        (b'{"w": NaN}', "holds NaN"),
        (b'{"w": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"w": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"w": 1', "not JSON"),
        (b' {"w": 1}', "not a JSON object"),
        (b"<html></html>", "not a JSON object"),
        (b'{"w": 1} {}', "not JSON"),
    ],
)
def test_bad_json(text: bytes, message: str) -> None:
    body = body_of(text, raw=True)
    with pytest.raises(WeightPushError, match=message) as caught:
        parse_header(body, total_bytes=len(body))
    assert caught.value.code is ErrorCode.BUCKET_MISMATCH
    # Whatever was sent, the refusal itself can be sent back.
    caught.value.body().model_dump_json().encode()


@pytest.mark.parametrize(
    ("data", "total", "limit", "message"),
    [
        (b"", 0, 100, "the body has 0 bytes"),
        (b"1234567", 7, 100, "the body has 7 bytes"),
        (bytes(8), 8, 100, "header would take 0 bytes"),
        ((101).to_bytes(8, "little"), 1000, 100, "header would take 101 bytes, allowed are 2 to 100"),
        (b"\xff" * 8, 1000, 100, "allowed are 2 to 100"),
        (b"PK\x03\x04zipfile", 1000, 100, "is this a safetensors file"),
        (body_of({}), 9, 100, "ends at byte 10, but only 9"),
        (body_of({})[:-1], 10, 100, "ends at byte 10, but only 9"),
    ],
)
def test_bad_lengths(data: bytes, total: int, limit: int, message: str) -> None:
    with pytest.raises(WeightPushError, match=message) as caught:
        parse_header(data, total_bytes=total, max_header_bytes=limit)
    assert caught.value.code is ErrorCode.BUCKET_MISMATCH


def test_what_we_would_not_parse_we_do_not_encode() -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(1,))
    other = spec.model_copy(update={"name": "v"})
    for entries in ([(spec, 0), (spec, 4)], [(spec, 4)], [(spec, 0), (other, 2)]):
        with pytest.raises(WeightPushError, match=r"'[wv]'") as caught:
            encode_header(entries, {})
        assert caught.value.code is ErrorCode.BUCKET_MISMATCH
    with pytest.raises(WeightPushError, match="reserved"):
        encode_header([(spec.model_copy(update={"name": "__metadata__"}), 0)], {})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"bucket": "x"}, "bucket number 'x'"),
        ({"bucket": "-1"}, "bucket number"),
        ({"bucket": "1" * 400}, "bucket number"),
        ({"digest:w": "12"}, "digest '12' of tensor 'w'"),
        ({"digest:w": "0123456789ABCDEF"}, "lowercase"),
    ],
)
def test_bad_metadata(metadata: Mapping[str, str], message: str) -> None:
    with pytest.raises(WeightPushError, match=message):
        digests_from_metadata(metadata)
