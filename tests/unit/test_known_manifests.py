from __future__ import annotations

import hashlib
import json

import pytest
from pydantic import ValidationError

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest, TensorSpec, build_manifest
from weightpush_protocol.messages import BeginCall, BeginRequest, InFlight
from weightpush_protocol.transports.base import TransportConfig
from weightpush_server.known_manifests import KnownManifests


def manifest(width: int, tensors: int = 3) -> Manifest:
    return build_manifest([TensorSpec(name=f"t{n}", dtype="float32", shape=(width,)) for n in range(tensors)], 64)


def request(width: int = 4) -> BeginRequest:
    return BeginRequest(
        weight_version="v1",
        manifest=manifest(width),
        transport=TransportConfig(name="http"),
        in_flight=InFlight.ABORT,
        update_id="u1",
    )


def test_what_was_taken_is_known_by_its_digest() -> None:
    known = KnownManifests()
    wanted = manifest(4)
    with pytest.raises(WeightPushError, match=wanted.digest()) as unknown:
        known.find(wanted.digest())
    assert (unknown.value.code, unknown.value.http_status) == (ErrorCode.UNKNOWN_MANIFEST, 409)
    known.keep(wanted, 100)
    assert known.find(wanted.digest()) is wanted


def test_the_one_used_longest_ago_is_forgotten_first() -> None:
    known = KnownManifests(limit=2)
    first, second, third = (manifest(width) for width in (4, 5, 6))
    known.keep(first, 1)
    known.keep(second, 1)
    known.find(first.digest())
    known.keep(third, 1)
    assert known.find(first.digest()) is first
    with pytest.raises(WeightPushError):
        known.find(second.digest())


def test_what_is_kept_is_bounded_in_bytes() -> None:
    known = KnownManifests(limit=10, limit_bytes=100)
    first, second, huge = (manifest(width) for width in (4, 5, 6))
    known.keep(first, 60)
    known.keep(second, 60)
    known.keep(huge, 101)
    assert known.find(second.digest()) is second
    for gone in (first, huge):
        with pytest.raises(WeightPushError):
            known.find(gone.digest())
    known.keep(second, 60)
    known.keep(first, 40)
    assert known.find(second.digest()) is second


def test_a_begin_by_digest_stands_for_the_same_request() -> None:
    whole = request()
    call = whole.by_digest()
    assert call.manifest is None
    assert call.manifest_digest == whole.manifest.digest()
    sent = BeginCall.model_validate_json(call.model_dump_json())
    assert sent.with_manifest(whole.manifest) == whole
    assert len(call.model_dump_json()) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manifest": None}, "bring the manifest"),
        ({"manifest_digest": "0" * 64}, "bring the manifest"),
        ({"manifest": None, "manifest_digest": "0" * 63}, "manifest_digest"),
        ({"manifest": None, "manifest_digest": "G" * 64}, "manifest_digest"),
        ({"manifest": None, "manifest_digest": 7}, "manifest_digest"),
    ],
)
def test_a_begin_needs_the_manifest_or_its_digest(change: dict[str, object], message: str) -> None:
    body = json.loads(request().model_dump_json())
    with pytest.raises(ValidationError, match=message):
        BeginCall.model_validate_json(json.dumps({**body, **change}))


def test_a_changed_copy_has_facts_and_a_digest_of_its_own() -> None:
    original = manifest(4)
    assert (original.facts.tensors, original.facts.nbytes, original.facts.buckets) == (3, 48, 1)
    assert original.facts.largest_bucket == 48
    digest = original.digest()
    bare = original.model_copy(update={"buckets": ()})
    assert (bare.facts.buckets, bare.facts.largest_bucket) == (0, 0)
    assert bare.digest() != digest
    assert original.model_copy() == original


def test_the_digest_can_be_worked_out_by_anybody() -> None:
    """As docs/protocol.md says it, without our classes."""
    wanted = manifest(4)
    plain = json.dumps(json.loads(wanted.model_dump_json()), sort_keys=True, separators=(",", ":"))
    assert wanted.digest() == hashlib.sha256(plain.encode()).hexdigest()


def test_the_same_tensors_make_the_same_manifest_at_once() -> None:
    assert manifest(4) is manifest(4)
    assert manifest(4) is not manifest(5)
    assert manifest(5) is manifest(5)
    specs = manifest(4).tensors
    assert build_manifest(specs, 16) != build_manifest(specs, 64)
