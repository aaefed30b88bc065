"""The page at ``GET /reload/ui``: one document, put together at the start from the files in ``page/``.

It holds no secret and nothing that a stranger could have chosen. What it shows it reads itself, with the token that its
reader types in, and writes into the document as text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from starlette.responses import Response

UI_PATH: Final = "/reload/ui"
#: In the order in which they build on each other.
_SCRIPTS: Final = ("text.js", "stream.js", "history.js", "card.js", "main.js")


def _source(name: str) -> str:
    return files("weightpush_server").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class StatusPage:
    """The document with its headers, the same for everybody."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        """``origins``: other servers that the page may read, as of `cross_origin.parse_origin`."""
        script = "\n".join(['"use strict";', *(_source(name) for name in _SCRIPTS)])
        style = _source("style.css")
        parts = {"STYLE": style, "SCRIPT": script, "ORIGINS": escape(" ".join(origins))}
        self._document = _source("index.html")
        for name, text in parts.items():
            self._document = self._document.replace(f"%{name}%", text)
        readable = " ".join(["'self'", *origins])
        policy = (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            # The token can go nowhere else, whatever happens in the page.
            f"connect-src {readable}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
        self._headers = {
            "Content-Security-Policy": "; ".join(policy),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            # Another version of the server has another page.
            "Cache-Control": "no-cache",
        }

    def response(self) -> Response:
        """Return the answer to ``GET /reload/ui``."""
        return Response(self._document, media_type="text/html", headers=self._headers)
