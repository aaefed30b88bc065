"""The contract of every transport of raw buckets, with real processes. Parametrised over those that run here."""

from __future__ import annotations

import gc
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from support.transport_peers import SHARED_BUFFERS, AnySender, Peer, make_sender, pattern, peers, usage
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports.base import Receiver, Sender, TransportConfig
from weightpush_protocol.transports.collective import CollectiveReceiver
from weightpush_protocol.transports.endpoints import make_receiver
from weightpush_protocol.transports.shm_sender import ShmSender

OPEN_S = 20.0
#: What "soon" may take on a busy machine, in seconds.
SOON_S = 2.5
#: More than all socket buffers on the way hold.
BIG = 17 * 2**20


@pytest.fixture(params=["gloo", "shm"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    return str(request.param)


@contextmanager
def opened(kind: str, workers: list[Peer], host: str = "127.0.0.1") -> Iterator[AnySender]:
    """Open a sender here and a receiver named ``r`` in each worker."""
    sender = make_sender(kind, len(workers) + 1, host=host)
    try:
        tickets = []
        for rank, worker in enumerate(workers, 1):
            worker.call("receiver", "r", sender.config, rank)
            tickets.append(worker.start("open", "r", OPEN_S))
        sender.open(OPEN_S)
        for worker, ticket in zip(workers, tickets, strict=True):
            worker.result(ticket)
        yield sender
    finally:
        sender.close()


class Call:
    """A call in a thread, with what it raised and how long it took."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0

        def run() -> None:
            start = time.monotonic()
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.error = error
            self.seconds = time.monotonic() - start

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def failure(self, code: ErrorCode, within_s: float) -> WeightPushError:
        """Return the error with which it ends within that time."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"still running after {within_s} s"
        assert isinstance(self.error, WeightPushError), self.error
        assert self.error.code is code
        return self.error


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + OPEN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def knocked(sender: AnySender, rank: int) -> bool:
    """Whether a worker has reached a sender that is not open yet."""
    if isinstance(sender, ShmSender):
        return bool(select.select([sender._listener], [], [], 0)[0])
    return bool(sender._rendezvous._require().check([f"joined/{rank}"]))


def unsent(kind: str, sender: AnySender) -> int:
    """Send until the next bucket has to wait for a receiver; return its number."""
    if kind == "gloo":
        return 0
    for number in range(SHARED_BUFFERS):
        sender.send(number, pattern(number, BIG), 5.0)
    return SHARED_BUFFERS


@pytest.mark.parametrize(
    ("kind", "host", "world_size"),
    [
        *[("gloo", "127.0.0.1", 2), ("gloo", "127.0.0.1", 3), ("gloo", "::1", 2), ("gloo", "[::1]", 3)],
        *[("gloo", "localhost", 2), ("shm", "", 2), ("shm", "", 3)],
    ],
)
def test_buckets_arrive_as_they_were_sent(kind: str, host: str, world_size: int) -> None:
    sizes = [1000, 0, 17 * 2**20 + 3, 1, 8, 65536]
    with peers(world_size - 1) as workers, opened(kind, workers, host) as sender:
        for number, nbytes in enumerate(sizes):
            tickets = [worker.start("receive", "r", number, nbytes, 20.0) for worker in workers]
            bucket = pattern(number, nbytes)
            sender.send(number, bucket, 20.0)
            expected = tensor_digest(bucket)
            bucket.fill_(0xAA)
            assert [worker.result(ticket) for worker, ticket in zip(workers, tickets, strict=True)] == [expected] * len(
                workers
            )


@pytest.mark.case("C71")
def test_the_host_name_of_this_machine_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with peers(1) as workers, opened("gloo", workers) as sender:
        ticket = workers[0].start("receive", "r", 0, 9, 10.0)
        sender.send(0, pattern(0, 9), 10.0)
        assert workers[0].result(ticket) == tensor_digest(pattern(0, 9))


def test_the_protocols_are_fulfilled(kind: str) -> None:
    sender = make_sender(kind, 2)
    assert isinstance(sender, Sender)
    assert isinstance(make_receiver(sender.config, rank=1), Receiver)
    sender.close()
    sender.close()


def test_several_groups_beside_a_default_group_of_the_process(kind: str) -> None:
    with peers(1) as (worker,):
        assert worker.call("default_group") == "gloo"
        senders = [make_sender(kind, 2) for _ in range(3)]
        for name, sender in zip("abc", senders, strict=True):
            worker.call("receiver", name, sender.config, 1)
            ticket = worker.start("open", name, OPEN_S)
            sender.open(OPEN_S)
            worker.result(ticket)
        tickets = [worker.start("receive", name, 7, 1000 + index, 20.0) for index, name in enumerate("abc")]
        for index in (2, 0, 1):
            senders[index].send(7, pattern(index, 1000 + index), 20.0)
        for index, ticket in enumerate(tickets):
            assert worker.result(ticket) == tensor_digest(pattern(index, 1000 + index))
        for sender in senders:
            sender.close()


def test_a_missing_worker_is_named(kind: str) -> None:
    with peers(1) as (worker,):
        sender = make_sender(kind, 4)
        worker.call("receiver", "r", sender.config, 2)
        ticket = worker.start("open", "r", OPEN_S)
        until(lambda: knocked(sender, 2))
        error = Call(sender.open, 0.3).failure(ErrorCode.RENDEZVOUS_FAILED, SOON_S)
        assert "worker ranks 1, 3 did not join within 0.3 s" in error.message
        assert error.details["missing_ranks"] == [1, 3]
        # The one that did join learns the same at once, long before its own time is over.
        with pytest.raises(WeightPushError, match="worker ranks 1, 3 did not join") as caught:
            worker.result(ticket, SOON_S)
        assert caught.value.code is ErrorCode.RENDEZVOUS_FAILED
        sender.close()


def test_a_rank_that_joins_twice_is_refused(kind: str) -> None:
    with peers(2) as (first, second):
        sender = make_sender(kind, 3)
        first.call("receiver", "r", sender.config, 1)
        first.start("open", "r", OPEN_S)
        until(lambda: knocked(sender, 1))
        opening = Call(sender.open, OPEN_S)
        if isinstance(sender, ShmSender):
            until(lambda: 1 in sender._members)
        second.call("receiver", "r", sender.config, 1)
        with pytest.raises(WeightPushError, match="worker rank 1 joined twice"):
            second.call("open", "r", OPEN_S)
        sender.close()
        opening.failure(ErrorCode.RENDEZVOUS_FAILED, SOON_S)


def test_abort_while_opening(kind: str) -> None:
    sender = make_sender(kind, 2)
    opening = Call(sender.open, 60.0)
    time.sleep(0.2)
    assert opening.running
    sender.abort()
    error = opening.failure(ErrorCode.RENDEZVOUS_FAILED, SOON_S)
    assert "aborted" in error.message
    assert error.details["aborted"] is True
    sender.close()


def test_abort_of_a_receiver_while_opening_reaches_the_sender_too(kind: str) -> None:
    with peers(1) as (worker,):
        sender = make_sender(kind, 3)
        worker.call("receiver", "r", sender.config, 1)
        ticket = worker.start("open", "r", 60.0)
        opening = Call(sender.open, 60.0)
        time.sleep(0.3)
        assert opening.running
        worker.call("abort", "r")
        with pytest.raises(WeightPushError, match="receiver of worker rank 1 was aborted"):
            worker.result(ticket, SOON_S)
        error = opening.failure(ErrorCode.RENDEZVOUS_FAILED, SOON_S)
        assert "worker rank 2 did not join: worker rank 1 gave up" in error.message
        sender.close()


def test_abort_while_receiving(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        ticket = worker.start("receive", "r", 0, BIG, 60.0)
        time.sleep(0.2)
        worker.call("abort", "r")
        with pytest.raises(WeightPushError, match=r"bucket 0 .* aborted") as caught:
            worker.result(ticket, SOON_S)
        assert caught.value.code is ErrorCode.TRANSPORT_FAILED
        # The other end cannot go on either, and learns it at once.
        Call(sender.send, 0, pattern(0, BIG), 60.0).failure(ErrorCode.TRANSPORT_FAILED, SOON_S)


def test_abort_while_sending(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        number = unsent(kind, sender)
        sending = Call(sender.send, number, pattern(number, BIG), 60.0)
        time.sleep(0.3)
        assert sending.running
        start = time.monotonic()
        sender.abort()
        assert time.monotonic() - start < 0.5
        error = sending.failure(ErrorCode.TRANSPORT_FAILED, SOON_S)
        assert error.details["aborted"] is True
        with pytest.raises(WeightPushError, match="was aborted"):
            sender.send(1, pattern(1, 1), 1.0)


def test_close_ends_a_pending_send(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        number = unsent(kind, sender)
        sending = Call(sender.send, number, pattern(number, BIG), 60.0)
        time.sleep(0.3)
        assert sending.running
        sender.close()
        sending.failure(ErrorCode.TRANSPORT_FAILED, SOON_S)


def test_a_killed_worker_ends_the_send(kind: str) -> None:
    with peers(2) as workers, opened(kind, workers) as sender:
        other = workers[0].start("receive", "r", 0, BIG, 60.0)
        number = unsent(kind, sender)
        sending = Call(sender.send, number, pattern(number, BIG), 60.0)
        time.sleep(0.3)
        assert sending.running
        workers[1].signal(signal.SIGKILL)
        error = sending.failure(ErrorCode.TRANSPORT_FAILED, SOON_S)
        assert f"bucket {number} (17825792 bytes) was not sent" in error.message
        assert "(worker rank 2)" in error.message
        assert error.details["exception"]
        # Rank 1 had its copy already, or fails as soon: it ends in any case.
        with suppress(WeightPushError):
            assert workers[0].result(other, SOON_S) == tensor_digest(pattern(0, BIG))


def test_a_killed_trainer_ends_the_receive(kind: str) -> None:
    with peers(2) as (trainer, worker):
        config = trainer.call("sender", "s", kind, 2)
        opening = trainer.start("open", "s", OPEN_S)
        worker.call("receiver", "r", config, 1)
        worker.call("open", "r", OPEN_S)
        trainer.result(opening)
        ticket = worker.start("receive", "r", 3, 100, 60.0)
        time.sleep(0.2)
        trainer.signal(signal.SIGKILL)
        with pytest.raises(WeightPushError, match=r"did not receive bucket 3 .*\(the trainer\)") as caught:
            worker.result(ticket, SOON_S)
        assert caught.value.code is ErrorCode.TRANSPORT_FAILED
        # The worker is well: it can serve the next update.
        worker.call("close", "r")
        with opened(kind, [worker]) as sender:
            ticket = worker.start("receive", "r", 0, 5, 10.0)
            sender.send(0, pattern(0, 5), 10.0)
            assert worker.result(ticket) == tensor_digest(pattern(0, 5))


def test_a_stopped_worker_costs_the_timeout_and_no_more(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        worker.signal(signal.SIGSTOP)
        number = unsent(kind, sender)
        sending = Call(sender.send, number, pattern(number, BIG), 1.0)
        error = sending.failure(ErrorCode.TRANSPORT_FAILED, 1.0 + SOON_S)
        assert sending.seconds >= 0.9
        assert "not all workers took it within 1 s" in error.message


def test_a_stopped_trainer_costs_the_timeout_and_no_more(kind: str) -> None:
    with peers(2) as (trainer, worker):
        config = trainer.call("sender", "s", kind, 2)
        opening = trainer.start("open", "s", OPEN_S)
        worker.call("receiver", "r", config, 1)
        worker.call("open", "r", OPEN_S)
        trainer.result(opening)
        trainer.signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WeightPushError, match="it did not arrive within 1 s"):
            worker.result(worker.start("receive", "r", 0, 100, 1.0), 1.0 + SOON_S)
        assert time.monotonic() - start >= 0.9


@pytest.mark.parametrize("joined", [False, True], ids=["before joining", "after joining"])
def test_a_trainer_that_stops_during_the_rendezvous(kind: str, joined: bool) -> None:
    with peers(1) as (trainer,):
        config = trainer.call("sender", "s", kind, 2)
        gc.collect()  # Earlier tests' endpoints lie in reference cycles with the errors that they raised.
        before = usage()
        receiver = make_receiver(config, rank=1)
        if not joined:
            trainer.signal(signal.SIGSTOP)
        opening = Call(receiver.open, 1.0)
        if joined:
            time.sleep(0.4)
            trainer.signal(signal.SIGSTOP)
        opening.failure(ErrorCode.RENDEZVOUS_FAILED, 1.0 + 1.0 + SOON_S)
        receiver.close()
        opening.error = None
        # Not even a thread stays behind in a call that the stopped process will never answer.
        deadline = time.monotonic() + SOON_S
        while usage() != before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert usage() == before


def test_a_wrong_key_never_joins(kind: str) -> None:
    with peers(1) as (worker,):
        sender = make_sender(kind, 2)
        config = sender.config.model_copy(update={"key": "0" * 32})
        worker.call("receiver", "stray", config, 1)
        opening = Call(sender.open, OPEN_S)
        start = time.monotonic()
        with pytest.raises(WeightPushError, match="does not know this update's key") as caught:
            worker.call("open", "stray", 30.0)
        assert caught.value.code is ErrorCode.RENDEZVOUS_FAILED
        assert time.monotonic() - start < SOON_S
        assert opening.running
        # The rank is still free for the one that belongs here.
        worker.call("receiver", "r", sender.config, 1)
        worker.call("open", "r", OPEN_S)
        opening._thread.join(SOON_S)
        assert opening.error is None
        sender.close()


def _receiver(port: int, host: str = "127.0.0.1") -> CollectiveReceiver:
    return CollectiveReceiver(TransportConfig(name="gloo", host=host, port=port, world_size=2, key="a" * 64), rank=1)


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        opening = Call(_receiver(port).open, 30.0)
        error = opening.failure(ErrorCode.RENDEZVOUS_FAILED, SOON_S)
    assert f"cannot reach data port 127.0.0.1:{port}: Connection refused" in error.message
    assert error.details["exception"] == "ConnectionRefusedError"


def test_a_port_where_something_else_listens() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(4)
        error = Call(_receiver(other.getsockname()[1]).open, 0.5).failure(
            ErrorCode.RENDEZVOUS_FAILED, 0.5 + 1.0 + SOON_S
        )
    assert "within 0.5 s" in error.message or "got no answer" in error.message


def test_a_host_name_that_does_not_exist() -> None:
    error = Call(_receiver(9, "trainer.invalid").open, 5.0).failure(ErrorCode.RENDEZVOUS_FAILED, 5.0 + SOON_S)
    assert "cannot reach data port trainer.invalid:9: the name does not resolve" in error.message


def test_ends_that_mean_different_buckets_find_out(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        ticket = worker.start("receive", "r", 4, 10, 20.0)
        sending = Call(lambda: [sender.send(number, pattern(0, BIG), 20.0) for number in (5, 6, 7)])
        with pytest.raises(WeightPushError, match="the trainer sent bucket 5 of 17825792 bytes instead"):
            worker.result(ticket, SOON_S)
        sending.failure(ErrorCode.TRANSPORT_FAILED, SOON_S)
        assert worker.call("ping") == "pong"


def test_nothing_is_left_after_twenty_opens(kind: str) -> None:
    with peers(1) as (worker,):

        def push() -> None:
            with opened(kind, [worker]) as sender:
                ticket = worker.start("receive", "r", 0, 1000, 20.0)
                sender.send(0, pattern(0, 1000), 20.0)
                worker.result(ticket)
            worker.call("close", "r")

        def settled(measure: Callable[[], dict[str, int]], at_most: dict[str, int]) -> dict[str, int]:
            deadline = time.monotonic() + SOON_S
            while (now := measure()) != at_most and time.monotonic() < deadline:
                time.sleep(0.05)
            return now

        push()
        push()
        time.sleep(0.3)
        here, there = usage(), worker.call("usage")
        for _ in range(20):
            push()
        assert settled(usage, here) == here
        assert settled(lambda: worker.call("usage"), there) == there


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_was_sent_arrives_even_if_the_sender_closes_at_once(kind: str, world_size: int) -> None:
    with peers(world_size - 1) as workers:
        for nbytes in (5, BIG, 100_000):
            with opened(kind, workers) as sender:
                tickets = [worker.start("receive", "r", 0, nbytes, 20.0) for worker in workers]
                sender.send(0, pattern(0, nbytes), 20.0)
            for worker, ticket in zip(workers, tickets, strict=True):
                assert worker.result(ticket) == tensor_digest(pattern(0, nbytes))
                worker.call("close", "r")


def test_wrong_calls_are_told(kind: str) -> None:
    with peers(1) as (worker,), opened(kind, [worker]) as sender:
        for bad in (
            torch.zeros(4),
            torch.zeros(2, 2, dtype=torch.uint8),
            torch.zeros(8, dtype=torch.uint8)[::2],
            torch.zeros(4, dtype=torch.uint8, device="meta"),
        ):
            with pytest.raises(ValueError, match="bucket"):
                sender.send(0, bad, 1.0)
        with pytest.raises(RuntimeError, match="only once"):
            sender.open(1.0)
    with pytest.raises(WeightPushError, match="closed"):
        sender.send(0, pattern(0, 1), 1.0)
    fresh = make_sender(kind, 2)
    with pytest.raises(RuntimeError, match="not open"):
        fresh.send(0, pattern(0, 1), 1.0)
    fresh.close()
