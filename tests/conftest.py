"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os

import pytest

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's proxies and token out of every test."""
    for name in _PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("WEIGHTPUSH_CONTROL_TOKEN", raising=False)


def pytest_configure() -> None:
    # Two cores: more threads only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
