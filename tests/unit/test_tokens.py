"""Control tokens in a file that changes, on the server's side and on the client's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightpush_client.access import ControlToken
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.tokens import MAX_TOKENS, TokenFile, parse_tokens, write_private


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("old\n")
    path.chmod(0o600)
    return path


def test_a_rotation_with_an_overlap(file: Path, server_log: pytest.LogCaptureFixture) -> None:
    tokens = TokenFile(file)
    assert (tokens.accepts("old"), tokens.accepts("new"), tokens.accepts("")) == (True, False, False)
    file.write_text("old\n\n  new  \n")
    assert (tokens.accepts("old"), tokens.accepts("new"), tokens.accepts("ol")) == (True, True, False)
    file.write_text("new\n")
    assert (tokens.accepts("old"), tokens.accepts("new")) == (False, True)
    assert [record.levelname for record in server_log.records] == ["INFO", "INFO"]
    assert "old" not in server_log.text.replace(str(file), "")


def test_a_file_that_is_replaced_or_linked_elsewhere_is_noticed(tmp_path: Path) -> None:
    # As Kubernetes does with secrets: a link to a link to a directory that changes.
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(f"token-{name}")
        os.utime(tmp_path / name / "token", ns=(1, 1))
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "token").symlink_to("data/token")
    tokens = TokenFile(tmp_path / "token")
    assert tokens.accepts("token-1")
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "data")
    assert (tokens.accepts("token-1"), tokens.accepts("token-2")) == (False, True)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words", b"\xff\xfe", b"x" * 70_000, b"a\n" + "ü".encode()])
def test_a_broken_file_keeps_the_last_good_tokens_and_is_told_once(
    file: Path, content: bytes, server_log: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(file)
    file.write_bytes(content)
    for _ in range(3):
        assert tokens.accepts("old")
        assert not tokens.accepts("a")
    assert [record.levelname for record in server_log.records] == ["ERROR"]
    assert "stay in force" in server_log.text
    assert "two words" not in server_log.text
    file.write_text("good")
    assert (tokens.accepts("old"), tokens.accepts("good")) == (False, True)


def test_a_missing_file_keeps_the_last_good_tokens_and_is_told_once(
    file: Path, server_log: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(file)
    file.unlink()
    for _ in range(3):
        assert tokens.accepts("old")
    assert [record.levelname for record in server_log.records] == ["ERROR"]
    file.write_text("new")
    assert (tokens.accepts("old"), tokens.accepts("new")) == (False, True)


def test_what_is_no_file_keeps_the_last_good_tokens_and_nobody_waits_for_it(
    file: Path, server_log: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(file)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        (file.unlink if not file.is_dir() else file.rmdir)()
        make(file)
        for _ in range(3):
            assert (tokens.accepts("old"), tokens.accepts("new")) == (True, False)
    assert [record.levelname for record in server_log.records] == ["ERROR"]
    assert "not a regular file" in server_log.text
    file.unlink()
    file.write_text("new")
    assert (tokens.accepts("old"), tokens.accepts("new")) == (False, True)


def test_no_start_without_a_good_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no token"):
        TokenFile(tmp_path / "empty")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="not a regular file"):
        TokenFile(tmp_path / "fifo")


def test_a_file_that_others_can_read_is_warned_of(file: Path, server_log: pytest.LogCaptureFixture) -> None:
    TokenFile(file)
    assert server_log.records == []
    file.chmod(0o644)
    TokenFile(file)
    assert "every user of this machine can read" in server_log.text


def test_limits_of_a_file() -> None:
    assert parse_tokens("a\na\r\n b ") == ("a", "b")
    assert len(parse_tokens("\n".join(f"t{n}" for n in range(MAX_TOKENS)))) == MAX_TOKENS
    with pytest.raises(ValueError, match="at most"):
        parse_tokens("\n".join(f"t{n}" for n in range(MAX_TOKENS + 1)))
    with pytest.raises(ValueError, match="token 2 must be") as caught:
        parse_tokens("fine\nse cret")
    assert "se cret" not in str(caught.value)


def test_a_private_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "t", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "t", "y")


FORGET = """
import os, subprocess, sys
from weightpush_server.tokens import forget_environment
before = open("/proc/self/environ").read()
forget_environment("WEIGHTPUSH_CONTROL_TOKEN")
forget_environment("WEIGHTPUSH_CONTROL_TOKEN")
after = open("/proc/self/environ").read()
child = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, text=True).stdout
print(before.count("s3cret"), after.count("s3cret"), child.count("s3cret"), "WEIGHTPUSH_CONTROL_TOKEN" in os.environ)
print(before.replace("s3cret", "******") == after, os.environ["AFTER"])
"""


def test_a_token_leaves_the_environment_for_good() -> None:
    environment = {**os.environ, "WEIGHTPUSH_CONTROL_TOKEN": "s3cret", "AFTER": "still here"}
    told = subprocess.run([sys.executable, "-c", FORGET], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["1 0 0 False", "True still here"]


def test_a_clients_file_is_read_again_when_its_token_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", "from-environment")
    token = ControlToken(file=file)
    assert token.value == "old"
    assert not token.renewed("old")
    file.write_text("\nnew\nold\n")
    assert token.value == "old"
    assert token.renewed("old")
    assert token.value == "new"
    file.unlink()
    with pytest.raises(WeightPushError, match="cannot read the token file"):
        token.renewed("new")
    assert (ControlToken().value, ControlToken("given").value) == ("from-environment", "given")
    assert not ControlToken("given").renewed("given")
    with pytest.raises(WeightPushError, match="not both") as caught:
        ControlToken("a", file)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_client_does_not_wait_for_the_writer_of_a_pipe(file: Path) -> None:
    token = ControlToken(file=file)
    file.unlink()
    os.mkfifo(file)
    for read in (lambda: token.renewed("old"), lambda: ControlToken(file=file)):
        with pytest.raises(WeightPushError, match="not a regular file") as caught:
            read()
        assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(("content", "reason"), [(b"\xff", "not UTF-8"), (b"x" * 70_000, "larger"), (b"\n", "empty")])
def test_a_clients_broken_file_is_refused(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(WeightPushError, match=reason):
        ControlToken(file=file)
