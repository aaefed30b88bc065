"""What a trainer imports: neither vLLM nor FastAPI nor ray, and no server."""

from __future__ import annotations

import subprocess
import sys

_FOREIGN = ("vllm", "fastapi", "starlette", "uvicorn", "ray", "weightpush_server", "transformers")


def test_importing_stays_light() -> None:
    # The command line imports all of the client.
    program = "import sys, weightpush_client.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "weightpush_client", "weightpush_protocol"} <= loaded
    assert loaded.isdisjoint(_FOREIGN), loaded & set(_FOREIGN)


def test_the_client_offers_what_it_says() -> None:
    import weightpush_client

    assert weightpush_client.__all__ == sorted(weightpush_client.__all__)
    for name in weightpush_client.__all__:
        assert getattr(weightpush_client, name) is not None
