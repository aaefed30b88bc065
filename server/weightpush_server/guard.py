"""The worker's own last line: while its weights are in pieces it runs no forward, whoever asks.

The gate keeps requests away and the engine is paused; this guard holds even if somebody resumes the engine. Raising in
``execute_model`` would kill the engine, so a step is answered without sampled tokens: requests stall until the next
commit and then go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TaintedGuard:
    """Wraps ``execute_model`` of one model runner."""

    def __init__(self) -> None:
        self.tainted = False
        self.steps_withheld = 0

    def install(self, runner: Any) -> None:
        """Put the guard before ``runner.execute_model``. A second call on the same runner does nothing."""
        if getattr(runner, "_weightpush_guard", None) is not None:
            return
        runner._weightpush_guard = self
        runner.execute_model = self._guarded(runner, runner.execute_model)

    def _guarded(self, runner: Any, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # A dummy step belongs to no request; engines that run in lockstep must not miss one.
            if not self.tainted or kwargs.get("dummy_run"):
                return execute_model(scheduler_output, *args, **kwargs)
            self.steps_withheld += 1
            _keep_books(runner, scheduler_output)
            return _no_tokens(scheduler_output)

        return guarded


def _keep_books(runner: Any, scheduler_output: Any) -> None:
    """Let the runner note new, finished and preempted requests, as at the start of any step."""
    if hasattr(runner, "_update_states"):  # Model runner V1.
        runner._update_states(scheduler_output)
        return
    runner.update_pp_decode_requests()  # V2.
    for note in (runner.finish_requests, runner.free_states, runner.add_requests, runner.update_requests):
        note(scheduler_output)
    runner.block_tables.apply_staged_writes()


def _no_tokens(scheduler_output: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    request_ids = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[] for _ in request_ids],
    )
