"""A tiny job under `megascale launch` that benches break: its settings, its processes, its story and its weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.status import PARKED, read_status

WAIT = 240.0  # seconds; only a broken job takes them

_SETTINGS = """
[model]
layers = 2
hidden = 32
heads = 4
sequence_length = 16
vocab_size = 64
vocab_multiple = 8
[data]
train = ["{folder}/train"]
[lr]
peak = 1e-2
[train]
runs = "{folder}/runs"
micro_batch = 2
global_batch = 4
device = "cpu"
threads = 1
[parallel]
data = 2
[checkpoint]
interval = 50
background = true
memory_interval = 1
replicas = true
linger = 20
[resilience]
nodes = 2
spares = 1
faults = true
[observe]
tensorboard = false
progress = false
"""
# A shell line that gives a job a network of its own, to be broken without harm to the machine's.
_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def make(folder: Path) -> Path:
    """Tokens and a configuration file: two ranks on two nodes, one spare, each step copied to a peer's memory."""
    import numpy as np

    from megascale.data.dataset.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(400):
            writer.add_document([np.cumsum(rng.choice([1, 2, 5], p=[0.8, 0.1, 0.1], size=101)) % 64])
    file = folder / "job.toml"
    file.write_text(_SETTINGS.format(folder=folder))
    return file


START_LINE = "ready to train "  # begins the line that a rank logs before its first step
LEAVE_LINE = "has left attempt "  # is in the line that a rank logs when it waits for the next attempt
FIRST_STEP_LINE = "first step complete "  # begins the line that a rank logs after its first step
SECOND_STEP_LINE = "second step queued "  # begins the line that a rank logs when it has queued its second step
SNAPSHOT_LINE = "first snapshot complete: "  # begins the line that a rank logs once per start
MEMORY_LINE = "GB for a snapshot: "  # is in the line that a rank logs for each slot
ALL_MEMORY_LINE = "memory for snapshots is prepared on all ranks"  # from then on, no step lacks a snapshot
GROUPS_LINE = "start-up "
PREPARED_LINES = ("warmed up the groups", "aborted the groups", "groups of attempt@")


class Launched:
    """A launched job.

    Args:
        file: from `make`.
        name: of the run.
        words: more settings.
        pace: least seconds of a step: each rank sleeps that long, as a larger model would compute; 0: none.
        own_network: run it in a network namespace.
        faults: what trainers do to themselves from the start on, as JSON.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        arguments: Sequence[str] = (),
        pace: float = 0.03,
        own_network: bool = False,
        faults: Sequence[str] = (),
    ) -> None:
        self.run, self.output = file.parent / "runs" / name, file.parent / f"{name}.out"
        self.command = _OWN_NETWORK if own_network else []
        self.command = self.command + [sys.executable, "-m", "megascale.cli.main", "launch", str(file)]
        self.command += [f"--train.name={name}"] + list(arguments)
        folder = self.run / "faults"
        folder.mkdir(parents=True)
        # Named so that a driver passes them on to nodes that do not see this folder.
        for rank in range(2 if pace else 0):
            fault = {"kind": "slow-rank", "rank": rank, "seconds": pace, "persistent": True}
            (folder / f"{rank:020}-{0:06x}.json").write_text(strict_json.dumps(fault))
        for number, text in enumerate(faults):
            (folder / f"50-{number}.json").write_text(text)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """The driver, for the first time or again."""
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
            )
        return self.process

    def end(self, grace_period: float = WAIT) -> int:
        """Exit code; a job that does not end is interrupted (-1), one that ignores that is killed."""
        try:
            return self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return -1

    def end_agents(self) -> None:
        """Agents outlive a driver that was killed or broke."""
        from megascale.errors import TrainingError
        from megascale.resilience.faults.inject import find_agent_process

        for folder in (self.run / "nodes").glob("*"):
            with contextlib.suppress(TrainingError):
                os.kill(find_agent_process(self.run, folder.name), signal.SIGKILL)

    def events(self, after: int = 0) -> list[Any]:
        """The driver's events so far."""
        from megascale.resilience.driver.state.journal_reader import read_journal_events

        return read_journal_events(self.run, after)

    def read_starts(self) -> dict[str, str]:
        """Return by rank the newest line of its log that divides the seconds of its start."""
        return {rank: lines[-1] for rank, lines in self._read_log_lines(START_LINE).items()}

    def read_leaves(self) -> dict[str, str]:
        """Return by rank the newest line of its log that divides the seconds of leaving an attempt."""
        return {rank: lines[-1] for rank, lines in self._read_log_lines(LEAVE_LINE).items()}

    def read_groups(self) -> str:
        """Return the newest line of rank 0's log that divides the seconds of making groups."""
        return self._read_log_lines(GROUPS_LINE).get("0", [""])[-1]

    def read_prepared_groups(self) -> dict[str, list[str]]:
        """Return by rank what its log says about groups that were prepared during the attempt before."""
        lines_by_rank: dict[str, list[str]] = {}
        for beginning in PREPARED_LINES:
            for rank, lines in self._read_log_lines(beginning).items():
                lines_by_rank.setdefault(rank, []).extend(beginning + line for line in lines)
        return lines_by_rank

    def read_first_steps(self) -> dict[str, list[str]]:
        """Return by rank a line per start, which has the seconds of the first step."""
        return self._read_log_lines(FIRST_STEP_LINE)

    def read_second_steps(self) -> dict[str, list[str]]:
        """Return by rank a line per start, which has the host's seconds for the second step."""
        return self._read_log_lines(SECOND_STEP_LINE)

    def read_memory(self) -> dict[str, list[str]]:
        """Return by rank a line per slot of memory for snapshots, which divides the seconds of its preparation."""
        return self._read_log_lines(MEMORY_LINE)

    def has_memory(self) -> bool:
        """Return whether the memory for snapshots of all ranks has been prepared."""
        return bool(self._read_log_lines(ALL_MEMORY_LINE))

    def count_waiting_processes(self) -> int:
        """Return the number of processes of spares that are prepared and wait for their first attempt."""
        statuses = [read_status(file) for file in (self.run / "status").glob("waiting-*.status")]
        return sum(status is not None and status.phase == PARKED for status in statuses)

    def _read_log_lines(self, beginning: str) -> dict[str, list[str]]:
        """Return by rank what follows `beginning` in the lines of its log that contain it."""
        lines_by_rank = {}
        for file in sorted((self.run / "logs").glob("rank-*.log")):
            lines = file.read_text(errors="replace").splitlines()
            matches = [line.partition(beginning)[2] for line in lines if beginning in line]
            if matches:
                lines_by_rank[file.stem.removeprefix("rank-")] = matches
        return lines_by_rank

    def over(self) -> bool:
        """Return whether the job has ended, so that no more events come."""
        return self.process.poll() is not None

    def first(self, expected: Callable[[Any], bool], grace_period: float = WAIT) -> Any:
        """The first event that is wanted, once it is there; None if the job ends before, or after `grace_period`."""
        deadline, after = time.monotonic() + grace_period, 0
        while time.monotonic() < deadline:
            over = self.over()
            fresh = self.events(after)
            result = next((e for e in fresh if expected(e)), None)
            if result:
                return result
            after = fresh[-1].id if fresh else after
            if over:
                return None
            time.sleep(0.02)
        return None

    def trainer_events(self) -> list[dict[str, Any]]:
        """The trainers' events, oldest first."""
        result = []
        file = self.run / "events.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line is being written
            if record.get("by") != "driver":
                result.append(record)
        return result

    def step(self) -> int:
        """The last step that rank 0 has done; one that it was in when it failed is not done."""
        from megascale.core.status import FAILED_IN_STEP, read_status

        status = read_status(self.run / "status" / "rank-0.status")
        if status is None:
            return 0
        if status.phase in ("train", FAILED_IN_STEP):
            return status.step - 1
        return status.step

    def weights(self) -> dict[str, Any]:
        """The model as the newest checkpoint has it."""
        return weights(self.run)


def has_copies(run: Path, ranks: int) -> bool:
    """Return whether the states of all `ranks` ranks are complete in memory and at their peers, if they have peers.

    Each rank logs its first snapshot of a start, and a new attempt starts without its own. The event `first_snapshot`
    is rank 0's alone.
    """
    for rank in range(ranks):
        file = run / "logs" / f"rank-{rank}.log"
        if not file.exists():
            return False
        _, _, text = file.read_text(errors="replace").rpartition(START_LINE)
        if SNAPSHOT_LINE not in text:
            return False
    return True


def weights(run: Path) -> dict[str, Any]:
    """The model as the newest checkpoint of a run has it."""
    from megascale.train.restore import restore_engine

    engine, _ = restore_engine(run, device="cpu")
    tensors = engine.optimizer.logical_tensors()
    return {name: tensor.clone() for name, _, _, tensor in tensors if name.startswith("model.")}


class Steps:
    """Watches the newest step that a job has told of; a context manager, since the strike may outlast the recovery."""

    def __init__(self, job: Launched) -> None:
        self._job = job
        self._samples = [(time.time(), job.step())]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            step = self._job.step()
            if step != self._samples[-1][1]:
                self._samples.append((time.time(), step))

    def count_until(self, when: float) -> int:
        """The newest that had been told of by then, seconds since 1970."""
        return max((step for at, step in self._samples if at <= when), default=0)


def recovery(job: Launched, verdicts: Sequence[str], began: float, before: int) -> tuple[Any, Any]:
    """Return a fault's verdict after `began` and before `event`, and the first step after it."""
    verdict = job.first(lambda e: e.kind in verdicts and e.time > began and e.id > before)
    return verdict, job.first(lambda e: e.kind == "first_step" and e.id > before)


def phases(
    job: Launched, injected: float, verdict: Any, repeated: Any, steps: Steps | None = None
) -> dict[str, float | int | None]:
    """Seconds of a recovery by phase, and with `steps` how many were lost.

    detect: fault to verdict; stop: to the start of the attempt that came to a step (all processes ended, recovery
    actions and placement), 0 if the verdict came later; load: to the state being back (processes, rendezvous, groups,
    checkpoint); step: to the first new step.
    """
    deadline = repeated.time if repeated else float("inf")
    starts = [e for e in job.events() if e.kind == "attempt_started" and injected < e.time <= deadline]
    started = starts[-1] if starts else None
    after = started.time if started else verdict.time if verdict else injected
    back = next(
        (e for e in job.trainer_events() if e["event"] in ("resumed", "run_started") and e["time"] > after), None
    )
    result: dict[str, float | int | None] = {"detect": verdict.time - injected if verdict else None}
    if started and verdict:
        result["stop"] = max(0.0, started.time - verdict.time)
    else:
        result["stop"] = None
    if back and started:
        result["load"] = back["time"] - started.time
    else:
        result["load"] = None
    if repeated and back:
        result["step"] = repeated.time - back["time"]
    else:
        result["step"] = None
    if repeated:
        result["total"] = repeated.time - injected
    else:
        result["total"] = None
    result["resumed_from"] = back.get("step", 0) if back else None
    if steps is not None:
        if back and repeated:
            result["lost"] = max(0, steps.count_until(back["time"]) - back.get("step", 0))
        else:
            result["lost"] = None
    return result
