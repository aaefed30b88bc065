"""One update over all servers: begin, stream, prepare, finish; and abort, whatever happens in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from time import perf_counter
from typing import Final, TypeVar

import torch

from weightpush_client.align import Outgoing
from weightpush_client.background import Stop
from weightpush_client.copies import Programs
from weightpush_client.delivery import Delivery, OpenUpdate, servers_reason
from weightpush_client.fleet import Fleet
from weightpush_client.http import ABORT_S, ServerApi
from weightpush_client.leases import Leases
from weightpush_client.loop import CallScope
from weightpush_client.opening import begin_and_open
from weightpush_client.policy import CONSEQUENCES, OnServerFailure
from weightpush_client.report import PhaseSeconds, ProgressCallback, PushError, PushPhase, PushProgress
from weightpush_client.sources import WeightSource
from weightpush_client.stream import BucketStream, Buffers
from weightpush_client.transport import Link, close_links
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginRequest,
    FinishAnswer,
    FinishRequest,
    PrepareAnswer,
    PrepareRequest,
    UpdateMode,
)
from weightpush_protocol.state import ServerState

# Errors of ``begin`` after which the server may hold the update all the same.
_UNCERTAIN: Final = frozenset({ErrorCode.UNREACHABLE, ErrorCode.PROTOCOL_ERROR, ErrorCode.INTERNAL})

#: From this many tensors on a manifest takes longer than a call that is answered with ``unknown_manifest``.
_WORTH_A_CALL: Final = 256
T = TypeVar("T")


class Update:
    """Runs one update on the servers of ``fleet``, each of which is in one of ``links``.

    ``request`` is the ``begin`` of all servers, but for the transport, which is each one's own. Under ``policy``
    ``exclude``, servers that break when the others have everything are left behind: see ``dropped``.

    Use it as a context manager: leaving it with an exception aborts the update on every server, within
    ``ABORT_S`` seconds, and the exception goes on.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: BeginRequest,
        links: Sequence[Link],
        progress: ProgressCallback | None,
        *,
        policy: OnServerFailure = OnServerFailure.ABORT,
        stop: Stop | None = None,
    ) -> None:
        if request.update_id is None:
            raise ValueError("the update_id must be the client's, or a lost answer could not be aborted")
        self._fleet = fleet
        self._request = request
        self._update_id: str = request.update_id
        self._links = links
        self._configs = {
            place: config for link in links for place, config in zip(link.places, link.configs, strict=True)
        }
        self._progress = progress
        self._policy = policy
        self._stop = stop or Stop()
        self._context = contextlib.ExitStack()
        self._scope = CallScope()
        #: Servers that may hold the update: asked to begin, and not known to have refused.
        self._may_hold: set[int] = set()
        self._epochs: list[int] = []
        #: How each server carries the update out.
        self.modes: list[UpdateMode] = []
        #: Servers that take part to the end, and those that were left behind, by their place in the fleet.
        self._active = list(range(len(fleet)))
        self.dropped: dict[int, PushError] = {}
        #: Addresses of those that did not answer when they were told that the push had failed.
        self.silent: set[str] = set()
        #: Of the tensors that were sent, by name.
        self.digests: Mapping[str, str] = {}
        self._tensors_done = 0
        self._bytes_done = 0
        self._buckets_done = 0
        self._seconds: dict[str, float] = {}
        self._leases = Leases(request.update_id, request.deadlines.lease_s)
        #: What failed while servers were waited for.
        self._of_servers: list[BaseException] = []
        #: Whether what the update ended with came from the trainer's own code: source, callback.
        self.is_trainers = False
        #: Whether the trainer paused for so long that servers may have lost their leases by that.
        self.trainer_was_silent = False

    def __enter__(self) -> Update:
        with contextlib.ExitStack() as context:
            context.callback(close_links, self._links)
            context.callback(self._fleet.beside(self._leases.run()).cancel)
            context.enter_context(self._stop.interrupting(self._interrupt))
            self._context = context.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self.trainer_was_silent = self._leases.trainer_was_silent
                self.is_trainers = all(error is not theirs for theirs in self._of_servers)
                self._of_servers.clear()
                self._interrupt()
                self._abort(error)
        finally:
            self._context.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enter it to wait for servers: meanwhile they keep their leases, and what fails may be their failure."""
        try:
            with self._leases.kept():
                yield
        except BaseException as error:
            self._of_servers.append(error)
            raise

    @property
    def update_id(self) -> str:
        """The id under which all servers know it."""
        return self._update_id

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
        with self.waiting():
            answers = begin_and_open(self._links, self._call_begin, self._scope, self._request.deadlines.rendezvous_s)
        self._epochs = [answer.epoch for answer in answers]
        self.modes = [answer.mode for answer in answers]
        self._seconds["begin"] = perf_counter() - start

    def stream(
        self,
        source: WeightSource,
        outgoing: Sequence[Outgoing],
        device: torch.device,
        buffers: Buffers,
        programs: Programs,
    ) -> None:
        """Send all buckets, gathered in ``buffers`` on ``device``, as ``programs`` say where they know how.

        Raises:
            WeightPushError: what a server, the transport or the source says; anything that they or the progress
                callback raise.
        """
        with self._delivering() as delivery:
            lender = delivery.lender(device)

            def lend(number: int) -> torch.Tensor:
                assert lender is not None
                with self.waiting():
                    return lender(number)

            def deliver(number: int, buffer: torch.Tensor, digests: bytes) -> None:
                with self.waiting():
                    delivery(number, buffer, digests)

            stream = BucketStream(
                source,
                outgoing,
                self._request.manifest,
                deliver=deliver,
                interrupt=self._interrupt,
                delivered=self._delivered,
                digest=self._request.digest,
                device=device,
                buffers=buffers,
                lend=lend if lender is not None else None,
                programs=programs,
            )
            self._report(PushPhase.STREAM)
            self.digests = stream.digests
            stream.run()
        times = stream.seconds
        self._seconds |= {"gather": times.gather, "digest": times.digest, "send": times.send, "wait": times.wait}

    def prepare(self) -> None:
        """Have several servers do all that may still go wrong before the first of them commits.

        Raises:
            PushError: what a server answered. Under ``exclude`` only if none is ready, or if one lacks bytes because
                another one went away.
        """
        self._report(PushPhase.FINISH)
        if len(self._active) == 1:
            return  # One call does it all.
        start = perf_counter()

        async def prepare(place: int, server: ServerApi) -> PrepareAnswer:
            request = PrepareRequest(update_id=self._update_id, epoch=self._epochs[place])
            return await server.prepare(request, self._request.deadlines, self.modes[place])

        with self.waiting():
            self._leave(self._unready(self._ask_active(prepare)))
        self._seconds["prepare"] = perf_counter() - start

    def _unready(self, results: Mapping[int, object]) -> dict[int, PushError]:
        """Return the servers to go on without, as far as they are not ready; raise where that would be none."""
        failed = self._errors(results)
        others_complete = all(error.code not in CONSEQUENCES for error in failed.values())
        # Whoever is ready for a partial push in direct mode cannot begin it again: what it builds on is gone.
        no_way_back = self._request.partial and UpdateMode.DIRECT in self.modes
        if failed and not (self._excludes and (others_complete or no_way_back) and len(failed) < len(results)):
            raise min(failed.values(), key=lambda error: error.code in CONSEQUENCES)
        # They are told when the others have committed.
        return failed

    def finish(self) -> dict[int, FinishAnswer]:
        """Commit on all servers; return their answers by their place in the fleet. Cannot be stopped any more.

        Raises:
            PushError: a server did not commit; ``details["committed"]`` names those that did, and serve them. Under
                ``exclude`` only if none did.
        """
        start = perf_counter()
        self._stop.pass_by()

        async def finish(place: int, server: ServerApi) -> FinishAnswer:
            request = FinishRequest(update_id=self._update_id, epoch=self._epochs[place])
            answer = await server.finish(request, self._request.deadlines, self.modes[place])
            if answer.weight_version != self._request.weight_version:
                raise PushError(
                    ErrorCode.PROTOCOL_ERROR,
                    f"the server committed {answer.weight_version!r}, expected {self._request.weight_version!r}",
                    server=server.url,
                    update_id=self._update_id,
                )
            return answer

        with self.waiting():
            results = self._ask_active(finish)
            answers = {place: result for place, result in results.items() if isinstance(result, FinishAnswer)}
            if len(answers) < len(results) and not (self._excludes and answers):
                fleet = self._fleet.only(list(results))
                raise not_committed(fleet, self._update_id, list(results.values()), self._scope)
        self._seconds["finish"] = perf_counter() - start
        self._leave(self._errors(results))
        self._tell_dropped()
        return answers

    @property
    def _excludes(self) -> bool:
        return self._policy is OnServerFailure.EXCLUDE

    def _ask_active(self, call: Callable[[int, ServerApi], Awaitable[T]]) -> dict[int, T | Exception]:
        """Ask the servers that still take part, each with its place in the fleet; return results by place."""
        active = list(self._active)
        results = self._fleet.only(active).call_to_the_end(
            lambda index, server: call(active[index], server), self._scope
        )
        return dict(zip(active, results, strict=True))

    def _errors(self, results: Mapping[int, object]) -> dict[int, PushError]:
        """Return the failures among results. Raises what is no failure of a server."""
        errors = {}
        for place, result in results.items():
            if isinstance(result, WeightPushError):
                errors[place] = PushError.of(result, self._fleet.servers[place].url)
            elif isinstance(result, Exception):
                raise result
        return errors

    def _leave(self, errors: Mapping[int, PushError]) -> None:
        """Go on without the servers at these places."""
        self.dropped |= errors
        self._active = [place for place in self._active if place not in errors]

    def _tell_dropped(self) -> None:
        """End the update on the servers that it went on without."""
        if self.dropped:
            self._abort_at(sorted(self.dropped), "the trainer went on without this server")

    def _call_begin(self) -> list[BeginAnswer]:
        async def begin(index: int, server: ServerApi) -> BeginAnswer:
            try:
                answer = await _begin(server, self._request.model_copy(update={"transport": self._configs[index]}))
            except PushError as error:
                if error.code not in _UNCERTAIN:
                    self._may_hold.discard(index)
                raise
            # It has to wait for the others.
            self._leases.hold(server, answer.epoch)
            return answer

        return self._fleet.call(begin, self._scope)

    @contextmanager
    def _delivering(self) -> Iterator[Delivery]:
        update = OpenUpdate(self._update_id, tuple(self._epochs), self._request.deadlines.bucket_s, self._scope)
        delivery = Delivery(self._links, self._fleet, update, self._request.manifest, self._interrupt)
        with self.waiting():
            delivery.__enter__()
        try:
            yield delivery
        except BaseException as error:
            with self.waiting():
                delivery.__exit__(type(error), error, None)  # Raises a server's reason where there is one.
            raise
        with self.waiting():
            delivery.__exit__(None, None, None)

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
        for link in self._links:
            if link.sender is not None:
                link.sender.abort()

    def _abort(self, error: BaseException) -> None:
        places = sorted(self._may_hold)
        states = self._abort_at(places, f"the trainer gave up: {type(error).__name__}: {error}")
        self.silent = {self._fleet.urls[place] for place in places if place not in states}
        if isinstance(error, WeightPushError) and error.state is None:
            error.state = self._state_after(error, states)

    def _abort_at(self, places: Sequence[int], reason: str) -> dict[int, ServerState]:
        """End the update on the servers at ``places``, within ``ABORT_S``; return the states that they answered."""

        async def abort(index: int, server: ServerApi) -> ServerState:
            epoch = self._epochs[places[index]] if self._epochs else None
            status = await server.abort(AbortRequest(update_id=self._update_id, epoch=epoch, reason=reason[:1000]))
            return status.state

        scope = CallScope()
        timer = threading.Timer(ABORT_S, scope.cancel)
        timer.start()
        states: Sequence[ServerState | Exception] = []
        try:
            # Best effort: what the servers answer to it must not hide why the push failed.
            with contextlib.suppress(CancelledError, RuntimeError):
                states = self._fleet.only(places).call_to_the_end(abort, scope)
        finally:
            timer.cancel()
            timer.join()
        return {place: state for place, state in zip(places, states, strict=False) if isinstance(state, ServerState)}

    def _state_after(self, error: WeightPushError, states: Mapping[int, ServerState]) -> ServerState | None:
        """Return the state of the server that ``error`` names; else one that does not serve, if there is any."""
        known = [(self._fleet.servers[place].url, state) for place, state in states.items()]
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


async def _begin(server: ServerApi, request: BeginRequest) -> BeginAnswer:
    """Begin with the manifest's digest, which a server that took it before knows, else with the manifest itself."""
    if len(request.manifest.tensors) >= _WORTH_A_CALL:
        try:
            return await server.begin(request.by_digest())
        except PushError as error:
            if error.code is not ErrorCode.UNKNOWN_MANIFEST:
                raise
    return await server.begin(request)
