"""The control tokens of a server, in a file that every API process reads again when it changes.

One token a line: during a rotation the old and the new one stand there together. Tokens that came by environment or
command line are moved into a private file before any child starts, so that there is one way only.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Final

from weightpush_protocol.token_files import read_token_file
from weightpush_server.log import logger

#: The control token, where the user gives it that way. No process of the server keeps it in its environment.
TOKEN_VARIABLE: Final = "WEIGHTPUSH_CONTROL_TOKEN"
MAX_TOKENS: Final = 16

_Identity = tuple[int, int, int, int, int]


def parse_tokens(text: str) -> tuple[str, ...]:
    """Return the tokens of a file's text, one a line; empty lines do not count.

    Raises:
        ValueError: none, too many, or one that cannot travel in a header. The message repeats none.
    """
    tokens = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not tokens:
        raise ValueError("it holds no token")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"it holds {len(tokens)} tokens, at most {MAX_TOKENS} are allowed")
    for number, token in enumerate(tokens, 1):
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"token {number} must be visible ASCII characters without spaces")
    return tokens


def write_private(path: Path, token: str) -> None:
    """Write a token into a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{token}\n")


def forget_environment(name: str) -> None:
    """Take a variable out of this process's environment, and out of what ``/proc/<pid>/environ`` shows of it."""
    value = os.environ.pop(name, None)
    if value is not None and sys.platform == "linux":
        _blank(name, os.fsencode(value))


def _blank(name: str, value: bytes) -> None:
    # The strings that the kernel put on the stack at the start stay there when a variable is taken out.
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    if not 0 < start < end:
        return
    block = ctypes.string_at(start, end - start)
    wanted = os.fsencode(name) + b"=" + value + b"\0"
    at = 0 if block.startswith(wanted) else block.find(b"\0" + wanted) + 1
    if block[at:].startswith(wanted):
        ctypes.memset(start + at + len(name) + 1, ord("*"), len(value))


class TokenFile:
    """The tokens in ``path``, as they are now; the last good ones while the file is missing or broken.

    Raises:
        OSError: the file cannot be read at the start.
        ValueError: it holds no usable token then; the message repeats none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tokens: tuple[str, ...] = ()
        self._seen: _Identity | None = None
        self._complaint: str | None = None
        self._read()

    def accepts(self, given: str) -> bool:
        """Whether ``given`` is one of the tokens; takes the same time whichever it is, or none."""
        self._refresh()
        wanted = given.encode("utf-8", "surrogateescape")
        same = [hmac.compare_digest(wanted, token.encode()) for token in self._tokens]
        return any(same)

    def _refresh(self) -> None:
        with self._lock:
            try:
                # A rotation may replace the file, a link to it, or its content.
                if self._seen == _identity(self._path.stat()):
                    return
                before = self._tokens
                self._read()
            except (OSError, ValueError) as error:
                self._complain(error)
                return
            if self._complaint is not None or before != self._tokens:
                logger.info("control tokens were read again from %s: %d in force", self._path, len(self._tokens))
            self._complaint = None

    def _read(self) -> None:
        text, status = read_token_file(self._path)
        self._seen = _identity(status)
        self._tokens = parse_tokens(text)
        if status.st_mode & stat.S_IROTH:
            logger.warning("every user of this machine can read the control tokens in %s: chmod o-r", self._path)

    def _complain(self, error: OSError | ValueError) -> None:
        reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
        if reason != self._complaint:
            logger.error("%s: %s; the control tokens of before stay in force", self._path, reason)
        self._complaint = reason


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
