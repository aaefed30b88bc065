"""One push, from the first look at the servers to the report: who takes part, and what if one of them fails."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch

from weightpush_client.align import Outgoing, agreed_manifest, check_tied, majority
from weightpush_client.background import Stop
from weightpush_client.catch_up import LastPush, catch_up_target, stale_for_partial
from weightpush_client.digests import digests_of
from weightpush_client.failures import arguments_checked
from weightpush_client.fleet import Call, Fleet, T
from weightpush_client.http import ServerApi
from weightpush_client.names import Names
from weightpush_client.policy import OnServerFailure, Witness, culprits, lost_by_silence, suspects
from weightpush_client.preparation import Preparation
from weightpush_client.report import (
    ExcludedServer,
    PhaseSeconds,
    ProgressCallback,
    PushError,
    PushPhase,
    PushProgress,
    PushReport,
    ServerReport,
)
from weightpush_client.sources import WeightSource
from weightpush_client.stream import Buffers
from weightpush_client.transport import Transports, workerless
from weightpush_client.update import Update
from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import (
    BeginRequest,
    Deadlines,
    DigestKind,
    FinishAnswer,
    InFlight,
    ManifestAnswer,
    UpdateMode,
)
from weightpush_protocol.status import Status
from weightpush_protocol.transports.base import TransportConfig

#: How long a server may take to notice what its trainer has noticed already, and how often it is asked, in seconds.
_VERDICT_S: Final = 5.0
_POLL_S: Final = 0.1
#: How long those that will take part again may take to end the update that failed, in seconds.
_SETTLE_S: Final = 15.0
#: How long those that were left out may take to say how they are now, in seconds.
_BRIEF_S: Final = 3.0

_logger = logging.getLogger("weightpush")


@dataclass(frozen=True, slots=True)
class PushSettings:
    """What all pushes of one pusher have in common; see `WeightPusher`."""

    transport: str
    mode: UpdateMode
    in_flight: InFlight
    deadlines: Deadlines
    bucket_bytes: int
    digest: DigestKind
    device: torch.device | None
    data_host: str | None
    names: Names | None
    policy: OnServerFailure


@dataclass(frozen=True, slots=True)
class Wish:
    """What one push is to do: bring all servers to ``weight_version``, or only those that are behind ``last``."""

    weight_version: str
    partial: bool
    progress: ProgressCallback | None
    stop: Stop
    #: What the pusher pushed last, if anything.
    last: LastPush | None
    catches_up: bool = False
    #: Called before the source is read once more.
    again: Callable[[], None] = field(default=lambda: None)


class Push:
    """Carries out ``wish`` on the servers of ``fleet``."""

    def __init__(
        self, settings: PushSettings, fleet: Fleet, wish: Wish, buffers: Buffers, preparation: Preparation
    ) -> None:
        self._preparation = preparation
        self._settings = settings
        self._fleet = fleet
        self._wish = wish
        self._buffers = buffers
        self._statuses: list[Status] = []
        self._excluded: dict[str, PushError] = {}
        self._fleet_at_start = fleet
        self._first_error: PushError | None = None
        self._start = perf_counter()

    def run(self, source: WeightSource) -> tuple[PushReport, LastPush]:
        """Push; return the report, and what was pushed last now.

        Raises:
            BaseException: see `WeightPusher.push`.
        """
        if self._wish.progress is not None:
            self._wish.progress(PushProgress(PushPhase.CHECK, 0, 0, 0, 0, 0, 0))
        if self._wish.catches_up:
            catch_up_target(self._wish.last)
        self._call_the_roll()
        if not len(self._fleet):
            assert self._wish.last is not None
            return self._nothing_to_do(), self._wish.last
        transports = Transports(
            self._settings.transport, self._settings.device or source.device, self._settings.data_host, self._buffers
        )
        outgoing, manifest = self._plan(source, transports)
        check_seconds = perf_counter() - self._start
        while True:
            request = self._request(manifest)
            names = transports.names(self._statuses)
            if without := workerless(names, self._statuses):
                self._go_on_without(without)
                continue
            device = transports.device if "nccl" in names else torch.device("cpu")
            try:
                links = transports.links(names, self._fleet.urls, self._statuses, manifest)
            except WeightPushError as error:
                if transports.go_on_without(error, names, self._fleet.urls, self._statuses):
                    continue
                raise
            update = Update(
                self._fleet, request, links, self._wish.progress, policy=self._settings.policy, stop=self._wish.stop
            )
            try:
                with self._buffers.dropped_on_failure(), update:
                    update.begin()
                    with update.waiting():
                        self._check_bases()
                    update.stream(source, outgoing, device, self._buffers, self._preparation.programs)
                    if self._wish.catches_up and self._wish.last is not None:
                        # They may have changed since they were looked at.
                        self._wish.last.check_same(update.digests)
                    update.prepare()
                    answers = update.finish()
            except Exception as error:
                if self._wish.stop.asked:
                    raise self._wish.stop.error() from error
                if transports.go_on_without(error, names, self._fleet.urls, self._statuses):
                    continue
                if not self._excludes or update.is_trainers or not isinstance(error, WeightPushError):
                    raise
                self._leave_out(update.dropped, self._find_culprits(error, update), error)
                # Others may be in the middle of reading it along.
                source.close()
                self._wish.again()
                continue
            if update.dropped:
                self._buffers.drop()  # Whoever was left behind may still read them.
            for place, reason in update.dropped.items():
                self._exclude(self._fleet.urls[place], reason)
            report = self._report(request, "+".join(dict.fromkeys(names)), answers, update, check_seconds)
            return report, self._last_after(update, answers)

    # who takes part

    def _call_the_roll(self) -> None:
        """Look who is there, and leave out those who need not, or cannot, take part."""
        self._statuses = self._ask(lambda _, server: server.ready_to_push())
        self._refuse_twice()
        last = self._wish.last
        if self._wish.catches_up and last is not None:
            self._keep([place for place, status in enumerate(self._statuses) if not last.is_served_by(status)])
        elif self._wish.partial:
            self._go_on_without(stale_for_partial(last, self._statuses))

    def _go_on_without(self, unfit: Mapping[int, WeightPushError]) -> None:
        """Go on without the servers at these places, which cannot take this push; under abort raise the first's."""
        errors = {place: PushError.of(error, self._fleet.urls[place]) for place, error in unfit.items()}
        if errors and not self._excludes:
            raise next(iter(errors.values()))
        self._exclude_at(errors)

    def _check_bases(self) -> None:
        """Look whether a partial push still builds on the weights that the servers had at the roll call.

        Called when all servers hold the update: from then on nobody else can change what they have.

        Raises:
            PushError: ``partial_refused``: one does not.
        """
        if not self._wish.partial:
            return
        for url, before, base in zip(self._fleet.urls, self._statuses, self._fleet.statuses(), strict=True):
            if isinstance(base, Exception):
                raise base
            seen, now = ((each.instance_id, each.weight_version, each.fingerprint) for each in (before, base))
            if seen != now:
                raise PushError(
                    ErrorCode.PARTIAL_REFUSED,
                    f"the server had version {before.weight_version!r} when this partial push began, and has "
                    f"{base.weight_version!r} now: somebody else changed its weights meanwhile",
                    server=url,
                    state=base.state,
                )

    @property
    def _excludes(self) -> bool:
        return self._settings.policy is OnServerFailure.EXCLUDE

    def _ask(self, call: Call[T]) -> list[T]:
        """Ask all that take part; exclude those that fail, if they may be."""
        if not self._excludes:
            return self._fleet.call(call)
        results = self._fleet.call_to_the_end(call)
        errors: dict[int, PushError] = {}
        for place, result in enumerate(results):
            if isinstance(result, WeightPushError):
                errors[place] = PushError.of(result, self._fleet.urls[place])
            elif isinstance(result, Exception):
                raise result
        self._exclude_at(errors)
        return [result for result in results if not isinstance(result, Exception)]

    def _refuse_twice(self) -> None:
        first: dict[str, str] = {}
        for url, status in zip(self._fleet.urls, self._statuses, strict=True):
            if status.instance_id in first:
                message = f"{first[status.instance_id]} and {url} are one server: name it once"
                raise PushError(ErrorCode.INVALID_REQUEST, message)
            first[status.instance_id] = url

    def _exclude_at(self, errors: dict[int, PushError]) -> None:
        """Go on without the servers at these places. Raises the first of ``errors`` where no server is left."""
        for place, error in errors.items():
            self._exclude(self._fleet.urls[place], error)
        self._keep([place for place in range(len(self._fleet)) if place not in errors])
        if not len(self._fleet) and self._first_error is not None:
            raise self._first_error

    def _exclude(self, url: str, error: PushError) -> None:
        self._first_error = self._first_error or error
        self._excluded[url] = error
        _logger.warning("the push of %s goes on without %s: %s", self._wish.weight_version, url, error.message)

    def _keep(self, places: Sequence[int]) -> None:
        self._statuses = [self._statuses[place] for place in places if place < len(self._statuses)]
        self._fleet = self._fleet.only(places)

    # what is sent

    def _plan(self, source: WeightSource, transports: Transports) -> tuple[Sequence[Outgoing], Manifest]:
        expected = self._expected()
        outgoing = self._preparation.outgoing(source, expected)
        check_tied(source, outgoing, expected.tied)
        if self._wish.catches_up and self._wish.last is not None:
            self._wish.last.check_same(digests_of(source, outgoing))
        # What is gathered from other ranks takes memory beside the two buffers: together no more than two buckets.
        bucket_bytes = transports.bucket_bytes(transports.names(self._statuses), self._settings.bucket_bytes)
        if source.ranks > 1:
            bucket_bytes = max(1, bucket_bytes // 2)
        return outgoing, self._preparation.manifest(outgoing, bucket_bytes)

    def _expected(self) -> ManifestAnswer:
        """Return the checkpoint that all who take part expect."""
        known = [self._preparation.checkpoint(status.expects) for status in self._statuses]

        async def manifest(place: int, server: ServerApi) -> ManifestAnswer:
            return known[place] or self._preparation.learn(await server.manifest())

        # Who has said it before, and says that it is still so, need not be asked.
        manifests = [one for one in known if one is not None] if all(known) else self._ask(manifest)
        pairs = list(zip(self._fleet.urls, manifests, strict=True))
        if not self._excludes:
            return agreed_manifest(pairs)
        expected, odd = majority(pairs)
        places = {url: place for place, url in enumerate(self._fleet.urls)}
        self._exclude_at({places[url]: PushError.of(error, url) for url, error in odd.items()})
        return expected

    def _request(self, manifest: Manifest) -> BeginRequest:
        with arguments_checked():
            # The id is the client's, so that a begin whose answer was lost can be repeated, and aborted.
            return BeginRequest(
                weight_version=self._wish.weight_version,
                manifest=manifest,
                mode=self._settings.mode,
                # Each server gets its own in its place.
                transport=TransportConfig(name="http"),
                in_flight=self._settings.in_flight,
                deadlines=self._settings.deadlines,
                digest=self._settings.digest,
                partial=self._wish.partial,
                update_id=uuid.uuid4().hex,
                protocol=PROTOCOL_VERSION,
            )

    # who failed

    def _find_culprits(self, error: WeightPushError, update: Update) -> dict[str, PushError]:
        """Return the servers to go on without, by address, once the others are ready to begin again."""
        update_id = update.update_id
        if len(self._fleet) == 1:
            return {self._fleet.urls[0]: PushError.of(error)}
        found: dict[str, PushError] = {}
        started = time.monotonic()
        while True:
            self._wish.stop.check()
            answers = self._fleet.statuses()
            witnesses = [
                Witness(url, status.instance_id, answer)
                for url, status, answer in zip(self._fleet.urls, self._statuses, answers, strict=True)
            ]
            if update.trainer_was_silent and lost_by_silence(error, update_id, witnesses):
                return {}
            found |= culprits(error, update_id, witnesses)
            waited = time.monotonic() - started
            if found or waited > _VERDICT_S:
                found = found or suspects(error, witnesses, update.silent)
                busy = [url for url, answer in zip(self._fleet.urls, answers, strict=True) if _runs(answer, update_id)]
                if not found or not set(busy) - set(found) or waited > _SETTLE_S:
                    return found
            time.sleep(_POLL_S)

    def _leave_out(
        self, dropped: Mapping[int, PushError], found: Mapping[str, PushError], error: WeightPushError
    ) -> None:
        """Go on without the servers that were ``dropped``, and those ``found``, by address.

        Raises ``error`` where it is nobody's, and the first one where no server is left.
        """
        places = {url: place for place, url in enumerate(self._fleet.urls)}
        if not found.keys() & places.keys():
            raise error
        self._exclude_at({places[url]: own for url, own in found.items() if url in places} | dict(dropped))

    # what became of it

    def _last_after(self, update: Update, answers: dict[int, FinishAnswer]) -> LastPush:
        fingerprints = {self._statuses[place].instance_id: answer.fingerprint for place, answer in answers.items()}
        if self._wish.catches_up and self._wish.last is not None:
            return self._wish.last.joined_by(fingerprints)
        return LastPush.after(
            self._wish.last,
            self._wish.weight_version,
            update.digests,
            partial=self._wish.partial,
            fingerprints=fingerprints,
        )

    def _report(
        self, request: BeginRequest, transport: str, answers: dict[int, FinishAnswer], update: Update, check: float
    ) -> PushReport:
        return PushReport(
            weight_version=request.weight_version,
            update_id=request.update_id or "",
            bytes=request.manifest.nbytes,
            tensors=len(request.manifest.tensors),
            buckets=len(request.manifest.buckets),
            seconds=perf_counter() - self._start,
            transport=transport,
            servers=tuple(
                ServerReport(
                    self._fleet.urls[place],
                    answer.fingerprint,
                    answer.seconds,
                    answer.pause_seconds,
                    answer.bytes,
                    update.modes[place],
                    self._statuses[place].instance_id,
                    answer.weight_version,
                )
                for place, answer in answers.items()
            ),
            phases=update.phase_seconds(check=check),
            excluded=self._excluded_now(),
        )

    def _nothing_to_do(self) -> PushReport:
        seconds = perf_counter() - self._start
        return PushReport(
            weight_version=self._wish.weight_version,
            update_id="",
            bytes=0,
            tensors=0,
            buckets=0,
            seconds=seconds,
            transport="none",
            servers=(),
            phases=PhaseSeconds(check=seconds),
            excluded=self._excluded_now(),
        )

    def _excluded_now(self) -> tuple[ExcludedServer, ...]:
        """Return the servers that were left out, as they are now."""
        at_start = {server.url: place for place, server in enumerate(self._fleet_at_start.servers)}
        fleet = self._fleet_at_start.only([at_start[url] for url in self._excluded])
        return tuple(
            ExcludedServer(
                url,
                answer.instance_id if isinstance(answer, Status) else None,
                answer.state if isinstance(answer, Status) else None,
                answer.weight_version if isinstance(answer, Status) else None,
                error.code,
                error.message,
            )
            for (url, error), answer in zip(self._excluded.items(), fleet.statuses(_BRIEF_S), strict=True)
        )


def _runs(answer: Status | Exception, update_id: str) -> bool:
    return isinstance(answer, Status) and answer.update is not None and answer.update.update_id == update_id
