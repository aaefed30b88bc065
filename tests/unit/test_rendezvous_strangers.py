"""Who does not hold an update's key: on the rendezvous' port and on Gloo's own, with real sockets."""

from __future__ import annotations

import base64
import os
import pickle
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from support.transport_peers import pattern, peers, usage
from unit.test_transports_contract import OPEN_S, SOON_S, Call, opened
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import keyed_store
from weightpush_protocol.transports.collective import CollectiveReceiver, CollectiveSender
from weightpush_protocol.transports.groups import GroupError
from weightpush_protocol.transports.keyed_store import GuestStore, HostedStore, StoreError, WrongKeyError

KEY = "ab" * 32
GARBAGE = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\0" * 64,
    b"\x80\x04\x95" + b"pickle" * 20,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"t" * 90,
    random.Random(1).randbytes(70_000),
)


@pytest.fixture
def host() -> Any:
    store = HostedStore(socket.create_server(("127.0.0.1", 0)), KEY, 2.0, guests=1)
    yield store
    store.close()


def port_of(store: HostedStore) -> int:
    return int(store._listener.getsockname()[1])


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5)


def guest(port: int, key: str = KEY, within_s: float = 3.0) -> GuestStore:
    return GuestStore(dial(port), key, deadline=time.monotonic() + within_s, timeout_s=1.0)


def test_holders_of_the_key_share_entries(host: HostedStore) -> None:
    with closing(guest(port_of(host))) as one, closing(guest(port_of(host), KEY.upper())) as other:
        one.set("bytes", bytes(range(256)))
        assert other.get("bytes") == host.get("bytes") == bytes(range(256))
        assert (one.add("count", 2), other.add("count", -5), host.add("count", 1)) == (2, -3, -2)
        assert (one.find("none"), one.check(["bytes", "none"]), one.check(["bytes"])) == (None, False, True)
        threading.Timer(0.3, host.set, ("late", "text")).start()
        assert one.get("late") == b"text"
        one.multi_set(["a", "b"], ["1", b"2"])
        assert other.multi_get(["a", "b"]) == [b"1", b"2"]
        assert (other.delete_key("a"), other.delete_key("a")) == (True, False)
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"did not connect within 0\.2 s"):
            one.wait(["never"], timedelta(seconds=0.2))
        assert time.monotonic() - start < 0.2 + SOON_S


def test_a_wrong_key_is_told_at_once_and_learns_nothing(host: HostedStore) -> None:
    host.set("secret", "entry")
    start = time.monotonic()
    with pytest.raises(WrongKeyError):
        guest(port_of(host), "cd" * 32, within_s=30)
    assert time.monotonic() - start < SOON_S
    with closing(dial(port_of(host))) as stranger:
        first = stranger.recv(4096)
        stranger.sendall(bytes(64))
        assert stranger.recv(4096) == b""
    assert first.startswith(keyed_store._MAGIC)
    # Another challenge each time: what one guest answered is of no use to anybody else.
    with closing(dial(port_of(host))) as stranger:
        assert stranger.recv(4096) != first


def test_an_answer_cannot_be_replayed(host: HostedStore) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as middle:
        overheard: list[bytes] = []

        def listen() -> None:
            client, _ = middle.accept()
            with client, closing(dial(port_of(host))) as server:
                client.sendall(server.recv(4096))
                overheard.append(client.recv(64))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(StoreError):
            guest(middle.getsockname()[1])
        thread.join()
    with closing(dial(port_of(host))) as stranger:
        stranger.recv(4096)
        stranger.sendall(overheard[0])
        assert stranger.recv(4096) == b""


def test_a_false_host_is_found_out() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as false:

        def answer() -> None:
            client, _ = false.accept()
            with client:
                client.sendall(keyed_store._MAGIC + bytes(32))
                client.recv(64)
                client.sendall(bytes(32))
                client.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WrongKeyError, match="does not know this update's key"):
            guest(false.getsockname()[1])
        thread.join()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 4) + b"[1]x",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 40_000) + b"[" * 40_000,
        struct.pack("!I", 14) + b'{"op": "steal"}'[:14],
        b"\0\0\0\x55" + b'{"op": "set", "names": ["x"], "within_s": 0, "value": "not base64 at all!!!!!!!!!!!!!"}',
    ],
    ids=range(6),
)
def test_a_guest_that_talks_nonsense_is_left(host: HostedStore, frame: bytes) -> None:
    with closing(guest(port_of(host))) as bad, closing(guest(port_of(host))) as good:
        bad._connection.settimeout(SOON_S)
        with suppress(ConnectionError):
            bad._connection.sendall(frame)
            bad._connection.sendall(bytes(10))
            assert bad._connection.recv(1) == b""
        good.set("still", "here")
        assert host.get("still") == b"here"


@given(st.binary(max_size=200))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_bytes_open_it(data: bytes) -> None:
    store = HostedStore(socket.create_server(("127.0.0.1", 0)), KEY, 2.0, guests=1)
    try:
        with closing(dial(port_of(store))) as stranger:
            received = bytearray()
            stranger.settimeout(SOON_S)
            with suppress(ConnectionError):
                stranger.sendall(data)
                stranger.sendall(bytes(max(0, 64 - len(data))))
                while part := stranger.recv(4096):
                    received += part
        assert len(received) <= len(keyed_store._MAGIC) + 32
        assert not store.check(["anything"])
    finally:
        store.close()


def strangers_served() -> int:
    """Return the threads of rendezvous in this process, the one that accepts left out."""
    return sum(thread.name == "weightpush-rendezvous" for thread in threading.enumerate()) - 1


def at_most(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(now[name] <= before[name] for name in before)


def test_silent_strangers_do_not_keep_a_worker_out_and_leave_nothing() -> None:
    with peers(1) as (worker,), ExitStack() as stack:
        worker.call("ping")
        before = usage()
        sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
        port = sender.config.port or 0
        opening = Call(sender.open, OPEN_S)
        for number in range(keyed_store.MAX_STRANGERS + 40):
            stranger = stack.enter_context(dial(port))
            if number % 3 == 0:
                stranger.sendall(b"a bit")
        settled = time.monotonic() + SOON_S
        # Room for the one worker is theirs, too, until it comes.
        while not keyed_store.MAX_STRANGERS <= strangers_served() <= keyed_store.MAX_STRANGERS + 4:
            assert time.monotonic() < settled, strangers_served()
            time.sleep(0.05)
        worker.call("receiver", "r", sender.config, 1)
        worker.call("open", "r", OPEN_S)
        opening._thread.join(SOON_S)
        assert opening.error is None
        ticket = worker.start("receive", "r", 0, 1000, OPEN_S)
        sender.send(0, pattern(0, 1000), OPEN_S)
        assert worker.result(ticket) == tensor_digest(pattern(0, 1000))
        sender.close()
        stack.close()
        settled = time.monotonic() + SOON_S
        while not at_most(usage(), before) and time.monotonic() < settled:
            time.sleep(0.05)
        assert at_most(usage(), before), (usage(), before)


def test_a_tcpstore_client_gets_nowhere() -> None:
    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", sender.config.port or 0, None, False, timedelta(seconds=1), wait_for_workers=False)
    sender.close()


def test_garbage_costs_a_rendezvous_nothing() -> None:
    with peers(1) as (worker,):
        sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
        opening = Call(sender.open, OPEN_S)
        for data in GARBAGE:
            with closing(dial(sender.config.port or 0)) as stranger:
                stranger.sendall(data)
        worker.call("receiver", "r", sender.config, 1)
        worker.call("open", "r", OPEN_S)
        opening._thread.join(SOON_S)
        assert opening.error is None
        sender.close()


def test_a_worker_of_an_older_update_is_fenced_off() -> None:
    with peers(1) as (worker,):
        old = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
        config, port = old.config, old.config.port or 0
        old.close()
        # The next update happens to listen on the same port.
        store = HostedStore(socket.create_server(("127.0.0.1", port)), KEY, 2.0, guests=1)
        worker.call("receiver", "late", config, 1)
        with pytest.raises(WeightPushError, match="is the update an old one") as caught:
            worker.call("open", "late", OPEN_S)
        assert caught.value.code is ErrorCode.RENDEZVOUS_FAILED
        assert not store.check(["joined/1"])
        store.close()


def listening_ports() -> set[int]:
    return {item.laddr.port for item in psutil.Process().net_connections("tcp") if item.status == psutil.CONN_LISTEN}


def test_more_guests_than_strangers_may_connect_in_one_moment() -> None:
    guests = keyed_store.MAX_STRANGERS + 20
    store = HostedStore(socket.create_server(("127.0.0.1", 0), backlog=guests), KEY, 2.0, guests=guests)
    try:
        port = store._listener.getsockname()[1]
        # All are strangers until they answer, which none does before the last one is there.
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(guests)]
        deadline = time.monotonic() + SOON_S
        while len(store._strangers) < guests:
            assert time.monotonic() < deadline, len(store._strangers)
            time.sleep(0.01)
        for number, connection in enumerate(connections):
            guest = GuestStore(connection, KEY, deadline=deadline, timeout_s=SOON_S)
            guest.set(f"guest/{number}", b"here")
            guest.close()
        assert store.check([f"guest/{number}" for number in range(guests)])
    finally:
        store.close()


def test_strangers_on_gloos_own_port_cannot_harm_a_running_push() -> None:
    before = listening_ports()
    with peers(1) as (worker,), opened("127.0.0.1", [worker]) as sender, ExitStack() as stack:
        ports = listening_ports() - before - {sender.config.port}
        assert ports
        for port in ports:
            for data in GARBAGE:
                # Some stay, some leave.
                stranger = dial(port)
                stranger.sendall(data)
                if len(data) % 2:
                    stack.enter_context(stranger)
                else:
                    stranger.close()
        for number in range(3):
            ticket = worker.start("receive", "r", number, 100_000, OPEN_S)
            sender.send(number, pattern(number, 100_000), OPEN_S)
            assert worker.result(ticket) == tensor_digest(pattern(number, 100_000))


@pytest.mark.case("C26")
def test_no_data_port_unpickles_anything(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    evil = pickle.dumps(Evil())
    texts = [evil, base64.b64encode(evil), struct.pack("!I", len(evil)) + evil, struct.pack("<Q", len(evil)) + evil]
    before = listening_ports()
    with peers(1) as (worker,), opened("127.0.0.1", [worker]) as sender:
        for port in listening_ports() - before:
            for text in texts:
                with closing(dial(port)) as stranger:
                    stranger.sendall(text)
        # Even from somebody who holds the key.
        for text in texts:
            with closing(guest(sender.config.port or 0, sender.config.key or "")) as insider:
                insider.set("formed/1", text)
                insider._connection.sendall(struct.pack("!I", len(text)) + text)
        ticket = worker.start("receive", "r", 0, 1000, OPEN_S)
        sender.send(0, pattern(0, 1000), OPEN_S)
        assert worker.result(ticket) == tensor_digest(pattern(0, 1000))
    assert not marker.exists()


def test_a_connection_that_nobody_in_the_group_made_ends_it() -> None:
    with peers(1) as (worker,), opened("127.0.0.1", [worker]) as sender:
        group = sender._group
        assert group is not None
        ours = dict.fromkeys(group.local_ends, 0)
        with pytest.raises(GroupError, match="no process of this update"):
            group.learn_peers(ours)


def test_the_key_never_appears_in_an_error() -> None:
    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=3)
    key = sender.config.key or ""
    receiver = CollectiveReceiver(sender.config, rank=1)
    opening = Call(sender.open, 0.5)
    waiting = Call(receiver.open, 0.5)
    errors = [
        waiting.failure(ErrorCode.RENDEZVOUS_FAILED, 0.5 + SOON_S),
        opening.failure(ErrorCode.RENDEZVOUS_FAILED, 0.5 + SOON_S),
    ]
    for error in errors:
        assert key not in repr(error) + str(error) + str(error.details) + str(error.__cause__)
    receiver.close()
    sender.close()
