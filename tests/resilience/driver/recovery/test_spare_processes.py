"""Spares prepare processes while the job trains, once per attempt and after their self-checks."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config import from_tree
from megascale.resilience.driver.nodes import Node, SelfCheck
from megascale.resilience.driver.recovery.spare_processes import SpareProcesses
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState, Phase
from megascale.resilience.protocol.heartbeat import Heartbeat


class Parts:
    """Job on the nodes n0 and n1 with the spare n2, and the orders that the spare has received."""

    def __init__(self, resilience: dict[str, Any], sections: dict[str, Any]) -> None:
        tree = {"resilience": {"nodes": 2, "spares": 1} | resilience} | sections
        self.config = from_tree(tree)
        self.limits = self.config.resilience
        self.state = JobState("job", phase=Phase.RUNNING, attempt=3, placement=("n0", "n1"), ranks_per_node=2, data=4)
        self.spare = Node("n2", NodeRecord(state=NodeState.UP), channel=object())  # type: ignore[arg-type]
        self.orders: list[tuple[str, tuple[int, ...], int]] = []
        parts: Any = self
        self.processes = SpareProcesses(job=parts, nodes=parts, attempts=parts, settings=parts)

    def list_spares(self) -> list[Node]:
        return [self.spare]

    def prepare_join(self, node: Node, following: JobState) -> None:
        self.orders.append((node.name, following.ranks(node.name), following.world))


def test_a_spare_receives_the_order_after_its_self_checks_once_per_attempt() -> None:
    parts = Parts({}, {})
    parts.processes.prepare()
    assert parts.orders == []
    parts.spare.self_check = SelfCheck.PASSED
    parts.processes.prepare()
    parts.processes.prepare()
    assert parts.orders == [("n2", (2, 3), 4)]
    parts.state = JobState("job", phase=Phase.RUNNING, attempt=4, placement=("n0", "n1"), ranks_per_node=2, data=4)
    parts.processes.prepare()
    assert len(parts.orders) == 2


def test_prepared_processes_stay_for_later_attempts() -> None:
    parts = Parts({"test_spares": False}, {})
    parts.spare.heartbeat = Heartbeat("job", 2, "n2", 1, 1, prepared=True)
    parts.processes.prepare()
    assert parts.orders == []


@pytest.mark.parametrize(
    ("resilience", "sections"),
    [
        ({"prepare_spares": False}, {}),
        ({"keep_seconds": 0}, {}),
        ({"preload": False}, {"foreign": {"command": "python train.py"}}),
    ],
)
def test_spares_prepare_nothing_if_no_process_could_wait(resilience: dict[str, Any], sections: dict[str, Any]) -> None:
    parts = Parts({"test_spares": False} | resilience, sections)
    parts.processes.prepare()
    assert parts.orders == []


def test_a_job_without_some_replicas_prepares_its_joins_elsewhere() -> None:
    parts = Parts({"test_spares": False}, {})
    parts.state = JobState("job", phase=Phase.DEGRADED, attempt=3, placement=("n0",), ranks_per_node=2, data=2)
    parts.processes.prepare()
    assert parts.orders == []
