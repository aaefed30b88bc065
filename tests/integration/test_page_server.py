"""The status page of a real vLLM server, through a push that fails and one that does not, and as part of a fleet."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from integration.conftest import TOKEN, Checkpoints
from support.browser import Browser
from support.raw import RawUpdate, read_tensors
from support.record_server import RecordServer
from support.server import ServerProcess
from weightpush_client import WeightPusher

#: A version may be any visible ASCII without spaces and commas.
EVIL = "<script>window.owned=1</script><img/src=x/onerror=window.owned=2>"


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordServer]:
    """Another server of the fleet, without vLLM, started by the test that knows the first one."""
    made = RecordServer(tmp_path_factory.mktemp("neighbour"), token=TOKEN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def vllm_server(
    checkpoints: Checkpoints, neighbour: RecordServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("page-server")
    arguments = ("--fleet-origin", neighbour.url, "--weight-version", "step-0")
    server = ServerProcess(checkpoints.a, arguments, folder=folder, token=TOKEN)
    neighbour.start(fleet_origins=[server.url])
    with server:
        yield server


def test_a_failed_and_a_good_push_as_the_page_shows_them(
    browser: Browser, vllm_server: ServerProcess, checkpoints: Checkpoints
) -> None:
    server = vllm_server
    with browser.open(f"{server.url}/reload/ui") as page:
        page.wait_text("Public status only.")
        page.wait_text("step-0")
        page.type("#token", TOKEN)
        page.wait_text("None since this server started.")
        page.wait_text("live")

        update = RawUpdate(server, read_tensors(checkpoints.b), version=EVIL)
        update.begin().raise_for_status()
        update.stream(0).raise_for_status()
        page.wait_text(f"Pushing {EVIL}: receiving")
        page.wait_text("Requests get 503 with Retry-After")
        status = server.status()
        assert page.value("document.querySelector('.steps .now').textContent") == "receiving"
        part = status["update"]["bytes_done"] / status["update"]["bytes_total"]
        assert 0 < part < 1
        page.wait_text(f"{int(100 * part)} %")

        update.abort(reason=EVIL).raise_for_status()
        page.wait_text("Why it does not serve")
        assert "aborted" in page.value("document.querySelector('.error .code').textContent")
        assert EVIL in page.value("document.querySelector('.error .message').textContent")
        page.wait("document.querySelectorAll('.updates .failed').length === 1")

        with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
            pusher.push(checkpoints.b, weight_version="step-1")
        page.wait("document.querySelectorAll('.updates li').length === 2")
        page.wait("document.querySelector('.pill').textContent === 'serving'")
        assert page.value("document.querySelector('.version').textContent") == "step-1"

        # What it draws is what the server says.
        with server.client() as client:
            history = client.get("/reload/history").json()
        good, bad = history["updates"]
        assert (good["weight_version"], good["error"], good["state"]) == ("step-1", None, "serving")
        assert good["phase_seconds"] == server.status()["last_update"]["phase_seconds"]
        assert (bad["weight_version"], bad["error"]["code"], bad["state"]) == (EVIL, "aborted", "failed")
        drawn = page.value("[...document.querySelector('.phases').children].map(piece => piece.title.split(' ')[0])")
        assert drawn == [phase.split("_")[0] for phase in good["phase_seconds"]]
        assert page.value("document.querySelector('.updates .failed .what').textContent") == EVIL

        assert page.value("[window.owned ?? null, document.scripts.length, document.images.length]") == [None, 1, 0]
        assert page.dialogs == []
        for request in page.requests.values():
            if "url" in request and not request["url"].startswith("data:"):
                assert request["url"].startswith(f"{server.url}/reload/")
                assert TOKEN not in request["url"]
    assert TOKEN not in server.log.read_text()


def test_it_watches_its_neighbour_and_is_watched_by_it(
    browser: Browser, vllm_server: ServerProcess, neighbour: RecordServer
) -> None:
    neighbour.begin("step-9")
    neighbour.progress(0.5)
    for here, there in ((vllm_server.url, neighbour.url), (neighbour.url, vllm_server.url)):
        with browser.open(f"{here}/reload/ui") as page:
            page.type("#token", TOKEN)
            page.wait_text("Last updates")
            page.type("#address", there)
            page.wait(
                "[...document.querySelectorAll('.link')].filter(link => link.textContent === 'live').length === 2"
            )
            page.wait_text("Pushing step-9: receiving")
            assert page.value("document.querySelectorAll('.card[data-state=updating]').length") == 1
            assert page.value("document.querySelectorAll('.card[data-state=serving]').length") == 1


def test_the_page_needs_no_token_and_tells_nothing(vllm_server: ServerProcess) -> None:
    page = httpx.get(f"{vllm_server.url}/reload/ui", **vllm_server.how)
    assert page.status_code == 200
    for secret in (TOKEN, vllm_server.status()["instance_id"], str(vllm_server.model), "step-"):
        assert secret not in page.text
    for path in ("/reload/ui/", "/reload/UI", "/reload/ui/x", "/reload/history", "/reload/events"):
        assert httpx.get(f"{vllm_server.url}{path}", **vllm_server.how).status_code == 401, path
