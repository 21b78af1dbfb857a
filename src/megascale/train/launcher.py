"""Starts the processes of a run on this host, one a rank, and ends them together."""

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

from megascale.config import Config
from megascale.core import run_lock
from megascale.core.ports import LISTENER
from megascale.core.preflight import CAME, CHECKED, Share, check_host, max_concurrent_imports
from megascale.core.python_command import module_command
from megascale.core.terminal import termination_signals
from megascale.core.untrusted_files import read_end
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

# A rank that has not said so by then counts as having imported everything all the same.
COME_SECONDS = 60.0
# After one process has failed the others get this long to say what they saw before they are ended.
GRACE_SECONDS = 10.0
# After a second interruption all get this long: a rank that hangs on its device hears no signal but the last.
IMPATIENT_SECONDS = 5.0
# A signal this soon after the first is the first once more: `timeout` sends each to the process and to its group.
SECOND_AFTER = 1.0
# Ranks that are told to end, since another failed or training was interrupted, have this long.
END_SECONDS = 3.0


def processes_wanted(config: Config, gpus: int) -> int:
    """Processes that `megascale train` starts here.

    On GPUs one a device unless parallel.data says fewer; on CPU tensor x pipeline x data (data: 1 by default).
    Raises FitError for more ranks than GPUs.
    """
    parallel = config.parallel
    model = parallel.tensor * parallel.pipeline
    use_gpus = gpus > 0 and config.train.device != "cpu"
    if parallel.data is None:
        return max(1, gpus // model) * model if use_gpus else model
    wanted = model * parallel.data
    if use_gpus and wanted > gpus:
        raise FitError(
            f"parallel.tensor x pipeline x data = {parallel.tensor} x {parallel.pipeline} x {parallel.data} = {wanted} "
            f"ranks but this host has {gpus} GPUs; lower one of them or start on more hosts with torchrun"
        )
    return wanted


def started_by_launcher() -> bool:
    """Whether somebody (torchrun, an agent, this module) has already made this process one of several ranks."""
    return "RANK" in os.environ


def die_with_parent() -> None:
    """For a process that is about to start: end with the one that starts it, so that no orphan trains on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_host_fits(config: Config, world: int, *, model: bool = True, keeps: bool = False) -> None:
    """Refuse what this host cannot run: FitError unless it holds `world` ranks of the run of `config` (resolved),
    ConfigError for train.device=cuda without a GPU.

    model: whether each has its share of the model; keeps: whether checkpoints are written.
    """
    gpus = False
    if config.train.device != "cpu":
        import torch

        gpus = torch.cuda.device_count() > 0
        if config.train.device == "cuda" and not gpus:
            raise ConfigError("train.device=cuda but this host has no CUDA device; use --train.device=cpu or auto")
    check_host(config, Share(world, 0, world, gpus=gpus, model=model, keeps=keeps))


def launch(
    words: list[str],
    world: int,
    config: Config,
    *,
    holds_model: bool = True,
    saves_checkpoints: bool = False,
    program: str = "megascale.cli.main",
) -> int:
    """Run `python -m PROGRAM WORDS` as `world` ranks; rank 0 talks to the terminal, the others to `logs/rank-N.log`.

    The host's data loader, where `config` (resolved) wants one, is started before them and ended after them.

    The first SIGINT, SIGTERM or SIGHUP is a SIGTERM to each rank, which one that has not come up yet heeds in silence;
    the second is passed on as it is, and ranks that are still there then are ended. A SIGHUP never counts as the
    second: a terminal that closes may send several. When a rank fails the others are ended too. Returns the exit code
    of the first failure, 130 after an interruption, else 0.

    Nothing starts that does not fit this host (see `check`: FitError), and no more than a wave of ranks imports at a
    time: many that start together on few cores each take as long as all of them.
    """
    check_host_fits(config, world, model=holds_model, keeps=saves_checkpoints)
    run_lock.check_available(config.run_folder)  # said once, before any process starts
    logs = config.run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = module_command(program, *words)
    # Rank 0 inherits it: a port that was only probed may be taken by the time of its use.
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = str(listener.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    common |= {"LOCAL_WORLD_SIZE": str(world), CHECKED: "1"}
    loader: host_loader.Started | None = None
    waves: _Waves | None = None
    ranks: list[subprocess.Popen[bytes]] = []
    interruptions: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if interruptions and (now - interruptions[0] < SECOND_AFTER or number == signal.SIGHUP):
            return
        interruptions.append(now)
        _tell(ranks, number if len(interruptions) > 1 else signal.SIGTERM)

    old = {number: signal.signal(number, pass_on) for number in termination_signals()}
    try:
        loader = host_loader.start_loader(config, world=world, first_rank=0, ranks=world)
        if loader is not None:
            common |= loader.environment
        waves = _Waves(ranks, interruptions)
        for rank in range(world):
            waves.wait()
            if interruptions:
                print("interrupted", file=sys.stderr)
                return EXIT_INTERRUPTED
            if _first_failed(ranks) is not None:
                break  # the others would wait for it
            environment = common | waves.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                environment[LISTENER] = str(listener.fileno())
            out = None
            if rank > 0:
                out = open(logs / f"rank-{rank}.log", "ab")  # noqa: SIM115 - inherited by the child
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT if out else None,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    pass_fds=[*waves.handles, *([listener.fileno()] if rank == 0 else [])],
                )
            )
            listener.close()
            if out is not None:
                out.close()
        if interruptions:
            _tell(ranks, signal.SIGTERM)  # the last was not in the list yet
        return _watch(ranks, logs, interruptions)
    finally:
        listener.close()
        end_processes(ranks, END_SECONDS)
        if waves is not None:
            waves.close()
        if loader is not None:
            loader.stop()
        for number, handler in old.items():
            signal.signal(number, handler)


class _Waves:
    """Holds starts back while as many as a wave have not said that they have come.

    Attributes:
        environment, handles: what a rank that is to say so needs.
    """

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]], interruptions: Sequence[float]) -> None:
        self._ranks, self._interruptions = ranks, interruptions
        self._size, self._come = max_concurrent_imports(os.cpu_count() or 1), 0
        self._mine, theirs = os.pipe()
        self.environment, self.handles = {CAME: str(theirs)}, (theirs,)

    def wait(self) -> None:
        """Until another rank may start: fewer than a wave are on their way, or all is over."""
        deadline = time.monotonic() + COME_SECONDS
        while len(self._ranks) - self._come >= self._size and time.monotonic() < deadline:
            if self._interruptions or _first_failed(self._ranks) is not None:
                return
            if select.select([self._mine], [], [], 0.05)[0]:
                self._come += len(os.read(self._mine, 4096))

    def close(self) -> None:
        """After the last."""
        for handle in (self._mine, *self.handles):
            os.close(handle)


def _tell(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _watch(ranks: list[subprocess.Popen[bytes]], logs: Path, interruptions: list[float]) -> int:
    first: tuple[int, int] | None = None
    deadline = float("inf")
    while sum(p.poll() is None for p in ranks) and time.monotonic() < deadline:  # any() would not ask them all
        if first is None:
            first = _first_failed(ranks)
            if first is not None:
                deadline = time.monotonic() + GRACE_SECONDS
        if len(interruptions) > 1:
            deadline = min(deadline, interruptions[1] + IMPATIENT_SECONDS)
        time.sleep(0.05)
    deaf = [str(r) for r, p in enumerate(ranks) if p.poll() is None]
    if len(interruptions) > 1 and deaf:
        print(f"ended after a second interruption: rank {', '.join(deaf)} did not answer", file=sys.stderr)
        return EXIT_INTERRUPTED
    first = first or _first_failed(ranks)
    if first is None:
        return 0
    rank, code = _cause(first, ranks)
    if interruptions and all(p.returncode in (0, EXIT_INTERRUPTED, -signal.SIGTERM) for p in ranks):
        if ranks[0].returncode < 0:
            print("interrupted", file=sys.stderr)  # rank 0, once it has come up, says so itself
        return EXIT_INTERRUPTED
    # Ranks that are told of the same mistake print the same; the terminal has it from rank 0 then.
    if code < 0 or (rank > 0 and ranks[0].returncode != code):
        tail = read_end(logs / f"rank-{rank}.log").splitlines()[-15:] if rank > 0 else []
        said = [f"; the end of {logs / f'rank-{rank}.log'}:", *(f"\n  {line}" for line in tail)] if tail else []
        print(f"rank {rank} was the first to end, with {_named(code)}", *said, sep="", file=sys.stderr)
    if deaf:  # gloo does not always notice that its peer has gone
        print(f"rank {', '.join(deaf)} had not ended {GRACE_SECONDS:g} seconds later and is ended", file=sys.stderr)
    return code if code > 0 else 1


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """(rank, code) of one that failed; one that a signal ended goes first, as the others fail for want of it."""
    failed = [(r, p.returncode) for r, p in enumerate(ranks) if p.poll()]
    return min(failed, key=lambda item: (item[1] > 0, item[0]), default=None)


def _cause(first: tuple[int, int], ranks: list[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """The failure to tell of: the first, unless it may have lost contact with one that knew why and ended after it."""
    why = (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA)
    known = [(r, p.returncode) for r, p in enumerate(ranks) if p.returncode in why]
    return known[0] if known and first[1] == EXIT_FAILED else first


def _named(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_period: float) -> None:
    """Tell processes to end, and kill those that are there after so many seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_period
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
