"""A launched job as others show it: what its driver says, or without one what the journal remembers; and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.errors import DataError, TrainingError
from megascale.resilience.driver.api.client import send_request
from megascale.resilience.driver.api.tokens import read_tokens
from megascale.resilience.driver.state.journal import FILE, JournalReader
from megascale.services.shared_token import same

_SECONDS = 5.0  # a driver has to answer
# Events that say something about a node's past.
_HISTORY = ("evict", "cordon", "lost", "diagnosed", "joined", "slow", "fault", "hang", "exit", "heartbeat")
_MOST_HISTORY = 300


def describe_job(run: Path) -> dict[str, Any] | None:
    """Phase, attempt, step, ranks, why and whether a driver is at work; None if the run was never launched.

    Asks nobody. DataError for a journal that cannot be read.
    """
    if not (run / FILE).exists():
        return None
    reader = JournalReader(run)
    try:
        state, alive = reader.job, reader.driver_alive()
    finally:
        reader.close()
    if state is None:
        return None
    return {
        "phase": state.phase.value, "attempt": state.attempt, "step": state.step, "world": state.world,
        "data": state.data, "nodes": list(state.placement), "why": state.why, "driver": alive,
        "ranks_per_node": state.ranks_per_node,
    }  # fmt: skip


def describe_nodes(run: Path) -> dict[str, Any]:
    """The job and its nodes with ranks, workers and history; `driver` false: as the journal remembers them."""
    if not (run / FILE).exists():
        raise DataError(f"{run.name} was not started with `megascale launch`: it has no nodes, and nobody takes orders")
    reader = JournalReader(run)
    try:
        state, alive, remembered = reader.job, reader.driver_alive(), reader.nodes()
        entries = reader.events()
    finally:
        reader.close()
    found, why = [], ""
    if alive:
        try:
            found = send_request(run, "GET", "/v1/nodes", seconds=_SECONDS)
        except (DataError, TrainingError) as error:
            alive, why = False, str(error)
    if not alive:
        found = [
            {"name": n.name, "address": n.address, "state": n.state, "cordoned": bool(n.facts.get("cordoned")),
             "ranks": list(state.ranks(n.name)) if state else [], "seen": None, "why": n.why, "workers": [],
             "checks": "not run", "facts": dict(n.facts)}
            for n in remembered
        ]  # fmt: skip
    history: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if any(word in entry.kind for word in _HISTORY):
            for node in entry.nodes:
                one = {"time": entry.time, "kind": entry.kind, "action": entry.action, "evidence": entry.evidence[:8]}
                history.setdefault(node, []).append(one)
    return {
        "job": describe_job(run),
        "driver": alive,
        "driver_error": why,
        "nodes": [one | {"history": history.get(one["name"], [])[-_MOST_HISTORY:][::-1]} for one in found],
    }


def send_order(run: Path, token: bytes, action: str, node: str, why: str) -> dict[str, Any]:
    """Hand an order to the run's driver: cordon, uncordon or evict of a node; pause, resume or restart of the job.

    PermissionError unless `token` is the run's acting token; ConfigError for what the driver refuses, DataError where
    none was launched, TrainingError if it does not answer.
    """
    if not (run / FILE).exists():
        raise DataError(f"{run.name} was not started with `megascale launch`: nobody takes orders")
    if not same(token, read_tokens(run).act):
        raise PermissionError(
            "this is not the run's acting token: it is the text of driver/token.act in the run folder"
        )
    path = f"/v1/nodes/{node}/{action}" if action in ("cordon", "uncordon", "evict") else f"/v1/job/{action}"
    answer: dict[str, Any] = send_request(run, "POST", path, {"why": why})
    return answer
