"""How the ranks of a trainer talk to each other during a push: all say something, and all hear the same.

They talk over a Gloo group of their own: nothing gets between the trainer's collectives, and a rank that does not come
is noticed at a deadline of ours. A message is a header (kind, number of bytes) from every rank, then the bytes of one:
of the lowest rank that failed, else of rank 0. They are JSON.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The names that torch.distributed passes on, from where they are typed.
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore

from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.transports.groups import brief

_PATIENCE_S: Final = (0.0005, 0.02)
#: How often each group was used: keys of one use must not be found by the next.
_uses: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Kind(IntEnum):
    """What a rank says."""

    FOLLOW = 0  #: Ready for whatever rank 0 says.
    SPECS = 1
    ANNOUNCE = 2
    GATHER = 3
    DONE = 4
    FAILED = 5
    AGAIN = 6  #: Rank 0 reads everything once more, for other servers.


@dataclass(frozen=True, slots=True)
class Message:
    """What all ranks heard: ``rank`` said ``body``."""

    kind: Kind
    rank: int
    body: Any


class Ranks:
    """The ranks of ``group``, as one of them sees it. Made on all of them alike, and connected when first needed.

    No rank waits for another longer than ``wait_s``. Ranks that lost each other stay lost: nobody can know what the
    others have heard.
    """

    def __init__(self, group: dist.ProcessGroup, wait_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.wait_s = wait_s
        self._group = group
        self._use = _uses[group] = _uses.get(group, 0) + 1
        self._gloo: Any = None
        self._pending: Any = None
        self._lost: str | None = None

    def exchange(self, kind: Kind, body: Any = None, *, wait_s: float | None = None) -> Message:
        """Say ``kind``, and ``body`` where this rank is the one that is heard; return what all ranks hear.

        Every rank must call this as often as the others do. ``wait_s`` is that of all calls where it is None.

        Raises:
            PushError: ``trainer_rank_lost``: a rank ended, did not push, or was waited for too long; now or before.
        """
        if self._lost is not None:
            raise self._error(self._lost)
        timeout = timedelta(seconds=self.wait_s if wait_s is None else wait_s)
        data = b"" if body is None else json.dumps(body).encode()
        try:
            gloo = self._connected()
            headers = [torch.zeros(2, dtype=torch.int64) for _ in range(self.size)]
            gathering = AllgatherOptions()
            gathering.timeout = timeout
            self._wait(gloo.allgather([headers], [torch.tensor([kind, len(data)])], gathering))
            said = [(Kind(int(header[0])), int(header[1])) for header in headers]
            failed = [rank for rank, (other, _) in enumerate(said) if other is Kind.FAILED]
            # Once it is committed, no failure of another rank undoes it.
            speaker = failed[0] if failed and said[0][0] is not Kind.DONE else 0
            spoken, size = said[speaker]
            text = torch.zeros(size, dtype=torch.uint8)
            if size:
                if speaker == self.rank:
                    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                telling = BroadcastOptions()
                telling.timeout = timeout
                telling.rootRank = speaker
                self._wait(gloo.broadcast([text], telling))
        except RuntimeError as error:
            self._lost = brief(error)
            self.close()
            raise self._error(self._lost) from error
        except BaseException as error:
            # Ctrl-C: the call that still runs would be taken for the next one.
            self._lost = type(error).__name__
            threading.Thread(target=_free_when_done, args=(self._gloo, self._pending), daemon=True).start()
            self._gloo = self._pending = None
            raise
        return Message(spoken, speaker, json.loads(bytes(text.tolist())) if size else None)

    def close(self) -> None:
        """Close the connections. May be called again."""
        self._gloo = None

    def _connected(self) -> Any:
        if self._gloo is None:
            store = dist.distributed_c10d._get_process_group_store(self._group)
            prefixed = PrefixStore(f"weightpush/{self._use}", store)
            # A registered group could not be made again under the name of one that is gone.
            timeout = timedelta(seconds=self.wait_s)
            self._gloo = dist.ProcessGroupGloo(prefixed, self.rank, self.size, timeout)
        return self._gloo

    def _wait(self, work: Any) -> None:
        # Waiting inside Gloo could not be interrupted by Ctrl-C.
        self._pending = work
        pause, longest = _PATIENCE_S
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()
        self._pending = None

    def _error(self, reason: str) -> PushError:
        return PushError(
            ErrorCode.TRAINER_RANK_LOST,
            f"rank {self.rank} of {self.size} lost the trainer's other ranks: one of them ended, did not push, or kept "
            f"the others waiting for {self.wait_s:g} s; make a new pusher on all of them ({reason})",
        )


def _free_when_done(gloo: Any, work: Any) -> None:
    """Hold a group until its last call has ended: then its connections close, and the other ranks notice.

    A call ends when the late rank comes, or at its time limit; Gloo cannot be freed under it.
    """
    while work is not None and not work.is_completed():
        time.sleep(_PATIENCE_S[1])
