"""How long nodes get to stop their ranks before they are taken out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megascale.config import ResilienceConfig
from megascale.resilience.driver.nodes.nodes import Node
from megascale.resilience.driver.recovery.placement import Placement
from megascale.resilience.driver.state.job_state import NodeRecord, NodeState, Phase


@pytest.mark.parametrize(("joined", "last"), [(0.0, 110.0), (115.0, 125.0)])
def test_a_node_that_was_away_has_its_time_to_stop_from_its_return_on(joined, last):
    node = Node("n0", NodeRecord(state=NodeState.UP), joined=joined)
    taken_out: list[str] = []

    class Nodes(dict[str, Node]):
        def lose(self, gone: Node, why: str) -> None:
            taken_out.append(why)

    state = SimpleNamespace(goal=Phase.STARTING, placement=("n0",), save=False)
    placement = Placement(
        SimpleNamespace(state=state, entered=100.0),
        Nodes(n0=node),
        SimpleNamespace(order=3),
        SimpleNamespace(recover_node=lambda name, evict: None),
        None,
        SimpleNamespace(limits=ResilienceConfig(window=5.0)),
        None,
    )
    placement.check_stopped(last)
    assert taken_out == []
    placement.check_stopped(last + 0.1)
    assert taken_out == ["n0 did not stop its processes within 10 s"]
