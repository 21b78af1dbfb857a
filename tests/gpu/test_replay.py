"""The cases of tests/gpu/replay.py, without a GPU."""

from __future__ import annotations

from megascale.core.flops import count_parameters
from tests.gpu.replay import CASES, make_config

GPUS = 2  # fewer have no replica, and with more each shard is smaller


def test_a_check_recomputes_the_element_whose_update_is_wrong():
    """A check of a part of the shard sees a passing fault only in that part, and each fault has one step."""
    cases = [case for case in CASES.values() if any(fault.kind == "update" for fault in case.faults)]
    assert cases
    for case in cases:
        shard = count_parameters(make_config(case.settings, GPUS, is_tiny=False).model) / GPUS
        assert case.update_range > shard
