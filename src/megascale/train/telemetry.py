"""Files through which other processes observe a rank: log, status, record of calls, stacks and flight recorder.

Stacks and flight recorder can be requested while the rank hangs. SIGUSR2 makes the interpreter write the main thread's
stack, even inside a call that never returns. A thread that waits for writers of a named pipe answers each one with a
dump of torch's flight recorder. If neither is answered, the process has stopped.
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
from megascale.core.group_names import ATTEMPT_KEY, remove_attempt
from megascale.core.process_orders import ORDERS_VARIABLE
from megascale.core.status import StatusFile
from megascale.parallel.runtime import Runtime
from megascale.rendezvous.groups import Groups
from megascale.train.rank_info import RankInfo

log = logging.getLogger("megascale.train")

ATTEMPT_VARIABLE = "MEGASCALE_ATTEMPT"  # set for ranks that an agent starts, whose output goes to a log


class _UtcFormatter(logging.Formatter):
    """Formats times in UTC. `start_rank_log` recognises its own handler by this class."""

    converter = time.gmtime  # type: ignore[assignment]


def start_rank_log(rank_info: RankInfo, attempt: int) -> None:
    """Write log records to stderr, this rank's log, with date, attempt and rank, so that logs can be merged.

    Do nothing on rank 0 of `megascale train`, whose stderr is a terminal, and in a program that has set up logging.
    """
    root = logging.getLogger()
    has_terminal = rank_info.rank == 0 and ATTEMPT_VARIABLE not in os.environ
    if has_terminal:
        return
    rank_handlers = [handler for handler in root.handlers if isinstance(handler.formatter, _UtcFormatter)]
    if rank_handlers:
        handler = rank_handlers[0]  # an earlier attempt in this process has added it
    elif root.handlers:
        return
    else:
        handler = logging.StreamHandler()
        root.addHandler(handler)
    prefix = f"%(asctime)s.%(msecs)03dZ attempt {attempt} rank {rank_info.rank} "
    handler.setFormatter(_UtcFormatter(prefix + "%(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    log.setLevel(logging.INFO)
    logging.getLogger("megascale.checkpoint").setLevel(logging.INFO)  # seconds until memory for snapshots is ready
    log.info("process %d on %s, one of %d ranks, begins", os.getpid(), socket.gethostname(), rank_info.world)


class Telemetry:
    """Opens the files of one rank that other processes read; `close` closes them.

    Args:
        status_folder: folder of status files, stacks and records of calls.
        flight_folder: folder of dumps of the flight recorder.
        attempt: number of the attempt, which dumps contain.
    """

    def __init__(
        self,
        status_folder: Path,
        flight_folder: Path,
        rank: int,
        world: int,
        groups: Groups | None,
        runtime: Runtime,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self.status = StatusFile(status_folder, rank)
        self._stacks = open(status_folder / f"rank-{rank}.stack", "w")  # noqa: SIM115 - open while the process lives
        if hasattr(signal, "SIGUSR2"):
            # Dump the signalled thread only. Other threads change their frames during a dump: a rank that dumped all
            # threads crashed after about ten dumps.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a crash in native code writes its stack to stderr
        self._calls = calls.CallLog(status_folder, rank, world)
        for name, size in _list_groups(groups):
            self._calls.register_group(name, size)
        self._runtime = runtime
        runtime.calls = self._calls
        self._pipe = status_folder / f"rank-{rank}.ask"
        self._flight_file = flight_folder / f"rank-{rank}.json"
        self._is_answering = hasattr(os, "mkfifo")
        if self._is_answering and groups is not None:
            flight_folder.mkdir(exist_ok=True)
            self._pipe.unlink(missing_ok=True)
            os.mkfifo(self._pipe, 0o600)
            threading.Thread(target=self._answer_requests, name="megascale-flight", daemon=True).start()
        self._step_start = 0.0
        self._waited_before_step = 0.0  # seconds

    def begin_step(self, step: int) -> None:
        """Store the start of a step. Call this before the step's first operation."""
        self.status.update("train", step)
        self._calls.begin_step(step)
        self._step_start = time.perf_counter()
        self._waited_before_step = self._calls.waited_seconds

    def end_step(self) -> None:
        """Write the seconds of the step without this rank's waits for other ranks to the status."""
        waited_seconds = self._calls.waited_seconds - self._waited_before_step
        self.status.compute_seconds = max(0.0, time.perf_counter() - self._step_start - waited_seconds)

    def close(self) -> None:
        """Close the files. Their last contents stay readable."""
        self._is_answering = False
        self._runtime.calls = calls.NullCallLog()
        if hasattr(signal, "SIGUSR2"):
            # Ignore a request that arrives now: without a handler the signal would end the process.
            faulthandler.unregister(signal.SIGUSR2)
            if ORDERS_VARIABLE in os.environ:
                # The agent asks for the stack of a rank that does not leave its attempt. It is written to the log.
                faulthandler.register(signal.SIGUSR2, all_threads=False)
            else:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._calls.close()
        self._stacks.close()
        self.status.close()
        self._pipe.unlink(missing_ok=True)

    def _answer_requests(self) -> None:
        """Dump the flight recorder whenever a process opens the pipe."""
        failures = FailureLog(log, "a dump of the flight recorder")
        while self._is_answering:
            try:
                with open(self._pipe) as pipe:  # sleeps until a writer opens the pipe
                    pipe.read()
                temporary = self._flight_file.with_suffix(".tmp")
                temporary.write_text(add_attempt(torch_private.dump_flight_recorder(), self._attempt))
                os.replace(temporary, self._flight_file)
            except Exception as error:
                if not self._pipe.exists():
                    return  # `close` has removed it
                failures.note(error, "the next request is answered again")
                time.sleep(0.1)  # the writer may still hold the pipe open


def add_attempt(dump: str, attempt: int) -> str:
    """Return a dump of the flight recorder (a JSON object) with the number of the attempt.

    The recorder also has calls of earlier attempts, and of groups that are prepared for the next one.
    """
    content = dump.lstrip().removeprefix("{")
    separator = "" if content.lstrip().startswith("}") else ", "
    return f'{{"{ATTEMPT_KEY}": {attempt}{separator}{content}'


def _list_groups(groups: Groups | None) -> list[tuple[str, int]]:
    """Return the names and sizes of a rank's groups."""
    if groups is None:
        return []
    sizes = [("world", groups.grid.world_size)]
    sizes += [(remove_attempt(group.group_name), dist.get_world_size(group)) for group in groups.by_kind.values()]
    sizes += [(remove_attempt(channel.group.group_name), 2) for channel in groups.p2p.values()]
    return sizes
