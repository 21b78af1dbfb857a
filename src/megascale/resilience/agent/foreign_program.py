"""Programs of foreign trainers: the command that ranks execute, and their progress from logs and status files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.config import ForeignConfig
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.status import UNOBSERVED, read_status
from megascale.errors import DataError
from megascale.observe.hang.evidence import ask_for_flight
from megascale.observe.hang.flight import read_flight
from megascale.resilience.agent.file_tails import LogTail
from megascale.resilience.agent.metrics_writer import MetricsWriter
from megascale.resilience.agent.progress_patterns import BAR, ProgressReader, Reading
from megascale.resilience.agent.rank_programs import Progress, RankProgram, TrainerProcess
from megascale.resilience.agent.saved_checkpoints import SavedCheckpoints
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import Fork

_COUNT_INTERVAL = 30.0  # seconds between counts of a rank's collectives, because each count takes milliseconds
_MAX_BAR_CHARACTERS = 4000  # beginning of a line in which a progress bar is searched
# Folder of the module that Python imports at the start of a foreign trainer's ranks.
SITE_FOLDER = Path(__file__).parent / "site"


@dataclass
class CallCount:
    """Number of collectives that a rank has started, from its newest flight record (NCCL's record of collectives).

    Attributes:
        total: number of collectives, or 0 before the first record was read.
        request_time: time of the last request for a record (time.monotonic()).
    """

    total: int = 0
    request_time: float = 0.0

    def update(self, rank: int, *, status_folder: Path, flight_folder: Path) -> None:
        """Read the record that was requested last, and request the next one, if _COUNT_INTERVAL has passed."""
        current_time = time.monotonic()
        if current_time - self.request_time < _COUNT_INTERVAL:
            return
        self.request_time = current_time
        with contextlib.suppress(OSError, DataError):  # no record yet, or a damaged one: the count stays
            groups = read_flight(flight_folder / f"rank-{rank}.json").record.groups
            self.total = sum(counts.started for counts in groups.values())
        ask_for_flight(status_folder, rank)


@dataclass
class ObservedRank:
    """Log of a rank in one attempt, and the progress that the log shows.

    Attributes:
        calls: counter of the rank's collectives.
        other_bar_lines: number of lines of progress bars other than the training's.
        step_count: number of steps of the training's progress bar, which is the first bar of the log. None before a
            line of the bar.
        first_step: first step that this attempt has completed, or None before it.
    """

    tail: LogTail
    calls: CallCount
    other_bar_lines: int = 0
    step_count: int | None = None
    first_step: int | None = None

    def read(self, lines: Sequence[str], reader: ProgressReader) -> list[Reading]:
        """Return the readings of training steps in new lines, and count lines of other progress bars."""
        step_readings = []
        for line in lines:
            reading = reader.read(line)
            if reading is not None and self.step_count is None:
                self.step_count = reading.total  # still None if the line is not one of a progress bar
            if reading is not None and reading.total in (None, self.step_count):
                step_readings.append(reading)
            elif BAR.search(line[:_MAX_BAR_CHARACTERS]):
                self.other_bar_lines += 1
        return step_readings

    def make_progress(self, first_step: int, step: int, time_ns: int = 0) -> Progress:
        """Return the progress of a rank.

        Args:
            first_step: first step of the new readings.
            step: last step of the new readings.
            time_ns: time of the status file, or 0 without one.
        """
        if self.first_step is None:
            self.first_step = max(1, first_step)  # a progress bar shows 0 before the first step
        completed_steps = max(0, step - self.first_step + 1)
        return Progress("train", step, self.describe_bars(), time_ns=time_ns, completed_steps=completed_steps)

    def describe_bars(self) -> str:
        """Return the count of lines of other progress bars as the rank's action, or an empty text if there are none.

        A rank whose action changes makes progress, although its step does not change.
        """
        return f"{self.other_bar_lines} states of other progress bars" if self.other_bar_lines else ""


class ForeignProgram(RankProgram):
    """Command of a foreign trainer: any program that torchrun could start. It gets torchrun's environment variables.

    Progress is read from the lines of the rank's log, or from the status file that `megascale.watch` writes in the
    rank. A rank with neither is unobserved. Its progress is then the size of its log and the number of its collectives.

    Args:
        run: run folder on this node.
        foreign: section `foreign` of the configuration.
        max_restarts: number of starts without a new step after which the driver ends the job.
    """

    def __init__(self, run: Path, foreign: ForeignConfig, max_restarts: int) -> None:
        self._foreign = foreign
        self._max_restarts = max_restarts
        self._status_folder = run / "status"
        self._flight_folder = run / "flight"
        self._reader = ProgressReader(foreign.patterns)
        self._metrics = MetricsWriter(run / "metrics.jsonl")
        self._last_rank = 0  # highest rank of the job
        self._has_metrics = False  # whether a rank of this node has printed metrics
        self._environment: dict[str, str] = {}  # environment variables of all ranks
        self._ranks: dict[int, ObservedRank] = {}
        self._checkpoints: SavedCheckpoints | None = None  # only on the node of rank 0

    def prepare(self, order: Start) -> None:
        """Make the folders for status files and flight records, and remove files of an earlier attempt's processes."""
        for folder in (self._status_folder, self._flight_folder):
            folder.mkdir(exist_ok=True)
        for rank in order.ranks:
            stale_files = [self._flight_folder / f"nccl_trace_rank_{rank}"]
            stale_files += self._status_folder.glob(f"rank-{rank}.*")
            stale_files += self._flight_folder.glob(f"rank-{rank}.*")
            for file in stale_files:
                file.unlink(missing_ok=True)
        if self._foreign.checkpoints and 0 in order.ranks:
            self._checkpoints = SavedCheckpoints(self._foreign.folder, self._foreign.checkpoints)
        self._last_rank = order.world - 1
        self._environment = self._make_environment(order)

    def _make_environment(self, order: Start) -> dict[str, str]:
        """Return torchrun's variables, and defaults for the diagnosis and for threads unless the user has set them."""
        default_variables = {
            # The next two are one variable: its name since torch 2.9, and its earlier name.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Without it, the flight record lacks the durations of calls, and whether the device has reached a call.
            "TORCH_NCCL_ENABLE_TIMING": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(self._flight_folder / "nccl_trace_rank_"),
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._status_folder / "nccl-"),
            "PYTHONUNBUFFERED": "1",  # progress is read from the growing log
        }
        if len(order.ranks) > 1:
            # As torchrun, so that the threads of several ranks do not share cores.
            default_variables["OMP_NUM_THREADS"] = "1"
        variables = {name: value for name, value in default_variables.items() if name not in os.environ}
        paths = [str(SITE_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        variables |= {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "MEGASCALE_STATUS": str(self._status_folder),
            "MEGASCALE_FLIGHT": str(self._flight_folder),
            # torchrun's group is a node. All nodes have equal numbers of ranks.
            "GROUP_RANK": str(order.ranks[0] // len(order.ranks)),
            "GROUP_WORLD_SIZE": str(order.world // len(order.ranks)),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(order.world),
            "TORCHELASTIC_RESTART_COUNT": str(order.attempt - 1),  # attempts count from 1
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_RUN_ID": order.job,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT
        }
        return variables

    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order to the fork server to execute the command as a rank."""
        log_start = log.stat().st_size if log.exists() else 0
        self._ranks[rank] = ObservedRank(LogTail(log, log_start), CallCount(request_time=time.monotonic()))
        variables = self._environment | dict(environment) | {"ROLE_RANK": str(rank)}
        del variables[REPLICA_VARIABLE]  # a secret of checkpoint services, which this program does not have
        return Fork(
            rank=rank,
            attempt=attempt,
            env=variables,
            arguments=tuple(self._foreign.command),
            log=str(log),
            executes=True,
            folder=self._foreign.folder,
        )

    def writes_metrics(self, ranks: Collection[int]) -> bool:
        """Return whether a rank of this node has printed metrics, which the agent then writes."""
        return self._has_metrics

    def find_saved_step(self) -> int:
        """Return the step of the newest complete checkpoint, or 0 on nodes without rank 0 or if it is unknown."""
        return self._checkpoints.step if self._checkpoints is not None else 0

    def close(self) -> None:
        """Stop the thread that searches for checkpoints."""
        if self._checkpoints is not None:
            self._checkpoints.stop()

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the rank's process group, because the command may be a script that started the trainer."""
        os.killpg(pid, number)

    def read_progress(self, trainer: TrainerProcess) -> None:
        """Update the progress from new lines of a rank's log, or from the status file of `megascale.watch`."""
        observed_rank = self._ranks[trainer.rank]
        lines = observed_rank.tail.read_lines(at_carriage_returns=True)
        readings = observed_rank.read(lines, self._reader)
        status = read_status(self._status_folder / f"rank-{trainer.rank}.status")
        if status is not None:
            trainer.compute_seconds = status.compute_seconds
            trainer.advance(observed_rank.make_progress(status.step, status.step, time_ns=status.time_ns))
        elif readings:
            trainer.advance(observed_rank.make_progress(readings[0].step, readings[-1].step))
        elif trainer.progress is not None and trainer.progress.phase == "train":
            trainer.advance(trainer.progress._replace(action=observed_rank.describe_bars()))
        elif trainer.progress is None or trainer.progress.phase == UNOBSERVED:
            trainer.advance(self._measure_unobserved_progress(trainer.rank, observed_rank))
        self._write_metrics(trainer.rank, readings)

    def _measure_unobserved_progress(self, rank: int, observed_rank: ObservedRank) -> Progress:
        """Return the progress of a rank whose steps are unknown: its action has the size of its log and its calls."""
        observed_rank.calls.update(rank, status_folder=self._status_folder, flight_folder=self._flight_folder)
        action = f"{observed_rank.tail.size} bytes of output, {observed_rank.calls.total} collectives"
        problems = self._reader.describe_problems()
        if problems:
            action += f"; {problems}"
        return Progress(UNOBSERVED, 0, action=action)

    def _write_metrics(self, rank: int, readings: Sequence[Reading]) -> None:
        """Write the readings that this rank's log is the right source for.

        All ranks may print a step. Its metrics are those of the last rank or of rank 0, as the line's pattern defines.
        """
        printed_readings = []
        for reading in readings:
            printing_rank = self._last_rank if reading.is_last_rank else 0
            if rank == printing_rank:
                printed_readings.append(reading)
        if printed_readings:
            self._has_metrics = True
            self._metrics.write(printed_readings)
