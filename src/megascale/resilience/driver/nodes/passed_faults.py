"""Passes faults that `megascale faults inject` asks of trainers on to the agents whose trainers see no run folder.

A fault waits in RUN/faults until its rank has taken it, which its agent tells like any other file: it is passed on once
an attempt, to the node that has the rank then, and an agent forgets at each start what the attempt before has left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from megascale.core.untrusted_files import read_bounded
from megascale.resilience.driver.nodes.nodes import Nodes
from megascale.resilience.driver.state.job import Job
from megascale.resilience.protocol.agent_messages import FAULT_CHARACTERS, FAULT_FILE


class PassedFaults:
    """Args:
    run: the run folder.
    job, nodes: whose trainers they are for, and where these are.
    taken: names of files whose fault a trainer has taken, whether they still lie there or not.
    """

    def __init__(self, run: Path, job: Job, nodes: Nodes, taken: Container[str]) -> None:
        self._folder, self._job, self._nodes, self._taken = run / "faults", job, nodes, taken
        self._passed: set[tuple[str, int]] = set()  # file and attempt

    def look(self) -> None:
        """Pass on what has come since the last look."""
        attempt = self._job.state.attempt
        for file in sorted(self._folder.glob("*.json")):
            if file.name in self._taken or (file.name, attempt) in self._passed:
                continue
            if not re.fullmatch(FAULT_FILE, file.name):
                continue
            fault = _read(file)
            node = self._nodes[self._node_of(fault)] if fault is not None and self._node_of(fault) else None
            if node is not None and node.channel is not None:
                self._passed.add((file.name, attempt))
                self._nodes.order(node, do="inject", name=file.name, fault=json.dumps(fault))

    def _node_of(self, fault: dict[str, Any]) -> str:
        """Where the trainers are that it is meant for, "" if nowhere now."""
        state = self._job.state
        if fault.get("node"):
            return str(fault["node"]) if fault["node"] in state.placement else ""
        return next((name for name in state.placement if fault.get("rank") in state.ranks(name)), "")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_bounded(file, FAULT_CHARACTERS))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
