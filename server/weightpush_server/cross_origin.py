"""Which web pages may read this server: those of the origins that ``--fleet-origin`` names, and three routes only.

Control routes go by this alone, whatever vLLM's ``--allowed-origins`` lets other pages do with its own routes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

#: All that the status page asks for. None of them changes anything.
READABLE: Final = frozenset(f"/reload/{name}" for name in ("status", "events", "history"))
#: How long a browser may remember what it was allowed, in seconds.
_REMEMBERED_S: Final = 600

_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?|\[[0-9a-f:.]+\]")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def parse_origin(text: str) -> str:
    """Return an origin as browsers write it: ``http://gpu-1:8000``, in lower case, without a default port.

    Raises:
        ValueError: it is none; there are no patterns, and no paths.
    """
    try:
        parts = urlsplit(text.strip().rstrip("/").lower())
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} is no origin: write http://HOST:PORT or https://HOST:PORT") from None
    host = parts.netloc.rpartition("@")[2]
    host = host[: -len(f":{port}")] if port is not None else host
    rest = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in _DEFAULT_PORTS or rest or not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} is no origin: write http://HOST:PORT or https://HOST:PORT, without a path")
    shown = "" if port is None or port == _DEFAULT_PORTS[parts.scheme] else f":{port}"
    return f"{parts.scheme}://{host}{shown}"


class CrossOrigin:
    """Answers browsers that ask whether a page from elsewhere may read an answer."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        """``origins`` as of `parse_origin`."""
        self._origins = frozenset(origins)

    def preflight(self, method: str, path: str, headers: Headers) -> Response | None:
        """Return the answer to a browser that asks first, if a page may make the call; it brings no token yet."""
        asked = headers.get("access-control-request-method")
        if method != "OPTIONS" or asked != "GET" or not self._allowed(path, headers):
            return None
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET",
                "Access-Control-Allow-Headers": "Authorization",
                "Access-Control-Max-Age": str(_REMEMBERED_S),
            },
        )

    def labelled(self, path: str, scope: Scope, send: Send) -> Send:
        """Return a ``send`` whose answers say who may read them, refusals included."""
        headers = Headers(scope=scope)
        origin = headers.get("origin") if self._allowed(path, headers) else None

        async def labelled_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                # Those of vLLM's own layer.
                for name in ("access-control-allow-origin", "access-control-allow-credentials"):
                    if name in answer:
                        del answer[name]
                answer.add_vary_header("Origin")
                if origin is not None:
                    answer["Access-Control-Allow-Origin"] = origin
                    answer["Access-Control-Expose-Headers"] = "Date"
            await send(message)

        return labelled_send

    def _allowed(self, path: str, headers: Headers) -> bool:
        return path in READABLE and headers.get("origin") in self._origins
