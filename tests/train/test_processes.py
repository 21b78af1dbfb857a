"""Facts that a process determines about its rank and host."""

from __future__ import annotations

import os

import pytest

from megascale.train.rank_info import count_threads


@pytest.mark.parametrize(("report", "threads"), [("1", 1), ("3", 3), ("4,2", 4), ("64", 8)])
def test_threads_are_no_more_than_asked_for(monkeypatch, report, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", report)
    assert (count_threads(2), count_threads(100)) == (threads, 1)


@pytest.mark.parametrize("report", [None, "", "0", "-1", "many"])
def test_threads_are_a_share_of_the_cores(monkeypatch, report):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    if report is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", report)
    assert (count_threads(1), count_threads(2), count_threads(100)) == (16, 8, 1)
