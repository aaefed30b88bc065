"""A server that speaks the wire contract over real sockets, without vLLM, and misbehaves on demand.

It keeps what arrives as plain tensors, checks buckets against the manifest and digests against bytes, and lets a test
put a function before any route. Workers of a collective transport are real receivers in processes of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.digest_text import texts
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest, ProblemKind, TensorSpec, compare_manifest
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginCall,
    BeginRequest,
    DigestKind,
    DiskReloadRequest,
    FinishAnswer,
    FinishRequest,
    KeepAnswer,
    KeepRequest,
    ManifestAnswer,
    PlanSummary,
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    StreamAnswer,
    StreamRequest,
    utc_now,
)
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import LastError, LastUpdate, Status, UpdateStatus, WorkerStatus
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.frames import frame_bytes, read_digests
from weightpush_protocol.transports.http import digests_from_metadata, parse_header

TOKEN = "a-token-of-the-tests"
#: Put before a route: may wait, raise, or return a response in place of the route's own.
Hook = Callable[[], Awaitable[Response | None]]


def _receive_forever(pipe: Connection) -> None:
    from weightpush_protocol.transports.base import Receiver
    from weightpush_protocol.transports.endpoints import make_receiver

    receiver: Receiver | None = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = None
            if command == "open":
                config, rank, timeout_s = arguments
                receiver = make_receiver(TransportConfig.model_validate(config), rank=rank)
                receiver.open(timeout_s)
            elif command == "close" and receiver is not None:
                receiver.close()
            elif command == "receive" and receiver is not None:
                number, nbytes, timeout_s = arguments
                buffer = torch.empty(nbytes, dtype=torch.uint8)
                receiver.receive(number, buffer, timeout_s)
                answer = bytes(buffer.tolist()) if nbytes < 2**16 else buffer.clone()
            pipe.send(("ok", answer))
        except WeightPushError as error:
            pipe.send(("error", error))


class ReceiverProcess:
    """A worker: a real receiver in a process of its own, used by one update after the other."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_receive_forever, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def call(self, *command: Any) -> Any:
        """Run ``command`` there and return its answer. Raises what the receiver raised, or ``worker_lost``."""
        with self._lock:
            try:
                self._pipe.send(command)
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                raise WeightPushError(ErrorCode.WORKER_LOST, "a worker of the tests died") from None
        if kind == "error":
            raise value
        return value

    def pause(self) -> None:
        """Stop it as a hung device does; only `kill` ends it then."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it at once, as the out-of-memory killer does."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self.kill()


class _Update:
    def __init__(self, request: BeginRequest, epoch: int) -> None:
        self.request = request
        self.epoch = epoch
        self.tensors: dict[str, torch.Tensor] = {}
        self.buckets: set[int] = set()
        self.pending: asyncio.Task[None] | None = None
        self.prepared = False
        #: When (``time.monotonic``) the trainer's last call ended, and how many run: meanwhile the server is at work.
        self.heard = time.monotonic()
        self.at_work = 0


class ContractServer:
    """One server with its own thread and port.

    ``hooks`` maps a route (``"begin"``...) to a function that runs before it; ``calls`` lists what was called;
    ``weights`` are those committed last; ``ended`` says for each update how it ended.
    """

    def __init__(
        self,
        expected: Sequence[TensorSpec],
        *,
        optional: Sequence[TensorSpec] = (),
        workers: Sequence[ReceiverProcess] = (),
        transports: Sequence[str] = ("gloo", "http"),
        host_id: str = "",
        token: str | None = TOKEN,
        keep_alive_s: int = 5,
        tls: dict[str, Any] | None = None,
    ) -> None:
        self.manifest = ManifestAnswer(tensors=list(expected), optional=list(optional))
        self.workers = list(workers)
        self._described: dict[str, Any] = {"transports": list(transports), "host_id": host_id}
        self.hooks: dict[str, Hook] = {}
        self.calls: list[str] = []
        self.authorizations: set[str | None] = set()
        self.begins: list[BeginRequest] = []
        self.known: dict[str, Manifest] = {}
        self.loads: list[DiskReloadRequest] = []
        self.rollbacks: list[RollbackRequest] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.ended: dict[str, str] = {}
        #: Of buckets, as they came: bodies with their headers.
        self.bytes_received = 0
        self.protocol = PROTOCOL_VERSION
        self._token = token
        self._state = ServerState.SERVING
        self._version = "default"
        self._update: _Update | None = None
        self._last_error: LastError | None = None
        self._last_update: LastUpdate | None = None
        self._answers: dict[str, FinishAnswer] = {}
        self._history: list[str] = []
        self._epoch = 0
        self._threads = ThreadPoolExecutor(8, "contract-server")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self._app(), log_level="critical", lifespan="off", timeout_keep_alive=keep_alive_s, **(tls or {})
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def close(self) -> None:
        """Stop, whatever still runs."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()
        for worker in self.workers:
            try:
                worker.call("close")
            except WeightPushError:
                continue
        self._threads.shutdown(wait=False, cancel_futures=True)

    # routes

    def _app(self) -> FastAPI:
        app = FastAPI()
        for method, name in (
            ("GET", "status"),
            ("GET", "manifest"),
            ("GET", "events"),
            ("POST", "begin"),
            ("POST", "stream"),
            ("POST", "keep"),
            ("POST", "prepare"),
            ("POST", "finish"),
            ("POST", "abort"),
            ("POST", "rollback"),
        ):
            app.add_api_route(f"/reload/{name}", self._route(name), methods=[method], response_model=None)
        app.add_api_route("/reload", self._route("load"), methods=["POST"], response_model=None)
        return app

    def _route(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        handler: Callable[[Request], Awaitable[Response]] = getattr(self, f"_{name}")

        async def route(request: Request) -> Response:
            self.calls.append(name)
            header = request.headers.get("authorization")
            self.authorizations.add(header)
            try:
                if name != "status" and self._token is not None and header != f"Bearer {self._token}":
                    raise WeightPushError(ErrorCode.UNAUTHORIZED, "the control token is missing or wrong")
                update = self._update if name not in ("status", "manifest", "events") else None
                if update is None:
                    return await self._answer(name, handler, request)
                if not update.at_work and time.monotonic() - update.heard > update.request.deadlines.lease_s:
                    self._end(WeightPushError(ErrorCode.LEASE_LOST, "the trainer was silent"))
                update.at_work += 1
                try:
                    answer = await self._answer(name, handler, request)
                    update.heard = time.monotonic()
                finally:
                    update.at_work -= 1
                return answer
            except WeightPushError as error:
                return Response(error.body().model_dump_json(), error.http_status, media_type="application/json")

        return route

    async def _answer(self, name: str, handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        if (hook := self.hooks.get(name)) and (answer := await hook()) is not None:
            return answer
        return await handler(request)

    def status(self) -> Status:
        """Return what ``GET /reload/status`` says."""
        update = self._update
        return Status(
            protocol=self.protocol,
            instance_id=self.url,
            state=self._state,
            serving=self._state.serving,
            weight_version=self._version,
            update=None if update is None else self._update_status(update),
            last_error=self._last_error,
            last_update=self._last_update,
            expects=self._expects(),
            workers=[
                WorkerStatus(rank=rank, pid=1, device="cpu", weight_version=self._version, **self._described)
                for rank in range(len(self.workers))
            ],
        )

    def _expects(self) -> str:
        return hashlib.sha256(self.manifest.model_dump_json().encode()).hexdigest()

    def _update_status(self, update: _Update) -> UpdateStatus:
        request = update.request
        return UpdateStatus(
            update_id=str(request.update_id),
            epoch=update.epoch,
            mode=request.mode,
            phase=Phase.PREPARED if update.prepared else Phase.RECEIVING,
            weight_version=request.weight_version,
            transport=request.transport.name,
            in_flight=request.in_flight,
            digest=request.digest,
            tensors_done=len(update.tensors),
            tensors_total=len(request.manifest.tensors),
            bytes_done=sum(tensor.nbytes for tensor in update.tensors.values()),
            bytes_total=request.manifest.nbytes,
            started_at=utc_now(),
        )

    async def _status(self, _: Request) -> Response:
        status = self.status()
        return Response(status.model_dump_json(), 200 if status.serving else 503, media_type="application/json")

    async def _manifest(self, _: Request) -> Response:
        answer = self.manifest.model_copy(update={"digest": self._expects()})
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _events(self, _: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            last = ""
            yield ": hello\n\n"
            while not self._server.should_exit:
                status = self.status()
                update = status.update.model_dump_json(exclude={"started_at"}) if status.update else ""
                now = f"{status.state}{status.weight_version}{status.last_error}{update}"
                if now != last:
                    last = now
                    yield f"event: other\ndata: nothing\n\nevent: status\ndata: {status.model_dump_json()}\n\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _begin(self, request: Request) -> Response:
        call = BeginCall.model_validate_json(await request.body())
        manifest = call.manifest or self.known.get(call.manifest_digest or "")
        if manifest is None:
            raise WeightPushError(ErrorCode.UNKNOWN_MANIFEST, "no such manifest; send it")
        begin = call.with_manifest(manifest)
        update = self._update
        if update is None or update.request.update_id != begin.update_id:
            self.begins.append(begin)
            if update is not None:
                raise WeightPushError(ErrorCode.UPDATE_IN_PROGRESS, "another update runs")
            optional = {spec.name: spec for spec in self.manifest.optional}
            problems = compare_manifest(self.manifest.tensors, begin.manifest.tensors, optional=optional)
            if begin.partial:
                problems = [problem for problem in problems if problem.kind is not ProblemKind.MISSING]
            if problems:
                details = {"problems": [problem.model_dump(mode="json") for problem in problems]}
                raise WeightPushError(
                    ErrorCode.MANIFEST_REJECTED, f"the manifest does not fit: {problems[0]}", details=details
                )
            self.known[manifest.digest()] = manifest
            self._epoch += 1
            update = self._update = _Update(begin, self._epoch)
            if begin.transport.name != "http":
                await self._open(begin)
            self._state = ServerState.UPDATING
        answer = BeginAnswer(
            update_id=str(begin.update_id),
            epoch=update.epoch,
            accepted_transport=begin.transport.name,
            mode=begin.mode,
            plan=PlanSummary(in_place=len(begin.manifest.tensors), bytes=begin.manifest.nbytes),
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _open(self, begin: BeginRequest) -> None:
        config = begin.transport.model_dump()
        calls = [
            self._in_thread(worker, "open", config, begin.transport.rank_offset + rank, begin.deadlines.rendezvous_s)
            for rank, worker in enumerate(self.workers)
        ]
        try:
            await asyncio.gather(*calls)
        except WeightPushError as error:
            self._end(error)
            raise

    async def _stream(self, request: Request) -> Response:
        if request.headers["content-type"] == "application/json":
            announced = StreamRequest.model_validate_json(await request.body())
            update = self._active(announced.update_id, announced.epoch)
            number = announced.bucket
            if number not in update.buckets:
                await self._settled(update)
                numbers = range(number, number + announced.count)
                update.buckets.update(numbers)
                update.pending = asyncio.ensure_future(self._receive_all(update, numbers, announced.digests))
                update.pending.add_done_callback(_look_at_its_error)
        else:
            query = request.query_params
            update = self._active(query["update_id"], int(query["epoch"]))
            number = int(query["bucket"])
            if number in update.buckets:
                raise WeightPushError(ErrorCode.BUCKET_OUT_OF_ORDER, f"bucket {number} came twice")
            update.buckets.add(number)
            body = await request.body()
            self.bytes_received += len(body)
            header = parse_header(body, total_bytes=len(body))
            named, digests = digests_from_metadata(header.metadata)
            if named != number:
                raise WeightPushError(ErrorCode.BUCKET_MISMATCH, f"bucket {number} says that it is {named}")
            self._land(update, number, body[header.data_start :], digests)
        answer = StreamAnswer(
            update_id=str(update.request.update_id),
            bucket=number,
            tensors_done=len(update.tensors),
            tensors_total=len(update.request.manifest.tensors),
            bytes_done=0,
            bytes_total=update.request.manifest.nbytes,
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _receive_all(self, update: _Update, numbers: Sequence[int], digests: dict[str, str]) -> None:
        for number in numbers:
            if self._update is update:
                await self._receive(update, number, digests)

    async def _receive(self, update: _Update, number: int, digests: dict[str, str]) -> None:
        manifest, deadlines = update.request.manifest, update.request.deadlines
        nbytes, entries = manifest.buckets[number].nbytes, manifest.bucket_tensors(number)
        framed = update.request.transport.name == "shm"
        if framed:
            nbytes = frame_bytes(nbytes, len(entries))
        calls = [self._in_thread(worker, "receive", number, nbytes, deadlines.bucket_s) for worker in self.workers]
        copies = await asyncio.gather(*calls, return_exceptions=True)
        try:
            for copy in copies:
                if isinstance(copy, BaseException):
                    raise copy
                data = bytes(copy) if isinstance(copy, bytes) else copy.numpy().tobytes()
                self.bytes_received += len(data)
                if framed:
                    frame = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    found = read_digests(frame, manifest.buckets[number].nbytes, len(entries))
                    digests = dict(zip((spec.name for spec, _ in entries), texts(found), strict=True))
                self._land(update, number, data, digests)
        except WeightPushError as error:
            if framed and error.code is ErrorCode.TRANSPORT_FAILED:
                # A trainer that gives up hangs up first, and then says why.
                await asyncio.sleep(0.5)
                if self._update is not update:
                    return
            self._end(error)
            # Workers of a real server are told, and hang up.
            await asyncio.gather(*(self._in_thread(worker, "close") for worker in self.workers))

    def _land(self, update: _Update, number: int, data: bytes, digests: dict[str, str]) -> None:
        for spec, offset in update.request.manifest.bucket_tensors(number):
            part = bytearray(data[offset : offset + spec.nbytes])
            tensor = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
            if update.request.digest is DigestKind.WP64 and digests.get(spec.name) != tensor_digest(tensor):
                error = WeightPushError(ErrorCode.DIGEST_MISMATCH, f"bucket {number}: {spec.name!r} arrived changed")
                self._end(error)
                raise error
            update.tensors[spec.name] = tensor.view(spec.torch_dtype).view(spec.shape)

    async def _keep(self, request: Request) -> Response:
        keep = KeepRequest.model_validate_json(await request.body())
        update = self._active(keep.update_id, keep.epoch)
        answer = KeepAnswer(update_id=keep.update_id, epoch=update.epoch, lease_s=update.request.deadlines.lease_s)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _prepare(self, request: Request) -> Response:
        prepare = PrepareRequest.model_validate_json(await request.body())
        update = self._active(prepare.update_id, prepare.epoch)
        await self._settled(update)
        update.prepared = True
        answer = PrepareAnswer(update_id=prepare.update_id, epoch=update.epoch, fingerprint="f" * 16)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _finish(self, request: Request) -> Response:
        finish = FinishRequest.model_validate_json(await request.body())
        if finish.update_id not in self._answers:
            update = self._active(finish.update_id, finish.epoch)
            await self._settled(update)
            self._active(finish.update_id, finish.epoch)
            self._commit(update)
        return Response(self._answers[finish.update_id].model_dump_json(), media_type="application/json")

    async def _rollback(self, request: Request) -> Response:
        """Go back to the version of before, but not to its weights."""
        self.rollbacks.append(rollback := RollbackRequest.model_validate_json(await request.body()))
        update_id = str(rollback.update_id)
        if update_id not in self._answers:
            if not self._history:
                raise WeightPushError(ErrorCode.NO_COPY, "no copy of the version before", state=self._state)
            self._version = self._history.pop()
            self._answers[update_id] = FinishAnswer(
                update_id=update_id,
                weight_version=self._version,
                fingerprint="f" * 16,
                tensors=1,
                bytes=4_000_000,
                seconds=0.5,
                pause_seconds=0.25,
            )
        return Response(self._answers[update_id].model_dump_json(), media_type="application/json")

    async def _load(self, request: Request) -> Response:
        """Answer as a server that has loaded a checkpoint without reading it."""
        self.loads.append(load := DiskReloadRequest.model_validate_json(await request.body()))
        self._version = load.weight_version
        answer = FinishAnswer(
            update_id=str(load.update_id),
            weight_version=load.weight_version,
            fingerprint="f" * 16,
            tensors=1,
            bytes=4,
            seconds=0.5,
            pause_seconds=0.25,
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    def _commit(self, update: _Update) -> None:
        begin = update.request
        update_id = str(begin.update_id)
        self.weights = update.tensors
        self._history.append(self._version)
        self._version = begin.weight_version
        common: dict[str, Any] = {
            "update_id": update_id,
            "weight_version": begin.weight_version,
            "tensors": len(update.tensors),
            "bytes": begin.manifest.nbytes,
            "seconds": 0.5,
            "pause_seconds": 0.25,
        }
        self._answers[update_id] = FinishAnswer(fingerprint="f" * 16, **common)
        self._last_update = LastUpdate(
            mode=begin.mode, transport=begin.transport.name, digest=begin.digest, finished_at=utc_now(), **common
        )
        self.ended[update_id] = "committed"
        self._update, self._state = None, ServerState.SERVING

    async def _abort(self, request: Request) -> Response:
        abort = AbortRequest.model_validate_json(await request.body())
        if abort.update_id not in self.ended:
            self._active(abort.update_id, abort.epoch)
            self._end(WeightPushError(ErrorCode.ABORTED, f"aborted: {abort.reason}"))
        return await self._status(request)

    # state

    def fail(self, error: WeightPushError) -> None:
        """Fail the running update from outside, as a lost lease does."""
        self._end(error)

    def _end(self, error: WeightPushError) -> None:
        update = self._update
        if update is None:
            return
        update_id = str(update.request.update_id)
        written = bool(update.buckets)
        self._state = ServerState.FAILED if written else ServerState.SERVING
        self._last_error = LastError(
            code=error.code, message=error.message, update_id=update_id, at=utc_now(), details=error.details
        )
        self.ended[update_id] = error.code.value
        self._update = None

    def _active(self, update_id: str, epoch: int | None) -> _Update:
        update = self._update
        if update is not None and update.request.update_id == update_id and epoch in {None, update.epoch}:
            return update
        if update_id in self.ended and self._last_error is not None:
            cause = WeightPushError(self._last_error.code, self._last_error.message).body().error
            raise WeightPushError(
                ErrorCode.UPDATE_FAILED,
                f"update {update_id} has failed: {cause.message}",
                details={"cause": cause.model_dump(mode="json")},
                state=self._state,
            )
        raise WeightPushError(ErrorCode.STALE_UPDATE, f"update {update_id} is not running")

    async def _settled(self, update: _Update) -> None:
        if update.pending is not None:
            await update.pending
            self._active(str(update.request.update_id), update.epoch)

    async def _in_thread(self, worker: ReceiverProcess, *command: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, worker.call, *command)


def _look_at_its_error(task: asyncio.Task[None]) -> None:
    # Else asyncio complains when the task is collected, in whatever runs then: formatting that complaint while Python
    # compiles makes the compiler fail (https://github.com/python/cpython/issues/106905).
    if not task.cancelled():
        task.exception()


class DroppingProxy:
    """Forwards connections to a port, and breaks off where a request line starts with a marked text.

    ``drop`` maps such a text (``"POST /reload/begin"``) to how many times it still does so. ``how``: ``swallow`` the
    answer and close, send ``half`` of it and close, or ``reset`` the connection in the middle of the request.
    """

    def __init__(self, port: int, drop: dict[str, int], how: str = "swallow") -> None:
        self.drop = drop
        self._how = how
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            swallow = threading.Event()
            forward = threading.Thread(target=self._forward, args=(client, server, swallow), daemon=True)
            forward.start()
            try:
                while data := server.recv(65536):
                    if swallow.is_set():
                        if self._how == "half":
                            client.sendall(data[: len(data) // 2])
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    client.sendall(data)
            except OSError:
                return

    def _forward(self, client: socket.socket, server: socket.socket, swallow: threading.Event) -> None:
        try:
            while data := client.recv(65536):
                for text, left in self.drop.items():
                    if left > 0 and data.startswith(text.encode()):
                        self.drop[text] = left - 1
                        swallow.set()
                if swallow.is_set() and self._how == "reset":
                    server.sendall(data[: len(data) // 2])
                    # Closing with this option set sends a reset; the other thread closes.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    server.shutdown(socket.SHUT_RDWR)
                    return
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
