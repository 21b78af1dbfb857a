"""Network counters, where an adapter does not answer."""

from __future__ import annotations

import io
import threading

from megascale.resilience.agent.node_health import NetworkInterface, TrafficSampler


class Hangs(NetworkInterface):
    """Answers twice, then not until `answers` is set."""

    def __init__(self) -> None:
        super().__init__("ib0", [])
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.times = 0
        self.over = False

    def read(self) -> list[int]:
        self.times += 1
        if self.times > 2:
            self.asked.set()
            self.answers.wait(10)
            self.over = True
        return [1000 * self.times, 0, 0, 0]


def test_an_adapter_that_hangs_holds_nobody_up(monkeypatch):
    stuck = Hangs()
    removed = NetworkInterface("eth9", [io.StringIO("no number")])
    monkeypatch.setattr("megascale.resilience.agent.node_health.open_interfaces", lambda: [removed, stuck])
    sampler = TrafficSampler(period=0.001)
    try:
        assert stuck.asked.wait(10)
        assert [(t.interface, t.samples) for t in sampler.take()] == [("ib0", 1)]  # while the thread waits
        assert sampler.take() == ()
        assert not stuck.over
        stuck.answers.set()
    finally:
        stuck.answers.set()
        sampler.close()
