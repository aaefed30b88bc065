"""What weightpush keeps in one API process; routes and middleware find it at ``app.state.weightpush``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.bodies import Spool
from weightpush_server.config import ServerConfig
from weightpush_server.coordinator import Coordinator
from weightpush_server.engine import Engine
from weightpush_server.gate import Gate
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.observe.listener import Listener
from weightpush_server.publishing import combine_fingerprints
from weightpush_server.rundir import RunDirectory
from weightpush_server.shared_state import SharedState
from weightpush_server.tokens import TokenFile
from weightpush_server.watch import Watchdog

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from weightpush_server.compat.calls import VllmCalls


def vllm_paths() -> frozenset[str]:
    """Return the paths of the routes that ``--compat vllm`` adds."""
    from weightpush_server.compat.router import VLLM_PATHS

    return VLLM_PATHS


class ServerContext:
    """Made when the routes are attached; complete once the engine is known."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.shared = SharedState(config.state_file)
        self.shared.listener = Listener()
        self.gate = Gate(self.shared)
        #: One bucket lands while the next arrives.
        self.spool = Spool(config.spool_dir, 2 * config.max_bucket_bytes)
        #: ``None``: no token is asked for.
        self.tokens = TokenFile(config.token_file) if config.token_file is not None else None
        #: Paths of vLLM's own weight-transfer routes, as far as they are served.
        self.vllm_paths = vllm_paths() if config.vllm_routes else frozenset()
        #: Whether those ask for no token.
        self.vllm_open = config.vllm_routes_open
        self._engine: Engine | None = None
        self._coordinator: Coordinator | None = None
        self._vllm_calls: VllmCalls | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def coordinator(self) -> Coordinator:
        """The update machinery. Raises ``WeightPushError`` (``internal``) before the engine is known."""
        if self._coordinator is None:
            raise WeightPushError(ErrorCode.INTERNAL, "the engine of this server is not up yet")
        return self._coordinator

    @property
    def vllm_calls(self) -> VllmCalls:
        """What vLLM's own routes stand on. Raises ``WeightPushError`` (``internal``) before the engine is known."""
        if self._vllm_calls is None:
            raise WeightPushError(ErrorCode.INTERNAL, "the engine of this server is not up yet")
        return self._vllm_calls

    def engine_dead(self) -> bool:
        """Whether vLLM has given the engine up; not before it is known."""
        return self._engine is not None and self._engine.dead

    async def start(self, client: EngineClient) -> None:
        """Connect to the engine, let its workers introduce themselves, and start watching."""
        engine = self._engine = Engine(client, workers=self.shared.workers)
        workers = await engine.call("weightpush_describe")
        with self.shared.transaction() as control:
            if control.epoch == 0 and control.state.serving:
                control.fingerprint = combine_fingerprints([worker["fingerprint"] for worker in workers])
        lifecycle = UpdateLifecycle(self.shared, engine)
        self._coordinator = Coordinator(self.shared, engine, lifecycle, self.config.reload_roots)
        if self.config.vllm_routes:
            from weightpush_server.compat.calls import VllmCalls

            self._vllm_calls = VllmCalls(self.shared, engine, lifecycle, client.vllm_config)
        watchdog = Watchdog(self.shared, engine, lifecycle, self.gate)
        self._watching = asyncio.create_task(watchdog.run(), name="weightpush-watchdog")
        RunDirectory(self.config.run_directory).note_up()
