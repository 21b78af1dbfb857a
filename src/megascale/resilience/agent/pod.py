"""The agent of a pod: `python -m megascale.resilience.agent.pod` is all that a node's container runs.

What it knows comes from its pod: the job and its own names from the environment (spec and downward API), the job's
secret from a mounted Secret, where the driver is from the pod's annotations, which a new driver changes and the kubelet
brings here as files. As the container's first process it passes signals on and reaps what others leave.
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
from megascale.core.background import FailureLog
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.resilience.agent.join import join_job, parse_place
from megascale.resilience.protocol.given import given_token, read_job, write_job

log = logging.getLogger("megascale.agent")
LOOK = 0.25  # seconds between looks at the pod's annotations
WAIT = 24 * 3600.0  # seconds to go on asking for a driver: whoever made the pod removes it


class Places:
    """Where the driver is, as the pod's annotations say now: (host, port) of each, read anew each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError, ConfigError):
            for text in (self._folder / "driver").read_text().replace(",", " ").split():
                yield parse_place(text)

    @property
    def epoch(self) -> int:
        """Of the driver that wrote them, 0 if none has."""
        try:
            return int((self._folder / "epoch").read_text())
        except (OSError, ValueError):
            return 0


def follow(places: Places, home: Path) -> None:
    """Give the agent in `home` the driver that the annotations name, once it differs from what it was given."""
    try:
        job = read_job(home)
    except DataError:
        return  # it has not joined yet
    found = list(places)
    if not found or places.epoch < job.epoch or (found[0] == job.driver and places.epoch == job.epoch):
        return
    log.info("the driver of epoch %d is at %s:%d", places.epoch, *found[0])
    write_job(home, replace(job, driver=found[0], elsewhere=tuple(found[1:]), epoch=places.epoch), given_token(home))


def _follow(places: Places, home: Path) -> None:
    failures = FailureLog(log, "taking over the pod's annotations")
    while True:
        try:
            follow(places, home)
        except Exception as error:  # of the kubelet's half-written files, say
            failures.note(error, f"it is tried again in {LOOK:g} s")
        time.sleep(LOOK)


def run() -> None:
    """Be the node's agent until the job ends. Raises MegascaleError."""
    missing = [
        name for name in ("MEGASCALE_JOB", "MEGASCALE_NODE", "MEGASCALE_POD_ADDRESS") if not os.environ.get(name)
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not set: this runs in a pod that the driver has made")
    environment = os.environ
    job, node = environment["MEGASCALE_JOB"], environment["MEGASCALE_NODE"]
    places = Places(Path(environment.get("MEGASCALE_ABOUT", "/etc/megascale/pod")))
    folder = Path(environment.get("MEGASCALE_FOLDER", "/var/lib/megascale"))
    secret = Path(environment.get("MEGASCALE_SECRET", "/etc/megascale/secret/token")).read_text().strip().encode()
    threading.Thread(target=_follow, args=(places, folder / node), name="annotations", daemon=True).start()
    join_job(
        places,
        job,
        secret,
        node,
        folder,
        environment["MEGASCALE_POD_ADDRESS"],
        "",
        WAIT,
        lambda line: print(line, flush=True),
        pod=environment.get("MEGASCALE_POD", ""),
    )


def _be_first_process() -> None:
    """Go on in a child; this process passes signals that ask for an end on, reaps, and ends as the child does."""
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
    """Command line; exit codes as `megascale agent`'s."""
    terminal.keep_working()
    if os.getpid() == 1:
        _be_first_process()
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
