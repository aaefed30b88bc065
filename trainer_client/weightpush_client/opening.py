"""``begin`` on all servers, while the data planes to their workers come up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Final

from weightpush_client.loop import CallScope
from weightpush_client.policy import CONSEQUENCES, LOST_SERVERS
from weightpush_client.report import PushError
from weightpush_client.transport import Link
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.messages import BeginAnswer
from weightpush_protocol.transports.base import Sender

# The server checks and plans before its rendezvous starts, and the trainer waits for it from the start.
_CHECKING_S: Final = 60.0
# When one end fails first, how long the other's account is waited for: it may tell more.
_OTHER_S: Final = 1.0


def begin_and_open(
    links: Sequence[Link], begin: Callable[[], list[BeginAnswer]], scope: CallScope, rendezvous_s: float
) -> list[BeginAnswer]:
    """Return what ``begin``, whose calls are in ``scope``, returns, once the senders of all ``links`` are open.

    Raises:
        PushError: what a server answered; with the servers that the trainer's end missed where that is all that failed.
        WeightPushError: ``rendezvous_failed``, and no server says why.
    """
    senders = [(link, link.sender) for link in links if link.sender is not None]
    if not senders:
        return begin()
    answered = threading.Event()

    def join(link: Link, sender: Sender) -> None:
        try:
            sender.open(rendezvous_s + _CHECKING_S)
        except BaseException as error:
            if isinstance(error, WeightPushError):
                link.note_lost(error)
            if not answered.wait(_OTHER_S):
                scope.cancel()
            raise

    with ThreadPoolExecutor(len(senders), "weightpush-open") as executor:
        opening = [executor.submit(join, *pair) for pair in senders]
        try:
            answers = begin()
            answered.set()
            for opened in opening:
                opened.result()
        except CancelledError:
            # One of them cancelled the calls, and is about to say why.
            done, _ = wait(opening, return_when=FIRST_EXCEPTION)
            for opened in done:
                opened.result()
            raise
        except PushError as error:
            answered.set()
            if error.code in CONSEQUENCES:
                # Our end knows which workers it waits for, and says so when it is told to give up.
                for _, sender in senders:
                    sender.abort()
                wait(opening, timeout=_OTHER_S)
                for opened in opening:
                    ours = opened.exception() if opened.done() else None
                    if isinstance(ours, WeightPushError) and LOST_SERVERS in ours.details:
                        error.details[LOST_SERVERS] = ours.details[LOST_SERVERS]
            raise
        finally:
            answered.set()
            for (_, sender), opened in zip(senders, opening, strict=True):
                if not (opened.done() and opened.exception() is None):
                    sender.abort()
    return answers
