"""FOLDER/NAME.json: the addresses of a job that a Prometheus scrapes, for its file-based discovery.

FOLDER is `resilience.targets`. All runs share it, since Prometheus accepts a wildcard only in a file's name.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core.addresses import is_loopback
from megascale.resilience.cluster.base import format_address
from megascale.resilience.driver.state.job_state import ENDED

if TYPE_CHECKING:
    from megascale.resilience.driver.driver import Driver

_INTERVAL = 2.0  # seconds between looks at the nodes
_WILDCARDS = ("", "0.0.0.0", "::")


class ScrapeTargets:
    """Keeps the file as the nodes are, and removes it after the job, so that the job's end is no outage."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._file = Path(driver.limits.targets) / f"{driver.job.state.name}.json"
        self._written: str | None = None

    async def keep_current(self) -> None:
        """Write the file whenever the nodes have changed, until the task is cancelled."""
        while True:
            self.write()
            await asyncio.sleep(_INTERVAL)

    def write(self) -> None:
        """Replace the file atomically unless it is current. Raises OSError."""
        text = json.dumps(self._list_targets(), indent=1) + "\n"
        if text == self._written:
            return
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, self._file)
        self._written = text

    def remove_if_ended(self) -> None:
        """Remove the file of a job that has ended. The file stays if another driver continues the job."""
        if self._driver.job.phase in ENDED:
            self._file.unlink(missing_ok=True)

    def _list_targets(self) -> list[dict[str, Any]]:
        """Return groups of targets in the format of Prometheus' file-based discovery."""
        driver = self._driver
        limits = driver.limits
        labels = limits.make_metric_labels(driver.job.state.name)
        groups = []
        if limits.driver_metrics:
            host, port = _split(limits.driver_metrics)
            if host in _WILDCARDS:
                host = limits.advertise or _own_host(limits.listen)
            groups.append({"targets": [format_address(host, port)], "labels": labels | {"role": "driver"}})
        if limits.agent_metrics:
            host, port = _split(limits.agent_metrics)
            for node in driver.nodes.all():
                address = host if is_loopback(host) else node.record.address
                if node.state.is_present and address:
                    node_labels = labels | {"role": "agent", "node": node.name}
                    groups.append({"targets": [format_address(address, port)], "labels": node_labels})
        return groups


def _own_host(listen: str) -> str:
    """Return the address that other machines reach, or this host's name, which a site may not resolve."""
    if listen in _WILDCARDS or is_loopback(listen):
        return socket.gethostname()
    return listen


def _split(address: str) -> tuple[str, int]:
    """Return (host, port) of "HOST:PORT"; the host has no brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
