"""vLLM's entry points: loaded by name through the groups in ``pyproject.toml``, never imported by users."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

#: Name of both plugins' entry points; ``weightpush serve`` adds them to ``VLLM_PLUGINS``.
GENERAL_PLUGIN = "weightpush"
ENDPOINT_PLUGIN = "weightpush_http"


def register() -> None:
    """General plugin: runs in every vLLM process, perhaps several times."""
    from weightpush_server.loader import register_loader

    register_loader()
    _initialise_amx()


def _initialise_amx() -> None:
    # Where vLLM skips its warm-up, nobody else asks the kernel for AMX before the first short prompt, and the attention
    # kernel dies with SIGILL. Elsewhere this does nothing.
    import torch

    initialise = getattr(torch.cpu, "_init_amx", None)
    if initialise is not None:
        initialise()


class WeightPushEndpoints:
    """Endpoint plugin: adds the routes to vLLM's application and connects them to its engine."""

    name = ENDPOINT_PLUGIN
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add ``/reload``, and our series to ``/metrics``. The gate, a middleware, finds the context made here."""
        from weightpush_server.config import ServerConfig
        from weightpush_server.context import ServerContext
        from weightpush_server.observe.exposition import add_metrics_route
        from weightpush_server.router import router

        context = app.state.weightpush = ServerContext(ServerConfig.from_environment())
        app.include_router(router)
        if app.state.weightpush.config.vllm_routes:
            from weightpush_server.compat.router import router as vllm_router

            app.include_router(vllm_router)
        add_metrics_route(app, context.shared, context.engine_dead)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Connect to the engine."""
        if engine_client is None:
            raise RuntimeError("weightpush needs an engine; the render server has none")
        await state.weightpush.start(engine_client)


def endpoint_plugin() -> Any:
    """Entry point of the endpoint plugin."""
    return WeightPushEndpoints()
