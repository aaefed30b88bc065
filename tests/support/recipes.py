"""The code blocks of docs/integrations.md, to be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def run_recipe(heading: str, **names: Any) -> dict[str, Any]:
    """Run the Python block below ``heading`` with ``names`` defined; return all names that it leaves."""
    section = RECIPES.read_text().split(f"\n## {heading}\n", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, f"no Python block below {heading}"
    left = {"__name__": "recipe", **names}
    exec(compile(found[1], f"{RECIPES.name}: {heading}", "exec"), left)
    return left
