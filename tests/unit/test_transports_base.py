"""Configuration, availability, addresses and the parts of the collective transports that need no peer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import groups, sockets
from weightpush_protocol.transports.base import TransportConfig, check_available
from weightpush_protocol.transports.cancellable import Cancelled, run_cancellable
from weightpush_protocol.transports.collective import CollectiveReceiver, CollectiveSender
from weightpush_protocol.transports.sockets import pick_host

KEY = "c0ffee" * 8
FULL: dict[str, Any] = {"name": "gloo", "host": "10.0.0.1", "port": 5000, "world_size": 3, "key": KEY}


def test_the_key_travels_but_is_never_shown() -> None:
    config = TransportConfig(**FULL)
    assert KEY not in repr(config)
    assert KEY not in str(config)
    assert TransportConfig.model_validate_json(config.model_dump_json()) == config
    assert config.model_dump()["key"] == KEY
    with pytest.raises(ValidationError) as caught:
        TransportConfig(**{**FULL, "key": KEY + "zz"})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("field", ["host", "port", "world_size", "key"])
@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_collectives_need_everything(name: str, field: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' needs {field}"):
        TransportConfig(**{**FULL, "name": name, field: None})


def test_http_needs_nothing() -> None:
    assert TransportConfig(name="http").host is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "carrier-pigeon"},
        {"port": 0},
        {"port": 65536},
        {"world_size": 1},
        {"rank_offset": 0},
        {"rank_offset": 3},
        {"key": "ab"},
        {"key": "g" * 32},
        {"key": "a" * 65},
        {"host": ""},
        {"host": "http://trainer"},
        {"host": "a b"},
        {"host": "x" * 254},
        {"more": 1},
    ],
)
def test_bad_configs(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TransportConfig(**{**FULL, **change})


def test_brackets_of_ipv6_come_off() -> None:
    assert TransportConfig(**{**FULL, "host": "[fe80::1]"}).host == "fe80::1"


def test_available_here() -> None:
    check_available("http", torch.device("cuda"))
    check_available("gloo", torch.device("cpu"))
    check_available("gloo", torch.device("cuda"))


@pytest.mark.parametrize(
    ("built", "cuda", "device", "reason"),
    [
        (False, False, "cpu", "without NCCL"),
        (True, True, "cpu", "they are on 'cpu'"),
        (True, False, "cuda", "no CUDA device is visible"),
    ],
)
def test_nccl_says_why_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, built: bool, cuda: bool, device: str, reason: str
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: built)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    with pytest.raises(WeightPushError, match=reason) as caught:
        check_available("nccl", torch.device(device))
    assert caught.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
    with pytest.raises(WeightPushError, match=reason):
        CollectiveSender("nccl", host="127.0.0.1", world_size=2, device=device)
    with pytest.raises(WeightPushError, match=reason):
        CollectiveReceiver(TransportConfig(**{**FULL, "name": "nccl"}), rank=1, device=device)


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_receiver_has_a_rank_of_the_group(rank: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.2"):
        CollectiveReceiver(TransportConfig(**FULL), rank=rank)


def test_http_is_no_collective() -> None:
    with pytest.raises(ValueError, match="not a collective"):
        CollectiveReceiver(TransportConfig(name="http"), rank=1)


@pytest.mark.parametrize(
    ("server", "seen"),
    [("127.0.0.1", {"127.0.0.1"}), ("::1", {"::1"}), ("[::1]", {"::1"}), ("localhost", {"127.0.0.1", "::1"})],
)
def test_loopback_stays_loopback(server: str, seen: set[str]) -> None:
    assert pick_host(server) in seen


def test_a_host_without_route_is_told() -> None:
    with pytest.raises(WeightPushError, match=r"no route to 'server\.invalid'") as caught:
        pick_host("server.invalid")
    assert caught.value.code is ErrorCode.RENDEZVOUS_FAILED


def test_a_sender_must_have_the_address_it_gives() -> None:
    # 192.0.2.0/24 is reserved for documentation; no machine has it.
    with pytest.raises(WeightPushError, match=r"cannot listen on '192\.0\.2\.1'") as caught:
        CollectiveSender("gloo", host="192.0.2.1", world_size=2)
    assert caught.value.code is ErrorCode.RENDEZVOUS_FAILED


def test_a_numeric_address_listens_there_only() -> None:
    with sockets.listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with sockets.listen("trainer.example") as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def cancellable(
    work: Callable[[], Any], *, cancel: threading.Event, seconds: float, cut: Callable[[], None], late: list[Any]
) -> Any:
    return run_cancellable(
        work, cancel=cancel, deadline=time.monotonic() + seconds, cut=cut, discard=late.append, name="test"
    )


def test_a_call_that_ends_gives_its_result_or_error() -> None:
    late: list[Any] = []
    assert cancellable(lambda: 5, cancel=threading.Event(), seconds=5, cut=lambda: None, late=late) == 5
    with pytest.raises(ZeroDivisionError):
        cancellable(lambda: 1 / 0, cancel=threading.Event(), seconds=5, cut=lambda: None, late=late)
    assert late == []


def test_a_call_that_hangs_is_cut_and_left() -> None:
    release, late = threading.Event(), []
    cuts: list[float] = []

    def work() -> str:
        release.wait(20)
        return "late"

    start = time.monotonic()
    with pytest.raises(Cancelled):
        cancellable(work, cancel=threading.Event(), seconds=0.1, cut=lambda: cuts.append(1), late=late)
    assert time.monotonic() - start < 2
    assert cuts == [1]
    release.set()
    deadline = time.monotonic() + 5
    while not late and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late == ["late"]


class FakeNccl:
    """Stands for ``ProcessGroupNCCL``, which needs GPUs: reports what it is told to and counts aborts."""

    def __init__(self, error: str = "SUCCESS") -> None:
        self.error = error
        self.aborts = 0

    def get_error(self) -> Any:
        return type("Error", (), {"name": self.error})

    def abort(self) -> None:
        self.aborts += 1


class Flag:
    """Stands for a CUDA event or a ``Work``: done after so many questions."""

    def __init__(self, after: int | None) -> None:
        self.left = after

    def query(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    is_completed = query


def nccl_group(fake: FakeNccl) -> groups.NcclGroup:
    group = groups.NcclGroup.__new__(groups.NcclGroup)
    group._group = fake
    group._aborted = threading.Event()
    return group


def wait_nccl(group: groups.NcclGroup, finished: Flag, work: Flag, seconds: float) -> None:
    group._wait(work, finished, time.monotonic() + seconds)  # type: ignore[arg-type]  # stand-ins


def settled(fake: FakeNccl) -> int:
    deadline = time.monotonic() + 2
    while not fake.aborts and time.monotonic() < deadline:
        time.sleep(0.01)
    return fake.aborts


def test_nccl_waits_until_the_kernel_has_finished() -> None:
    fake = FakeNccl()
    finished = Flag(5)
    wait_nccl(nccl_group(fake), finished, Flag(None), 5)
    assert finished.left == -1
    assert fake.aborts == 0


def test_nccl_is_aborted_once_when_time_is_over() -> None:
    fake = FakeNccl()
    group = nccl_group(fake)
    with pytest.raises(groups.GroupError, match="timed out") as caught:
        wait_nccl(group, Flag(None), Flag(None), 0.05)
    assert caught.value.timed_out
    group.abort()
    assert settled(fake) == 1


def test_nccl_errors_and_aborts_end_the_wait() -> None:
    fake = FakeNccl("COMM_ERROR")
    with pytest.raises(groups.GroupError, match="NCCL reported COMM_ERROR"):
        wait_nccl(nccl_group(fake), Flag(None), Flag(None), 5)
    assert settled(fake) == 1

    fake = FakeNccl()
    group = nccl_group(fake)
    threading.Timer(0.1, group.abort).start()
    start = time.monotonic()
    with pytest.raises(groups.GroupError, match="aborted"):
        wait_nccl(group, Flag(None), Flag(None), 30)
    assert time.monotonic() - start < 5
    # A kernel that an abort ended has finished too, with anything in its buffer.
    with pytest.raises(groups.GroupError, match="aborted"):
        wait_nccl(group, Flag(0), Flag(0), 30)


def test_nccl_work_that_failed_without_finishing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_OPERATION_MARGIN_S", 0.1)
    with pytest.raises(groups.GroupError, match="reported an error"):
        wait_nccl(nccl_group(FakeNccl()), Flag(None), Flag(0), 30)


def test_nccl_settings_of_the_process_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")

    def construct() -> None:
        with groups._errors_left_to_us():
            raise RuntimeError([os.environ[name] for name in names])

    with pytest.raises(RuntimeError, match=r"\['0', '0'\]"):
        construct()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:3. This is typically", None),
        ("plain\nframe #0: x", "plain"),
        ("", "RuntimeError"),
    ],
)
def test_backend_errors_are_shortened(text: str, short: str | None) -> None:
    assert groups.brief(RuntimeError(text)) == (short or "Connection closed by peer [::1]:3")
