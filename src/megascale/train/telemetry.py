"""What a rank leaves for those who look at it from outside: status, record of calls, stacks, flight recorder.

All of it works while the rank hangs. SIGUSR2 makes the interpreter write the main thread's stack, even inside a call
that never returns. A thread that sleeps in a named pipe answers each writer with a dump of torch's flight recorder.
A stopped process answers neither, which is a finding of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megascale import torch_private
from megascale.core import calls
from megascale.core.background import FailureLog
from megascale.core.status import StatusFile
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups

log = logging.getLogger(__name__)


class Telemetry:
    """Opens the files of one rank in `status` and `flight`; `close` lets go of them.

    Attributes:
        status: the rank's status file.
    """

    def __init__(
        self, status: Path, flight: Path, rank: int, world: int, groups: Groups | None, runtime: Runtime
    ) -> None:
        self.status = StatusFile(status, rank)
        self._stacks = open(status / f"rank-{rank}.stack", "w")  # noqa: SIM115 - held while the process lives
        if hasattr(signal, "SIGUSR2"):
            # Of the thread that takes the signal only: others run meanwhile, and whoever walks their frames reads
            # what is being changed. A rank that was asked for all crashed after some ten times.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a crash in native code leaves its stack on stderr
        self._calls = calls.CallLog(status, rank, world)
        for name, size in _groups(groups):
            self._calls.register_group(name, size)
        self._runtime = runtime
        runtime.calls = self._calls
        self._pipe = status / f"rank-{rank}.ask"
        self._flight = flight / f"rank-{rank}.json"
        self._open = hasattr(os, "mkfifo")
        if self._open and groups is not None:
            flight.mkdir(exist_ok=True)
            self._pipe.unlink(missing_ok=True)
            os.mkfifo(self._pipe, 0o600)
            threading.Thread(target=self._answer, name="megascale-flight", daemon=True).start()
        self._waited = self._begun = 0.0

    def step_begins(self, step: int) -> None:
        """A step's first operation comes next."""
        self.status.update("train", step)
        self._calls.begin_step(step)
        self._begun, self._waited = time.perf_counter(), self._calls.waited_seconds

    def step_ended(self) -> None:
        """The step is done; tells how long this rank computed, without its waits for others."""
        waited = self._calls.waited_seconds - self._waited
        self.status.compute_seconds = max(0.0, time.perf_counter() - self._begun - waited)

    def close(self) -> None:
        """Let go of the files; their last words stay."""
        self._open = False
        self._runtime.calls = calls.NoCalls()
        if hasattr(signal, "SIGUSR2"):
            # Somebody may ask just now: without a handler the signal would end the process.
            faulthandler.unregister(signal.SIGUSR2)
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._calls.close()
        self._stacks.close()
        self.status.close()
        self._pipe.unlink(missing_ok=True)

    def _answer(self) -> None:
        """Dump the flight recorder whenever somebody opens the pipe."""
        failures = FailureLog(log, "a dump of the flight recorder")
        while self._open:
            try:
                with open(self._pipe) as pipe:  # sleeps until a writer comes
                    pipe.read()
                text = torch_private.flight_records()
                temporary = self._flight.with_suffix(".tmp")
                temporary.write_text(text)
                os.replace(temporary, self._flight)
            except Exception as error:
                if not self._pipe.exists():
                    return  # the rank has closed it
                failures.note(error, "the next request is answered again")
                time.sleep(0.1)  # whoever asked may still hold the pipe open


def _groups(groups: Groups | None) -> list[tuple[str, int]]:
    """Names and sizes of a rank's groups."""
    if groups is None:
        return []
    found = [("world", groups.grid.world_size)]
    for name in ("tensor", "data_gather", "data_reduce", "model", "stage", "embedding"):
        group = getattr(groups, name)
        if group is not None:
            found.append((group.group_name, dist.get_world_size(group)))
    return found + [(channel.group.group_name, 2) for channel in groups.p2p_channels()]
