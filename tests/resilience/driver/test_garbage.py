"""Old garbage: left alone between collections, as it was before afterwards."""

from __future__ import annotations

import gc

import pytest

from megascale.resilience.driver import process


def test_old_objects_are_not_looked_through_until_tidied(monkeypatch):
    before = gc.get_threshold()
    old = process.DeferredGarbageCollection()
    try:
        assert gc.get_threshold()[:2] == before[:2]
        collected = gc.get_stats()[2]["collections"]
        retained = [[i] for i in range(20 * before[0] * before[1])]  # enough for several full collections
        assert old.collect_if_due() == 0.0
        assert gc.get_stats()[2]["collections"] == collected
        monkeypatch.setattr(process, "FULL_COLLECTION_INTERVAL", 0.0)
        assert old.collect_if_due() > 0.0
        assert gc.get_stats()[2]["collections"] == collected + 1
        assert len(retained) == 20 * before[0] * before[1]
    finally:
        old.close()
    assert gc.get_threshold() == before


@pytest.fixture(autouse=True)
def _no_other_collection():
    """Nothing else in this test collects by itself."""
    gc.collect()
    return
