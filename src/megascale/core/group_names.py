"""Names of process groups in torch: the name in the plan (`rendezvous/group_plan.py`) and the attempt.

torch's symmetric memory caches the ranks and the store of a group by its name, until the process ends. A process that
outlives an attempt therefore gives the groups of each attempt other names. People, records of calls and comparisons of
ranks use the name in the plan.
"""

from __future__ import annotations

import re

_NAME_WITH_ATTEMPT = re.compile(r"(world|\w+/\d+(?:-\d+)?)@(\d+)")
ATTEMPT_KEY = "megascale_attempt"  # of the number of the attempt in a dump of torch's flight recorder


def make_attempt_suffix(attempt: int) -> str:
    """Return the end of the names of an attempt's groups; equal on all ranks of the attempt."""
    return f"@{attempt}"


def remove_attempt(name: str) -> str:
    """Return the name in the plan of a group of torch. Other names, such as another trainer's, stay as they are."""
    match = _NAME_WITH_ATTEMPT.fullmatch(name)
    if match is None:
        return name
    return match[1]


def read_attempt(name: str) -> int | None:
    """Return the attempt of a group of torch, or None if its name has none."""
    match = _NAME_WITH_ATTEMPT.fullmatch(name)
    if match is None:
        return None
    return int(match[2])
