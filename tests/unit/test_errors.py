from __future__ import annotations

import json
import pickle

import pytest

from weightpush_protocol import errors
from weightpush_protocol.errors import HTTP_STATUS, ErrorBody, ErrorCode, WeightPushError
from weightpush_protocol.state import ServerState

STATUS = {
    "unauthorized": 401,
    "too_large": 413,
    "slow_body": 408,
    "too_many_calls": 429,
    "invalid_request": 422,
    "manifest_rejected": 422,
    "protocol_mismatch": 422,
    "layout_unknown": 422,
    "reload_refused": 422,
    "online_quantization": 422,
    "runtime_layout": 422,
    "unrecorded_parameter": 422,
    "overlapping_storage": 422,
    "storage_unavailable": 422,
    "frozen_weights": 422,
    "draft_shares_head": 422,
    "lora_with_moe": 422,
    "kv_connector": 422,
    "self_check_failed": 422,
    "partial_refused": 422,
    "staging_budget_exceeded": 422,
    "no_copy": 422,
    "disk_reload_off": 422,
    "path_refused": 422,
    "checkpoint_damaged": 422,
    "asleep": 409,
    "transport_unavailable": 422,
    "rendezvous_failed": 422,
    "drain_failed": 409,
    "update_in_progress": 409,
    "stale_update": 409,
    "unknown_manifest": 409,
    "update_failed": 409,
    "bucket_out_of_order": 409,
    "bucket_mismatch": 409,
    "digest_mismatch": 409,
    "incomplete_update": 409,
    "landing_failed": 409,
    "transport_failed": 409,
    "lease_lost": 409,
    "deadline_exceeded": 409,
    "aborted": 409,
    "files_changed": 409,
    "worker_lost": 409,
    "postload_failed": 409,
    "proof_failed": 409,
    "cache_reset_failed": 409,
    "not_serving": 503,
    "internal": 500,
}
CLIENT_ONLY = {"unreachable", "protocol_error", "weights_rejected", "trainer_rank_lost", "launch_failed"}


def full_error() -> WeightPushError:
    return WeightPushError(
        ErrorCode.LANDING_FAILED,
        "worker 3 could not write",
        details={"tensor": "a.b", "ranks": [3], "nested": {"x": None}},
        update_id="u1",
        state=ServerState.FAILED,
    )


@pytest.mark.parametrize(("code", "status"), STATUS.items())
def test_status_of_each_code(code: str, status: int) -> None:
    assert WeightPushError(ErrorCode(code), "m").http_status == status


def test_no_code_is_forgotten() -> None:
    assert {code.value for code in ErrorCode} == set(STATUS) | CLIENT_ONLY
    assert set(HTTP_STATUS) == set(ErrorCode)


def test_the_table_in_the_docstring_says_the_same() -> None:
    assert errors.__doc__ is not None
    rows = [line.split() for line in errors.__doc__.splitlines() if len(line.split()) > 2]
    documented = {row[0]: row[1] for row in rows if row[0] in {code.value for code in ErrorCode}}
    assert documented == {**{code: str(status) for code, status in STATUS.items()}, **dict.fromkeys(CLIENT_ONLY, "-")}


def test_wire_form_and_back() -> None:
    error = full_error()
    text = error.body().model_dump_json()
    assert json.loads(text) == {
        "error": {
            "code": "landing_failed",
            "message": "worker 3 could not write",
            "update_id": "u1",
            "state": "failed",
            "details": {"tensor": "a.b", "ranks": [3], "nested": {"x": None}},
        }
    }
    rebuilt = WeightPushError.from_detail(ErrorBody.model_validate_json(text).error)
    assert vars(rebuilt) == vars(error)


def test_fields_of_a_newer_server_are_ignored() -> None:
    body = ErrorBody.model_validate({"error": {"code": "aborted", "message": "m", "added_later": 1}})
    assert WeightPushError.from_detail(body.error).code is ErrorCode.ABORTED


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_survives_pickling(protocol: int) -> None:
    for error in (full_error(), WeightPushError(ErrorCode.INTERNAL, "m")):
        rebuilt = pickle.loads(pickle.dumps(error, protocol))
        assert type(rebuilt) is WeightPushError
        assert vars(rebuilt) == vars(error)
        assert str(rebuilt) == str(error)


def test_the_text_shows_message_and_code() -> None:
    assert str(full_error()) == "worker 3 could not write [landing_failed]"


def test_whatever_a_file_is_called_an_error_can_say_it() -> None:
    name = b"tmp\xff.safetensors".decode("utf-8", "surrogateescape")
    error = WeightPushError(ErrorCode.CHECKPOINT_DAMAGED, f"{name} is damaged", details={"file": name, "all": [name]})
    assert error.body().model_dump_json().encode()
    assert error.message == "tmp\\udcff.safetensors is damaged"
    assert error.details["all"] == ["tmp\\udcff.safetensors"]
