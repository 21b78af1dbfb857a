#!/usr/bin/env python3
"""Prints the driver's transitions of jobs and nodes as Markdown tables, from `driver/state/job_state.py`.

A row is an event, a column a state in which it may occur, a cell the state that follows; "=" leaves the state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from megascale.resilience.driver.state.job_state import JOB_TRANSITIONS, NODE_TRANSITIONS, UNCHANGED, NodeState, Phase


def format_table(
    table: Mapping[StrEnum, Mapping[Any, Any]], states: Sequence[Any], names: Mapping[Any, str] | None = None
) -> str:
    """Return a table of transitions as Markdown; `names` replaces the names of states in the head."""
    names = names or {}
    head = ["event", *(names.get(state, str(state)) for state in states)]
    lines = [head, ["---"] * len(head)]
    for event, followers in table.items():
        lines.append([str(event), *(_format_follower(state, followers.get(state)) for state in states)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format_follower(state: object, following: object) -> str:
    if following is None:
        return ""
    if following in (UNCHANGED, state):
        return "="
    return str(following)


def main() -> None:
    """Print both tables."""
    print(format_table(JOB_TRANSITIONS, list(Phase)))
    print()
    print(format_table(NODE_TRANSITIONS, [None, *NodeState], {None: "unknown"}))


if __name__ == "__main__":
    main()
