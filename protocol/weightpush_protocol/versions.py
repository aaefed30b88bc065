"""Whether a client and a server speak versions of the wire contract that fit together.

===========  ===========  =========================================================
client       server
===========  ===========  =========================================================
1.1          1.1          fits
1.1          1.4          fits: the server can do all that the client asks for
1.1          1.0          does not: the client may ask for what the server lacks
1.1          2.0          does not
===========  ===========  =========================================================
"""

from __future__ import annotations

from typing import Final

#: What a client must have in common with a server to understand its status.
READING: Final = "1.0"


def mismatch(*, client: str, server: str) -> str | None:
    """Say why these versions do not fit together and what to do; None where they do."""
    ours, theirs = _parts(client), _parts(server)
    if ours is not None and theirs is not None and ours[0] == theirs[0] and ours[1] <= theirs[1]:
        return None
    older = "client" if ours is not None and theirs is not None and ours < theirs else "server"
    return f"the server speaks protocol {server}, the client {client}: install a matching weightpush on the {older}"


def _parts(version: str) -> tuple[int, int] | None:
    major, _, minor = version.partition(".")
    # Nothing else that int() would take, such as other alphabets' digits.
    if not all(part.isascii() and part.isdecimal() for part in (major, minor)):
        return None
    return int(major), int(minor)
