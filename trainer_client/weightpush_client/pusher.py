"""The trainer's way in: `WeightPusher`."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from weightpush_client.access import ControlToken, Tls
from weightpush_client.align import Outgoing, agreed_manifest, align, check_tied
from weightpush_client.digests import digests_of
from weightpush_client.fleet import Call, Fleet
from weightpush_client.lockstep import Lockstep
from weightpush_client.loop import CallScope
from weightpush_client.names import Names, RenamedSource
from weightpush_client.report import (
    PhaseSeconds,
    ProgressCallback,
    PushError,
    PushPhase,
    PushProgress,
    PushReport,
    ServerReport,
)
from weightpush_client.sources import Weights, WeightSource, open_source
from weightpush_client.stream import Buffers
from weightpush_client.transport import TRANSPORTS, choose_transport, make_sender
from weightpush_client.update import Update, not_committed
from weightpush_client.urls import normalise_urls
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import DEFAULT_BUCKET_BYTES, Manifest, build_manifest
from weightpush_protocol.messages import (
    BeginRequest,
    Deadlines,
    DigestKind,
    DiskReloadRequest,
    FinishAnswer,
    InFlight,
    ManifestAnswer,
    RollbackRequest,
    Status,
    UpdateMode,
)
from weightpush_protocol.transports.base import TransportConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightPusher:
    """Pushes weights into one live vLLM server, or into several at once.

    ::

        with WeightPusher("http://gpu-7:8000") as pusher:
            for step in range(steps):
                train(model)
                report = pusher.push(model, weight_version=f"step-{step}")

    A push either ends with all servers serving the new weights, or raises, and then no server ever serves a mixture.
    With several servers there is no promise that all switch at the same moment.

    Args:
        urls: address of each server: ``http://host:port``, ``host:port`` or ``[::1]:8000``.
        token: control token of the servers; from ``token_file`` or the environment's ``WEIGHTPUSH_CONTROL_TOKEN`` where
            it is None.
        token_file: file whose first line is the token; read again when a server refuses the token.
        transport: ``nccl``, ``gloo``, ``http``, or ``auto``: nccl where the weights lie on a GPU and all workers have
            it, else gloo where all workers have it, else http.
        mode: ``direct`` writes into the live model; ``staged`` collects the bytes in the servers' memory while the old
            weights serve, and pauses for the rest only. It takes a copy of the weights on each server.
        in_flight: what becomes of running requests: ``wait``, ``abort`` or ``keep``.
        deadlines: how long each wait may last, in seconds.
        bucket_bytes: tensors travel in buckets of at most this size. Two of them are held in memory, until `close`.
        digest: ``wp64`` has every tensor checked on arrival, ``none`` does not.
        partial: pushes may leave out tensors, which then stay as they are. A server refuses where it cannot keep them
            exactly: start it with ``--storage-policy retain`` to leave out any. Otherwise pushes must be complete.
        trust_env: use the proxies that the environment names.
        verify: True for the system's certificates (or those of the environment's ``WEIGHTPUSH_CA_FILE``), or the path
            of a CA file, for ``https``.
        client_cert: PEM file with the client's certificate and key (or a pair of files), for servers that ask for one.
        device: where buckets are gathered for ``nccl``; the device of the weights where it is None.
        data_host: address under which the servers reach this process for ``nccl`` and ``gloo``; found from the route to
            them where it is None. Must be an address of this machine: behind NAT use ``http``.
        names: new names of tensors where the trainer's differ from the checkpoint's: a mapping of those that change, or
            a function of each name; None leaves a tensor out. See `weightpush_client.names`.
        process_group: the ranks of a sharded trainer (``torch.distributed.group.WORLD``, or a group of all that hold a
            part). All of them make the pusher with the same arguments, and call `push` alike: rank 0 of the group talks
            to the servers, the others gather along, and all return the same report or raise the same error.

    Raises:
        PushError: ``invalid_request``: an argument is wrong; it says which.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        transport: str = "auto",
        mode: UpdateMode | str = UpdateMode.DIRECT,
        in_flight: InFlight | str = InFlight.WAIT,
        deadlines: Deadlines | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        digest: DigestKind | str = DigestKind.WP64,
        partial: bool = False,
        trust_env: bool = False,
        verify: bool | str | Path = True,
        client_cert: str | Path | tuple[str | Path, str | Path] | None = None,
        device: torch.device | str | None = None,
        data_host: str | None = None,
        names: Names | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        with _as_push_error(), _arguments_checked():
            self._urls = normalise_urls(urls)
            self._mode = UpdateMode(mode)
            self._in_flight = InFlight(in_flight)
            self._digest = DigestKind(digest)
            self._partial = partial
            if transport not in TRANSPORTS:
                raise ValueError(f"transport {transport!r} is none of {', '.join(TRANSPORTS)}")
            if bucket_bytes <= 0:
                raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
            if data_host in {"0.0.0.0", "::", "[::]"}:
                raise ValueError(f"data_host {data_host!r} is no address that a server can connect to: name one")
            self._transport = transport
            self._deadlines = deadlines or Deadlines()
            self._bucket_bytes = bucket_bytes
            self._device = None if device is None else torch.device(device)
            self._data_host = data_host
            self._names = names
            self._lockstep = None if process_group is None else Lockstep(process_group, self._deadlines)
            self._fleet = Fleet(
                self._urls, token=ControlToken(token, token_file), trust_env=trust_env, verify=Tls(verify, client_cert)
            )
        self._buffers = Buffers()
        self._pushing = threading.Lock()
        self._stop = weakref.finalize(self, self._fleet.stop)

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each server, in normal form."""
        return self._urls

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, end the pusher's thread and free its buffers. May be called again."""
        self._stop()
        self._buffers.drop()
        if self._lockstep is not None:
            self._lockstep.close()

    def status(self) -> list[Status]:
        """Return the status of each server, in the order of `urls`.

        Raises:
            PushError: a server cannot be reached.
        """
        return self._fleet.call(lambda _, server: server.status())

    def rollback(self) -> list[FinishAnswer]:
        """Let every server go back to the weights that it keeps a copy of, and return what each then serves.

        A failed server goes back to the version that it committed last, a serving one to the version before that.
        Servers keep copies where they were started with ``--keep-previous``.

        Raises:
            PushError: ``no_copy`` where a server has none, or why it failed; ``details["committed"]`` names the servers
                that went back.
        """
        request = RollbackRequest(update_id=uuid.uuid4().hex, in_flight=self._in_flight, deadlines=self._deadlines)
        return self._by_themselves(request.update_id or "", lambda _, server: server.rollback(request))

    def push_from_disk(
        self,
        path: str | os.PathLike[str],
        *,
        weight_version: str,
        weights: Weights | None = None,
        mode: UpdateMode | str = UpdateMode.STAGED,
    ) -> list[FinishAnswer]:
        """Let every server load the safetensors checkpoint in ``path`` by itself, and return what each then serves.

        ``path`` is absolute and as the servers see it, below a ``--reload-root`` of each; nothing of it is read here.
        ``weights``, of any kind that `push` takes, are what it must hold: only their digests travel, and a directory
        that is not wholly written, or that a server's file system shows as it was before, is refused. Whatever the mode
        of the pusher, files are read into host memory while the old weights serve, unless ``mode`` is ``direct``.

        Raises:
            PushError: why a server refused or failed; ``details["committed"]`` names the servers that serve the new
                weights.
        """
        with _as_push_error():
            digests = self._digests(open_source(weights)) if weights is not None else {}
        with _as_push_error(), _arguments_checked():
            request = DiskReloadRequest(
                path=os.fspath(path),
                weight_version=weight_version,
                mode=UpdateMode(mode),
                in_flight=self._in_flight,
                deadlines=self._deadlines,
                digests=digests,
                update_id=uuid.uuid4().hex,
            )
        return self._by_themselves(request.update_id or "", lambda _, server: server.load(request))

    def _digests(self, source: WeightSource) -> dict[str, str]:
        return digests_of(source, align(source, self._expected()))

    def _by_themselves(self, update_id: str, call: Call[FinishAnswer]) -> list[FinishAnswer]:
        """Ask all servers for an update that needs no weights of ours."""
        results = self._fleet.call_to_the_end(call)
        answers = [result for result in results if isinstance(result, FinishAnswer)]
        if len(answers) < len(results):
            with _as_push_error():
                raise not_committed(self._fleet, update_id, results, CallScope())
        return answers

    def push(
        self,
        weights: Weights,
        *,
        weight_version: str,
        partial: bool | None = None,
        progress: ProgressCallback | None = None,
    ) -> PushReport:
        """Push ``weights`` to all servers as ``weight_version``; return when all of them serve it.

        ``weights``: a module, a state dict, ``(name, tensor)`` pairs or a checkpoint directory, see
        `weightpush_client.sources`; the tensors must not change meanwhile. Names and dtypes are brought to those of
        the server's checkpoint, see `weightpush_client.align`. ``partial`` is the pusher's own where it is None.

        Raises:
            PushError: why the push failed, in the words of the server where it has any. The update was aborted.
            TypeError: ``weights`` is of no known kind.
            BaseException: whatever the source, ``progress`` or Ctrl-C raise, once the update was aborted.
        """
        if not self._pushing.acquire(blocking=False):
            raise PushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                "this pusher is in the middle of another push: wait for it, or use one pusher a thread",
            )
        try:
            with _as_push_error():
                return self._push(weights, weight_version, self._partial if partial is None else partial, progress)
        finally:
            self._pushing.release()

    def _push(
        self, weights: Weights, weight_version: str, partial: bool, progress: ProgressCallback | None
    ) -> PushReport:
        def push(source: WeightSource) -> PushReport:
            renamed = source if self._names is None else RenamedSource(source, self._names)
            return self._push_source(renamed, weight_version, partial, progress)

        if self._lockstep is not None:
            return self._lockstep.push(lambda: open_source(weights), push, self._bucket_bytes // 2)
        source = open_source(weights)
        if source.ranks > 1:
            raise PushError(
                ErrorCode.WEIGHTS_REJECTED,
                f"the weights are sharded over {source.ranks} ranks: make the pusher with process_group= on all of "
                "them and push on all of them, or gather the weights first",
            )
        try:
            return push(source)
        finally:
            source.close()

    def _push_source(
        self, source: WeightSource, weight_version: str, partial: bool, progress: ProgressCallback | None
    ) -> PushReport:
        start = perf_counter()
        if progress is not None:
            progress(PushProgress(PushPhase.CHECK, 0, 0, 0, 0, 0, 0))
        statuses = self.status()
        self._refuse_twice(statuses)
        outgoing, manifest = self._plan(source)
        name = choose_transport(self._transport, statuses, self._device or source.device)
        device = (self._device or source.device) if name == "nccl" else torch.device("cpu")
        request = self._request(weight_version, manifest, partial)
        sender, configs = make_sender(name, self._urls, statuses, device=device, data_host=self._data_host)
        check_seconds = perf_counter() - start
        with Update(self._fleet, request, configs, sender, progress) as update:
            update.begin()
            update.stream(source, outgoing, device, self._buffers)
            answers = update.finish()
        seconds = perf_counter() - start
        return self._report(request, name, answers, update.modes, seconds, update.phase_seconds(check=check_seconds))

    def _refuse_twice(self, statuses: list[Status]) -> None:
        first: dict[str, str] = {}
        for url, status in zip(self._urls, statuses, strict=True):
            if status.instance_id in first:
                message = f"{first[status.instance_id]} and {url} are one server: name it once"
                raise PushError(ErrorCode.INVALID_REQUEST, message)
            first[status.instance_id] = url

    def _plan(self, source: WeightSource) -> tuple[list[Outgoing], Manifest]:
        expected = self._expected()
        outgoing = align(source, expected)
        check_tied(source, outgoing, expected.tied)
        # What is gathered from other ranks takes memory beside the two buffers: together no more than two buckets.
        bucket_bytes = self._bucket_bytes if source.ranks == 1 else max(1, self._bucket_bytes // 2)
        return outgoing, build_manifest((item.sent for item in outgoing), bucket_bytes)

    def _expected(self) -> ManifestAnswer:
        """Return the checkpoint that all servers expect."""
        manifests = self._fleet.call(lambda _, server: server.manifest())
        return agreed_manifest(list(zip(self._urls, manifests, strict=True)))

    def _request(self, weight_version: str, manifest: Manifest, partial: bool) -> BeginRequest:
        # The id is the client's, so that a begin whose answer was lost can be repeated, and aborted.
        with _arguments_checked():
            return BeginRequest(
                weight_version=weight_version,
                manifest=manifest,
                mode=self._mode,
                # Each server gets its own in its place.
                transport=TransportConfig(name="http"),
                in_flight=self._in_flight,
                deadlines=self._deadlines,
                digest=self._digest,
                partial=partial,
                update_id=uuid.uuid4().hex,
            )

    def _report(
        self,
        request: BeginRequest,
        transport: str,
        answers: list[FinishAnswer],
        modes: list[UpdateMode],
        seconds: float,
        phases: PhaseSeconds,
    ) -> PushReport:
        return PushReport(
            weight_version=request.weight_version,
            update_id=request.update_id or "",
            bytes=request.manifest.nbytes,
            tensors=len(request.manifest.tensors),
            buckets=len(request.manifest.buckets),
            seconds=seconds,
            transport=transport,
            servers=tuple(
                ServerReport(url, answer.fingerprint, answer.seconds, answer.pause_seconds, answer.bytes, mode)
                for url, answer, mode in zip(self._urls, answers, modes, strict=True)
            ),
            phases=phases,
        )


@contextmanager
def _as_push_error() -> Iterator[None]:
    try:
        yield
    except WeightPushError as error:
        if isinstance(error, PushError):
            raise
        raise PushError.of(error) from error


@contextmanager
def _arguments_checked() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise PushError(ErrorCode.INVALID_REQUEST, reasons) from error
    except (ValueError, OSError) as error:
        raise PushError(ErrorCode.INVALID_REQUEST, str(error)) from error
