"""Agent of a Kubernetes pod. The container of a node runs only `python -m megascale.resilience.agent.pod`.

The names of job and node are in the environment (pod spec and downward API), and the secret is in a mounted Secret. The
driver's address is in the pod's annotations, which a new driver changes and which the kubelet writes into files. As the
first process of the container, the program forwards signals and waits for orphaned processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megascale.core import terminal
from megascale.core.failure import FailureLog
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.resilience.agent.join import join_job, parse_driver_address
from megascale.resilience.protocol.job_description import read_job, read_job_token, write_job

log = logging.getLogger("megascale.agent")
READ_INTERVAL = 0.25  # seconds between two reads of the annotations
JOIN_TIMEOUT = 24 * 3600.0  # seconds to wait for a driver; the pod's creator deletes a useless pod earlier


class DriverAnnotations:
    """Addresses of the driver in the pod's annotations. Each iteration reads them again, and yields host and port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError, ConfigError):
            # One or more addresses, separated by commas or blanks.
            for text in (self._folder / "driver").read_text().replace(",", " ").split():
                yield parse_driver_address(text)

    @property
    def epoch(self) -> int:
        """Epoch of the driver that wrote the annotations, or 0 without one."""
        try:
            return int((self._folder / "epoch").read_text())
        except (OSError, ValueError):
            return 0


def update_driver(annotations: DriverAnnotations, node_folder: Path) -> None:
    """Write the driver of the annotations into the node's folder if it is newer or has another address."""
    try:
        job = read_job(node_folder)
    except DataError:
        return  # the agent has not joined yet
    drivers = list(annotations)
    epoch = annotations.epoch
    if not drivers or epoch < job.epoch or (drivers[0] == job.driver and epoch == job.epoch):
        return
    log.info("the driver of epoch %d is at %s:%d", epoch, *drivers[0])
    job = replace(job, driver=drivers[0], alternative_drivers=tuple(drivers[1:]), epoch=epoch)
    write_job(node_folder, job, read_job_token(node_folder))


def _follow_annotations(annotations: DriverAnnotations, node_folder: Path) -> None:
    """Update the driver in the node's folder whenever the annotations change. Never returns."""
    failures = FailureLog(log, "reading the pod's annotations")
    while True:
        try:
            update_driver(annotations, node_folder)
        except Exception as error:  # any error, such as files that the kubelet is just writing
            failures.note(error, f"the next attempt is in {READ_INTERVAL:g} s")
        time.sleep(READ_INTERVAL)


def run() -> None:
    """Run the node's agent until the job ends. Raises MegascaleError."""
    required = ("MEGASCALE_JOB", "MEGASCALE_NODE", "MEGASCALE_POD_ADDRESS")
    missing = [name for name in required if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not set: this command runs in a pod that the driver has made")
    node = os.environ["MEGASCALE_NODE"]
    annotations = DriverAnnotations(Path(os.environ.get("MEGASCALE_ABOUT", "/etc/megascale/pod")))
    folder = Path(os.environ.get("MEGASCALE_FOLDER", "/var/lib/megascale"))
    secret_file = Path(os.environ.get("MEGASCALE_SECRET", "/etc/megascale/secret/token"))
    secret = secret_file.read_text().strip().encode()
    arguments = (annotations, folder / node)
    threading.Thread(target=_follow_annotations, args=arguments, name="annotations", daemon=True).start()
    join_job(
        annotations,
        os.environ["MEGASCALE_JOB"],
        secret,
        node=node,
        folder=folder,
        address=os.environ["MEGASCALE_POD_ADDRESS"],
        interface="",
        timeout=JOIN_TIMEOUT,
        report=lambda line: print(line, flush=True),
        pod=os.environ.get("MEGASCALE_POD", ""),
    )


def _fork_from_first_process() -> None:
    """Fork, and return in the child.

    The parent forwards signals to the child, waits for orphaned processes, and ends with the child's exit code.
    """
    child = os.fork()
    if not child:
        return
    for number in terminal.termination_signals():
        signal.signal(number, lambda number, frame: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) % 256)  # An end by a signal has a code below 0.


def main() -> None:
    """Run the command line, with the exit codes of `megascale agent`."""
    terminal.keep_working()
    if os.getpid() == 1:
        _fork_from_first_process()
    try:
        run()
    except MegascaleError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
