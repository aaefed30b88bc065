"""The server's logger: below vLLM's, so that vLLM's own logging options apply to it."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.weightpush")
