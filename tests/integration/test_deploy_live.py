"""A real server run as deploy/ runs it, as far as that goes without containers.

Process 1 of its own process ids, another user, no capabilities, nothing to write to but what the StatefulSet mounts,
and with the options of the StatefulSet; asked by its probes and the images' health check, pushed to by the example.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from integration.conftest import TOKEN
from support.deployment import DEPLOY, ROOT, USER, Dockerfile, container
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_server.processes import children_of

#: Run by root in namespaces of its own: the interpreter's home opens for others, and all else is closed for writing.
_CONFINE = r"""
set -e
mount --make-rprivate /
keep=$(mktemp -d) && mount --bind "$PYTHON_HOME" "$keep"
shut=$PYTHON_HOME
for part in $(dirname "$PYTHON_HOME" | tr / ' '); do
    at=$at/$part
    if [ $(($(stat -c %a "$at") % 2)) = 0 ]; then shut=$at && break; fi
done
if [ "$shut" != "$PYTHON_HOME" ]; then
    mount -t tmpfs -o mode=755 tmpfs "$shut" && mkdir -p "$PYTHON_HOME" && mount --bind "$keep" "$PYTHON_HOME"
fi
for folder in $WRITABLE; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /
exec setpriv --reuid=$USER_ID --regid=$USER_ID --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def _why_not() -> str | None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "needs root, unshare and setpriv"
    if subprocess.run([*_NAMESPACES, "true"], capture_output=True).returncode:
        return "may not make namespaces here"
    return None


_REASON = _why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user may enter; those of pytest are for one."""
    made = Path(tempfile.mkdtemp(prefix="weightpush-deploy-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    made = checkpoint("qwen3", 1, folder)
    subprocess.run(["chmod", "-R", "a+rX", made], check=True)
    return made


@pytest.fixture(scope="module")
def token_file(folder: Path) -> Path:
    file = folder / "control-token"
    file.write_text(f"{TOKEN}\n")
    os.chown(file, 0, USER)
    file.chmod(0o440)
    return file


@pytest.fixture(scope="module")
def confined(folder: Path, model: Path, token_file: Path) -> Iterator[ServerProcess]:
    """The server, up and awaiting weights."""
    writable = [folder / "home", folder / "tmp"]
    for path in writable:
        path.mkdir()
        os.chown(path, USER, USER)
    # Those of the StatefulSet, for a smaller model and another place of the token.
    changed = ("--control-token-file=", "--max-model-len=")
    options = [word for word in container()["args"][1:] if not word.startswith(changed)]
    server = ServerProcess(
        model,
        [*options, f"--control-token-file={token_file}"],
        environment={
            "PYTHON_HOME": sys.base_prefix,
            "WRITABLE": " ".join(map(str, writable)),
            "USER_ID": str(USER),
            "HOME": str(writable[0]),
            "TMPDIR": str(writable[1]),
            "WP_TEST_FAULT_FILE": str(writable[0] / "faults.json"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        folder=folder,
        prefix=(*_NAMESPACES, "sh", "-c", _CONFINE, "sh"),
    )
    server.token = TOKEN
    try:
        server.start().wait_up()
        yield server
    finally:
        server.stop()


def first_process(server: ServerProcess) -> int:
    """Return the process that is number 1 in its namespace."""
    (found,) = children_of(server.pid)
    return found


def health_check(server: ServerProcess) -> int:
    """Run the images' own check against ``server`` and return its exit status."""
    _, *words = Dockerfile.read(DEPLOY / "docker" / "server.Dockerfile").health_check
    words[-1] = words[-1].replace(":8000/", f":{server.port}/")
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=120).returncode


def probe(server: ServerProcess, name: str) -> int:
    """Ask what a probe of the StatefulSet asks, and return the HTTP status."""
    path = container()[f"{name}Probe"]["httpGet"]["path"]
    return httpx.get(f"{server.url}{path}", **server.how, timeout=60).status_code


@pytest.mark.slow
def test_a_server_without_rights_takes_pushes_and_ends_in_good_order(
    confined: ServerProcess, model: Path, token_file: Path
) -> None:
    server = confined
    status = Path(f"/proc/{first_process(server)}/status").read_text()
    assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in status
    assert "CapEff:\t0000000000000000" in status
    assert status.partition("NSpid:")[2].split()[1] == "1"
    # It is alive and not ready before the first push: whoever started again must not serve what it began with.
    assert [probe(server, name) for name in ("startup", "liveness", "readiness")] == [200, 200, 503]
    assert health_check(server) == 1
    assert server.status()["state"] == "awaiting_weights"

    example = [sys.executable, str(DEPLOY / "docker" / "push_steps.py"), str(model), "--url", server.url]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["--token-file", str(token_file), "--steps", "2", "--pause", "0"]
    pushed = subprocess.run([*example, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert pushed.returncode == 0, pushed.stderr
    assert "was not pushed" not in pushed.stdout

    assert [probe(server, name) for name in ("startup", "liveness", "readiness")] == [200, 200, 200]
    assert health_check(server) == 0
    assert server.status()["weight_version"] == "step-2"
    assert server.complete().headers["X-Weight-Version"] == "step-2"
    metrics = httpx.get(f"{server.url}/metrics", **server.how, timeout=60)
    assert 'weightpush_weight_version_info{weight_version="step-2"} 1' in metrics.text

    processes = [pid for pid in server.processes() if pid != server.pid]
    os.kill(first_process(server), signal.SIGTERM)
    assert server.wait_exit(120) == 0
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
