"""Files by which one rank is observed from outside: log, status, record of calls, stacks, flight recorder.

They also serve while the rank hangs. SIGUSR2 makes the interpreter write the main thread's stack, even inside a call
that never returns. A thread that sleeps in a named pipe answers each writer with a dump of torch's flight recorder.
A stopped process answers neither, which is evidence of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megascale import torch_private
from megascale.core import calls
from megascale.core.failure import FailureLog
from megascale.core.status import StatusFile
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups
from megascale.train.rank_info import RankInfo

log = logging.getLogger("megascale.train")

ATTEMPT_VARIABLE = "MEGASCALE_ATTEMPT"  # set for ranks that an agent starts, whose output goes to a log


class _UtcFormatter(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]


def start_rank_log(rank_info: RankInfo, attempt: int) -> None:
    """Write log records to this rank's log from now on, with date, attempt and rank, so that logs can be joined.

    Rank 0 of `megascale train` writes to a terminal and has no log. A program that has set up logging is left alone.
    """
    root = logging.getLogger()
    has_terminal = rank_info.rank == 0 and ATTEMPT_VARIABLE not in os.environ
    handler = next((handler for handler in root.handlers if isinstance(handler.formatter, _UtcFormatter)), None)
    if has_terminal or (root.handlers and handler is None):
        return
    if handler is None:
        handler = logging.StreamHandler()
        root.addHandler(handler)
    prefix = f"%(asctime)s.%(msecs)03dZ attempt {attempt} rank {rank_info.rank} "
    handler.setFormatter(_UtcFormatter(prefix + "%(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    log.setLevel(logging.INFO)
    log.info("process %d on %s, one of %d, begins", os.getpid(), socket.gethostname(), rank_info.world)


class Telemetry:
    """Opens the files of one rank in `status` and `flight`; `close` closes them.

    Attributes:
        status: the rank's status file.
    """

    def __init__(
        self, status: Path, flight: Path, rank: int, world: int, groups: Groups | None, runtime: Runtime
    ) -> None:
        self.status = StatusFile(status, rank)
        self._stacks = open(status / f"rank-{rank}.stack", "w")  # noqa: SIM115 - open while the process lives
        if hasattr(signal, "SIGUSR2"):
            # Only the signalled thread's stack is safe: other threads change their frames while these are walked. A
            # rank whose threads were all dumped crashed after about ten dumps.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a crash in native code writes its stack to stderr
        self._calls = calls.CallLog(status, rank, world)
        for name, size in _list_groups(groups):
            self._calls.register_group(name, size)
        self._runtime = runtime
        runtime.calls = self._calls
        self._pipe = status / f"rank-{rank}.ask"
        self._flight = flight / f"rank-{rank}.json"
        self._is_open = hasattr(os, "mkfifo")
        if self._is_open and groups is not None:
            flight.mkdir(exist_ok=True)
            self._pipe.unlink(missing_ok=True)
            os.mkfifo(self._pipe, 0o600)
            threading.Thread(target=self._answer_requests, name="megascale-flight", daemon=True).start()
        self._step_start = 0.0
        self._wait_at_start = 0.0

    def begin_step(self, step: int) -> None:
        """Note that a step's first operation comes next."""
        self.status.update("train", step)
        self._calls.begin_step(step)
        self._step_start = time.perf_counter()
        self._wait_at_start = self._calls.waited_seconds

    def end_step(self) -> None:
        """Write how long this rank computed in the step, without its waits for other ranks."""
        wait = self._calls.waited_seconds - self._wait_at_start
        self.status.compute_seconds = max(0.0, time.perf_counter() - self._step_start - wait)

    def close(self) -> None:
        """Close the files; their last contents remain."""
        self._is_open = False
        self._runtime.calls = calls.NullCallLog()
        if hasattr(signal, "SIGUSR2"):
            # A request may arrive at this moment: without a handler the signal would end the process.
            faulthandler.unregister(signal.SIGUSR2)
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._calls.close()
        self._stacks.close()
        self.status.close()
        self._pipe.unlink(missing_ok=True)

    def _answer_requests(self) -> None:
        """Dump the flight recorder whenever a process opens the pipe."""
        failures = FailureLog(log, "a dump of the flight recorder")
        while self._is_open:
            try:
                with open(self._pipe) as pipe:  # sleeps until a writer opens the pipe
                    pipe.read()
                temporary = self._flight.with_suffix(".tmp")
                temporary.write_text(torch_private.dump_flight_recorder())
                os.replace(temporary, self._flight)
            except Exception as error:
                if not self._pipe.exists():
                    return  # `close` has removed it
                failures.note(error, "the next request is answered again")
                time.sleep(0.1)  # the writer may still hold the pipe open


def _list_groups(groups: Groups | None) -> list[tuple[str, int]]:
    """Return the names and sizes of a rank's groups."""
    if groups is None:
        return []
    sizes = [("world", groups.grid.world_size)]
    sizes += [(group.group_name, dist.get_world_size(group)) for group in groups.by_kind.values()]
    sizes += [(channel.group.group_name, 2) for channel in groups.p2p.values()]
    return sizes
