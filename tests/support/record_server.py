"""Our routes, gate and shared record on a real port, without vLLM: a test writes into the record what shall be seen."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.messages import Deadlines, DigestKind, InFlight, UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_server.config import ServerConfig
from weightpush_server.context import ServerContext
from weightpush_server.gate import WeightPushMiddleware
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord
from weightpush_server.router import router
from weightpush_server.shared_state import SharedState
from weightpush_server.tokens import write_private

GIB = 2**30


class _Core:
    """Workers that have nothing to say."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    async def call_utility_all_async(self, *_: Any) -> list[list[dict[str, Any]]]:
        return [[{"ok": True, "fingerprint": "c0ffee" * 5}] * self._workers]


class _Client:
    errored = False

    def __init__(self, workers: int) -> None:
        self.engine_core = _Core(workers)

    async def pause_generation(self, *_: Any, **__: Any) -> None:
        return None


class RecordServer:
    """A server with its own thread and port."""

    def __init__(
        self,
        folder: Path,
        *,
        token: str | None = None,
        fleet_origins: Sequence[str] = (),
        workers: int = 2,
        port: int = 0,
    ) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = token
        self._folder = folder / uuid.uuid4().hex
        self._fleet_origins = tuple(fleet_origins)
        self._workers = workers
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def start(self, *, fleet_origins: Sequence[str] | None = None) -> RecordServer:
        """Start serving; ``fleet_origins`` may name servers whose ports were not known before."""
        (self._folder / "spool").mkdir(parents=True)
        token_file = None
        if self.token is not None:
            token_file = self._folder / "token"
            write_private(token_file, self.token)
        config = ServerConfig(
            run_directory=self._folder,
            token_file=token_file,
            fleet_origins=self._fleet_origins if fleet_origins is None else tuple(fleet_origins),
        )
        control = ControlRecord(instance_id=uuid.uuid4().hex, weight_version="step-40", previous_version="step-39")
        self.shared = SharedState.create(config.state_file, workers=self._workers, control=control)
        for rank in range(self._workers):
            self.set_worker(rank, weight_version="step-40", self_check="passed")
        app = FastAPI()
        app.include_router(router)
        app.state.weightpush = context = ServerContext(config)
        app.add_middleware(WeightPushMiddleware)

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
                self.requests.append((scope["method"], scope["path"] + scope["query_string"].decode(), headers))
            await app(scope, receive, send)

        settings = uvicorn.Config(noted, log_level="critical", lifespan="off")
        self._server = app.state.server = uvicorn.Server(settings)

        async def run() -> None:
            client: Any = _Client(self._workers)
            await context.start(client)
            await self._server.serve(sockets=[self._socket])

        self._thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def close(self) -> None:
        """Stop, whatever still runs."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()

    def set_worker(self, rank: int, **changes: Any) -> None:
        """Write what a worker says of itself."""
        present = self.shared.worker(rank)
        fields = present.model_dump() if present is not None else {"rank": rank, "pid": 4000 + rank, "device": "cpu"}
        self.shared.write_worker(WorkerRecord.model_validate({**fields, **changes}))

    def begin(self, version: str, phase: Phase = Phase.RECEIVING, **changes: Any) -> str:
        """Begin an update and bring it to ``phase``; return its id."""
        update_id = uuid.uuid4().hex
        fields: dict[str, Any] = {
            "request_digest": "d",
            "mode": UpdateMode.DIRECT,
            "transport": "shm",
            "in_flight": InFlight.WAIT,
            "digest": DigestKind.WP64,
            "deadlines": Deadlines(),
            "tensors_total": 291,
            "bytes_total": GIB,
            "buckets_total": 8,
            **changes,
        }
        with self.shared.transaction() as control:
            control.reserve(
                update_id,
                "d",
                lambda record: UpdateRecord(
                    update_id=update_id,
                    epoch=record.epoch,
                    origin=record.state,
                    weight_version=version,
                    **fields,
                ),
            )
        if fields["mode"] is UpdateMode.STAGED:
            with self.shared.transaction() as control:
                control.stage()
        elif phase not in (Phase.CHECKING, Phase.RENDEZVOUS):
            with self.shared.transaction() as control:
                control.close_gate()
        self.enter(phase)
        return update_id

    def enter(self, phase: Phase, *, seconds: dict[Phase, float] | None = None) -> None:
        """Go on to ``phase``; ``seconds`` says how long each phase so far shall have taken."""
        with self.shared.transaction() as control:
            assert control.update is not None
            control.update.enter(phase)
            untouched = (Phase.CHECKING, Phase.RENDEZVOUS, Phase.DRAINING)
            control.update.written = control.state is ServerState.UPDATING and phase not in untouched
            if seconds is not None:
                control.update.phase_seconds = {name.value: spent for name, spent in seconds.items()}
                control.update.started -= sum(seconds.values())
                serving = {Phase.CHECKING, Phase.RENDEZVOUS}
                if control.update.mode is UpdateMode.STAGED:
                    serving.add(Phase.RECEIVING)
                if control.update.gate_closed is not None:
                    control.update.gate_closed -= sum(spent for name, spent in seconds.items() if name not in serving)

    def progress(self, part: float) -> None:
        """Let the workers have landed that part of the update."""
        update = self.shared.control().update
        assert update is not None
        for rank in range(self._workers):
            self.set_worker(
                rank,
                epoch=update.epoch,
                tainted=True,
                buckets_done=int(update.buckets_total * part),
                tensors_done=int(update.tensors_total * part),
                bytes_done=int(update.bytes_total * part),
            )

    def commit(self) -> None:
        """End the update with the new version in force."""
        with self.shared.transaction() as control:
            control.commit(fingerprint="5eed" * 8)
            version = control.weight_version
        for rank in range(self._workers):
            self.set_worker(rank, weight_version=version, tainted=False)

    def fail(self, error: WeightPushError) -> None:
        """End the update with an error."""
        with self.shared.transaction() as control:
            control.fail(error)

    def push(self, version: str, seconds: dict[Phase, float], **changes: Any) -> None:
        """Carry out a whole update that took ``seconds``."""
        self.begin(version, **changes)
        self.enter(Phase.PUBLISHING, seconds=seconds)
        self.commit()
