"""Addresses of servers and the control token, as people write them."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from weightpush_protocol.errors import ErrorCode, WeightPushError

TOKEN_ENV: Final = "WEIGHTPUSH_CONTROL_TOKEN"


def normalise_url(text: str) -> str:
    """Return ``scheme://host:port/prefix`` without a trailing slash.

    ``host:port`` and ``[::1]:8000`` mean http.

    Raises:
        WeightPushError: ``invalid_request``: not such an address; it says what is wrong without repeating a password.
    """
    text = text.strip()
    if "://" not in text:
        text = f"http://{text}"
        if not re.search(r":\d+(/|$)", text.partition("://")[2].rpartition("]")[2]):
            raise _invalid(f"{text.removeprefix('http://')!r} has no port: write host:port, or a full URL")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _invalid(f"not a server address: {error} (IPv6 needs brackets, as in [::1]:8000)") from error
    if "@" in parts.netloc:
        raise _invalid("a server address must not hold credentials: give the control token instead")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise _invalid(f"{text!r} is not a server address: write http://host:port, https://host or host:port")
    if re.search(r"[\s\\]", text):
        raise _invalid(f"{text!r} is not a server address: it holds a blank or a backslash")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{parts.path.rstrip('/')}"


def normalise_urls(urls: str | Iterable[str]) -> tuple[str, ...]:
    """Return every address in its normal form.

    Raises:
        WeightPushError: ``invalid_request``: none, one twice, or one that is no address.
    """
    normal = tuple(normalise_url(url) for url in ([urls] if isinstance(urls, str) else urls))
    if not normal:
        raise _invalid("give the address of at least one server")
    if len(set(normal)) != len(normal):
        raise _invalid(f"a server is named twice: {', '.join(normal)}")
    return normal


def is_loopback(url: str) -> bool:
    """Whether a server address in normal form is of this machine itself."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def control_token(token: str | None) -> str | None:
    """Return ``token``, else the environment's ``WEIGHTPUSH_CONTROL_TOKEN``, else None. Surrounding blanks go.

    Raises:
        WeightPushError: ``invalid_request``: it cannot be sent in a header. The message does not repeat it.
    """
    value = (os.environ.get(TOKEN_ENV, "") if token is None else token).strip()
    if not value:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", value):
        raise _invalid("the control token must be visible ASCII characters without blanks")
    return value


def _invalid(message: str) -> WeightPushError:
    return WeightPushError(ErrorCode.INVALID_REQUEST, message)
