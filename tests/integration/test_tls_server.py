"""A server with vLLM's own TLS options, an API key, and a file of control tokens that is rotated while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from integration.conftest import PROMPTS, Checkpoints
from support.certificates import Authority
from support.server import ServerProcess
from weightpush_client import ErrorCode, PushError, WeightPusher

OLD, NEW, API_KEY = "the-old-token-4711", "the-new-token-0815", "the-api-key-42"


@dataclass(frozen=True)
class Secure:
    server: ServerProcess
    ca: Authority
    other: Authority
    tokens: Path


@pytest.fixture(scope="module")
def secure(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    ca, other = Authority(folder, "ours"), Authority(folder, "other")
    issued = ca.issue("127.0.0.1")
    tokens = folder / "tokens"
    tokens.write_text(f"{OLD}\n")
    tokens.chmod(0o644)
    arguments = ("--ssl-certfile", str(issued.certificate), "--ssl-keyfile", str(issued.key), "--api-key", API_KEY)
    arguments += ("--control-token-file", str(tokens))
    with ServerProcess(checkpoints.a, arguments, folder=folder, ca_file=ca.file) as server:
        yield Secure(server, ca, other, tokens)


def refused(url: str, checkpoints: Checkpoints, **options: object) -> PushError:
    with pytest.raises(PushError) as caught, WeightPusher(url, **options) as pusher:  # type: ignore[arg-type] # any
        pusher.push(checkpoints.b, weight_version="bad")
    return caught.value


@pytest.mark.slow
@pytest.mark.case("C24", "C25")
def test_a_push_over_tls_while_tokens_rotate(
    secure: Secure, checkpoints: Checkpoints, cold_b: dict[str, str], tmp_path: Path
) -> None:
    server, ca = secure.server, secure.ca
    assert server.url.startswith("https://")
    for options, code, words in (
        ({"token": OLD}, ErrorCode.UNREACHABLE, "its certificate is not trusted"),
        ({"token": OLD, "verify": secure.other.file}, ErrorCode.UNREACHABLE, "its certificate is not trusted"),
        ({"token": NEW, "verify": ca.file}, ErrorCode.UNAUTHORIZED, "credentials"),
        ({"token": API_KEY, "verify": ca.file}, ErrorCode.UNAUTHORIZED, "credentials"),
        ({"verify": ca.file}, ErrorCode.UNAUTHORIZED, "no credentials came"),
    ):
        error = refused(server.url, checkpoints, **options)
        assert error.code is code
        assert words in error.message
    plain = refused(server.url.replace("https", "http"), checkpoints, token=OLD)
    assert "does this port speak TLS? Then write https://" in plain.message

    mine = tmp_path / "token"
    mine.write_text(OLD)
    with WeightPusher(server.url, token_file=mine, verify=ca.file, transport="gloo") as pusher:
        pusher.push(checkpoints.b, weight_version="B")
        # Both are good, then only the new one; the trainer reads its own file again.
        secure.tokens.write_text(f"{OLD}\n{NEW}\n")
        pusher.push(checkpoints.b, weight_version="B1")
        mine.write_text(NEW)
        secure.tokens.write_text(f"{NEW}\n")
        pusher.push(checkpoints.b, weight_version="B2")
        # A file that is broken by mistake takes nobody's access away.
        secure.tokens.write_text("\n")
        pusher.push(checkpoints.b, weight_version="B3")
    assert refused(server.url, checkpoints, token=OLD, verify=ca.file).code is ErrorCode.UNAUTHORIZED
    assert server.status()["weight_version"] == "B3"
    body = {"model": str(server.model), "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {API_KEY}"},
        timeout=60,
        verify=server.how["verify"],
        trust_env=False,
    )
    assert answer.json()["choices"][0]["text"] == cold_b[PROMPTS[0]]

    log = server.log.read_text()
    assert log.count("can read the control tokens in") >= 1
    assert log.count("it holds no token; the control tokens of before stay in force") == 1
    assert OLD not in log
    assert NEW not in log
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        for file in ("environ", "cmdline"):
            text = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert OLD.encode() not in text
            assert NEW.encode() not in text
