"""What Prometheus reads from a page of series."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

#: Values by name and labels.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(page: str) -> Samples:
    """Return the samples on a page.

    Raises:
        ValueError: one is there twice.
    """
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            if key in found:
                raise ValueError(f"{key} is there twice")
            found[key] = sample.value
    return found


def scrape(url: str) -> Samples:
    """Return what a server shows."""
    page = httpx.get(f"{url}/metrics", trust_env=False, timeout=30)
    page.raise_for_status()
    return parse(page.text)


def value(samples: Samples, name: str, missing: float | None = None, /, **labels: str) -> float:
    """Return one sample; ``missing``, if given, where it is not there."""
    key = (name, frozenset(labels.items()))
    return samples[key] if missing is None else samples.get(key, missing)
