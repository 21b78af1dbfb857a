"""What a process finds out about its place."""

from __future__ import annotations

import os

import pytest

from megascale.train.processes import _threads

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("4,2", 4)])
def test_threads_are_those_asked_for(monkeypatch, told, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert _threads(1) == _threads(10**6) == threads


@pytest.mark.parametrize("told", [None, "", "0", "-1", "many"])
def test_else_threads_are_a_share_of_the_cores(monkeypatch, told):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert (_threads(1), _threads(10**6)) == (CORES, 1)
