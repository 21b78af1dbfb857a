"""A fault asked for in the run folder comes to the node that has its rank, once an attempt, until it is taken."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.telemetry.trainer_files import FaultForwarding


@dataclass
class Nodes:
    """Nodes that are all connected, and what they were ordered."""

    ordered: list[tuple[str, dict]] = field(default_factory=list)

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, channel=object())

    def order(self, node: SimpleNamespace, **order: object) -> None:
        self.ordered.append((node.name, order))


def ask(run: Path, number: int, **fault: object) -> str:
    name = f"{number:020d}-abcdef.json"
    (run / "faults").mkdir(exist_ok=True)
    (run / "faults" / name).write_text(json.dumps({"kind": "spin", **fault}))
    return name


def state(attempt: int, *placement: str) -> JobState:
    return JobState("a", Phase.RUNNING, attempt, placement, 2, len(placement) * 2)


def test_a_fault_follows_its_rank_until_it_is_taken(tmp_path):
    job = SimpleNamespace(state=state(1, "n0", "n1"))
    nodes = Nodes()
    used = set()
    faults = FaultForwarding(run=tmp_path, job=job, nodes=nodes, taken_faults=used)
    faults.send_new_faults()  # no folder yet
    name = ask(tmp_path, 1, rank=3, node=None, step=9)
    of_node = ask(tmp_path, 2, rank=None, node="n0")
    faults.send_new_faults()
    faults.send_new_faults()
    assert [(node, order["do"], order["name"]) for node, order in nodes.ordered] == [
        ("n1", "inject", name),
        ("n0", "inject", of_node),
    ]
    assert json.loads(nodes.ordered[0][1]["fault"])["step"] == 9
    nodes.ordered.clear()
    used.add(of_node)
    job.state = state(2, "n0", "n2")  # rank 3 is elsewhere, and has not come to step 9 yet
    faults.send_new_faults()
    assert [(node, order["name"]) for node, order in nodes.ordered] == [("n2", name)]


def test_what_is_no_fault_goes_to_nobody(tmp_path):
    nodes = Nodes()
    faults = FaultForwarding(run=tmp_path, job=SimpleNamespace(state=state(1, "n0")), nodes=nodes, taken_faults=set())
    ask(tmp_path, 1, rank=7)  # no such rank
    ask(tmp_path, 2, node="n9")
    for number, text in enumerate(("", "[1]", "{" * 5000, '{"rank": 0', "[" * 3000)):
        (tmp_path / "faults" / f"{10 + number:020d}-abcdef.json").write_text(text)
    (tmp_path / "faults" / "mine.json").write_text('{"rank": 0}')
    faults.send_new_faults()
    assert nodes.ordered == []
