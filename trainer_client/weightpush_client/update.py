"""One update over all servers: begin, stream, finish; and abort, whatever happens in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from time import perf_counter
from typing import Final

import torch

from weightpush_client.align import Outgoing
from weightpush_client.delivery import OpenUpdate, deliver_by_body, deliver_by_broadcast, servers_reason
from weightpush_client.fleet import Fleet
from weightpush_client.http import ABORT_S, SLACK_S, STORED_S, ServerApi
from weightpush_client.loop import CallScope
from weightpush_client.report import PhaseSeconds, ProgressCallback, PushError, PushPhase, PushProgress
from weightpush_client.sources import WeightSource
from weightpush_client.stream import BucketStream, Buffers
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginRequest,
    FinishAnswer,
    FinishRequest,
    UpdateMode,
)
from weightpush_protocol.state import ServerState
from weightpush_protocol.transports.base import Sender, TransportConfig

# The server checks and plans before its rendezvous starts, and the trainer waits for it from the start.
_CHECKING_S: Final = 60.0
# When the trainer's end fails first, how long the servers' own answer is waited for: it tells more.
_SERVER_FIRST_S: Final = 1.0
# Errors of ``begin`` after which the server may hold the update all the same.
_UNCERTAIN: Final = frozenset({ErrorCode.UNREACHABLE, ErrorCode.PROTOCOL_ERROR, ErrorCode.INTERNAL})


class Update:
    """Runs one update. ``request`` is the ``begin`` of all servers, but for the transport, which is each one's own.

    Use it as a context manager: leaving it with an exception aborts the update on every server, within
    ``ABORT_S`` seconds, and the exception goes on.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: BeginRequest,
        configs: Sequence[TransportConfig],
        sender: Sender | None,
        progress: ProgressCallback | None,
    ) -> None:
        if request.update_id is None:
            raise ValueError("the update_id must be the client's, or a lost answer could not be aborted")
        self._fleet = fleet
        self._request = request
        self._update_id: str = request.update_id
        self._configs = configs
        self._sender = sender
        self._progress = progress
        self._scope = CallScope()
        #: Servers that may hold the update: asked to begin, and not known to have refused.
        self._may_hold: set[int] = set()
        self._epochs: list[int] = []
        #: How each server carries the update out.
        self.modes: list[UpdateMode] = []
        self._tensors_done = 0
        self._bytes_done = 0
        self._buckets_done = 0
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> Update:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self._interrupt()
                self._abort(error)
        finally:
            if self._sender is not None:
                self._sender.close()

    def phase_seconds(self, *, check: float) -> PhaseSeconds:
        """Return where the time went; ``check`` seconds passed before the update."""
        return PhaseSeconds(check=check, **self._seconds)

    def begin(self) -> None:
        """Open the update on all servers while the data plane comes up.

        Raises:
            PushError: what a server answered; else what kept the data plane from coming up.
        """
        start = perf_counter()
        self._report(PushPhase.BEGIN)
        self._may_hold = set(range(len(self._fleet)))
        answers = self._call_begin() if self._sender is None else self._begin_with_rendezvous(self._sender)
        self._epochs = [answer.epoch for answer in answers]
        self.modes = [answer.mode for answer in answers]
        self._seconds["begin"] = perf_counter() - start

    def stream(
        self, source: WeightSource, outgoing: Sequence[Outgoing], device: torch.device, buffers: Buffers
    ) -> None:
        """Send all buckets, gathered in ``buffers`` on ``device``.

        Raises:
            WeightPushError: what a server, the transport or the source says; anything that they or the progress
                callback raise.
        """
        stream = BucketStream(
            source,
            outgoing,
            self._request.manifest,
            deliver=self._deliverer(),
            interrupt=self._interrupt,
            delivered=self._delivered,
            digest=self._request.digest,
            device=device,
            buffers=buffers,
        )
        self._report(PushPhase.STREAM)
        stream.run()
        times = stream.seconds
        self._seconds |= {"gather": times.gather, "digest": times.digest, "send": times.send, "wait": times.wait}

    def finish(self) -> list[FinishAnswer]:
        """Commit on all servers.

        Raises:
            PushError: a server did not commit; ``details["committed"]`` names those that did, and serve them.
        """
        start = perf_counter()
        self._report(PushPhase.FINISH)
        limits = self._request.deadlines
        # The last bucket's landing is part of it.
        timeout_s = limits.bucket_s + limits.commit_s + SLACK_S
        if UpdateMode.STAGED in self.modes:
            # The drain comes now; and what fails may be undone before the answer.
            timeout_s += limits.drain_s + limits.commit_s + STORED_S
        results = self._fleet.call_to_the_end(
            lambda index, server: server.finish(
                FinishRequest(update_id=self._update_id, epoch=self._epochs[index]), timeout_s
            ),
            self._scope,
        )
        self._seconds["finish"] = perf_counter() - start
        answers = [result for result in results if isinstance(result, FinishAnswer)]
        if len(answers) < len(results):
            raise not_committed(self._fleet, self._update_id, results, self._scope)
        for server, answer in zip(self._fleet.servers, answers, strict=True):
            if answer.weight_version != self._request.weight_version:
                raise PushError(
                    ErrorCode.PROTOCOL_ERROR,
                    f"the server committed {answer.weight_version!r}, expected {self._request.weight_version!r}",
                    server=server.url,
                    update_id=self._update_id,
                )
        return answers

    def _call_begin(self) -> list[BeginAnswer]:
        async def begin(index: int, server: ServerApi) -> BeginAnswer:
            try:
                return await server.begin(self._request.model_copy(update={"transport": self._configs[index]}))
            except PushError as error:
                if error.code not in _UNCERTAIN:
                    self._may_hold.discard(index)
                raise

        return self._fleet.call(begin, self._scope)

    def _begin_with_rendezvous(self, sender: Sender) -> list[BeginAnswer]:
        answered = threading.Event()

        def join() -> None:
            try:
                sender.open(self._request.deadlines.rendezvous_s + _CHECKING_S)
            except BaseException:
                if not answered.wait(_SERVER_FIRST_S):
                    self._scope.cancel()
                raise

        with ThreadPoolExecutor(1, "weightpush-open") as executor:
            opened = executor.submit(join)
            try:
                answers = self._call_begin()
                answered.set()
                opened.result()
            except CancelledError:
                opened.result()
                raise
            finally:
                answered.set()
                if not (opened.done() and opened.exception() is None):
                    sender.abort()
        return answers

    def _deliverer(self) -> Callable[[int, torch.Tensor, dict[str, str]], None]:
        update = OpenUpdate(self._update_id, tuple(self._epochs), self._request.deadlines.bucket_s, self._scope)
        sender = self._sender
        manifest = self._request.manifest
        if sender is None:
            return lambda number, buffer, digests: deliver_by_body(
                self._fleet, update, manifest, number, buffer, digests
            )
        return lambda number, buffer, digests: deliver_by_broadcast(
            self._fleet, update, sender, number, buffer, digests
        )

    def _delivered(self, number: int) -> None:
        bucket = self._request.manifest.buckets[number]
        self._buckets_done += 1
        self._tensors_done += len(bucket.tensors)
        self._bytes_done += bucket.nbytes
        self._report(PushPhase.STREAM)

    def _report(self, phase: PushPhase) -> None:
        if self._progress is None:
            return
        manifest = self._request.manifest
        self._progress(
            PushProgress(
                phase=phase,
                bucket=self._buckets_done,
                buckets=len(manifest.buckets),
                tensors=self._tensors_done,
                tensors_total=len(manifest.tensors),
                bytes=self._bytes_done,
                bytes_total=manifest.nbytes,
            )
        )

    def _interrupt(self) -> None:
        self._scope.cancel()
        if self._sender is not None:
            self._sender.abort()

    def _abort(self, error: BaseException) -> None:
        reason = f"the trainer gave up: {type(error).__name__}: {error}"[:1000]

        async def abort(index: int, server: ServerApi) -> ServerState | None:
            if index not in self._may_hold:
                return None
            epoch = self._epochs[index] if self._epochs else None
            status = await server.abort(AbortRequest(update_id=self._update_id, epoch=epoch, reason=reason))
            return status.state

        scope = CallScope()
        timer = threading.Timer(ABORT_S, scope.cancel)
        timer.start()
        try:
            # Best effort: what the servers answer to it must not hide why the push failed.
            with contextlib.suppress(CancelledError, RuntimeError):
                states = self._fleet.call_to_the_end(abort, scope)
                if isinstance(error, WeightPushError) and error.state is None:
                    error.state = self._state_after(error, states)
        finally:
            timer.cancel()
            timer.join()

    def _state_after(
        self, error: WeightPushError, states: Sequence[ServerState | Exception | None]
    ) -> ServerState | None:
        """Return the state of the server that ``error`` names; else one that does not serve, if there is any."""
        known = [
            (server.url, state)
            for server, state in zip(self._fleet.servers, states, strict=True)
            if isinstance(state, ServerState)
        ]
        named = [state for url, state in known if isinstance(error, PushError) and error.server == url]
        idle = [state for _, state in known if not state.serving]
        return next(iter(named or idle or [state for _, state in known]), None)


def not_committed(
    fleet: Fleet, update_id: str, results: Sequence[FinishAnswer | Exception], scope: CallScope
) -> Exception:
    """Return the first failure of a commit; ``details["committed"]`` names the servers that did commit."""
    pairs = list(zip((server.url for server in fleet.servers), results, strict=True))
    committed = [url for url, result in pairs if isinstance(result, FinishAnswer)]
    errors = [(url, result) for url, result in pairs if isinstance(result, Exception)]
    url, first = errors[0]
    if not isinstance(first, WeightPushError):
        return first
    error = PushError.of(first, url)
    if error.code is ErrorCode.UNREACHABLE:
        error = servers_reason(fleet, update_id, scope) or error
    if len(pairs) > 1:
        error.details |= {"committed": committed, "failed": [name for name, _ in errors]}
    return error
