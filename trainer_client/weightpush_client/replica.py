"""One replica of a fleet: a server on this node that is started again when it dies. Knows nothing of Ray.

A server that was started again awaits weights: those on disk may be older than what it served.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Final

import httpx

from weightpush_client.server_child import ServerChild
from weightpush_client.urls import TOKEN_ENV
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.status import Status

_LOOK_S: Final = 0.2
_ANSWER_S: Final = 5.0
#: Ports that are tried before the node is taken for one where none can be had.
_PORTS: Final = 5
_PORT_TAKEN: Final = "Address already in use"
_AWAIT_WEIGHTS: Final = "--await-weights"


class ReplicaState(StrEnum):
    """Where a replica is. Only ``up`` is an address that takes pushes."""

    STARTING = "starting"  #: Its server does not answer yet.
    UP = "up"  #: It answers: it serves, or awaits weights.
    RESTARTING = "restarting"  #: Its server died, and is started again after a pause.
    GAVE_UP = "gave_up"  #: Its server died too often; ``reason`` says how.
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"  #: Its actor does not answer: it, or its node, is being replaced.


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as it is now.

    Attributes:
        url: address of its server; the same after a restart on the same node, and None once it has given up.
        node: address of its node; ``node_id`` is Ray's name for it.
        pid: process id of the server's supervisor on that node, while it runs.
        restarts: how often the server was started again since the actor was started.
        actor_restarted: the actor itself was started anew by Ray.
        reason: why the last server ended, or why nothing is known.
        log: the end of the log of the server that starts, else of the one that ended last.
        accelerators: what Ray assigned, as ``CUDA_VISIBLE_DEVICES`` says it; None where it says nothing.
        server: the server's own status, where it was asked for and answers.
    """

    index: int
    state: ReplicaState
    url: str | None = None
    node: str | None = None
    node_id: str | None = None
    pid: int | None = None
    restarts: int = 0
    actor_restarted: bool = False
    reason: str | None = None
    log: str = ""
    accelerators: str | None = None
    server: Status | None = None

    def __str__(self) -> str:
        where = f" (node {self.node})" if self.node else ""
        again = f", started again {self.restarts} times" if self.restarts else ""
        return f"replica {self.index}{where}: {self.state.value}{again}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is told. ``environment`` is added to that of its process; ``token`` goes there as well.

    A server is started again ``quick_crashes`` times in a row; the count begins anew with one that was up for
    ``healthy_s`` seconds.
    """

    index: int
    model: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    quick_crashes: int = 5
    healthy_s: float = 120.0


def serve_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of ``weightpush serve ARGUMENTS`` on this machine.

    Raises:
        WeightPushError: ``launch_failed``: the machine has no vLLM.
    """
    if find_spec("vllm") is None:
        raise WeightPushError(
            ErrorCode.LAUNCH_FAILED,
            "vLLM is not installed there: give the nodes of servers 'weightpush[server]' ('weightpush[cpu]' without a "
            "GPU)",
        )
    # What a trainer installs need not have a server in it.
    from weightpush_server.supervisor import command_line

    return command_line(arguments)


class Replica:
    """Starts a server on ``host``, an address of this machine, and keeps it up until `stop`.

    ``restarted``: the replica was there before, and its first server awaits weights already; otherwise a server that
    ends before it was ever up is not started again. ``command`` makes a command from the words after ``serve``.

    Raises:
        WeightPushError: as ``command`` does.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        host: str,
        node_id: str | None = None,
        restarted: bool = False,
        command: Callable[[Sequence[str]], Sequence[str]] = serve_command,
    ) -> None:
        command([])  # Raises here rather than in the thread.
        self._settings = settings
        self._host = host
        self._node_id = node_id
        self._restarted = restarted
        self._command = command
        self._http = httpx.Client(trust_env=False, timeout=_ANSWER_S)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        # All below are guarded by the lock.
        self._state = ReplicaState.STARTING
        self._child: ServerChild | None = None
        self._port_holder: socket.socket | None = None
        self._restarts = 0
        self._reason: str | None = None
        self._log = ""
        self._thread = threading.Thread(target=self._keep_up, name="replica", daemon=True)
        self._thread.start()

    def status(self, ask_server: bool = False) -> ReplicaStatus:
        """Return how it is; ``ask_server``: with the status that its server gives of itself."""
        with self._lock:
            state, child, url = self._state, self._child, self._url()
            restarts, reason, log = self._restarts, self._reason, self._log
        alive = child is not None and child.alive
        if state is ReplicaState.UP and not alive:
            state = ReplicaState.RESTARTING  # The thread that waits for it is about to notice.
        return ReplicaStatus(
            index=self._settings.index,
            state=state,
            url=url,
            node=self._host,
            node_id=self._node_id,
            pid=child.pid if child is not None and alive else None,
            restarts=restarts,
            actor_restarted=self._restarted,
            reason=reason,
            log=child.tail() if child is not None and state is ReplicaState.STARTING else log,
            accelerators=os.environ.get("CUDA_VISIBLE_DEVICES"),
            server=self._ask(url) if ask_server and url and state is ReplicaState.UP else None,
        )

    def kill_server(self) -> None:
        """Kill the server, for drills; it is started again. Returns when all of its processes are gone."""
        with self._lock:
            child = self._child
        if child is not None:
            child.kill()

    def stop(self, grace_s: float) -> bool:
        """End the server for good, after ``grace_s`` seconds by force; return whether all of it is gone."""
        with self._lock:
            self._stopping.set()
            child = self._child
        gone = child is None or child.stop(grace_s)
        self._thread.join(grace_s + _ANSWER_S)
        return gone

    def _url(self) -> str | None:
        if self._port_holder is None:
            return None
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{shown}:{self._port_holder.getsockname()[1]}"

    def _keep_up(self) -> None:
        try:
            self._run_servers()
        except Exception as error:  # noqa: BLE001 - the thread's only way to speak
            self._enter(ReplicaState.GAVE_UP, f"{type(error).__name__}: {error}")
        finally:
            if self._stopping.is_set():
                self._enter(ReplicaState.STOPPED)
            self._give_port_back()

    def _run_servers(self) -> None:
        # The same budget as that of `--restart-on-failure`, which knows nothing of ports.
        from weightpush_server.processes import describe_exit
        from weightpush_server.supervisor import RestartBudget

        budget = RestartBudget(self._settings.quick_crashes, renew_s=self._settings.healthy_s)
        awaits, ports_tried, was_up = self._restarted, 0, self._restarted
        while (child := self._start(awaits)) is not None:
            up_since = self._wait_until_up(child)
            status = child.wait()
            if self._stopping.is_set():
                return
            if up_since is None and _PORT_TAKEN in child.tail() and ports_tried < _PORTS:
                ports_tried += 1
                self._give_port_back()
                continue
            was_up = was_up or up_since is not None
            exit_status = status if status >= 0 else 128 - status
            ended = f"the server {describe_exit(exit_status)}{' before it was up' if up_since is None else ''}"
            up_s = 0.0 if up_since is None else time.monotonic() - up_since
            pause_s = budget.spend(up_s) if was_up else None
            if pause_s is None:
                often = f", {budget.limit + 1} times in a row" if was_up else ""
                self._enter(ReplicaState.GAVE_UP, f"{ended}{often}", child.tail())
                return
            self._enter(ReplicaState.RESTARTING, f"{ended}; it is started again in {pause_s:g} s", child.tail())
            if self._stopping.wait(pause_s):
                return
            with self._lock:
                self._restarts += 1
            awaits, ports_tried = True, 0

    def _start(self, awaits: bool) -> ServerChild | None:
        """Start a server, or return None if there shall be none any more."""
        words = [self._settings.model, "--host", self._host, "--port", str(self._take_port()), "--end-with-stdin"]
        words += self._settings.arguments
        if awaits and _AWAIT_WEIGHTS not in words:
            words.append(_AWAIT_WEIGHTS)
        environment = {**os.environ, **self._settings.environment}
        environment.pop(TOKEN_ENV, None)
        if self._settings.token is not None:
            environment[TOKEN_ENV] = self._settings.token
        with self._lock:
            if self._stopping.is_set():
                return None
            self._child = ServerChild(self._command(words), environment, lambda line: print(line, flush=True))
            self._state = ReplicaState.STARTING
            return self._child

    def _wait_until_up(self, child: ServerChild) -> float | None:
        """Return when (``time.monotonic``) the server answered first, or None if it ended before."""
        url = self._url()
        assert url is not None
        while child.alive:
            if self._ask(url) is not None and child.alive:
                self._enter(ReplicaState.UP)
                return time.monotonic()
            time.sleep(_LOOK_S)
        return None

    def _enter(self, state: ReplicaState, reason: str | None = None, log: str = "") -> None:
        with self._lock:
            self._state = state
            if reason is not None:
                self._reason, self._log = reason, log

    def _take_port(self) -> int:
        """Return a port of this node that stays ours.

        A socket that is bound, and never listens, keeps the kernel from giving the port to anybody else, and lets a
        server that sets ``SO_REUSEADDR``, as they all do, listen on it.
        """
        with self._lock:
            if self._port_holder is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                holder = socket.socket(family, socket.SOCK_STREAM)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((self._host, 0))
                self._port_holder = holder
            return int(self._port_holder.getsockname()[1])

    def _give_port_back(self) -> None:
        with self._lock:
            if self._port_holder is not None:
                self._port_holder.close()
                self._port_holder = None

    def _ask(self, url: str) -> Status | None:
        """Return what the server says of itself, or None if it does not answer."""
        try:
            return Status.model_validate(self._http.get(f"{url}/reload/status").json())
        except (httpx.HTTPError, ValueError):  # Among the latter: what is no JSON, or no status.
            return None
