"""The client of a driver's HTTP API, and the description of a job for commands.

The client sends the token to the run's driver only.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megascale.core import strict_json
from megascale.core.addresses import is_loopback
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.resilience.driver.api.access import create_client_context, read_access, read_tokens
from megascale.resilience.driver.state.journal_reader import JOURNAL_FILE, JournalReader
from megascale.resilience.protocol.contact import read_contact
from megascale.services.shared_token import secrets_equal

_END_PHASES = ("done", "failed", "interrupted")
_LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp
TIMEOUT_SECONDS = 10.0  # for the answer to a request
_VIEW_TIMEOUT_SECONDS = 5.0  # for the answer to a page of the dashboard, which otherwise shows the journal
# An event whose kind contains one of these texts belongs to the history of its nodes.
_HISTORY_KINDS = ("evict", "cordon", "lost", "diagnosed", "joined", "slow", "fault", "hang", "exit", "heartbeat")
_HISTORY_LIMIT = 300  # newest events of a node
_HISTORY_SENTENCES = 8  # sentences of evidence per event


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the driver never redirects, and the target of a redirect would receive the token."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        return None


def send_request(
    run: Path, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = TIMEOUT_SECONDS
) -> Any:
    """Send a request to a run's driver and return its answer.

    Args:
        run: the run folder, or on another machine the file that `megascale access` wrote.
        path: path of the API, such as /v1/job.
        body: sent as JSON.
        seconds: time in which the driver must answer.

    Raises:
        ConfigError: the driver refuses, or the token could reach another receiver than the driver.
        TrainingError: the driver does not answer.
    """
    url, token, context = _locate(run, method)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None
    if body is not None:
        data = strict_json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    # An empty handler keeps urllib from using the environment's proxies.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            reason = json.load(error)["detail"]
        except (ValueError, KeyError, TypeError):
            reason = f"HTTP {error.code}"
        raise ConfigError(f"the driver of {run} refused: {reason}") from None
    except (OSError, ValueError) as error:
        raise TrainingError(_describe_silence(run, url, error)) from None


def _describe_silence(run: Path, url: str, error: Exception) -> str:
    """Return a sentence on a driver that does not answer, with the remedy."""
    reason = getattr(error, "reason", error)
    silence = f"the driver of {run} does not answer at {url} ({getattr(reason, 'strerror', None) or reason})"
    if run.is_file():
        return f"{silence}; check that the job is running, and that this machine reaches the address"
    with contextlib.suppress(DataError):
        job = describe_job(run)
        if job is not None and job["phase"] in _END_PHASES and not job["driver"]:
            ending = f"the job of {run} has ended: it is {job['phase']}"
            return f"{ending}; `megascale events {run}` says why, and `megascale launch` starts it again"
    return f"{silence}; start it again with `megascale launch`"


def _locate(run: Path, method: str) -> tuple[str, str, ssl.SSLContext | None]:
    """Return (base URL, token, TLS context) of a run's driver, without a context on loopback."""
    if run.is_file():
        access = read_access(run)
        return access.api, access.token, access.make_context()
    contact = read_contact(run)
    tokens = read_tokens(run)
    token = (tokens.read if method == "GET" else tokens.act).decode()
    url = urlsplit(contact.api)
    if url.scheme == "https":
        return contact.api, token, create_client_context(run)
    if not is_loopback(url.hostname or ""):
        raise ConfigError(f"the driver of {run} is at {contact.api}: no token is sent over a network without TLS")
    _check_owner(run, contact.api, url.port or 0)
    return contact.api, token, None


def _check_owner(run: Path, url: str, port: int) -> None:
    """Raise ConfigError if another user listens on the driver's port: the driver has ended, and its port was taken."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue  # The system is not Linux or has no IPv6.
        for line in lines:
            fields = line.split()  # local address and port at 1, state at 3, user at 7
            is_driver_port = fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port
            if is_driver_port and int(fields[7]) not in (0, os.geteuid()):
                raise ConfigError(
                    f"at {url}, where the driver of {run} was, another user (uid {fields[7]}) listens: no token is "
                    "sent; start the driver again with `megascale launch`"
                )


# the job as commands show it ------------------------------------------------------------------------------------------


def describe_job(run: Path) -> dict[str, Any] | None:
    """Return phase, attempt, step, ranks, reason and whether a driver is at work; None if the run was never launched.

    The journal has the answer; no driver is needed. Raise DataError for an unreadable journal.
    """
    if not (run / JOURNAL_FILE).exists():
        return None
    reader = JournalReader(run)
    try:
        state = reader.job
        is_alive = reader.is_driver_alive()
    finally:
        reader.close()
    if state is None:
        return None
    return {
        "phase": state.phase.value,
        "attempt": state.attempt,
        "step": state.step,
        "world": state.world,
        "data": state.data,
        "nodes": list(state.placement),
        "why": state.reason,
        "driver": is_alive,
        "ranks_per_node": state.ranks_per_node,
    }


def describe_nodes(run: Path) -> dict[str, Any]:
    """Return the job and its nodes with ranks, workers and history, from the journal if no driver answers."""
    _require_journal(run, "it has no nodes, and accepts no orders")
    reader = JournalReader(run)
    try:
        is_alive = reader.is_driver_alive()
        events = reader.events()
        nodes = list_stored_nodes(reader)
    finally:
        reader.close()
    problem = ""
    if is_alive:
        try:
            nodes = send_request(run, "GET", "/v1/nodes", seconds=_VIEW_TIMEOUT_SECONDS)
        except (DataError, TrainingError) as error:
            is_alive = False
            problem = str(error)
    history: dict[str, list[dict[str, Any]]] = {}
    for entry in events:
        if any(text in entry.kind for text in _HISTORY_KINDS):
            evidence = entry.evidence[:_HISTORY_SENTENCES]
            event = {"time": entry.time, "kind": entry.kind, "action": entry.action, "evidence": evidence}
            for name in entry.nodes:
                history.setdefault(name, []).append(event)
    described_nodes = []
    for node in nodes:
        newest_events = history.get(node["name"], [])[-_HISTORY_LIMIT:]
        described_nodes.append(node | {"history": list(reversed(newest_events))})
    return {"job": describe_job(run), "driver": is_alive, "driver_error": problem, "nodes": described_nodes}


def list_stored_nodes(reader: JournalReader) -> list[dict[str, Any]]:
    """Return the journal's nodes in the form of the API's answer to /v1/nodes."""
    state = reader.job
    return [
        {
            "name": name,
            "address": record.address,
            "state": record.state.value,
            "cordoned": record.cordoned,
            "ranks": list(state.ranks(name)) if state is not None else [],
            "seen": None,
            "why": record.reason,
            "workers": [],
            "checks": "not run",
            "facts": dict(record.facts),
        }
        for name, record in reader.nodes().items()
    ]


def send_order(run: Path, token: bytes, action: str, node: str, reason: str) -> dict[str, Any]:
    """Send an order to the run's driver: cordon, uncordon or evict a node; pause, resume or restart the job.

    Raises:
        PermissionError: `token` is not the run's token for orders.
        ConfigError: the driver refuses.
        DataError: no driver was launched.
        TrainingError: the driver does not answer.
    """
    _require_journal(run, "it accepts no orders")
    if not secrets_equal(token, read_tokens(run).act):
        raise PermissionError(
            "this is not the run's acting token: it is the text of driver/token.act in the run folder"
        )
    path = f"/v1/job/{action}"
    if action in ("cordon", "uncordon", "evict"):
        path = f"/v1/nodes/{node}/{action}"
    answer: dict[str, Any] = send_request(run, "POST", path, {"why": reason})
    return answer


def _require_journal(run: Path, consequence: str) -> None:
    """Raise DataError, with a consequence for people, if the run was not launched."""
    if not (run / JOURNAL_FILE).exists():
        raise DataError(f"{run.name} was not started with `megascale launch`: {consequence}")
