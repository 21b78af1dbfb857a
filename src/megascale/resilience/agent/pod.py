"""The agent of a pod: a node's container runs only `python -m megascale.resilience.agent.pod`.

The job's name and the node's names come from the environment (pod spec and downward API), the secret from a mounted
Secret. The driver's address comes from the pod's annotations, which a new driver changes and the kubelet writes into
files. As the container's first process it forwards signals and reaps orphaned processes.
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
READ_INTERVAL = 0.25  # seconds between reads of the annotations
JOIN_TIMEOUT = 24 * 3600.0  # seconds to wait for a driver; the pod's creator removes it earlier


class DriverAnnotations:
    """The driver's addresses in the pod's annotations; each iteration reads them again and yields (host, port)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError, ConfigError):
            for text in (self._folder / "driver").read_text().replace(",", " ").split():
                yield parse_driver_address(text)

    @property
    def epoch(self) -> int:
        """Epoch of the driver that wrote the annotations, 0 if none has."""
        try:
            return int((self._folder / "epoch").read_text())
        except (OSError, ValueError):
            return 0


def update_driver(annotations: DriverAnnotations, home: Path) -> None:
    """Write the annotations' driver into the agent's folder if it is another or a newer one."""
    try:
        job = read_job(home)
    except DataError:
        return  # the agent has not joined yet
    drivers = list(annotations)
    epoch = annotations.epoch
    if not drivers or epoch < job.epoch or (drivers[0] == job.driver and epoch == job.epoch):
        return
    log.info("the driver of epoch %d is at %s:%d", epoch, *drivers[0])
    job = replace(job, driver=drivers[0], alternative_drivers=tuple(drivers[1:]), epoch=epoch)
    write_job(home, job, read_job_token(home))


def _follow_annotations(annotations: DriverAnnotations, home: Path) -> None:
    failures = FailureLog(log, "reading the pod's annotations")
    while True:
        try:
            update_driver(annotations, home)
        except Exception as error:  # for example files that the kubelet has half written
            failures.note(error, f"it is tried again in {READ_INTERVAL:g} s")
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
    """Return in a child; the parent forwards signals to it, reaps processes and ends with the child's exit code."""
    child = os.fork()
    if not child:
        return
    for number in terminal.termination_signals():
        signal.signal(number, lambda number, frame: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def main() -> None:
    """Run from the command line, with the exit codes of `megascale agent`."""
    terminal.keep_working()
    if os.getpid() == 1:
        _fork_from_first_process()
    try:
        run()
    except MegascaleError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
