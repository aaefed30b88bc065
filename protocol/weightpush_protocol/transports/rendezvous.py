"""How the processes of a collective transport find each other: bounded, cancellable, and open to key holders only.

::

    sender                                         receivers
    hosts the store, sets ``here``
                                                   connect, find ``here`` (else: wrong key or port)
                                                   claim their rank, set ``joined/<rank>`` to their address
    polls until all ranks joined
    sets ``go``                     ───►           poll for ``go``
                 then, and only then, all build the process group
    gives up: sets ``stop``         ───►           fail at once with the sender's reason
                                    ◄───           give up: set ``left``

The constructors of process groups block and cannot be cancelled, so nobody enters one before all have joined. The store
is a ``TCPStore`` of this transport alone. Its calls have no time limit of their own when a peer is frozen, which is why
:func:`run_cancellable` makes them in a thread that the caller can leave.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeVar

# The names that torch.distributed passes on, from where they are typed.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import sockets

T = TypeVar("T")

_POLL_S: Final = 0.02
_CONNECT_S: Final = 10.0
#: How long a cancelled thread may take to notice before its connections are cut.
_GRACE_S: Final = 0.3


class Cancelled(Exception):
    """The rendezvous was aborted, or the caller's time was over."""


def key_prefix(key: str) -> str:
    """Return the namespace of a key's entries. The key itself never becomes a store key, which error texts may show."""
    return "weightpush/" + hashlib.sha256(b"weightpush rendezvous " + key.lower().encode()).hexdigest()


def ranks_text(ranks: list[int]) -> str:
    """Name worker ranks for a message, at most ten of them."""
    shown = ", ".join(str(rank) for rank in ranks[:10])
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"worker rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def failed(message: str, error: BaseException | None = None, **details: object) -> WeightPushError:
    """Return the error of a rendezvous; ``error`` is what was caught."""
    if error is not None:
        details["exception"] = type(error).__name__
    return WeightPushError(ErrorCode.RENDEZVOUS_FAILED, message, details=details)


def run_cancellable(
    work: Callable[[], T],
    *,
    cancel: threading.Event,
    deadline: float,
    cut: Callable[[], None],
    discard: Callable[[T], None],
    name: str,
) -> T:
    """Return ``work()``, run in a thread that is left behind when it does not end.

    ``work`` looks at ``cancel`` between its blocking calls; one that hangs in a call is freed with ``cut``. A result
    that comes too late goes to ``discard``.

    Raises:
        Cancelled: ``cancel`` was set or ``deadline`` (``time.monotonic()``) passed before ``work`` ended.
        BaseException: what ``work`` raised.
    """
    lock = threading.Lock()
    ended = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []
    left = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            errors.append(error)
        else:
            with lock:
                if left:
                    discard(result)
                else:
                    results.append(result)
        ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while not ended.wait(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
        if cancel.is_set() or time.monotonic() >= deadline:
            cancel.set()
            if not ended.wait(_GRACE_S):
                cut()
                ended.wait(_GRACE_S)
            break
    with lock:
        left = not (results or errors)
    if left:
        raise Cancelled("aborted")
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class _Store:
    """Entries of one rendezvous under the prefix of its key."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self.raw = store
        self.entries = PrefixStore(prefix, store)

    def set(self, name: str, value: str) -> None:
        self.entries.set(name, value)

    def get(self, name: str) -> str | None:
        # `get` on a missing entry would wait for it.
        return bytes(self.entries.get(name)).decode() if self.entries.check([name]) else None

    def namespace(self, name: str) -> PrefixStore:
        return PrefixStore(name, self.entries)


class RendezvousServer:
    """The sender's side; hosts the store from construction to :meth:`close`.

    Raises:
        WeightPushError: ``rendezvous_failed``: ``host`` is not an address of this machine.
    """

    def __init__(self, host: str, key: str, world_size: int) -> None:
        self.host = host
        self.world_size = world_size
        try:
            listener = sockets.listen(host)
        except OSError as error:
            raise failed(
                f"cannot listen on {host!r} for workers: {error}; give an address of this machine", error, host=host
            ) from error
        self._bound: sockets.Endpoint = listener.getsockname()[:2]
        self.port = self._bound[1]
        local = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(self._bound[0], self._bound[0])
        store = TCPStore(
            local,
            self.port,
            None,
            True,
            timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store: _Store | None = _Store(store, key_prefix(key))
        self._store.set("here", "1")

    def gather(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[PrefixStore, str]:
        """Wait for all workers, let them go, and return the group's store and the sender's address for them.

        Raises:
            WeightPushError: ``rendezvous_failed``, naming who is missing or gave up.
            Cancelled: ``cancel`` was set.
        """
        store = self._require()
        ranks = list(range(1, self.world_size))
        try:
            while not store.entries.check([f"joined/{rank}" for rank in ranks]):
                self._check_left(store)
                if time.monotonic() >= deadline:
                    raise self._missing(store, timeout_s)
                if cancel.wait(_POLL_S):
                    raise Cancelled("aborted")
        except (Cancelled, WeightPushError) as error:
            store.set("stop", error.message if isinstance(error, WeightPushError) else "the trainer aborted")
            raise
        # A name may resolve differently here; workers have said from where they come.
        address = self.host if sockets.is_address(self.host) else sockets.pick_host(store.get("joined/1") or self.host)
        store.set("go", "1")
        return store.namespace("group"), address

    def wait_formed(self, group_store: PrefixStore, cancel: threading.Event, deadline: float) -> None:
        """Wait until all workers have called :meth:`RendezvousClient.report_formed`.

        Raises:
            WeightPushError: ``rendezvous_failed``, naming who did not.
            Cancelled: ``cancel`` was set.
        """
        names = [f"formed/{rank}" for rank in range(1, self.world_size)]
        while not group_store.check(names):
            if time.monotonic() >= deadline:
                absent = [rank for rank, name in enumerate(names, 1) if not group_store.check([name])]
                raise failed(f"{ranks_text(absent)} joined, but did not form the group in time", missing_ranks=absent)
            if cancel.wait(_POLL_S / 4):
                raise Cancelled("aborted")

    def _missing(self, store: _Store, timeout_s: float) -> WeightPushError:
        absent = self._absent(store)
        return failed(
            f"{ranks_text(absent)} did not join within {timeout_s:g} s at {_at(self.host, self.port)}; "
            "check that the workers can reach this address",
            missing_ranks=absent,
            host=self.host,
            port=self.port,
        )

    def _check_left(self, store: _Store) -> None:
        reason = store.get("left")
        if reason is None:
            return
        absent = self._absent(store)
        if absent:
            reason = f"{ranks_text(absent)} did not join: {reason}"
        raise failed(reason, missing_ranks=absent, host=self.host, port=self.port)

    def _absent(self, store: _Store) -> list[int]:
        return [rank for rank in range(1, self.world_size) if not store.entries.check([f"joined/{rank}"])]

    def _require(self) -> _Store:
        if self._store is None:
            raise RuntimeError("this rendezvous is closed")
        return self._store

    def cut(self) -> None:
        """Cut the connections of the store."""
        address, port = self._bound
        wildcard = address in ("::", "0.0.0.0")

        def ours(end: sockets.Endpoint) -> bool:
            return end[1] == port and (wildcard or end[0] == address)

        sockets.cut_where(lambda local, remote: ours(local) or ours(remote))

    def close(self) -> None:
        """Stop hosting the store."""
        self._store = None


class RendezvousClient:
    """A receiver's side: joins the rendezvous at ``host:port`` as ``rank``."""

    def __init__(self, host: str, port: int, key: str, rank: int) -> None:
        self.host = host
        self.port = port
        self.rank = rank
        self._prefix = key_prefix(key)
        self._remote: sockets.Endpoint | None = None

    @property
    def at(self) -> str:
        """Where the rendezvous is, for messages."""
        return _at(self.host, self.port)

    def join(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[PrefixStore, str]:
        """Join, wait until all have, and return the group's store and this worker's address for the others.

        Raises:
            WeightPushError: ``rendezvous_failed``: unreachable, wrong key, rank taken, or the sender gave up.
            Cancelled: ``cancel`` was set.
        """
        try:
            address, remote = sockets.probe(
                self.host, self.port, min(deadline, time.monotonic() + _CONNECT_S), cancel.is_set
            )
        except InterruptedError:
            raise Cancelled("aborted") from None
        except OSError as error:
            raise self._unreachable(error) from error
        self._remote = (remote.removeprefix("::ffff:"), self.port)
        try:
            return self._join(remote, address, cancel, deadline, timeout_s)
        except RuntimeError as error:
            # All errors of a store are RuntimeErrors (dist.DistError).
            raise failed(
                f"worker rank {self.rank} lost the trainer's rendezvous at {self.at}; did the trainer stop?",
                error,
                host=self.host,
                port=self.port,
            ) from error

    def _join(
        self, remote: str, address: str, cancel: threading.Event, deadline: float, timeout_s: float
    ) -> tuple[PrefixStore, str]:
        raw = TCPStore(remote, self.port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        store = _Store(raw, self._prefix)
        if store.get("here") is None:
            raise failed(
                f"the rendezvous at {self.at} does not know this update's key; "
                "is another trainer listening there, or is the update an old one?",
                host=self.host,
                port=self.port,
            )
        if store.entries.add(f"claim/{self.rank}", 1) > 1:
            raise failed(
                f"worker rank {self.rank} joined twice at {self.at}; check rank_offset of the servers", rank=self.rank
            )
        store.set(f"joined/{self.rank}", address)
        while store.get("go") is None:
            stopped = store.get("stop")
            if stopped is not None:
                raise failed(stopped)
            if cancel.is_set():
                with suppress(RuntimeError):
                    store.set("left", f"worker rank {self.rank} gave up waiting at {self.at}")
                raise Cancelled("aborted")
            if time.monotonic() >= deadline:
                store.set("left", f"worker rank {self.rank} gave up after {timeout_s:g} s at {self.at}")
                raise failed(
                    f"worker rank {self.rank} waited {timeout_s:g} s at {self.at}, but the others did not all join",
                    host=self.host,
                    port=self.port,
                )
            time.sleep(_POLL_S)
        return store.namespace("group"), address

    def report_formed(self, group_store: PrefixStore) -> None:
        """Tell the sender that this worker is connected to all others and needs the store no more."""
        group_store.set(f"formed/{self.rank}", "1")

    def _unreachable(self, error: OSError) -> WeightPushError:
        reason = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        if isinstance(error, socket.gaierror):
            reason = f"the name does not resolve ({reason})"
        return failed(
            f"worker rank {self.rank} cannot reach data port {self.at}: {reason}; "
            "check the address that the trainer gave, and firewalls between trainer and workers",
            error,
            host=self.host,
            port=self.port,
        )

    def cut(self) -> None:
        """Cut the connections to the store."""
        if self._remote is not None:
            sockets.cut_where(lambda _local, remote: remote == self._remote)


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
