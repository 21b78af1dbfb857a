"""Nodes that a run has evicted, for whoever asks for nodes on its behalf."""

from __future__ import annotations

from pathlib import Path

from megascale.errors import DataError
from megascale.resilience.driver.state.job_state import NodeState
from megascale.resilience.driver.state.journal import FILE, JournalReader


def list_evicted_nodes(run: Path) -> list[str]:
    """Their names in alphabetical order; none where there is no journal, or a damaged one."""
    if not (run / FILE).exists():
        return []
    try:
        reader = JournalReader(run)
        try:
            return sorted(row.name for row in reader.nodes() if row.state == NodeState.EVICTED)
        finally:
            reader.close()
    except DataError:
        return []
