"""Addresses that belong to one server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weightpush_server.address import claim_address
from weightpush_server.options import StartRefusedError

HOST = "127.0.0.1"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bound(opened: ExitStack, *options: int, port: int = 0) -> socket.socket:
    """Return a TCP socket with these options, bound as those of a server are, that does not listen."""
    made = opened.enter_context(socket.socket())
    for option in (socket.SO_REUSEADDR, *options):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind((HOST, port))
    return made


def test_two_servers_that_start_at_once_do_not_get_one_address(opened: ExitStack) -> None:
    port = bound(opened).getsockname()[1]  # As a replica holds the port of its server.
    held = claim_address(HOST, port)
    assert held is not None
    with pytest.raises(StartRefusedError, match=rf"{HOST}:{port}: Address already in use.*--port"):
        claim_address(HOST, port)
    bound(opened, socket.SO_REUSEPORT, port=port).listen()  # It is in nobody's way itself.
    held.close()


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEPORT,)])
@pytest.mark.parametrize("host", [HOST, None, "0.0.0.0"])
def test_a_port_where_somebody_listens_is_refused(
    opened: ExitStack, options: tuple[int, ...], host: str | None
) -> None:
    server = bound(opened, *options)
    server.listen()
    port = server.getsockname()[1]
    with pytest.raises(StartRefusedError, match="Address already in use"):
        claim_address(host, port)
    server.close()
    again = claim_address(host, port)  # What was refused is held by nobody.
    assert again is not None
    again.close()


def test_a_port_of_the_kernels_choice_and_an_address_that_is_not_ours(opened: ExitStack) -> None:
    assert claim_address(HOST, 0) is None
    held = claim_address("192.0.2.1", bound(opened).getsockname()[1])  # vLLM says what is wrong with that.
    assert held is not None
    held.close()


def test_a_socket_that_a_dead_server_left_is_removed(opened: ExitStack, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    held = claim_address(None, 8000, str(path))
    assert held is not None
    assert not path.exists()
    # Now somebody starts: the file is there, and nobody listens yet.
    starting = opened.enter_context(socket.socket(socket.AF_UNIX))
    starting.bind(str(path))
    for name in (path, tmp_path / "x" / ".." / path.name):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(StartRefusedError, match=f"unix:{path}: Address already in use.*--uds"):
            claim_address(None, 8000, str(name))
    held.close()
    starting.listen()
    with pytest.raises(StartRefusedError, match="Address already in use"):
        claim_address(None, 8000, str(path))
    assert path.is_socket()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    held = claim_address(None, 8000, str(path))
    assert held is not None
    held.close()
    assert path.read_text() == "mine"
