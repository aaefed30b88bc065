"""An RPC is through when every worker has said so: answers are counted and read, not only awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.engine import Engine

GOOD = {"ok": True, "value": 1}
TOLD = {"tensor": "a.b", "bucket": 2, "worker_rank": 1, "exception": "OSError"}
BAD = {
    "ok": False,
    "error": WeightPushError(ErrorCode.LANDING_FAILED, "no room", details=TOLD).body().error.model_dump(mode="json"),
}


class Client:
    """vLLM's client, as far as an RPC needs it; answers engine by engine."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.errored = False
        self.engine_core = self

    async def call_utility_all_async(self, *_: Any) -> Any:
        if isinstance(self.answers, Exception):
            self.errored = True
            raise self.answers
        if self.answers is None:
            await asyncio.sleep(60)
        return self.answers


def call(answers: Any, *, workers: int = 2) -> Any:
    return asyncio.run(Engine(Client(answers), workers=workers).call("weightpush_close", 1))  # type: ignore[arg-type] # stands for vLLM's


@pytest.mark.case("C107")
def test_all_workers_of_all_engines_have_answered() -> None:
    assert call([[GOOD], [GOOD]]) == [GOOD, GOOD]
    assert call([[GOOD, GOOD]]) == [GOOD, GOOD]


@pytest.mark.case("C107")
@pytest.mark.parametrize("answers", [[], [[]], [[GOOD]], [[GOOD, GOOD], [GOOD]]])
def test_a_missing_or_a_surplus_answer_is_no_success(answers: Any) -> None:
    with pytest.raises(WeightPushError, match=r"answered by \d of 2 workers") as caught:
        call(answers)
    assert caught.value.code is ErrorCode.WORKER_LOST


@pytest.mark.case("C15", "C107")
@pytest.mark.parametrize("answers", [[[GOOD, BAD]], [[BAD], [GOOD]]])
def test_one_worker_that_failed_fails_the_call_with_all_it_said(answers: Any) -> None:
    with pytest.raises(WeightPushError, match="no room") as caught:
        call(answers)
    assert caught.value.code is ErrorCode.LANDING_FAILED
    assert caught.value.details == TOLD


@pytest.mark.case("C14")
def test_an_engine_that_dies_in_a_call_is_a_lost_worker() -> None:
    with pytest.raises(WeightPushError, match="restart the server") as caught:
        call(RuntimeError("engine dead"))
    assert caught.value.code is ErrorCode.WORKER_LOST

    async def dies_silently() -> None:
        client = Client(None)
        asyncio.get_running_loop().call_later(0.2, setattr, client, "errored", True)
        await Engine(client, workers=2).call("weightpush_close", 1)  # type: ignore[arg-type] # stands for vLLM's

    with pytest.raises(WeightPushError, match="it died during a call"):
        asyncio.run(dies_silently())
