"""The ``http`` transport's body: a bucket as a safetensors file. Pure functions, no sockets.

::

    8 bytes            length of the header, little-endian
    header             JSON: {"__metadata__": {...}, "<tensor>": {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data               the tensors, without holes; offsets count from here

A checkpoint file that ``safetensors`` wrote is such a body as it is. A weightpush client adds to the metadata the
bucket's number, ``bucket``, and for each tensor ``digest:<name>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pydantic import ValidationError

from weightpush_protocol.dtypes import name_of_safetensors_code, safetensors_code
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import MAX_NAME_LENGTH, MAX_TENSORS, TensorSpec

#: The format's own limit, in bytes.
MAX_HEADER_BYTES: Final = 100_000_000
LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_METADATA: Final = "__metadata__"
_BUCKET: Final = "bucket"
_DIGEST: Final = "digest:"


@dataclass(frozen=True)
class BucketHeader:
    """What the header of a body says.

    Attributes:
        entries: tensors in the order of their bytes, each with its byte offset in the data.
        metadata: the free text entries.
        data_start: where the data begins in the body, in bytes.
        data_bytes: how many bytes of data follow.
    """

    entries: tuple[tuple[TensorSpec, int], ...]
    metadata: dict[str, str]
    data_start: int
    data_bytes: int


def encode_header(entries: Sequence[tuple[TensorSpec, int]], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a body whose data are the tensors of ``entries`` at their byte offsets.

    The data that follow start at a multiple of 8 bytes.

    Raises:
        WeightPushError: ``bucket_mismatch``: the tensors overlap or leave holes, or two have one name.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for spec, offset in entries:
        if spec.name in header or spec.name == _METADATA:
            _reject(f"tensor {spec.name!r} cannot be in the bucket twice or take a reserved name", spec.name)
        header[spec.name] = {
            "dtype": safetensors_code(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
    _in_order(entries)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(start: bytes | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return how many bytes length and header take together, from the first 8 bytes of a body.

    Raises:
        WeightPushError: ``bucket_mismatch``: fewer than 8 bytes, or a header that is empty or over the limit.
    """
    if len(start) < LENGTH_BYTES:
        _reject(f"the body has {len(start)} bytes, a safetensors file starts with an {LENGTH_BYTES}-byte header length")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if not 2 <= length <= max_header_bytes:
        _reject(
            f"the header would take {length} bytes, allowed are 2 to {max_header_bytes}; is this a safetensors file?"
        )
    return LENGTH_BYTES + length


def parse_header(
    data: bytes | memoryview, *, total_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES
) -> BucketHeader:
    """Parse and check the header of a body.

    Args:
        data: the beginning of the body, at least length and header; what follows is ignored.
        total_bytes: size of the whole body: length, header and data.
        max_header_bytes: longest header that is looked at.

    Raises:
        WeightPushError: ``bucket_mismatch``, naming the tensor: not a safetensors header, an unknown dtype, a size that
            does not fit the shape, two tensors of one name, overlaps, holes, or data that is not all there.
    """
    data_start = header_bytes(data, max_header_bytes=max_header_bytes)
    if data_start > min(total_bytes, len(data)):
        _reject(f"the header ends at byte {data_start}, but only {min(total_bytes, len(data))} bytes are there")
    header = _load(bytes(data[LENGTH_BYTES:data_start]))
    metadata = _metadata(header.pop(_METADATA, None))
    if len(header) > MAX_TENSORS:
        _reject(f"the header names {len(header)} tensors, allowed are {MAX_TENSORS}")
    entries = _in_order(_entry(name, value) for name, value in header.items())
    data_bytes = total_bytes - data_start
    end = entries[-1][1] + entries[-1][0].nbytes if entries else 0
    if end != data_bytes:
        last = entries[-1][0].name if entries else None
        where = f"after the last tensor, {last!r}, " if last else ""
        _reject(f"{where}the data should end at byte {end}, but the body has {data_bytes} bytes of data", last)
    return BucketHeader(tuple(entries), metadata, data_start, data_bytes)


def digests_to_metadata(number: int, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of bucket ``number``, whose tensors have ``digests``, name to digest."""
    return {_BUCKET: str(number), **{f"{_DIGEST}{name}": digest for name, digest in digests.items()}}


def digests_from_metadata(metadata: Mapping[str, str]) -> tuple[int | None, dict[str, str]]:
    """Return bucket number and digests by tensor name; ``None`` and none for a plain safetensors file.

    Raises:
        WeightPushError: ``bucket_mismatch``: not a number, or not a digest.
    """
    text = metadata.get(_BUCKET)
    if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
        _reject(f"bucket number {_shown(text)} in the metadata is not a number")
    digests = {}
    for key, value in metadata.items():
        if key.startswith(_DIGEST):
            name = key.removeprefix(_DIGEST)
            if not re.fullmatch(r"[0-9a-f]{16}", value):
                _reject(f"digest {_shown(value)} of tensor {_shown(name)} is not 16 lowercase hex digits", name)
            digests[name] = value
    return (None if text is None else int(text)), digests


def _load(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _reject("the header is not a JSON object; is the body a safetensors file?")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    _reject(f"the header has {_shown(name)} twice", name)
                seen.add(name)
        return result

    def constant(name: str) -> NoReturn:
        _reject(f"the header holds {name}, which is not JSON")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=constant)
    except UnicodeDecodeError as error:
        _reject(f"the header is not UTF-8 at byte {error.start}")
    except RecursionError:
        _reject("the header is nested too deeply")
    except ValueError as error:
        _reject(f"the header is not JSON: {error}")
    if not isinstance(header, dict):
        _reject("the header is not a JSON object")
    return header


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _reject(f"{_METADATA} must be an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            _reject(f"{_METADATA} entry {_shown(key)} must be a string")
    return value


def _entry(name: str, value: Any) -> tuple[TensorSpec, int]:
    shown = _shown(name)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _reject(f"tensor {shown} must have exactly dtype, shape and data_offsets", name)
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    try:
        dtype = name_of_safetensors_code(code)
    except (KeyError, TypeError):
        _reject(f"tensor {shown} has dtype {_shown(str(code))}, which cannot be pushed", name)
    if not _whole_numbers(shape):
        _reject(f"tensor {shown}: shape must be a list of whole numbers from 0", name)
    if not _whole_numbers(offsets) or len(offsets) != 2:
        _reject(f"tensor {shown}: data_offsets must be two whole numbers from 0", name)
    try:
        spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        _reject(f"tensor {shown}: {problem['loc'][0]}: {problem['msg']}", name)
    begin, end = offsets
    if end - begin != spec.nbytes:
        given = f"{end - begin} bytes" if end >= begin else f"offsets {begin} to {end}"
        _reject(f"tensor {shown}: {spec.dtype} {list(spec.shape)} takes {spec.nbytes} bytes, given {given}", name)
    return spec, begin


def _whole_numbers(value: Any) -> bool:
    # bool is an int to Python, not to JSON.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _in_order(entries: Iterable[tuple[TensorSpec, int]]) -> list[tuple[TensorSpec, int]]:
    """Return the entries in order of their bytes; reject overlaps and holes."""
    ordered = sorted(entries, key=lambda entry: (entry[1], entry[0].nbytes))
    end = 0
    for spec, offset in ordered:
        if offset != end:
            kind = "overlaps the one before" if offset < end else "leaves a hole before it"
            _reject(f"tensor {_shown(spec.name)} at byte {offset} {kind}, which ends at {end}", spec.name)
        end = offset + spec.nbytes
    return ordered


def _shown(text: str) -> str:
    """Quote what a stranger sent, shortened."""
    return ascii(text if len(text) <= MAX_NAME_LENGTH else text[:MAX_NAME_LENGTH] + "...")


def _reject(message: str, name: str | None = None) -> NoReturn:
    details = {} if name is None else {"tensor": name[:MAX_NAME_LENGTH].encode("utf-8", "replace").decode()}
    raise WeightPushError(ErrorCode.BUCKET_MISMATCH, f"bucket refused: {message}", details=details)
