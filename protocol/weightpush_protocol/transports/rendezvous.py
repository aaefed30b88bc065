"""How the processes of a collective transport find each other: bounded, cancellable, and open to key holders only.

::

    sender                                         receivers
    hosts the store, sets ``here``
                                                   connect, find ``here`` (else: wrong key or port)
                                                   claim their rank, set ``joined/<rank>`` to their address
    polls until all ranks joined
    sets ``go``                     ───►           poll for ``go``
                 then, and only then, all build the process group
                                                   set ``formed/<rank>``
    polls for all, sets ``formed``  ───►           poll for ``formed``; all are open
    gives up: sets ``stop``         ───►           fail at once with the sender's reason
                                    ◄───           give up: set ``left``

The constructors of process groups block and cannot be cancelled, so nobody enters one before all have joined. The store
is a ``TCPStore`` of this transport alone. Its calls have no time limit of their own when a peer is frozen, which is why
its users make them in a thread that they can leave (:mod:`.cancellable`).
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Final

# The names that torch.distributed passes on, from where they are typed.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import sockets
from weightpush_protocol.transports.cancellable import Cancelled

_POLL_S: Final = 0.02
_CONNECT_S: Final = 5.0


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

    def confirm_formed(
        self, group_store: PrefixStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        """Wait until all workers report that they formed the group, and let them know.

        ``ends`` are the local ends of this process's connections; returns the rank behind each end of anybody.

        Raises:
            WeightPushError: ``rendezvous_failed``, naming who did not report.
            Cancelled: ``cancel`` was set.
        """
        names = [f"formed/{rank}" for rank in range(1, self.world_size)]
        while not group_store.check(names):
            if time.monotonic() >= deadline:
                absent = [rank for rank, name in enumerate(names, 1) if not group_store.check([name])]
                raise failed(f"{ranks_text(absent)} joined, but did not form the group in time", missing_ranks=absent)
            if cancel.wait(_POLL_S / 4):
                raise Cancelled("aborted")
        ranks = dict.fromkeys(ends, 0)
        for rank, name in enumerate(names, 1):
            ranks.update(dict.fromkeys(bytes(group_store.get(name)).decode().split(), rank))
        group_store.set("formed", " ".join(f"{end}={rank}" for end, rank in ranks.items()))
        return ranks

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
            raise self._lost(error, cancel) from error

    def _join(
        self, remote: str, address: str, cancel: threading.Event, deadline: float, timeout_s: float
    ) -> tuple[PrefixStore, str]:
        left = timedelta(seconds=max(0.1, min(_CONNECT_S, deadline - time.monotonic())))
        raw = TCPStore(remote, self.port, None, False, left, wait_for_workers=False)
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

    def confirm_formed(
        self, group_store: PrefixStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        """Report that this worker formed the group, and wait until all have; see :class:`RendezvousServer`."""
        try:
            group_store.set(f"formed/{self.rank}", " ".join(ends))
            while not group_store.check(["formed"]):
                if time.monotonic() >= deadline:
                    raise failed(f"worker rank {self.rank} formed the group, but not all others did in time")
                if cancel.wait(_POLL_S / 4):
                    raise Cancelled("aborted")
            pairs = bytes(group_store.get("formed")).decode().split()
        except RuntimeError as error:
            raise self._lost(error, cancel) from error
        return {end: int(rank) for end, _, rank in (pair.rpartition("=") for pair in pairs)}

    def _lost(self, error: RuntimeError, cancel: threading.Event) -> Exception:
        """Return what a broken store means. All errors of a store are RuntimeErrors (``DistError``)."""
        if cancel.is_set():
            return Cancelled("aborted")
        return failed(
            f"worker rank {self.rank} got no answer from the trainer's rendezvous at {self.at}; "
            "did the trainer stop, or does something else listen there?",
            error,
            host=self.host,
            port=self.port,
        )

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
