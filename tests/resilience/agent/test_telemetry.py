"""Log of an agent whose heartbeats take long."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from megascale.resilience.agent import telemetry
from megascale.resilience.agent.telemetry import Telemetry


def test_the_log_names_what_held_a_heartbeat_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current = [10.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: current[0]))

    def fails() -> None:
        current[0] += 7.0
        raise ValueError

    with caplog.at_level(logging.WARNING):
        assert Telemetry._call_timed("quick", lambda: 3) == 3
        with pytest.raises(ValueError):
            Telemetry._call_timed("what GPUs report", fails)
    assert [record.getMessage() for record in caplog.records] == ["what GPUs report took 7.0 s"]
