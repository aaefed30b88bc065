"""How long the tests that repeat themselves go on: ``WP_TEST_LONG=1`` asks for the full numbers (`make test-long`)."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("WP_TEST_LONG", "0") not in ("", "0")
