"""Fixtures and settings that all tests share."""

from __future__ import annotations

import logging
import os

import pytest

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's proxies, passwords and token out of every test."""
    for name in _PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("WEIGHTPUSH_CONTROL_TOKEN", raising=False)
    # `requests` sends what it finds there in the place of the header that it was given.
    monkeypatch.setenv("NETRC", os.devnull)


def pytest_configure() -> None:
    # Two cores: more threads only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def server_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the server logs, once each: vLLM's logger, whoever has set it up by now, hands nothing on to pytest's."""
    logger = logging.getLogger("vllm.weightpush")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, "vllm.weightpush")
    return caplog
