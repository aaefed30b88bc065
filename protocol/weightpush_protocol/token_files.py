"""Files of control tokens, one a line, as servers and clients read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

#: Beyond any file that holds tokens, in bytes.
MAX_TOKEN_FILE_BYTES: Final = 64 * 1024


def read_token_file(path: Path) -> tuple[str, os.stat_result]:
    """Return a token file's text and status; never waits for whoever may write into a pipe.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, too large, or not UTF-8. The message repeats nothing of it.
    """
    # To open a pipe or a device may already do something, and without O_NONBLOCK it may not return.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # Exchanged meanwhile.
            raise ValueError("it is not a regular file")
        content = file.read(MAX_TOKEN_FILE_BYTES + 1)
    if len(content) > MAX_TOKEN_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_TOKEN_FILE_BYTES} bytes")
    try:
        return content.decode(), status
    except UnicodeDecodeError:
        # Its own text would quote the file's bytes.
        raise ValueError("it is not UTF-8") from None
