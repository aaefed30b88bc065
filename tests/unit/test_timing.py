"""Where a worker's time goes in an update."""

from __future__ import annotations

import time

import pytest

from weightpush_server.timing import PartSeconds, slowest


def test_parts_add_up_over_several_blocks() -> None:
    seconds = PartSeconds()
    for _ in range(2):
        with seconds.booking("land"):
            time.sleep(0.01)
    assert seconds.spent["land"] >= 0.02


def test_a_block_that_raises_is_booked() -> None:
    seconds = PartSeconds()
    with pytest.raises(ValueError, match="broken"), seconds.booking("digest"):
        raise ValueError("broken")
    assert "digest" in seconds.spent


def test_each_part_is_that_of_its_slowest_worker() -> None:
    assert slowest([{"land": 1.0, "digest": 0.5}, {"land": 0.25, "digest": 0.75, "copy": 0.1}]) == {
        "land": 1.0,
        "digest": 0.75,
        "copy": 0.1,
    }
