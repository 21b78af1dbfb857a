"""Starts the ranks of a run on this host, one process per rank, and ends them together."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from megascale.checkpoint.background.service_memory import measure_service_memory
from megascale.config import Config
from megascale.core import run_lock
from megascale.core.addresses import STORE_LISTENER_VARIABLE
from megascale.core.failure import describe_exit
from megascale.core.grid import Grid
from megascale.core.layout import Layout
from megascale.core.preflight import (
    CHECKED_VARIABLE,
    IMPORTED_PIPE_VARIABLE,
    HostShare,
    check_host,
    max_concurrent_imports,
)
from megascale.core.python_process import module_command
from megascale.core.terminal import termination_signals
from megascale.core.untrusted_files import read_tail
from megascale.data.loader import host_loader
from megascale.errors import (
    EXIT_BAD_DATA,
    EXIT_CANNOT_FIT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    FitError,
)

# A rank that has not reported its imports after this time counts as having finished them.
IMPORT_SECONDS = 60.0
# After one rank has failed, the other ranks have this time to report errors of their own. Then they are ended.
GRACE_SECONDS = 10.0
# Time from a second interruption to SIGKILL, the only signal to which a rank that hangs on its device reacts.
IMPATIENT_SECONDS = 5.0
# A signal this soon after the first is a repetition: `timeout` sends each signal to the process and to its group.
REPEATED_SIGNAL_SECONDS = 1.0
# Time from SIGTERM to SIGKILL for ranks that are ended because another rank failed or training was interrupted.
END_SECONDS = 3.0
# Time within which processes end after SIGKILL. Freeing the memory of a large process takes seconds, and a failed
# device may keep the kernel from ending a process at all.
KILL_SECONDS = 30.0
_TAIL_LINES = 15  # lines of a failed rank's log that are printed


def count_processes(config: Config, gpus: int) -> int:
    """Return the number of ranks that `megascale train` starts on this host.

    If parallel.data is not set, the model is replicated over all GPUs, and once on a CPU. Raises FitError for more
    ranks than GPUs.
    """
    parallel = config.parallel
    model_ranks = parallel.model_ranks
    use_gpus = gpus > 0 and config.train.device != "cpu"
    if parallel.data is None:
        if use_gpus:
            return max(1, gpus // model_ranks) * model_ranks
        return model_ranks
    ranks = model_ranks * parallel.data
    if use_gpus and ranks > gpus:
        raise FitError(
            f"{Grid.from_config(parallel, ranks).describe()} = {ranks} ranks but this host has {gpus} GPUs; "
            "lower parallel.tensor, pipeline or data, or start on more hosts with torchrun"
        )
    return ranks


def is_launched_rank() -> bool:
    """Return whether a launcher (torchrun, an agent, this module) started this process as one of several ranks."""
    return "RANK" in os.environ


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, so that no rank trains on without its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_host_fits(layout: Layout, *, holds_model: bool = True, saves_checkpoints: bool = False) -> None:
    """Check that this host has the GPUs and the memory for all ranks of the run.

    Args:
        holds_model: whether the ranks train the model of `layout`; False: the memory for training is not checked.
        saves_checkpoints: whether the ranks save checkpoints, for which the disk needs space.

    Raises FitError if the ranks do not fit, ConfigError for train.device=cuda without a GPU.
    """
    config, world = layout.config, layout.grid.world_size
    has_gpus = False
    if config.train.device != "cpu":
        import torch

        has_gpus = torch.cuda.device_count() > 0
        if config.train.device == "cuda" and not has_gpus:
            raise ConfigError("train.device=cuda but this host has no CUDA device; use --train.device=cpu or auto")
    reused_bytes = 0
    if saves_checkpoints:
        reused_bytes = measure_service_memory(config)
    share = HostShare(
        world,
        first_rank=0,
        ranks=world,
        uses_gpus=has_gpus,
        has_model=holds_model,
        writes_checkpoints=saves_checkpoints,
        reused_bytes=reused_bytes,
    )
    check_host(layout, share)


def launch(
    arguments: list[str],
    layout: Layout,
    *,
    holds_model: bool = True,
    saves_checkpoints: bool = False,
    program: str = "megascale.cli.main",
) -> int:
    """Run `python -m PROGRAM ARGUMENTS` as the ranks of `layout`, and return the exit code of the launch.

    The code is that of the failed rank that is reported, 130 after an interruption, else 0. If a rank fails, the other
    ranks are ended too. Rank 0 writes to the terminal, rank N to `logs/rank-N.log`. The host's data loader, if the run
    uses one, is started before the ranks and ended after them.

    The first SIGINT, SIGTERM or SIGHUP becomes a SIGTERM to each rank; a rank that is still importing ends silently.
    The second signal is passed on unchanged, and ranks that still run after IMPATIENT_SECONDS are killed. A SIGHUP
    never counts as the second signal, since a closing terminal may send several.

    Ranks start in waves. If more ranks than cores import modules at the same time, all of them finish late.

    Raises FitError if the ranks do not fit this host (`check_host_fits`).

    Args:
        holds_model, saves_checkpoints: as for `check_host_fits`.
    """
    check_host_fits(layout, holds_model=holds_model, saves_checkpoints=saves_checkpoints)
    config, world = layout.config, layout.grid.world_size
    run_lock.check_available(config.run_folder)  # one message, before any process starts
    (config.run_folder / "logs").mkdir(parents=True, exist_ok=True)
    job = _LocalJob(module_command(program, *arguments), world, config.run_folder / "logs")
    handlers = {number: signal.signal(number, job.pass_signal) for number in termination_signals()}
    loader: host_loader.StartedLoader | None = None
    try:
        loader = host_loader.start_loader(layout, first_rank=0, ranks=world)
        if loader is not None:
            job.environment |= loader.environment
        if not job.start_ranks():
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        return job.wait()
    finally:
        job.close()
        if loader is not None:
            loader.stop()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Failure(NamedTuple):
    """A rank that has failed, and its exit code: the negative number of a signal if a signal ended it."""

    rank: int
    code: int


class _LocalJob:
    """The rank processes of one launch.

    Attributes:
        environment: environment variables of every rank.
        ranks: processes started so far; the index is the rank.
    """

    def __init__(self, command: list[str], world: int, logs: Path) -> None:
        self._command = command
        self._world = world
        self._logs = logs
        # Rank 0 inherits the listening socket: a port that was only probed may be in use when rank 0 needs it.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._listener.getsockname()[1]),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            CHECKED_VARIABLE: "1",
        }
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._interruptions: list[float] = []  # monotonic time of each signal that counts
        self._waves = _Waves(self.ranks, self._interruptions)

    def pass_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal of the launcher: the first becomes SIGTERM for all ranks, the second is passed on."""
        current_time = time.monotonic()
        if self._interruptions:
            is_repeated = current_time - self._interruptions[0] < REPEATED_SIGNAL_SECONDS
            if is_repeated or number == signal.SIGHUP:
                return
        self._interruptions.append(current_time)
        _signal_ranks(self.ranks, number if len(self._interruptions) > 1 else signal.SIGTERM)

    def start_ranks(self) -> bool:
        """Start all ranks in waves, or fewer if one fails meanwhile. Return False if an interruption came first."""
        for rank in range(self._world):
            self._waves.wait()
            if self._interruptions:
                return False
            if _find_first_failure(self.ranks) is not None:
                break  # further ranks would wait for the failed one
            self.ranks.append(self._start_rank(rank))
        if self._interruptions:
            _signal_ranks(self.ranks, signal.SIGTERM)  # the signal may have come before the last rank was in the list
        return True

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        """Start the process of a rank. Rank 0 inherits the terminal and the listening socket."""
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | self._waves.environment
        if rank > 0:
            with open(self._logs / f"rank-{rank}.log", "ab") as log_file:
                return self._start_process(
                    variables, stdout=log_file.fileno(), stderr=subprocess.STDOUT, descriptors=()
                )
        descriptor = self._listener.fileno()
        variables[STORE_LISTENER_VARIABLE] = str(descriptor)
        process = self._start_process(variables, stdout=None, stderr=None, descriptors=(descriptor,))
        self._listener.close()
        return process

    def _start_process(
        self, variables: dict[str, str], stdout: int | None, stderr: int | None, descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start a process that inherits `descriptors` and has `variables` in its environment."""
        return subprocess.Popen(
            self._command,
            env=self.environment | variables,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=(self._waves.write_end, *descriptors),
        )

    def wait(self) -> int:
        """Wait until all ranks have ended, or until the deadline that a failure or a second interruption sets.

        Return the exit code of the launch. `close` ends the ranks that still run.
        """
        ranks, interruptions = self.ranks, self._interruptions
        failure: _Failure | None = None
        deadline = float("inf")
        while _list_running(ranks) and time.monotonic() < deadline:
            if failure is None:
                failure = _find_first_failure(ranks)
                if failure is not None:
                    deadline = time.monotonic() + GRACE_SECONDS
            if len(interruptions) > 1:
                deadline = min(deadline, interruptions[1] + IMPATIENT_SECONDS)
            time.sleep(0.05)
        running = ", ".join(map(str, _list_running(ranks)))
        if len(interruptions) > 1 and running:
            print(f"ended after a second interruption: rank {running} did not answer", file=sys.stderr)
            return EXIT_INTERRUPTED
        failure = failure or _find_first_failure(ranks)
        if failure is None:
            return 0
        if interruptions and all(p.returncode in (0, EXIT_INTERRUPTED, -signal.SIGTERM) for p in ranks):
            # After its imports, rank 0 handles SIGTERM and prints its own message.
            if ranks[0].returncode < 0:
                print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        cause = _find_cause(failure, ranks)
        self._report_failure(cause)
        if running:  # gloo does not always notice that its peer has ended
            print(
                f"rank {running} had not ended {GRACE_SECONDS:g} seconds later and is ended by the launcher",
                file=sys.stderr,
            )
        return max(cause.code, EXIT_FAILED)  # the code is negative if a signal ended the rank

    def _report_failure(self, failure: _Failure) -> None:
        """Print which rank failed and the end of its log, unless rank 0 has printed the error itself."""
        rank, code = failure
        # If rank 0 has the same exit code, it has received the same error and printed it on the terminal.
        if code >= 0 and (rank == 0 or self.ranks[0].returncode == code):
            return
        lines = [f"rank {rank} was the first to end, with {_explain_exit(code)}"]
        log_file = self._logs / f"rank-{rank}.log"
        if rank > 0:
            tail = read_tail(log_file).splitlines()[-_TAIL_LINES:]
        else:
            tail = []
        if tail:
            lines[0] += f"; the end of {log_file}:"
            lines += [f"  {line}" for line in tail]
        print("\n".join(lines), file=sys.stderr)

    def close(self) -> None:
        """End all ranks that still run, and close the launcher's descriptors."""
        self._listener.close()
        end_processes(self.ranks, END_SECONDS)
        self._waves.close()


class _Waves:
    """Delays starts so that at most one wave of ranks imports modules at a time.

    Args:
        ranks: processes started so far; the caller appends to the list.
        interruptions: times of the signals so far; the caller appends to the list.

    Attributes:
        write_end: descriptor of a pipe into which each rank writes a byte when it has imported its modules.
        environment: variable that tells a rank this descriptor.
    """

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]], interruptions: Sequence[float]) -> None:
        self._ranks = ranks
        self._interruptions = interruptions
        self._size = max_concurrent_imports(os.cpu_count() or 1)
        self._imported_count = 0  # number of ranks that have imported their modules
        self._read_end, self.write_end = os.pipe()
        self.environment = {IMPORTED_PIPE_VARIABLE: str(self.write_end)}

    def wait(self) -> None:
        """Wait until less than a wave of ranks is importing, a rank has failed, or the launch is interrupted.

        Stop waiting after IMPORT_SECONDS.
        """
        deadline = time.monotonic() + IMPORT_SECONDS
        while len(self._ranks) - self._imported_count >= self._size and time.monotonic() < deadline:
            if self._interruptions or _find_first_failure(self._ranks) is not None:
                return
            if select.select([self._read_end], [], [], 0.05)[0]:
                self._imported_count += len(os.read(self._read_end, 4096))

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)


def _list_running(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return the ranks that still run. Polling stores the exit codes of all others in `returncode`."""
    return [rank for rank, process in enumerate(ranks) if process.poll() is None]


def _signal_ranks(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _find_first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> _Failure | None:
    """Return the failure of the lowest failed rank, None if no rank has failed.

    A rank that a signal ended comes before all others, which may have failed because of it.
    """
    failures = [_Failure(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    failures_by_signal = [failure for failure in failures if failure.code < 0]
    return min(failures_by_signal or failures, default=None)


def _find_cause(failure: _Failure, ranks: list[subprocess.Popen[bytes]]) -> _Failure:
    """Return the failure to report.

    EXIT_FAILED may mean that a rank lost contact with another rank. If a rank ended with a more specific code, its
    failure is returned instead of `failure`.
    """
    if failure.code == EXIT_FAILED:
        for rank, process in enumerate(ranks):
            if process.returncode in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA):
                return _Failure(rank, process.returncode)
    return failure


def _explain_exit(code: int) -> str:
    """Return a phrase for an exit code, or for the signal that ended a process."""
    if code == -signal.SIGKILL:
        return f"{describe_exit(code)} (out of memory?)"
    return describe_exit(code)


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_period: float) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that still run after `grace_period` seconds.

    Print which processes run KILL_SECONDS after their SIGKILL, and do not wait for them any longer.
    """
    for process in processes:
        if process.poll() is None:
            process.terminate()
    running = _wait_for_processes(processes, grace_period)
    for process in running:
        process.kill()
    for process in _wait_for_processes(running, KILL_SECONDS):
        print(
            f"process {process.pid} has not ended {KILL_SECONDS:g} s after SIGKILL and may keep its GPU and memory: "
            f"the kernel waits for a device or a file system. `cat /proc/{process.pid}/stack` (as root) and `dmesg` "
            "show which; restart the host if it does not end",
            file=sys.stderr,
        )


def _wait_for_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Wait for the end of processes, for at most `seconds` in all. Return those that still run."""
    deadline = time.monotonic() + seconds
    running = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.append(process)
    return running
