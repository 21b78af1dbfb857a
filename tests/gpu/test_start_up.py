"""Ends that tests/gpu/start_up.py counts as faults."""

from __future__ import annotations

from tests.gpu.start_up import find_faults


def test_a_rank_that_hangs_or_ends_in_another_way_is_a_fault() -> None:
    right = {"store": "redis", "exit codes": [0, 0], "hung": [], "keys left": 0}
    assert find_faults(right) == []
    assert find_faults(right | {"exit codes": [0, -9], "end": "lost"}) == []
    assert find_faults(right | {"exit codes": [0, 0], "end": "lost"}) == [
        "redis lost: rank 1 ended with 0 instead of -9"
    ]
    assert find_faults(right | {"exit codes": [1, -9], "hung": [1], "keys left": 3}) == [
        "redis: rank 1 hangs",
        "redis: rank 0 ended with 1 instead of 0",
        "redis: 3 keys stay in the store",
    ]
