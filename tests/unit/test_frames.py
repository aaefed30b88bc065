"""A bucket and its digests in one piece of memory."""

from __future__ import annotations

import pytest
import torch

from weightpush_protocol.digest_text import raw_of
from weightpush_protocol.manifest import TensorSpec, build_manifest
from weightpush_protocol.transports.frames import frame_bytes, largest_frame, read_digests, write_digests

DIGESTS = raw_of(["0123456789abcdef", "ffffffffffffffff", "0000000000000000"])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 65])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_digests_come_back_and_leave_the_bucket_alone(nbytes: int, count: int) -> None:
    size = frame_bytes(nbytes, count)
    memory = torch.full((size + 5,), 0x55, dtype=torch.uint8)
    write_digests(memory, nbytes, DIGESTS[: 8 * count])
    assert read_digests(memory, nbytes, count) == DIGESTS[: 8 * count]
    assert memory[:nbytes].eq(0x55).all()
    assert memory[size:].eq(0x55).all()
    assert size == nbytes + -nbytes % 8 + 8 * count


def test_a_frame_that_is_too_short_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        write_digests(torch.zeros(frame_bytes(10, 2) - 1, dtype=torch.uint8), 10, DIGESTS[:16])


def test_the_largest_frame_need_not_be_that_of_the_largest_bucket() -> None:
    small = [TensorSpec(name=f"t{number}", dtype="uint8", shape=(0,)) for number in range(50)]
    specs = [TensorSpec(name="large", dtype="uint8", shape=(100,)), *small]
    manifest = build_manifest(specs, bucket_bytes=100)
    wanted = [frame_bytes(bucket.nbytes, len(bucket.tensors)) for bucket in manifest.buckets]
    assert largest_frame(manifest.buckets) == max(wanted) > 100
    assert largest_frame([]) == 0
