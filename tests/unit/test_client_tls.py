"""Whom a client trusts, what it shows, and how it says that something is wrong: real TLS with CAs of the tests."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Response

from support.certificates import Authority, Issued
from support.contract_server import TOKEN, ContractServer
from unit.test_cli import run
from unit.test_client_push import our_threads
from weightpush_client import ErrorCode, PushError, WeightPusher, http
from weightpush_protocol.manifest import TensorSpec

WEIGHTS = {"w": torch.arange(12.0)}
SPECS = [TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()]


@dataclass(frozen=True)
class Pki:
    ca: Authority
    other: Authority
    local: Issued

    def server(self, issued: Issued | None = None, **options: Any) -> dict[str, Any]:
        """Return uvicorn's options, as vLLM's ``--ssl-*`` set them."""
        issued = issued or self.local
        return {"ssl_certfile": str(issued.certificate), "ssl_keyfile": str(issued.key), **options}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    ca = Authority(folder, "ours")
    return Pki(ca, Authority(folder, "other"), ca.issue("127.0.0.1", "localhost"))


@pytest.fixture
def start() -> Iterator[Callable[..., ContractServer]]:
    servers: list[ContractServer] = []

    def make(**options: Any) -> ContractServer:
        servers.append(ContractServer(SPECS, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def refused(url: str, **options: Any) -> PushError:
    """Push, and return the error; nothing of the token may be in it."""
    with pytest.raises(PushError) as caught, WeightPusher(url, token=TOKEN, transport="http", **options) as pusher:
        pusher.push(WEIGHTS, weight_version="v1")
    assert our_threads() == []
    assert TOKEN not in str(caught.value) + str(caught.value.details)
    return caught.value


def test_a_private_ca_is_trusted_where_it_is_named(
    pki: Pki, start: Callable[..., ContractServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = start(tls=pki.server())
    with WeightPusher(server.url, token=TOKEN, transport="http", verify=pki.ca.file) as pusher:
        assert pusher.push(WEIGHTS, weight_version="v1").weight_version == "v1"
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)
    assert run("status", server.url, "--ca-file", pki.ca.file)[0] == 0
    assert run("status", server.url)[0] == 2
    monkeypatch.setenv("WEIGHTPUSH_CA_FILE", str(pki.ca.file))
    assert run("status", server.url)[0] == 0
    assert run("status", server.url, "--ca-file", pki.other.file)[0] == 2
    assert server.status().weight_version == "v1"


def test_who_is_not_trusted_gets_no_token(pki: Pki, start: Callable[..., ContractServer]) -> None:
    expired = pki.ca.issue("127.0.0.1", lasts=timedelta(hours=-1))
    elsewhere = pki.ca.issue("trainer.example")
    for tls, ca, words in (
        (pki.server(), pki.other, "its certificate is not trusted: .*; name the CA that signed it"),
        (pki.server(expired), pki.ca, "its certificate is not trusted: certificate has expired"),
        (pki.server(elsewhere), pki.ca, "its certificate is for another name: .*'127.0.0.1'"),
    ):
        server = start(tls=tls)
        error = refused(server.url, verify=ca.file)
        assert error.code is ErrorCode.UNREACHABLE
        assert re.search(words, error.message), error.message
        assert (server.calls, server.authorizations) == ([], set())


def test_plain_http_on_a_tls_port_and_the_other_way_round(pki: Pki, start: Callable[..., ContractServer]) -> None:
    secure = start(tls=pki.server())
    error = refused(secure.url.replace("https", "http"))
    assert "does this port speak TLS? Then write https://" in error.message
    plain = start()
    error = refused(plain.url.replace("http", "https"), verify=pki.ca.file)
    assert "it does not speak TLS (" in error.message
    assert secure.calls == plain.calls == []


def test_no_redirect_is_followed(pki: Pki, start: Callable[..., ContractServer]) -> None:
    target, source = start(), start()

    async def redirect() -> Response:
        return Response(status_code=307, headers={"Location": f"{target.url}/reload/status"})

    source.hooks["status"] = redirect
    error = refused(source.url)
    assert error.code is ErrorCode.PROTOCOL_ERROR
    assert "redirects are not followed" in error.message
    assert target.calls == []


def test_a_certificate_of_the_client(pki: Pki, start: Callable[..., ContractServer]) -> None:
    server = start(tls=pki.server(ssl_ca_certs=str(pki.ca.file), ssl_cert_reqs=ssl.CERT_REQUIRED))
    trainer = pki.ca.issue("trainer-7")
    for shown in (trainer.both, (trainer.certificate, trainer.key)):
        with WeightPusher(server.url, token=TOKEN, transport="http", verify=pki.ca.file, client_cert=shown) as pusher:
            pusher.push(WEIGHTS, weight_version="v1")
    code, _, err = run("status", server.url, "--ca-file", pki.ca.file, "--client-cert", trainer.both)
    assert code == 0, err
    calls = len(server.calls)
    for shown in (None, pki.other.issue("trainer-8").both):
        error = refused(server.url, verify=pki.ca.file, client_cert=shown)
        assert error.code is ErrorCode.UNREACHABLE
        assert "client_cert=, --client-cert" in error.message
    assert len(server.calls) == calls


def test_files_that_are_no_certificates_are_named(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    with pytest.raises(PushError, match=r"the CA file .*empty.pem cannot be used"):
        WeightPusher("https://127.0.0.1:1", verify=tmp_path / "empty.pem")
    with pytest.raises(PushError, match=r"the client certificate .*empty.pem cannot be used"):
        WeightPusher("https://127.0.0.1:1", client_cert=tmp_path / "empty.pem")
    with pytest.raises(PushError, match="certificates are always verified"):
        WeightPusher("https://127.0.0.1:1", verify=False)


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://trainer.example:1", True),
        ("http://10.0.0.7:1", True),
        ("http://[fd00::1]:1", True),
        ("https://10.0.0.7:1", False),
        ("http://127.0.0.9:1", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
    ],
)
def test_a_token_that_the_network_can_read_is_warned_of_once(
    url: str, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_warned", set())
    monkeypatch.delenv("WEIGHTPUSH_CONTROL_TOKEN", raising=False)
    caplog.set_level(logging.WARNING, "weightpush")
    WeightPusher(url).close()
    assert caplog.records == []
    for _ in range(2):
        WeightPusher(url, token="a-secret").close()
    assert len(caplog.records) == int(warned)
    assert "a-secret" not in caplog.text


@pytest.mark.case("C24")
def test_a_token_that_was_rotated_meanwhile_is_read_again(start: Callable[..., ContractServer], tmp_path: Path) -> None:
    server = start()
    file = tmp_path / "token"
    file.write_text("of-yesterday")
    with WeightPusher(server.url, token_file=file, transport="http", bucket_bytes=16) as pusher:
        with pytest.raises(PushError) as caught:
            pusher.push(WEIGHTS, weight_version="v1")
        assert caught.value.code is ErrorCode.UNAUTHORIZED
        # One that does not help is not tried again.
        assert server.calls.count("manifest") == 1
        file.write_text(f"{TOKEN}\n")
        pusher.push(WEIGHTS, weight_version="v1")
        assert server.calls.count("manifest") == 3
        assert server.calls.count("begin") == 1

        async def rotate() -> None:
            server._token = "of-tomorrow"
            file.write_text("of-tomorrow\n")
            server.hooks.clear()

        # In the middle of a push, at a call whose body is not sent twice otherwise.
        server.hooks["stream"] = rotate
        pusher.push(WEIGHTS, weight_version="v2")
    assert server.status().weight_version == "v2"
    assert torch.equal(server.weights["w"], WEIGHTS["w"])
