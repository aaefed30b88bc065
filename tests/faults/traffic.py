"""Steady traffic: clients that ask known prompts all the time, streaming and not, and keep what they were told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import httpx

from faults.checks import Answer
from support.server import ServerProcess
from weightpush_protocol.messages import VERSION_HEADER

MAX_TOKENS: Final = 12
_PAUSE_S: Final = 0.02
_REQUEST_S: Final = 240.0  # Longer than a server is ever stopped: until its trainer's deadlines are over.


class BrokenAnswerError(Exception):
    """A stream that had begun well told of an error of the server."""


class Traffic:
    """Clients in threads. ``moved_to`` a new server after a restart; ``quiet`` while somebody counts resources."""

    def __init__(self, server: ServerProcess, prompts: Sequence[str], clients: int = 3) -> None:
        self._server = server
        self._prompts = prompts
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._troubles: list[str] = []
        #: Answers since the start: complete ones, aborted ones, refusals of the gate, connections lost with a server.
        self.counts: Counter[str] = Counter()
        self._losses_expected = threading.Event()
        self._stop = threading.Event()
        self._turn = threading.Condition(self._lock)
        self._hushed = False
        self._asking = 0
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client-{number}", daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> tuple[list[Answer], list[str]]:
        """Return, and forget, the answers of status 200 and what should not have happened, since the last call."""
        with self._lock:
            taken = self._answers, self._troubles
            self._answers, self._troubles = [], []
        return taken

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Ask nothing within; what was asked before has ended.

        Raises:
            TimeoutError: a request got no end within its deadline.
        """
        with self._turn:
            self._hushed = True
            ended = self._turn.wait_for(lambda: not self._asking, _REQUEST_S + 30)
        try:
            if not ended:
                raise TimeoutError("a request has no end")
            yield
        finally:
            self._hush_over()

    def _hush_over(self) -> None:
        with self._turn:
            self._hushed = False
            self._turn.notify_all()

    def expect_losses(self) -> None:
        """Until ``moved_to``, connections may break: the server is being killed."""
        self._losses_expected.set()

    def moved_to(self, server: ServerProcess) -> None:
        """Ask ``server`` from now on; nothing may ask the old one any more, see ``quiet``."""
        self._server = server
        self._losses_expected.clear()

    def close(self) -> None:
        """End all clients."""
        self._stop.set()
        self._hush_over()
        for thread in self._threads:
            thread.join(_REQUEST_S + 30)

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 1
            with self._turn:
                self._turn.wait_for(lambda: not self._hushed)
                self._asking += 1
            try:
                self._ask(prompt, streamed=(turn + number) % 2 == 0)
            except (httpx.HTTPError, BrokenAnswerError) as error:
                self._note_loss(error)
            except Exception as error:  # noqa: BLE001 - a client that dies would see nothing any more, and say nothing
                self._note_trouble(f"a client cannot read its answer: {type(error).__name__}: {error}")
            finally:
                with self._turn:
                    self._asking -= 1
                    self._turn.notify_all()
            self._stop.wait(_PAUSE_S)

    def _note_loss(self, error: Exception) -> None:
        if self._losses_expected.is_set():
            self.counts["lost"] += 1
            self._stop.wait(0.2)
            return
        self._note_trouble(f"a request broke off: {type(error).__name__}: {error}")

    def _note_trouble(self, text: str) -> None:
        with self._lock:
            self._troubles.append(text)

    def _ask(self, prompt: str, *, streamed: bool) -> None:
        body = {
            **{"model": str(self._server.model), "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0},
            **{"ignore_eos": True, "stream": streamed},
        }
        with (
            httpx.Client(base_url=self._server.url, trust_env=False, timeout=_REQUEST_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code == 200:
                self._note_answer(read_answer(prompt, response, streamed=streamed))
            else:
                self._note_refusal(response.status_code, response.read())

    def _note_answer(self, answer: Answer | None) -> None:
        with self._lock:
            if answer is None:
                self.counts["evicted"] += 1
                return
            self.counts["complete" if answer.finish != "abort" else "aborted"] += 1
            self._answers.append(answer)

    def _note_refusal(self, status: int, body: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if status == 503 and json.loads(body)["error"]["code"] == "not_serving":
                self.counts["refused"] += 1
                return
        if self._losses_expected.is_set():
            self.counts["lost"] += 1
            return
        self._note_trouble(f"a request was answered {status}: {body[:300]!r}")


def read_answer(prompt: str, response: httpx.Response, *, streamed: bool) -> Answer | None:
    """Read an answer of status 200 to its end; None for a stream that ended without saying why.

    Raises:
        BrokenAnswerError: the server's own error came in the middle of a stream.
    """
    version = response.headers.get(VERSION_HEADER, "")
    if not streamed:
        choice = json.loads(response.read())["choices"][0]
        return Answer(prompt, version, choice["text"], choice["finish_reason"], streamed)
    text, finish = "", None
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise BrokenAnswerError(f"a stream ended with an error: {event['error']}")
            part = event["choices"][0]
            text += part["text"]
            finish = part["finish_reason"] or finish
    return None if finish is None else Answer(prompt, version, text, finish, streamed)
