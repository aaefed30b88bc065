"""Shared buffers between real processes: no copy, no early reuse, nobody else's memory, and nothing left of them.

What every transport has to do is in ``test_transports_contract.py``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from support.transport_peers import Peer, make_sender, pattern, peers
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import local_links
from weightpush_protocol.transports.base import BorrowingReceiver, LendingSender, TransportConfig
from weightpush_protocol.transports.endpoints import make_receiver
from weightpush_protocol.transports.shared_memory import (
    MEMORY_NAME,
    MemoryRefused,
    SharedBuffers,
    host_id,
    map_for_reading,
)
from weightpush_protocol.transports.shm_receiver import ShmReceiver
from weightpush_protocol.transports.shm_sender import ShmSender

WAIT_S = 20.0
SMALL = 4096

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or leave a namespace")


def sharing(count: int, workers: list[Peer], nbytes: int = SMALL) -> tuple[ShmSender, SharedBuffers]:
    """Open a sender of ``count`` buffers here and a receiver named ``r`` in each worker."""
    memory = SharedBuffers(count, nbytes)
    sender = ShmSender(memory, world_size=len(workers) + 1)
    tickets = []
    for rank, worker in enumerate(workers, 1):
        worker.call("receiver", "r", sender.config, rank)
        tickets.append(worker.start("open", "r", WAIT_S))
    sender.open(WAIT_S)
    for worker, ticket in zip(workers, tickets, strict=True):
        worker.result(ticket)
    return sender, memory


def ship(sender: ShmSender, number: int, nbytes: int = SMALL) -> str:
    """Gather bucket ``number`` into a lent buffer and send it; return its digest."""
    buffer = sender.lend(nbytes, WAIT_S).copy_(pattern(number, nbytes))
    digest = tensor_digest(buffer)
    sender.send(number, buffer, WAIT_S)
    return digest


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Call ``function`` in a thread; the list gets its result, or what it raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def holders(inode: int) -> set[int]:
    """Return the processes that have the shared memory of that number mapped or open."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            lines = [line.split() for line in (entry / "maps").read_text().splitlines() if MEMORY_NAME in line]
            found |= {int(entry.name) for line in lines if line[4] == str(inode)}
            for link in (entry / "fd").iterdir():
                with suppress(OSError):
                    if MEMORY_NAME in os.readlink(link) and link.stat().st_ino == inode:
                        found.add(int(entry.name))
    return found


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# buffers


def test_a_bucket_is_read_where_it_was_gathered_and_its_buffer_waits_for_every_worker() -> None:
    with peers(2) as workers:
        sender, memory = sharing(2, workers)
        assert isinstance(sender, LendingSender)
        addresses = []
        for number in range(2):
            digest = ship(sender, number)
            addresses.append(memory.buffer(number, SMALL).data_ptr())
            for worker in workers:
                assert worker.call("borrow", "r", number, SMALL, WAIT_S) == digest
        assert addresses[1] - addresses[0] == memory.buffer_bytes
        # What the trainer writes now is what they see: there is one copy in all.
        memory.buffer(1, SMALL).fill_(7)
        lending, lent = in_thread(lambda: sender.lend(SMALL, WAIT_S))
        for give_back in ((0, 0), (1, 1)):
            worker, number = give_back
            workers[worker].call("give_back", "r", number)
            lending.join(0.3)
            assert lending.is_alive()  # Worker 1 is not done with bucket 0.
        workers[1].call("give_back", "r", 0)
        lending.join(WAIT_S)
        (buffer,) = lent
        assert isinstance(buffer, torch.Tensor)
        assert buffer.data_ptr() == addresses[0]
        sender.close()


def test_a_worker_sees_what_is_written_after_it_looked() -> None:
    """The mapping is the trainer's memory itself. That is why a buffer is lent to one side at a time."""
    memory = SharedBuffers(1, SMALL)
    seen = map_for_reading(memory.descriptor, memory.buffer_bytes)
    memory.buffer(0, SMALL).fill_(3)
    assert seen[:SMALL].eq(3).all()
    memory.buffer(0, SMALL).fill_(4)
    assert seen[:SMALL].eq(4).all()


def test_the_next_bucket_is_announced_while_the_one_before_is_read() -> None:
    with peers(1) as (worker,):
        sender, _ = sharing(2, [worker])
        digests = [ship(sender, number) for number in range(2)]  # Returns although nothing was taken yet.
        for number in range(6):
            assert worker.call("borrow", "r", number, SMALL, WAIT_S) == digests[number]
            worker.call("give_back", "r", number)
            digests.append(ship(sender, number + 2))
        sender.close()


def test_buckets_of_all_sizes_share_two_buffers() -> None:
    sizes = [SMALL, 0, 1, 0, 0, 77, SMALL - 1]
    with peers(1) as (worker,):
        sender, _ = sharing(2, [worker])
        for number, nbytes in enumerate(sizes):
            digest = ship(sender, number, nbytes)
            assert worker.call("receive", "r", number, nbytes, WAIT_S) == digest
        with pytest.raises(ValueError, match="does not fit"):
            sender.lend(SMALL + 1, 1.0)
        sender.close()


def test_lent_buffers_are_sent_in_their_order() -> None:
    with peers(1) as (worker,):
        sender, _ = sharing(2, [worker])
        first, second = sender.lend(8, 1.0), sender.lend(8, 1.0)
        for wrong in (second, torch.zeros(8, dtype=torch.uint8), first[1:]):
            with pytest.raises(ValueError, match="in the order"):
                sender.send(0, wrong, 1.0)
        sender.send(0, first, 1.0)
        sender.send(1, second, 1.0)
        sender.close()


@pytest.mark.parametrize("end", ["abort", "close", "kill the worker", "abort the worker"])
def test_a_wait_for_a_free_buffer_can_be_ended(end: str) -> None:
    with peers(2) as workers:
        sender, _ = sharing(1, workers)
        ship(sender, 0)
        lending, results = in_thread(lambda: sender.lend(SMALL, 60.0))
        lending.join(0.2)
        assert lending.is_alive()
        match end:
            case "abort":
                sender.abort()
            case "close":
                sender.close()
            case "kill the worker":
                workers[1].signal(signal.SIGKILL)
            case "abort the worker":
                workers[1].call("abort", "r")
        lending.join(WAIT_S)
        (error,) = results
        assert isinstance(error, WeightPushError)
        assert error.code is ErrorCode.TRANSPORT_FAILED
        assert error.details["aborted"] is (end in ("abort", "close"))
        assert error.details.get("peer_rank") == (2 if "worker" in end else None)
        # The other worker learns it at once, not at its own deadline.
        workers[0].call("receive", "r", 0, SMALL, 60.0)
        with pytest.raises(WeightPushError, match=r"\(the trainer\)"):
            workers[0].call("receive", "r", 1, SMALL, 60.0)
        sender.close()


def test_a_worker_that_keeps_a_bucket_is_named_when_the_time_is_over() -> None:
    with peers(2) as workers:
        sender, _ = sharing(1, workers)
        ship(sender, 5)
        workers[0].call("receive", "r", 5, SMALL, WAIT_S)
        with pytest.raises(WeightPushError, match=r"worker rank 2 did not take bucket 5 within 0\.3 s") as caught:
            sender.lend(SMALL, 0.3)
        assert (caught.value.code, caught.value.details["peer_rank"]) == (ErrorCode.TRANSPORT_FAILED, 2)
        sender.close()


# who may see it


def test_nobody_can_change_the_memory_but_the_trainers_own_mapping() -> None:
    memory = SharedBuffers(2, SMALL)
    again = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
    try:
        for descriptor in (memory.descriptor, again):
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, SMALL)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            for size in (0, 2 * memory.buffer_bytes):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size + 1)
    finally:
        os.close(again)
    assert os.fstat(memory.descriptor).st_mode & 0o777 == 0o600


def _memfd(nbytes: int = SMALL, *, sealed: bool = True, mode: int = 0o600) -> int:
    descriptor = os.memfd_create("strange", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    os.fchmod(descriptor, mode)
    if sealed:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def test_what_is_no_sealed_memory_of_this_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(SMALL))
    file.chmod(0o600)
    pipe, other = os.pipe()
    cases = [
        (os.open(file, os.O_RDWR), "no anonymous memory"),
        (pipe, "something else"),
        (_memfd(sealed=False), "not sealed"),
        (_memfd(mode=0o640), "mode 640"),
        (_memfd(SMALL - 1), f"it has {SMALL - 1} bytes, the update needs {SMALL}"),
    ]
    for descriptor, reason in cases:
        with pytest.raises(MemoryRefused, match=reason):
            map_for_reading(descriptor, SMALL)
        os.close(descriptor)
    os.close(other)
    good = _memfd()
    assert map_for_reading(good, SMALL).eq(0).all()
    os.close(good)


@needs_root
def test_memory_of_another_user_is_refused() -> None:
    descriptor = _memfd()
    os.fchown(descriptor, 12345, -1)
    with pytest.raises(MemoryRefused, match="belongs to user 12345"):
        map_for_reading(descriptor, SMALL)
    os.close(descriptor)


def test_a_worker_that_cannot_map_the_memory_says_so_to_all() -> None:
    with peers(2) as workers:
        memory = SharedBuffers(1, SMALL)
        sender = ShmSender(memory, world_size=3)
        workers[0].call("receiver", "r", sender.config, 1)
        # More than there is: as if the trainer had said one size and made another.
        workers[1].call("receiver", "r", sender.config.model_copy(update={"buffers": 2}), 2)
        opening = [worker.start("open", "r", WAIT_S) for worker in workers]
        with pytest.raises(WeightPushError, match=r"worker rank 2 cannot map the trainer's memory: it has") as caught:
            sender.open(WAIT_S)
        assert caught.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
        assert caught.value.details["peer_rank"] == 2
        for worker, ticket in zip(workers, opening, strict=True):
            with pytest.raises(WeightPushError, match="worker rank 2 cannot map") as told:
                worker.result(ticket)
            assert told.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
        sender.close()


def test_where_no_trainer_listens_nothing_can_be_shared() -> None:
    sender = make_sender("shm", 2)
    sender.close()
    receiver = make_receiver(sender.config, rank=1)
    with pytest.raises(WeightPushError, match=r"no trainer listens at @weightpush-.*network namespace") as caught:
        receiver.open(WAIT_S)
    assert caught.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
    receiver.close()


@needs_root
def test_a_worker_of_another_user_gets_nothing() -> None:
    """Refused by either side: the trainer asks the kernel who has connected, and so does the worker."""
    sender = make_sender("shm", 2)
    assert sender.config.socket is not None
    opening, results = in_thread(lambda: sender.open(60.0))
    child = os.fork()
    if child == 0:
        # The stranger does not look, as a receiver of ours would.
        status = 1
        with suppress(BaseException):
            os.setuid(12345)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(f"\0{sender.config.socket}")
            with suppress(BrokenPipeError):  # It may have been shown the door already.
                connection.send(local_links.hello(1, str(sender.config.key)))
            told, descriptors, *_ = socket.recv_fds(connection, 4096, 4)
            refused = told.startswith(b"Etransport_unavailable\0the worker runs as user 12345") and not descriptors
            receiver = ShmReceiver(sender.config, rank=1)
            try:
                receiver.open(WAIT_S)
            except WeightPushError as error:
                mine = error.code is ErrorCode.TRANSPORT_UNAVAILABLE and "the trainer runs as user 0" in error.message
                status = 0 if refused and mine else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert opening.is_alive()  # It goes on waiting for the one who belongs here.
    assert sender._members == {}
    sender.close()
    opening.join(WAIT_S)
    assert isinstance(results[0], WeightPushError)


@needs_root
def test_another_network_namespace_is_another_host() -> None:
    sender = make_sender("shm", 2)
    here = host_id()
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
                os._exit(77)
            host_id.cache_clear()
            receiver = ShmReceiver(sender.config, rank=1)
            try:
                receiver.open(WAIT_S)
            except WeightPushError as error:
                status = int(error.code is not ErrorCode.TRANSPORT_UNAVAILABLE or host_id() in ("", here))
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sender.close()
    if status == 77:
        pytest.skip("this system lets nobody leave its network namespace")
    assert status == 0


def test_processes_of_one_user_on_one_host_know_each_other() -> None:
    with peers(1) as (worker,):
        assert worker.call("host_id") == host_id() != ""
    assert len(host_id()) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"socket": "/tmp/socket"},
        {"socket": "weightpush-../../etc"},
        {"socket": "weightpush-" + "G" * 32},
        {"socket": None},
        {"buffers": 0},
        {"buffers": 9},
        {"buffer_bytes": 100},
        {"buffer_bytes": -64},
        {"key": None},
        {"world_size": None},
    ],
)
def test_bad_configurations_are_refused(change: dict[str, object]) -> None:
    sender = make_sender("shm", 2)
    good = sender.config.model_dump()
    sender.close()
    with pytest.raises(ValueError, match=r"socket|buffer|key|world_size"):
        TransportConfig.model_validate(good | change)


def test_a_receiver_borrows_and_has_a_rank() -> None:
    sender = make_sender("shm", 2)
    receiver = ShmReceiver(sender.config, rank=1)
    assert isinstance(receiver, BorrowingReceiver)
    receiver.close()
    with pytest.raises(ValueError, match=r"1\.\.1"):
        ShmReceiver(sender.config, rank=2)
    with pytest.raises(ValueError, match="shares no memory"):
        ShmReceiver(TransportConfig(name="http"), rank=1)
    sender.close()


# what is left

PHASES = ("listening", "joined", "sent", "borrowed", "waiting for a buffer", "given back", "closed")


@pytest.mark.parametrize("victim", ["trainer", "worker"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_at_any_phase_leaves_nothing(victim: str, phase: str) -> None:
    with peers(3) as (trainer, worker, other):
        config = trainer.call("sender", "s", "shm", 3)
        inode = trainer.call("inode", "s")
        receivers = (worker, other)
        for rank, peer in enumerate(receivers, 1):
            peer.call("receiver", "r", config, rank)
        step = PHASES.index(phase)
        pending = []
        if step >= 1:
            tickets = [(trainer, trainer.start("open", "s", WAIT_S))]
            tickets += [(peer, peer.start("open", "r", WAIT_S)) for peer in receivers]
            for peer, ticket in tickets:
                peer.result(ticket)
            assert len(holders(inode)) == 3
        if step >= 2:
            trainer.call("lend_and_send", "s", 0, SMALL, WAIT_S)
        if step >= 3:
            for peer in receivers:
                peer.call("borrow", "r", 0, SMALL, WAIT_S)
        if phase == "waiting for a buffer":
            trainer.call("lend_and_send", "s", 1, SMALL, WAIT_S)
            pending.append((trainer, trainer.start("lend_and_send", "s", 2, SMALL, 60.0)))
            pending.append((other, other.start("receive", "r", 1, SMALL, 60.0)))
            pending.append((other, other.start("receive", "r", 2, SMALL, 60.0)))
        if step >= 5:
            for peer in receivers:
                peer.call("give_back", "r", 0)
        if step >= 6:
            trainer.call("close", "s")
            for peer in receivers:
                peer.call("close", "r")
        killed = trainer if victim == "trainer" else worker
        killed.signal(signal.SIGKILL)
        survivors = [peer for peer in (trainer, *receivers) if peer is not killed]
        for peer, ticket in pending:
            if peer is not killed:
                # Whoever waits learns it, long before its own time is over.
                with suppress(WeightPushError):
                    peer.result(ticket, WAIT_S)
        for peer in survivors:
            peer.call("reset")
        until(lambda: not holders(inode))
        name = str(config.socket)
        assert name not in Path("/proc/net/unix").read_text()
