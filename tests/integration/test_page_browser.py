"""The status page in a real browser, before servers whose record the test writes: no vLLM, all else is real."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.browser import Browser, Page
from support.record_server import GIB, RecordServer
from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.records import FROM_COPY

TOKEN = "a-token-of-these-tests"
EVIL = "<img/src=x/onerror=window.owned=1><script>window.owned=2</script>"

Start = Callable[..., RecordServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Make servers; all of them stop at the end."""
    made: list[RecordServer] = []

    def make(**options: object) -> RecordServer:
        started = RecordServer(tmp_path, **options).start()  # type: ignore[arg-type] - handed on as it came
        made.append(started)
        return started

    yield make
    for server in made:
        server.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[list[RecordServer]]:
    """Three servers that may be read together."""
    servers = [RecordServer(tmp_path, token=TOKEN) for _ in range(3)]
    for server in servers:
        server.start(fleet_origins=[other.url for other in servers])
    yield servers
    for server in servers:
        server.close()


def ui(server: RecordServer) -> str:
    return f"{server.url}/reload/ui"


def card(server: RecordServer, rest: str = "") -> str:
    """Return an expression for the text of one server's card."""
    name = json.dumps(server.url.removeprefix("http://"))
    cards = "[...document.querySelectorAll('.card')]"
    return f"({cards}.find(card => card.querySelector('.name').textContent === {name})?.innerText ?? ''){rest}"


def wait_card(page: Page, server: RecordServer, *texts: str) -> None:
    for text in texts:
        page.wait(card(server, f".includes({json.dumps(text)})"))


def unfold(page: Page) -> None:
    """Open everything that can be opened."""
    page.value("document.querySelectorAll('details').forEach(node => { node.open = true; })")


def unharmed(page: Page) -> None:
    """Nothing that came as text ran, or became a part of the document."""
    assert page.value("window.owned ?? null") is None
    assert page.value("document.querySelectorAll('script').length") == 1
    assert page.value("document.querySelectorAll('img, b, iframe, svg').length") == 0
    assert page.dialogs == []


def test_an_update_is_followed_to_its_end(browser: Browser, start: Start) -> None:
    server = start()
    with browser.open(ui(server)) as page:
        page.wait_text("None since this server started.")
        assert "control token" not in page.text()  # None is asked for.
        server.begin("step-41", Phase.DRAINING)
        page.wait_text("Pushing step-41: draining")
        server.enter(Phase.RECEIVING)
        server.progress(0.5)
        page.wait_text("50 % · 145 of 291 tensors · 537 MB of 1.07 GB")
        assert page.value("document.querySelector('[role=progressbar]').getAttribute('aria-valuenow')") == "50"
        assert page.value("document.querySelector('.done').style.width") == "50%"
        assert page.value("document.querySelector('.steps .now').textContent") == "receiving"
        assert "half-written" in page.text()
        assert page.value("document.title").startswith("updating to step-41")
        server.enter(Phase.PUBLISHING, seconds={Phase.RECEIVING: 0.75, Phase.CLOSING: 0.25})
        server.commit()
        page.wait("document.querySelectorAll('.updates li').length === 1")
        assert page.value("document.querySelector('.version').textContent") == "step-41"
        pieces = page.value(
            "[...document.querySelectorAll('.phases i')].map(piece => [piece.title, piece.style.width])"
        )
        titles = [title for title, _ in pieces]
        assert titles[:2] == ["receiving 750 ms", "closing 250 ms"]
        widths = [float(width.removesuffix("%")) for _, width in pieces]
        assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
        assert page.value("document.title").startswith("serving step-41")
        # Ages go on in the nodes that are there: a reader may have selected something.
        page.value("document.querySelector('.updates li').marked = true")
        page.wait("/^[2-9] s ago$/.test(document.querySelector('.updates [data-when]').textContent)")
        assert page.value("document.querySelector('.updates li').marked") is True
        # Without anything being asked for again and again.
        paths = [path for _, path, _ in server.requests]
        assert paths.count("/reload/events") == 1
        assert paths.count("/reload/status") == 0


def test_each_state_says_what_it_means_for_requests(browser: Browser, start: Start) -> None:
    server = start()
    with browser.open(ui(server)) as page:
        server.begin("step-41", Phase.RECEIVING, mode=UpdateMode.STAGED, transport="gloo")
        page.wait_text("The old weights serve while the new ones arrive.")
        assert page.value("document.querySelector('.steps').innerText").split()[:4] == [
            *("checking", "rendezvous", "receiving", "draining")
        ]
        server.fail(WeightPushError(ErrorCode.LEASE_LOST, "the trainer was silent"))
        page.wait_text("The last update that failed")
        assert "Why it does not serve" not in page.text()
        server.begin("step-42", Phase.RECEIVING)
        page.wait_text("Requests get 503 with Retry-After")
        failure = WeightPushError(
            ErrorCode.DIGEST_MISMATCH, "bucket 3 arrived changed", details={"names": ["a.b", "c"]}
        )
        server.fail(failure)
        page.wait_text("Why it does not serve")
        for text in ("bucket 3 arrived changed", "digest_mismatch", "while receiving", "committed last, not served"):
            assert text in page.text()
        page.click(".error summary")
        assert '"a.b"' in page.value("document.querySelector('.error pre').innerText")
        server.begin("step-40", Phase.LANDING, transport=FROM_COPY, restores=CopyRole.SERVED)
        page.wait_text("Going back to step-40: landing")
        server.enter(Phase.PUBLISHING)
        server.commit()
        page.wait_text("rollback · direct · copy")
        copies = [CopyStatus(role=CopyRole.SERVED, weight_version="step-40", bytes=GIB)]
        server.set_worker(0, copies=[copy.model_dump() for copy in copies])
        page.wait_text("step-40 (served, 1.07 GB)")
        refused = ErrorDetail(code=ErrorCode.SELF_CHECK_FAILED, message="model.layers.0 differs")
        server.set_worker(1, reload_refused=refused.model_dump(), self_check="failed")
        page.wait_text("takes no updates: model.layers.0 differs")
        with server.shared.transaction() as control:
            control.state = ServerState.AWAITING_WEIGHTS
        page.wait_text("started on, not served")
        assert page.complaints == []


def test_the_token_is_typed_in_and_goes_nowhere_else(browser: Browser, start: Start) -> None:
    server = start(token=TOKEN)
    server.push("step-41", {Phase.RECEIVING: 1.0})
    with browser.open(ui(server)) as page:
        page.wait_text("Public status only.")
        assert "step-41" in page.text()
        assert "Last updates" not in page.text()
        page.type("#token", "wrong")
        page.wait_text("This server refuses the token.")
        page.type("form .locked input, .locked input", TOKEN)
        page.wait_text("Last updates 1")
        assert page.value("document.querySelector('#token').value") == ""
        assert TOKEN not in page.value("document.documentElement.outerHTML")
        assert page.value("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        for method, path, headers in server.requests:
            assert TOKEN not in path
            assert "cookie" not in headers
            assert "referer" not in headers
            assert (method, path.split("?")[0]) in {
                ("GET", f"/reload/{name}") for name in ("ui", "status", "events", "history")
            }
        asked = [request for request in page.requests.values() if "url" in request]
        assert {request["url"].partition("/reload")[0] for request in asked if "data:" not in request["url"]} == {
            server.url
        }
        assert any(request["headers"].get("authorization") == f"Bearer {TOKEN}" for request in asked)
        # Gone with the page.
        page.go(ui(server) + "?again")
        page.wait_text("Public status only.")
        # And when its reader says so.
        page.type("#token", TOKEN)
        page.wait_text("Last updates 1")
        page.click("#forget")
        page.wait_text("Public status only.")
        page.wait("!document.body.innerText.includes('Last updates')")


def test_a_fleet_is_seen_from_any_of_its_servers(browser: Browser, fleet: list[RecordServer]) -> None:
    first, second, third = fleet
    with browser.open(ui(first)) as page:
        page.type("#token", TOKEN)
        page.wait_text("Last updates")
        options = page.value("[...document.querySelectorAll('#known option')].map(option => option.value)")
        assert set(options) == {second.url, third.url}
        page.type("#address", second.url.removeprefix("http://"))
        page.type("#address", f"{third.url}/reload/ui")
        page.wait_text("all 3 serve step-40")
        assert page.value("document.querySelectorAll('#known option').length") == 0
        second.begin("step-41")
        second.progress(0.25)
        wait_card(page, second, "25 %", "updating")
        page.wait_text("1 updating")
        second.enter(Phase.PUBLISHING)
        second.commit()
        page.wait_text("3 serving; 2 versions are served: step-40, step-41")
        third.begin("step-41")
        third.fail(WeightPushError(ErrorCode.TRANSPORT_FAILED, "cut off"))
        wait_card(page, third, "Why it does not serve", "cut off")
        page.type("#address", second.url)
        page.wait_text("is there already")
        page.type("#address", "http://[nonsense")
        page.wait_text("is no address of a server")
        page.click(".card:nth-child(2) .remove")
        page.wait("document.querySelectorAll('.card').length === 2")
        # What was taken off the page is not read any more.
        second.begin("step-42")
        page.wait_text("1 serving, 1 failed")
        assert second.url.removeprefix("http://") not in page.text()
        for server in fleet:
            assert {path for _, path, _ in server.requests if TOKEN in path} == set()
        assert [complaint for complaint in page.complaints if "401" not in complaint] == []


def test_a_server_with_another_token_is_asked_about_on_its_own(browser: Browser, tmp_path: Path) -> None:
    ours, theirs = RecordServer(tmp_path, token=TOKEN), RecordServer(tmp_path, token="the-other-one")
    for server in (ours, theirs):
        server.start(fleet_origins=[ours.url, theirs.url])
    try:
        with browser.open(ui(ours)) as page:
            page.type("#token", TOKEN)
            page.wait_text("Last updates")
            page.type("#address", theirs.url)
            wait_card(page, theirs, "This server refuses the token.")
            page.type(".card:nth-child(2) .locked input", "the-other-one")
            wait_card(page, theirs, "live", "Last updates")
        assert all("the-other-one" not in headers.get("authorization", "") for _, _, headers in ours.requests)
    finally:
        for server in (ours, theirs):
            server.close()


def test_the_token_does_not_go_to_a_server_that_the_page_may_not_read(browser: Browser, start: Start) -> None:
    """Neither where this server's policy does not name it, nor where it does not name this one."""
    elsewhere = start(token=TOKEN)
    alone = start(token=TOKEN)
    one_sided = start(token=TOKEN, fleet_origins=[elsewhere.url])
    for server, complaint in (
        (alone, f"start {alone.url.removeprefix('http://')} with --fleet-origin {elsewhere.url}"),
        (one_sided, f"was started without --fleet-origin {one_sided.url}"),
    ):
        with browser.open(ui(server)) as page:
            page.type("#token", TOKEN)
            page.wait_text("Last updates")
            page.type("#address", elsewhere.url)
            wait_card(page, elsewhere, "unreachable", complaint)
    assert all("authorization" not in headers for _, _, headers in elsewhere.requests)


def test_what_strangers_say_stays_text(browser: Browser, fleet: list[RecordServer]) -> None:
    first, second, _ = fleet
    for server in (first, second):
        server.push(EVIL, {Phase.RECEIVING: 1.0}, transport=EVIL)
        server.begin(EVIL, Phase.RECEIVING)
        server.fail(WeightPushError(ErrorCode.ABORTED, EVIL, details={EVIL: [EVIL]}))
        refused = ErrorDetail(code=ErrorCode.RELOAD_REFUSED, message=EVIL)
        server.set_worker(0, device=EVIL, self_check=EVIL, reload_refused=refused.model_dump())
        server.begin(EVIL, Phase.RECEIVING)
    with browser.open(ui(first)) as page:
        page.type("#token", TOKEN)
        page.wait(f"document.title.startsWith({json.dumps(f'updating to {EVIL}')})")
        page.type("#address", second.url)
        wait_card(page, second, "Last updates 2")
        unfold(page)
        wait_card(page, first, f"Pushing {EVIL}: receiving", "Last updates 2")
        wait_card(page, second, f"takes no updates: {EVIL}")
        page.wait(f"document.querySelector('.updates .what').innerText === {json.dumps(EVIL)}")
        assert EVIL in page.value("document.querySelector('.error pre').innerText").replace('\\"', '"')
        page.type("#address", f"http://{EVIL}")
        page.wait_text("is no address of a server")
        unharmed(page)


class Impostor(http.server.BaseHTTPRequestHandler):
    """Answers every question with what is no status, to whoever asks."""

    answer = b"null"
    kind = "application/json"

    def do_OPTIONS(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.answer)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Access-Control-Allow-Headers", "Authorization")
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    "answer",
    [
        b"data: null\n\n",
        b"data: {]\n\n",
        b'data: {"state": 7}\n\n',
        b"event: status\ndata: [1, 2]\n\n",
    ],
)
def test_what_is_no_weightpush_server_is_said_to_be_none(browser: Browser, start: Start, answer: bytes) -> None:
    handler = type("Handler", (Impostor,), {"answer": answer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as impostor:
        thread = threading.Thread(target=impostor.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{impostor.server_port}"
        server = start(fleet_origins=[url])
        with browser.open(ui(server)) as page:
            page.type("#address", url)
            page.wait_text("It answers something else than a weightpush status.")
            page.wait_text("serving")
            unharmed(page)
        impostor.shutdown()


def test_fields_of_any_type_do_no_harm(browser: Browser, start: Start) -> None:
    odd = {
        **{
            "state": EVIL,
            "serving": "yes",
            "weight_version": {"a": EVIL},
            "previous_version": [EVIL],
            "workers": "many",
        },
        **{
            "update": {
                "phase": EVIL,
                "bytes_total": "x",
                "bytes_done": None,
                "started_at": 7,
                "mode": [],
                "transport": {},
            }
        },
        **{"last_error": {"code": 7, "details": {"__proto__": EVIL}}, "last_update": {"seconds": "1", "bytes": EVIL}},
        **{"copies": [None, 3, {"bytes": []}], "fingerprint": 12},
    }
    answer = b"data: " + json.dumps(odd).encode() + b"\n\n"
    handler = type("Handler", (Impostor,), {"answer": answer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{impostor.server_port}"
        server = start(fleet_origins=[url])
        with browser.open(ui(server)) as page:
            page.type("#address", url)
            page.wait("document.querySelectorAll('.card')[1]?.innerText.includes('onerror')")
            unharmed(page)
            assert [complaint for complaint in page.complaints if "TypeError" in complaint] == []
        impostor.shutdown()


def test_a_server_that_comes_back_is_followed_again(browser: Browser, start: Start, tmp_path: Path) -> None:
    first = RecordServer(tmp_path).start()
    port = first.port
    first.push("step-41", {Phase.RECEIVING: 1.0})
    with browser.open(ui(first)) as page:
        page.wait_text("Last updates 1")
        first.close()
        page.wait_text("unreachable")
        assert "No connection" in page.text()
        start(port=port)
        page.wait_text("None since this server started.")
        page.wait_text("live")


_CONTRAST = """
(() => {
  const channel = (part) => { const x = part / 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const shown = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const parts = parse(getComputedStyle(at).backgroundColor.replace("color(srgb", ""));
      if (parts.length === 3 || parts[3] === 1) return parts.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  return [...document.querySelectorAll("h1, h2, h3, p, span, dd, dt, td, th, li, button, summary, label")]
    .filter((node) => node.offsetParent && node.textContent.trim() && !node.children.length)
    .map((node) => {
      const [a, b] = [light(parse(getComputedStyle(node).color).slice(0, 3)), light(shown(node))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), node.className + " " + node.textContent.slice(0, 30)];
    });
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_it_is_readable_in_any_light_and_on_any_screen(browser: Browser, start: Start, width: int, dark: bool) -> None:
    server = start(workers=4)
    server.push("v" * 128, {phase: 0.1 for phase in Phase}, transport="gloo")
    server.begin("w" * 128, Phase.RECEIVING)
    server.fail(
        WeightPushError(ErrorCode.MANIFEST_REJECTED, "model." + "layers." * 60 + "weight", details={"x": "y" * 400})
    )
    server.begin("u" * 128, Phase.RECEIVING)
    server.progress(0.4)
    with browser.open(ui(server), width=width, dark=dark) as page:
        page.wait_text("Last updates 2")
        page.wait_text("40 %")
        unfold(page)
        assert page.value("document.documentElement.scrollWidth") <= width
        ratios = page.value(_CONTRAST)
        assert len(ratios) > 40
        assert [pair for pair in ratios if pair[0] < 4.5] == []
        ground = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(ground) < 200) is dark
