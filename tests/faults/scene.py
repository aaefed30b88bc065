"""What the actors of one shot share: server, proxy, traffic, and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from faults.checks import Violation, Wrong
from faults.plan import Shot
from faults.proxy import Proxy
from faults.report import EventLog
from faults.traffic import Traffic
from support.server import ServerProcess

#: Every deadline of an update together, and the client's own beyond them: nothing may take longer.
TRAINER_S: Final = 300.0
#: The lease, the clean-up after it, and what a busy machine adds.
REST_S: Final = 30.0
#: A server of which a part was killed ends by itself within this.
END_S: Final = 90.0


@dataclass
class Scene:
    """Where a shot is carried out. ``before``: the server's status then; ``keeps``: it keeps copies for a rollback;
    ``folder``: it reloads from there; ``repair`` makes another trainer push, and says whether that went through."""

    server: ServerProcess
    proxy: Proxy
    traffic: Traffic
    log: EventLog
    shot: Shot
    before: Mapping[str, Any]
    keeps: bool
    folder: Path
    version: str
    directory: Path
    buckets: int
    repair: Callable[[], bool]
    #: Set by the fault.
    struck: bool = False
    struck_at: float = field(default_factory=time.monotonic)
    #: Status when the server came to rest, where the fault itself had to wait for it.
    at_rest: Mapping[str, Any] | None = None
    killed: bool = False
    #: Versions that were served for a while, beside the one that is judged.
    committed: set[str] = field(default_factory=set)
    wrong: list[Violation] = field(default_factory=list)

    def strike(self, what: str) -> None:
        """Note that the fault happens now."""
        self.struck, self.struck_at = True, time.monotonic()
        self.log.note("strike", what=what)

    def blame(self, kind: Wrong, text: str) -> None:
        """Note a violation."""
        self.wrong.append(Violation(kind, text, self.shot.number))

    def rest(self) -> Mapping[str, Any]:
        """Wait until no update runs, and return the status.

        Raises:
            TimeoutError: one runs longer than every deadline.
        """
        deadline = time.monotonic() + REST_S
        while True:
            status = self.server.status()
            if status["update"] is None and status["state"] != "updating":
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"an update has no end: {status['state']}, {status['update']}")
            time.sleep(0.02)
