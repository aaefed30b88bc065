"""The trainer's way in: `WeightPusher`."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch

from weightpush_client.access import ControlToken, Tls
from weightpush_client.align import agreed_manifest, align
from weightpush_client.background import PushHandle, Stop, copied
from weightpush_client.catch_up import LastPush
from weightpush_client.digests import digests_of
from weightpush_client.failures import arguments_checked, as_push_error, choice
from weightpush_client.fleet import Call
from weightpush_client.lockstep import Lockstep
from weightpush_client.loop import CallScope
from weightpush_client.membership import Membership, Urls
from weightpush_client.names import Names, RenamedSource
from weightpush_client.policy import OnServerFailure
from weightpush_client.preparation import Preparation
from weightpush_client.pushing import Push, PushSettings, Wish
from weightpush_client.report import ProgressCallback, PushError, PushReport, ServedAnswers
from weightpush_client.sources import Weights, WeightSource, open_source
from weightpush_client.stream import Buffers
from weightpush_client.transport import TRANSPORTS
from weightpush_client.turns import Turns
from weightpush_client.update import not_committed
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import DEFAULT_BUCKET_BYTES
from weightpush_protocol.messages import (
    Deadlines,
    DigestKind,
    DiskReloadRequest,
    FinishAnswer,
    InFlight,
    RollbackRequest,
    UpdateMode,
)
from weightpush_protocol.status import Status

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: HTTP status of refusals: nothing was changed.
_REFUSED: Final = frozenset({401, 413, 422, 429})


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
        urls: address of each server: ``http://host:port``, ``host:port`` or ``[::1]:8000``; or a function that returns
            those of the present servers, asked whenever a call needs them.
        token: control token of the servers; from ``token_file`` or the environment's ``WEIGHTPUSH_CONTROL_TOKEN`` where
            it is None.
        token_file: file whose first line is the token; read again when a server refuses the token.
        transport: ``nccl``, ``shm``, ``gloo``, ``http``, or ``auto``: for each server nccl where the weights lie on a
            GPU and all its workers have it, else shm where they are on this host, else gloo where they have it, else
            http. All get the same buckets at once.
        mode: ``direct`` writes into the live model; ``staged`` collects the bytes in the servers' memory while the old
            weights serve, and pauses for the rest only. It takes a copy of the weights on each server.
        in_flight: what becomes of running requests: ``wait``, ``abort`` or ``keep``.
        deadlines: how long each wait may last, in seconds.
        bucket_bytes: tensors travel in buckets of at most this size, over shm of at most 8 MiB; of a sixteenth of the
            weights where that is less, but no less than 16 MiB. Two are held in memory, until `close`.
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
        on_server_failure: ``abort``: one server that fails fails the push, and nobody commits. ``exclude``: the others
            commit, and the report lists the ones that failed or are not there.

    Raises:
        PushError: ``invalid_request``: an argument is wrong; it says which.
    """

    def __init__(
        self,
        urls: Urls,
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
        on_server_failure: OnServerFailure | str = OnServerFailure.ABORT,
    ) -> None:
        with as_push_error(), arguments_checked():
            if transport not in TRANSPORTS:
                raise ValueError(f"transport {transport!r} is none of {', '.join(TRANSPORTS)}")
            if bucket_bytes <= 0:
                raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
            if data_host in {"0.0.0.0", "::", "[::]"}:
                raise ValueError(f"data_host {data_host!r} is no address that a server can connect to: name one")
            self._settings = PushSettings(
                transport=transport,
                mode=choice(UpdateMode, "mode", mode),
                in_flight=choice(InFlight, "in_flight", in_flight),
                deadlines=deadlines or Deadlines(),
                bucket_bytes=bucket_bytes,
                digest=choice(DigestKind, "digest", digest),
                device=None if device is None else torch.device(device),
                data_host=data_host,
                names=names,
                policy=choice(OnServerFailure, "on_server_failure", on_server_failure),
            )
            self._partial = partial
            self._lockstep = None if process_group is None else Lockstep(process_group, self._settings.deadlines)
            self._membership = Membership(
                urls, token=ControlToken(token, token_file), trust_env=trust_env, verify=Tls(verify, client_cert)
            )
        self._buffers = Buffers()
        self._preparation = Preparation()
        self._turns = Turns()
        self._last: LastPush | None = None
        self._background: PushHandle | None = None
        self._stop = weakref.finalize(self, self._membership.stop)

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each present server, in normal form."""
        return self._membership.urls

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._background is not None:
            self._background.cancel()
        self.close()

    def close(self) -> None:
        """Close all connections, end the pusher's thread and free its buffers. May be called again.

        A push that runs in another thread is aborted on all servers, unless they commit already; one in the background
        is waited for, like a rollback or a load from disk. Called in the middle of a push, by its ``progress``, it ends
        the push, and the rest is done then.
        """
        self._turns.close(self._free)
        if self._background is not None:
            self._background.wait()

    def _free(self) -> None:
        self._stop()
        self._buffers.drop()
        if self._lockstep is not None:
            self._lockstep.close()

    def status(self) -> list[Status]:
        """Return the status of each server, in the order of `urls`.

        Raises:
            PushError: a server cannot be reached.
        """
        with self._membership.present() as fleet:
            return fleet.call(lambda _, server: server.status())

    def rollback(self) -> ServedAnswers:
        """Let every server go back to the weights that it keeps a copy of, and return what each then serves.

        A failed server goes back to the version that it committed last, a serving one to the version before that.
        Servers keep copies where they were started with ``--keep-previous``.

        Raises:
            PushError: ``no_copy`` where a server has none, or why it failed; ``details["committed"]`` names the servers
                that went back.
        """

        def rollback(update_id: str) -> Call[FinishAnswer]:
            request = RollbackRequest(
                update_id=update_id, in_flight=self._settings.in_flight, deadlines=self._settings.deadlines
            )
            return lambda _, server: server.rollback(request)

        return self._by_themselves(rollback)

    def push_from_disk(
        self,
        path: str | os.PathLike[str],
        *,
        weight_version: str,
        weights: Weights | None = None,
        mode: UpdateMode | str = UpdateMode.STAGED,
    ) -> ServedAnswers:
        """Let every server load the safetensors checkpoint in ``path`` by itself, and return what each then serves.

        ``path`` is absolute and as the servers see it, below a ``--reload-root`` of each; nothing of it is read here.
        ``weights``, of any kind that `push` takes, are what it must hold: only their digests travel, and a directory
        that is not wholly written, or that a server's file system shows as it was before, is refused. Whatever the mode
        of the pusher, files are read into host memory while the old weights serve, unless ``mode`` is ``direct``.

        Raises:
            PushError: why a server refused or failed; ``details["committed"]`` names the servers that serve the new
                weights.
        """
        with as_push_error():
            digests = self._digests(open_source(weights)) if weights is not None else {}

        def load(update_id: str) -> Call[FinishAnswer]:
            with arguments_checked():
                request = DiskReloadRequest(
                    path=os.fspath(path),
                    weight_version=weight_version,
                    mode=choice(UpdateMode, "mode", mode),
                    in_flight=self._settings.in_flight,
                    deadlines=self._settings.deadlines,
                    digests=digests,
                    update_id=update_id,
                )
            return lambda _, server: server.load(request)

        return self._by_themselves(load)

    def _digests(self, source: WeightSource) -> dict[str, str]:
        with self._membership.present() as fleet:
            manifests = fleet.call(lambda _, server: server.manifest())
            expected = agreed_manifest(list(zip(fleet.urls, manifests, strict=True)))
        return digests_of(source, align(source, expected))

    def _by_themselves(self, call: Callable[[str], Call[FinishAnswer]]) -> ServedAnswers:
        """Ask all servers for an update that needs no weights of ours."""
        update_id = uuid.uuid4().hex
        ask = call(update_id)
        with self._turns.one(), self._membership.present() as fleet, as_push_error():
            # Whatever comes of it, it is not what was pushed last.
            last, self._last = self._last, None
            results = fleet.call_to_the_end(ask)
            if all(isinstance(result, WeightPushError) and result.http_status in _REFUSED for result in results):
                self._last = last
            answers = [result for result in results if isinstance(result, FinishAnswer)]
            if len(answers) < len(results):
                raise not_committed(fleet, update_id, results, CallScope())
            return ServedAnswers(fleet.urls, answers)

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
            PushError: why the push failed, in the words of the server where it has any. The update was aborted. Under
                ``on_server_failure="exclude"`` only if no server is left; see ``report.excluded`` otherwise.
            TypeError: ``weights`` is of no known kind.
            BaseException: whatever the source, ``progress`` or Ctrl-C raise, once the update was aborted.
        """
        stop = Stop()
        with self._turns.one(stop):
            return self._push(weights, self._wish(weight_version, partial, progress, stop))

    def push_async(
        self,
        weights: Weights,
        *,
        weight_version: str,
        partial: bool | None = None,
        progress: ProgressCallback | None = None,
        copy: bool = False,
    ) -> PushHandle:
        """Begin a push in a thread of its own, and return its handle at once.

        ``weights`` must not change until it is done; with ``copy`` they are first copied to host memory, and the
        trainer may train on when this returns. ``progress`` is called from that thread. Leaving the pusher's ``with``
        block waits for the push, or cancels it where an exception ends the block.

        Raises:
            PushError: ``update_in_progress``: another push runs; ``invalid_request``: this pusher has a
                ``process_group``, whose ranks may be in collectives of their own meanwhile.
        """
        if self._lockstep is not None:
            raise PushError(
                ErrorCode.INVALID_REQUEST,
                "push_async is not for sharded trainers: gathering needs all ranks, and their own collectives may run "
                "meanwhile. Use push, or gather the weights and give them to a pusher without process_group",
            )
        self._turns.take()
        try:
            with as_push_error():
                if copy:
                    source = open_source(weights)
                    try:
                        weights = copied(source)
                    finally:
                        source.close()
            stop = Stop()
            wish = self._wish(weight_version, partial, progress, stop)

            def push() -> PushReport:
                with self._turns.carry_out():
                    return self._push(weights, wish)

            self._background = handle = PushHandle(push, stop, weight_version)
        except BaseException:
            self._turns.give_back()
            raise
        return handle

    def catch_up(self, weights: Weights, *, progress: ProgressCallback | None = None) -> PushReport:
        """Bring every server that does not serve what was pushed last to that version, and leave the others alone.

        For servers that joined late, came back after a crash, or were excluded from the last push. ``weights`` must be
        those that were pushed last; they are read once more to make sure of it before anything is sent. The report
        lists the servers that were behind, and no server where none was.

        Raises:
            PushError: ``weights_rejected``: these are other weights; ``invalid_request``: nothing was pushed yet, or
                only a part, or without digests; else as `push`.
        """
        stop = Stop()
        with self._turns.one(stop):
            # Of a sharded trainer only rank 0 knows what was pushed; it is looked at there.
            version = self._last.weight_version if self._last is not None else ""
            return self._push(weights, replace(self._wish(version, False, progress, stop), catches_up=True))

    def _wish(self, weight_version: str, partial: bool | None, progress: ProgressCallback | None, stop: Stop) -> Wish:
        return Wish(
            weight_version=weight_version,
            partial=self._partial if partial is None else partial,
            progress=progress,
            stop=stop,
            last=self._last,
            again=self._lockstep.again if self._lockstep is not None else _nothing,
        )

    def _push(self, weights: Weights, wish: Wish) -> PushReport:
        with as_push_error():
            if self._lockstep is not None:
                return self._lockstep.push(
                    lambda: open_source(weights),
                    lambda source: self._push_source(source, wish),
                    self._settings.bucket_bytes // 2,
                )
            source = self._preparation.sources.open(weights)
            if source.ranks > 1:
                raise PushError(
                    ErrorCode.WEIGHTS_REJECTED,
                    f"the weights are sharded over {source.ranks} ranks: make the pusher with process_group= on all of "
                    "them and push on all of them, or gather the weights first",
                )
            try:
                return self._push_source(source, wish)
            finally:
                source.close()

    def _push_source(self, source: WeightSource, wish: Wish) -> PushReport:
        names = self._settings.names
        with self._membership.present() as fleet:
            report, self._last = Push(self._settings, fleet, wish, self._buffers, self._preparation).run(
                source if names is None else RenamedSource(source, names)
            )
        return report


def _nothing() -> None:
    """Do nothing."""
