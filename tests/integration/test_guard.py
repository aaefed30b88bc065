"""The worker's own guard, on a real engine: a request that meets torn weights stalls, and goes on after the commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from support.engine import ENVIRONMENT, engine
from support.tiny import checkpoint
from weightpush_server.guard import TaintedGuard


@pytest.mark.case("C47")
def test_a_tainted_worker_runs_no_forward_and_keeps_the_engine_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with engine(checkpoint("qwen3", 1, tmp_path), enable_prefix_caching=True) as running:
        cold = running.llm.generate(["guarded"], sampling, use_tqdm=False)[0].outputs[0].token_ids
        core = running.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        running.model.register_forward_pre_hook(count)
        guard = TaintedGuard()
        guard.install(runner)
        guard.install(runner)  # Twice is once.
        guard.tainted = True
        running.llm.llm_engine.add_request("stalled", "guarded", sampling)
        outputs = [output for _ in range(6) for output in running.llm.llm_engine.step()]
        assert not any(output.outputs[0].token_ids for output in outputs)
        assert guard.steps_withheld >= 1
        assert forwards == 0
        # What a commit does: the guard comes off, KV of stalled requests is forgotten, the engine goes on.
        guard.tainted = False
        assert core.reset_prefix_cache(reset_running_requests=True)
        finished = []
        for _ in range(50):
            finished += [output for output in running.llm.llm_engine.step() if output.finished]
            if finished:
                break
        assert finished[0].outputs[0].token_ids == cold
        assert forwards > 0
