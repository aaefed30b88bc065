"""Addresses and the control token, as people write them."""

from __future__ import annotations

import pytest

from weightpush_client.urls import control_token, normalise_url
from weightpush_protocol.errors import ErrorCode, WeightPushError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000"),
        (" HTTP://Host:8000/ ", "http://host:8000"),
        ("host:8000", "http://host:8000"),
        ("host:8000//", "http://host:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("https://host", "https://host"),
        ("https://host/models/a/", "https://host/models/a"),
        ("host:8000/models/a", "http://host:8000/models/a"),
    ],
)
def test_normal_form(text: str, url: str) -> None:
    assert normalise_url(text) == url
    assert normalise_url(url) == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host", "'host' has no port: write host:port"),
        ("host/path", "has no port"),
        ("[::1]", "has no port"),
        ("::1:8000", "is not a server address|not a server address"),
        ("", "has no port"),
        ("ftp://host:1", "is not a server address: write http://"),
        ("http://", "is not a server address"),
        ("http://host:99999", "not a server address: Port out of range"),
        ("http://host:port", "not a server address: Port could not be cast"),
        ("http://host:1?x=1", "is not a server address"),
        ("http://host:1/a b", "a blank or a backslash"),
        ("http://[::1", "not a server address"),
    ],
)
def test_what_is_no_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(WeightPushError, match=message) as caught:
        normalise_url(text)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    for text in ("http://user:hunter2@host:8000", "user:hunter2@host:8000"):
        with pytest.raises(WeightPushError, match="must not hold credentials") as caught:
            normalise_url(text)
        assert "hunter2" not in str(caught.value)


def test_the_token_comes_from_the_argument_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert control_token(None) is None
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", "from-env\n")
    assert control_token(None) == "from-env"
    assert control_token(" given ") == "given"
    assert control_token("") is None
    for wrong in ("a b", "a\nb", "gehe\u00efm"):
        with pytest.raises(WeightPushError, match="visible ASCII") as caught:
            control_token(wrong)
        assert wrong not in str(caught.value)
