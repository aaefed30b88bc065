from __future__ import annotations

import pytest

from weightpush_client.align import Outgoing
from weightpush_client.preparation import Preparation
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec, build_manifest
from weightpush_server.router import check_bucket_sizes


@pytest.mark.case("C60")
def test_a_plan_of_the_trainers_is_refused_where_its_buckets_are_too_large() -> None:
    """Bucket sizes are the trainer's; only the limit is the server's, and it is told before anything is sent."""
    specs = [TensorSpec(name=f"t{number}", dtype="float32", shape=(250,)) for number in range(4)]
    for bucket_bytes, largest in ((1000, 1000), (2000, 2000), (10_000, 4000)):
        manifest = build_manifest(specs, bucket_bytes)
        check_bucket_sizes("http", manifest.facts, largest)
        check_bucket_sizes("gloo", manifest.facts, largest - 1)
        with pytest.raises(WeightPushError, match="max-bucket-mb") as refused:
            check_bucket_sizes("http", manifest.facts, largest - 1)
        assert refused.value.code is ErrorCode.TOO_LARGE
        assert refused.value.details == {"largest_bytes": largest, "limit_bytes": largest - 1}
    check_bucket_sizes("http", manifest.model_copy(update={"buckets": ()}).facts, 1)


@pytest.mark.parametrize(
    ("limit_mib", "weights_mib", "largest_mib"),
    [(256, 8, 8), (256, 64, 16), (256, 1024, 64), (256, 8192, 256), (8, 1024, 8), (1, 64, 1), (100, 1600, 100)],
)
def test_a_plan_has_sixteen_buckets_at_least_unless_they_would_be_small(
    limit_mib: int, weights_mib: int, largest_mib: int
) -> None:
    sent = [TensorSpec(name=f"t{number}", dtype="uint8", shape=(2**20,)) for number in range(weights_mib)]
    manifest = Preparation().manifest([Outgoing(spec, spec) for spec in sent], limit_mib * 2**20)
    assert max(bucket.nbytes for bucket in manifest.buckets) == largest_mib * 2**20
    assert manifest.nbytes == weights_mib * 2**20
