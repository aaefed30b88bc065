"""What weightpush asks of vLLM's engine client: RPCs to every worker, pausing, caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

PauseMode = Literal["abort", "wait", "keep"]
_T = TypeVar("_T")
#: How often a pending call looks whether its engine still lives, in seconds.
_HEARTBEAT_S: Final = 0.2
#: How long after a call that broke the engine may still turn out to be dead, in seconds.
_DYING_S: Final = 2.0
#: How often a bounded call looks whether it is still wanted, in seconds.
_LOOK_S: Final = 0.05


class Engine:
    """All engine cores and workers of this server, seen from one API process."""

    def __init__(self, client: EngineClient, *, workers: int) -> None:
        self._client: Any = client
        self._workers = workers

    @property
    def dead(self) -> bool:
        """Whether vLLM has given this engine up."""
        return bool(self._client.errored)

    async def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Run an RPC of the worker extension on every worker and return their answers, in rank order.

        Never given a timeout: vLLM's answers carry no id, so that after a timeout every later call would get the
        answer of the one before. Whoever cannot wait must leave this call running.

        Raises:
            WeightPushError: the first worker's error; ``worker_lost`` if the engine died or a worker did not answer.
        """
        # With several engines `collective_rpc` would return the answers of the first one only.
        per_engine: list[list[dict[str, Any]]] = await self._while_alive(
            self._client.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        )
        answers = [answer for answers in per_engine for answer in answers]
        if len(answers) != self._workers:
            raise self._lost(f"{method} was answered by {len(answers)} of {self._workers} workers")
        for answer in answers:
            if not answer["ok"]:
                raise WeightPushError.from_detail(ErrorDetail.model_validate(answer["error"]))
        return answers

    async def call_within(
        self, timeout_s: float, method: str, *args: Any, look: Callable[[], object] | None = None
    ) -> list[dict[str, Any]]:
        """As ``call``, but wait no longer than ``timeout_s`` seconds, or until ``look`` raises.

        The call itself goes on: vLLM has no way to take it back, and the worker knows by the epoch that it is late.

        Raises:
            WeightPushError: as ``call``; ``deadline_exceeded``.
        """
        calling = asyncio.ensure_future(self.call(method, *args))
        calling.add_done_callback(swallow)
        deadline = time.monotonic() + timeout_s
        while not calling.done():
            if time.monotonic() >= deadline:
                raise WeightPushError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"the workers did not answer {method.removeprefix('weightpush_')} within {timeout_s:g} s: they are "
                    "stopped, or busy with an earlier call",
                )
            await asyncio.wait({calling}, timeout=_LOOK_S)
            if look is not None and not calling.done():
                look()
        return calling.result()

    def start_pause(self, mode: PauseMode) -> asyncio.Future[None]:
        """Ask all engines to pause; the future is done when they rest. Nobody needs to wait for it."""
        # Not `pause_generation`, which then sleeps 20 ms for nothing but a tidier order of events.
        core = self._client.engine_core
        pausing = asyncio.ensure_future(self._while_alive(core.pause_scheduler_async(mode=mode, clear_cache=False)))
        pausing.add_done_callback(swallow)
        return pausing

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """Pause all engines; return whether that was complete within ``timeout_s``. A late pause still happens."""
        pausing = self.start_pause(mode)
        done, _ = await asyncio.wait({pausing}, timeout=timeout_s)
        if pausing in done:
            pausing.result()
            return True
        return False

    async def resume(self) -> None:
        """Let all engines run again."""
        await self._while_alive(self._client.resume_generation())

    async def reset_caches(self) -> None:
        """Forget everything that was computed with the old weights, KV of frozen requests included.

        Raises:
            WeightPushError: ``cache_reset_failed``, if a cache says that it could not be emptied.
        """
        try:
            emptied = await self._while_alive(
                self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            )
            await self._while_alive(self._client.reset_encoder_cache())
            await self._while_alive(self._client.reset_mm_cache())
        except WeightPushError:
            raise
        except Exception as error:
            message = f"caches of the old weights could not be emptied: {type(error).__name__}: {error}"
            raise WeightPushError(ErrorCode.CACHE_RESET_FAILED, message) from error
        if not emptied:
            raise WeightPushError(
                ErrorCode.CACHE_RESET_FAILED, "the prefix cache could not be emptied: requests still hold its blocks"
            )

    async def reset_prefix_cache(self, *, running: bool, connector: bool) -> bool:
        """Empty the prefix cache and return whether that was possible: requests that run hold blocks.

        ``running``: stop those first. ``connector``: the second tier of a KV connector, too.
        """
        emptied = await self._while_alive(
            self._client.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        )
        return bool(emptied)

    async def label(self, weight_version: str) -> None:
        """Tell vLLM the version, for the answers of its own that carry one."""
        await self._while_alive(self._client.update_weight_version(weight_version))

    async def _while_alive(self, work: Awaitable[_T]) -> _T:
        """Wait for ``work``, but not for ever: vLLM does not answer the calls that a dead engine left open."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_HEARTBEAT_S)
                if self.dead and not task.done():
                    raise self._lost("it died during a call")
            return task.result()
        except WeightPushError:
            raise
        except Exception as error:
            if await self._dies():
                raise self._lost(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            task.cancel()

    async def _dies(self) -> bool:
        """Whether the engine is dead, or will be in a moment: a call that a dying worker cancels fails before that."""
        waited = 0.0
        while not self.dead and waited < _DYING_S:
            await asyncio.sleep(_HEARTBEAT_S)
            waited += _HEARTBEAT_S
        return self.dead

    @staticmethod
    def _lost(why: str) -> WeightPushError:
        return WeightPushError(ErrorCode.WORKER_LOST, f"a worker or its engine is gone: {why}; restart the server")


def swallow(task: asyncio.Future[Any]) -> None:
    """Fetch the exception of a task whose outcome nobody waits for; asyncio would log it as lost."""
    if not task.cancelled():
        task.exception()
