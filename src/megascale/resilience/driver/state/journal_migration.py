"""Fields of the job's state that were called otherwise once: older journals, and agents that still run, are read."""

from __future__ import annotations

from typing import Any

# Old name -> new name.
RENAMED: dict[str, str] = {"fruitless": "starts_without_progress"}


def current_fields(record: dict[str, Any]) -> dict[str, Any]:
    """A state as a journal or an agent has it, with today's names of its fields. TypeError if it is no table."""
    if not isinstance(record, dict):
        raise TypeError("a job's state that is no table")
    return {RENAMED.get(name, name): value for name, value in record.items()}
