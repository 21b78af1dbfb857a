"""`python -m tests.chaos restarts`: a run that is killed again and again, beside the same run left alone.

Each attempt is a real `megascale train`; its processes are ended with SIGKILL at a random moment of start-up, of a step
or of a save, and the same command is started again, with --layout sometimes in another layout. In the end losses,
ledger and weights are compared with the undisturbed run's: bit for bit where the layout stayed the same.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.config import Config
from megascale.core import strict_json
from megascale.errors import TrainingError

# Shares of kills: during start-up; of one rank alone where there are several.
_EARLY, _ONE_RANK = 0.15, 0.25
# Seconds without a new step after which a start counts as stuck.
_GRACE_PERIOD = 300.0


@dataclass
class Attempt:
    """One start that was killed (or, the last one, finished).

    Attributes:
        layout: keys of [parallel] it ran with.
        victim: "all", "rank N" or "" for the one that finished.
        step: steps on record when it died.
        resumed, source: the step it went on from and where that state came from.
        first_step: seconds from the start to its first step on record, None if it made none.
    """

    layout: dict[str, Any]
    victim: str = ""
    step: int = 0
    resumed: int = 0
    source: str = "nothing"
    first_step: float | None = None


@dataclass
class Comparison:
    """The disturbed run against the calm one: all zero and true if they are the same bit for bit."""

    steps: int
    loss: float
    weights: float
    ledger: bool
    attempts: list[Attempt] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("restarts", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(restarts)


def restarts(
    context: typer.Context,
    file: Path = typer.Argument(..., help="Configuration, such as examples/stdlib-3d.toml.", show_default=False),
    kills: int = typer.Option(10, min=1, help="How often the run is killed."),
    steps: int = typer.Option(40, min=2, help="Steps of the run."),
    layout: list[str] = typer.Option(
        [], help="Another layout to go on in at times, such as tensor=1,pipeline=2,data=2; may be repeated."
    ),
    memory: bool = typer.Option(True, help="Copy every step to host memory; else save every fifth step to storage."),
    within: float = typer.Option(1e-3, help="With --layout: exit 1 if a loss differs by more than this, relatively."),
    seed: int = typer.Option(0, help="Of the kills."),
    out: Path = typer.Option(Path("bench-restarts.json"), help="JSON file for the metrics."),
) -> None:
    """Kill a training run at random moments, restart it, and compare it with an undisturbed one.

    Any setting can be given as --section.key=value. Exit 1 if losses, ledger or weights differ. Runs leave nothing
    behind.

    Example: python -m tests.chaos restarts examples/stdlib-3d.toml --kills 20

    Example: python -m tests.chaos restarts examples/stdlib-3d.toml --layout tensor=2,pipeline=1,data=1
    """
    from rich.progress import Progress

    from benchmarks.training.layouts import _parse
    from megascale import api
    from megascale.config import load_command_line
    from megascale.core.layout import lay_out
    from megascale.train.launcher import count_processes

    config = api.resolve(load_command_line(file, context.args))
    local = config.parallel.model_dump(exclude_none=True)
    layouts = [local] + [{"gpus_per_host": config.parallel.gpus_per_host, **_parse(text)} for text in layout]
    with temporary_folder() as folder, Progress(transient=True) as progress:
        configs = [_prepared(config, keys, steps, memory, folder) for keys in layouts]
        for item in configs:
            lay_out(item, count_processes(item, api.visible_gpus()))  # all are checked before the first one trains
        bar = progress.add_task("undisturbed", total=steps)
        calm = RestartedRun(configs[0], "calm")
        calm.start()
        while calm.process.poll() is None:
            progress.update(bar, completed=calm.steps())
            time.sleep(0.1)
        calm.must_have_finished()
        progress.reset(bar, description="killed 0 times")
        dice = random.Random(seed)
        killed = RestartedRun(configs[0], "killed")
        attempts: list[Attempt] = []
        while (done := killed.steps()) < steps:
            progress.update(bar, completed=done, description=f"killed {len(attempts)} times")
            last = len(attempts) == kills
            chosen = 0 if last or len(configs) == 1 else dice.randrange(len(configs))
            killed.config = configs[chosen]
            attempts.append(killed.attempt(None if last else dice, (steps - done) / (kills + 1 - len(attempts))))
            if last:
                killed.must_have_finished()
                break
        result = compare(calm.folder, killed.folder)
    result.attempts = attempts
    record = _record(file, config, result, memory)
    _show(record, result)
    out.write_text(strict_json.dumps(record, indent=2) + "\n")
    limit = within if layout else 0.0
    if not result.ledger or result.loss > limit or result.steps != steps or (not layout and result.weights):
        raise TrainingError(
            f"the killed run is not the undisturbed one: {result.steps} of {steps} steps, losses apart by "
            f"{result.loss:.1e}, weights by {result.weights:.1e}, ledger {'equal' if result.ledger else 'DIFFERENT'}; "
            f"see {out}"
        )


class RestartedRun:
    """One run folder and the processes that train in it."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.folder = Path(config.train.runs) / name
        self.log = Path(config.train.runs) / f"{name}.log"

    def start(self) -> None:
        """Begin, or go on."""
        file = Path(self.config.train.runs) / f"{self.name}.toml"
        self.config.write(file)
        command = [sys.executable, "-m", "megascale.cli.main", "train", str(file), f"--train.name={self.name}"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def steps(self) -> int:
        """The last step on record, 0 before there is one."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        for line in reversed(lines[-3:]):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue  # the line is being written
        return 0

    def attempt(self, dice: random.Random | None, pace: float) -> Attempt:
        """Start, and with `dice` kill at a random moment, on average `pace` steps on."""
        result = Attempt(self.config.parallel.model_dump(exclude_none=True))
        resumed_before = self._resumes()
        begun = newest = self.steps()
        started = time.monotonic()
        goal = begun + round(dice.uniform(0.0, 2.0 * pace)) if dice is not None else sys.maxsize
        early = dice is not None and dice.random() < _EARLY
        deadline = time.monotonic() + _GRACE_PERIOD
        self.start()
        try:
            if early:
                assert dice is not None
                time.sleep(dice.uniform(0.0, 5.0))
            while not early and self.process.poll() is None and time.monotonic() < deadline:
                local = self.steps()
                if local != newest:
                    newest = local
                    deadline = time.monotonic() + _GRACE_PERIOD
                if local != begun and result.first_step is None:
                    result.first_step = time.monotonic() - started
                if result.first_step is not None and local >= goal:
                    break
                time.sleep(0.02)
            if time.monotonic() >= deadline:
                raise TrainingError(
                    f"run {self.name} has made no step after step {newest} in {_GRACE_PERIOD:g} s: {self._read_end()}"
                )
            if dice is not None and self.process.poll() is None:
                time.sleep(dice.uniform(0.0, 0.3))  # somewhere in a step or a save
                result.victim = self._kill(dice)
        finally:
            self._end()
        if dice is not None and not result.victim and self.process.returncode:
            raise TrainingError(
                f"run {self.name} ended with {self.process.returncode} before it was killed: {self._read_end()}"
            )
        result.step = self.steps()
        if len(resumes := self._resumes()) > len(resumed_before):
            result.resumed, result.source = resumes[-1]["step"], resumes[-1]["loaded_from"]
        return result

    def _resumes(self) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [r for r in records if r["event"] == "resumed"]

    def _kill(self, dice: random.Random) -> str:
        from megascale.core.status import read_status

        result = [read_status(p) for p in sorted((self.folder / "status").glob("rank-*.status"))]
        children = _children(self.process.pid)
        ranks = [s for s in result if s is not None and s.pid in children]
        if ranks and dice.random() < _ONE_RANK:
            victim = dice.choice(ranks)
            os.kill(victim.pid, signal.SIGKILL)
            return f"rank {victim.rank}"
        self.process.kill()  # the ranks die with the one that started them
        return "all"

    def _end(self) -> None:
        """Leave none of this attempt's processes."""
        ranks = _children(self.process.pid) if self.process.poll() is None else []
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 30
        while any(_alive(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)

    def must_have_finished(self) -> None:
        """TrainingError with what was said last if the run ended badly."""
        if self.process.wait() != 0:
            raise TrainingError(f"run {self.name} ended with {self.process.returncode}: {self._read_end()}")

    def _read_end(self) -> str:
        """Return the last lines of the log."""
        return "\n  ".join(self.log.read_text(errors="replace").strip().splitlines()[-8:])


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _prepared(config: Config, parallel: dict[str, Any], steps: int, memory: bool, folder: str) -> Config:
    from megascale.config import from_tree

    tree = config.model_dump(exclude_none=True)
    tree["parallel"] = parallel
    tree["lr"].setdefault("decay_steps", max(1, config.train.steps))
    tree["data"].pop("valid", None)
    tree["train"].pop("sample_prompt", None)
    tree["train"] |= {"steps": steps, "eval_interval": 0, "runs": folder}
    every = {"interval": 20, "background": True, "memory_interval": 1} if memory else {"interval": 5}
    tree["checkpoint"] = {"keep": 2, **every}
    tree["observe"] = {"tensorboard": False}
    return from_tree(tree)


def compare(calm: Path, killed: Path) -> Comparison:
    """Two finished run folders, the second against the first."""
    from benchmarks.training.layouts import relative
    from megascale.train.restore import restore_engine

    def lines(file: Path) -> list[dict[str, Any]]:
        return [strict_json.loads(line) for line in file.read_text().splitlines()]

    ours = {r["step"]: r["loss"] for r in lines(calm / "metrics.jsonl")}
    records = lines(killed / "metrics.jsonl")
    theirs = {r["step"]: r["loss"] for r in records}
    separate = max((relative(theirs[s], ours[s]) for s in ours if s in theirs), default=float("inf"))
    sets = []
    for run in (calm, killed):
        engine, _ = restore_engine(run, device="cpu")
        sets.append({name: t for name, _, _, t in engine.optimizer.logical_tensors() if name.startswith("model.")})
    distances = [float((sets[1][n] - t).norm() / t.norm().clamp(min=1e-12)) for n, t in sets[0].items()]
    weights = max(distances) if all(map(math.isfinite, distances)) else math.inf
    steps = len(theirs) if len(records) == len(theirs) else -1  # a step on record twice is an error
    ledgers = [lines(run / "samples" / "ledger.jsonl") for run in (calm, killed)]
    return Comparison(steps, separate, weights, ledgers[0] == ledgers[1])


def _record(file: Path, config: Config, result: Comparison, memory: bool) -> dict[str, Any]:
    import platform
    from dataclasses import asdict

    import torch

    import megascale

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
        "file": str(file),
        "precision": config.train.precision,
        "memory": memory,
        **asdict(result),
    }


def _show(record: dict[str, Any], result: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    killed = [a for a in result.attempts if a.victim]
    table = Table(title=f"{record['file']}: {len(killed)} kills in {result.steps} steps", show_header=False)
    victims = Counter("one rank" if a.victim.startswith("rank") else "all ranks" for a in killed)
    # Started, but killed before it had read any state: it lost nothing, and the next one tells what it cost.
    began = [a for a in result.attempts if a.resumed or a.first_step is not None]
    sources = Counter(a.source for a in began)
    sources["killed before that"] = len(result.attempts) - len(began)
    lost = [before.step - after.resumed for before, after in itertools.pairwise(began)]
    waits = [a.first_step for a in result.attempts if a.first_step is not None]
    layouts = len({strict_json.dumps(a.layout, sort_keys=True) for a in result.attempts})
    for name, value in {
        "killed": ", ".join(f"{subject} {count}" for subject, count in victims.items()),
        "went on from": ", ".join(f"{origin} {count}" for origin, count in sources.items() if count),
        "layouts": str(layouts),
        "steps trained again": f"{sum(lost)} in all, at most {max(lost, default=0)} a kill",
        "start to first step": f"median {statistics.median(waits):.1f} s" if waits else "-",
        "losses apart": f"{result.loss:.1e}" if result.loss else "not at all",
        "weights apart": f"{result.weights:.1e}" if result.weights else "not at all",
        "ledger": "equal" if result.ledger else "DIFFERENT",
    }.items():
        table.add_row(name, value)
    Console().print(table)
