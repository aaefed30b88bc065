from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import pytest

from weightpush_server.status_page import StatusPage


def served(*origins: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the document, its headers and its policy, by directive."""
    answer = StatusPage(origins).response()
    headers = dict(answer.headers)
    policy = dict(part.partition(" ")[::2] for part in headers["content-security-policy"].split("; "))
    return bytes(answer.body).decode(), headers, policy


def test_only_its_own_script_and_style_run() -> None:
    document, _, policy = served()
    assert policy["default-src"] == "'none'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    # Nothing that a policy with hashes would have to let through.
    assert not re.search(r"<[^>]*\s(on\w+|style)\s*=", document.partition("<script>")[0])


def test_nothing_comes_from_elsewhere_and_nothing_goes_there() -> None:
    document, headers, policy = served("http://gpu-2:8000", "https://gpu-3.example")
    assert policy["connect-src"] == "'self' http://gpu-2:8000 https://gpu-3.example"
    assert policy["form-action"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["img-src"] == "data:"
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!data:|status["'])""", document)
    assert not re.search(r"@import|url\(", document)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert "set-cookie" not in headers


def test_text_goes_into_it_in_one_way_only() -> None:
    _, _, policy = served()
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    for file in files("weightpush_server").joinpath("page").iterdir():
        if file.name.endswith(".js"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|setHTML"
                r"|createContextualFragment|localStorage|sessionStorage|document\.cookie|indexedDB",
                file.read_text(),
            )
            assert not found, file.name


def test_it_is_the_same_for_everybody_and_names_only_the_fleet() -> None:
    assert served()[0] == served()[0]
    document, _, _ = served("http://gpu-2:8000")
    assert document.count("http://gpu-2:8000") == 1 + served()[0].count("http://gpu-2:8000")
    assert '<meta name="fleet-origins" content="http://gpu-2:8000">' in document
    assert not re.search(r"%(STYLE|SCRIPT|ORIGINS)%", document)


@pytest.mark.parametrize(
    "name", ["text.js", "stream.js", "history.js", "card.js", "main.js", "style.css", "index.html"]
)
def test_its_sources_are_plain_text_of_a_readable_size(name: str) -> None:
    lines = files("weightpush_server").joinpath("page", name).read_text().splitlines()
    assert 10 < len(lines) <= 400
