"""Headless Chromium, driven over its DevTools protocol: enough to open a page, use it, look at it and listen to it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from websockets.sync.client import connect

_PROGRAMS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Generous: processes start slowly on a busy machine.
_START_S: Final = 60.0
_ANSWER_S: Final = 60.0
_KEYS: Final = {"Enter": 13}


def find_browser() -> str | None:
    """Return a browser that can be driven, or ``None``."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One browser process with a profile of its own; ``with`` ends it."""

    def __init__(self, folder: Path) -> None:
        program = find_browser()
        assert program is not None
        self._profile = folder / "profile"
        self._log = (folder / "browser.log").open("wb")
        arguments = ["--headless", "--remote-debugging-port=0", f"--user-data-dir={self._profile}", "--disable-gpu"]
        arguments += ["--no-first-run", "--disable-extensions", "--hide-scrollbars", "--no-proxy-server"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium's refuses to work for root.
        self._process = subprocess.Popen(
            [program, *arguments], stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._url = self._find_port()
        except BaseException:
            self.close()
            raise

    def _find_port(self) -> str:
        file = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + _START_S
        while not (file.exists() and len(lines := file.read_text().split("\n")) >= 2):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the browser did not start: {self._log.name}")
            time.sleep(0.05)
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}"

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open ``url`` in a tab of its own, which shares nothing with any other."""
        return Page(self._url, url, width=width, height=height, dark=dark)

    def close(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._log.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """A tab. ``requests`` are those it sent, with headers as they went out; ``complaints`` what its console says."""

    def __init__(self, browser: str, url: str, *, width: int, height: int, dark: bool) -> None:
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(browser, max_size=None, compression=None, proxy=None))
        self._last = 0
        self._session: str | None = None
        self.requests: dict[str, dict[str, Any]] = {}
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        self.show(dark=dark)
        self.go(url)

    def go(self, url: str) -> None:
        """Load ``url`` and wait for its scripts to have run."""
        self._call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window, in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=width < 600,
        )

    def show(self, *, dark: bool) -> None:
        """Say which colours the reader prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page.

        Raises:
            RuntimeError: it raised.
        """
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60) -> Any:
        """Wait until a JavaScript expression is true and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}\n{self.complaints}\n{self.text()}")
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """Return what a reader sees."""
        text: str = self.value("document.body.innerText")
        return text

    def wait_text(self, text: str, timeout_s: float = 60) -> None:
        """Wait until a reader sees ``text``."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})", timeout_s)

    def type(self, selector: str, text: str) -> None:
        """Type ``text`` into a field, in place of what stands there, and press Enter, as a reader does."""
        self.wait(f"Boolean(document.querySelector({json.dumps(selector)})?.offsetParent)")
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self._call("Input.dispatchKeyEvent", type=kind, **key)

    def click(self, selector: str) -> None:
        """Click on an element."""
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, file: Path) -> None:
        """Write what the whole page looks like."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Close the tab."""
        with suppress(Exception):
            self._call("Page.close")
        self._open.close()

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        deadline = time.monotonic() + _ANSWER_S
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.1, deadline - time.monotonic())))
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer.get("method", ""), answer.get("params", {}))

    def _hear(self, event: str, what: dict[str, Any]) -> None:
        hearers: dict[str, Callable[[dict[str, Any]], None]] = {
            "Network.requestWillBeSent": self._hear_request,
            "Network.requestWillBeSentExtraInfo": self._hear_headers,
            "Log.entryAdded": lambda what: self.complaints.append(_entry(what["entry"])),
            "Runtime.exceptionThrown": lambda what: self.complaints.append(str(what["exceptionDetails"])),
            "Page.javascriptDialogOpening": self._hear_dialog,
        }
        if event in hearers:
            hearers[event](what)

    def _hear_request(self, what: dict[str, Any]) -> None:
        request = what["request"]
        seen = self.requests.setdefault(what["requestId"], {"headers": {}})
        seen.update(url=request["url"], method=request["method"])
        seen["headers"].update({name.lower(): text for name, text in request["headers"].items()})

    def _hear_headers(self, what: dict[str, Any]) -> None:
        seen = self.requests.setdefault(what["requestId"], {"headers": {}})
        seen["headers"].update({name.lower(): text for name, text in what["headers"].items()})

    def _hear_dialog(self, what: dict[str, Any]) -> None:
        self.dialogs.append(what["message"])


def _entry(entry: dict[str, Any]) -> str:
    return f"{entry['source']} {entry['level']}: {entry['text']}"
