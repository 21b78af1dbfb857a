"""`python -m tests.chaos restarts`: compare a run that is killed repeatedly with an undisturbed run.

Each attempt is a real `megascale train`. SIGKILL ends its processes at a random moment of a start, a step or a save.
The same command then starts again, with --layout sometimes in another layout. At the end losses, ledger and weights
are compared with those of the undisturbed run: bit for bit if the layout stayed the same.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.config import Config
from megascale.core import strict_json
from megascale.errors import TrainingError

_EARLY = 0.15  # share of kills during the start
_ONE_RANK = 0.25  # share of kills that end one rank, if there are several
_GRACE_PERIOD = 300.0  # seconds without a new step after which a run counts as hanging
_END_SECONDS = 60.0  # for a run to end after a kill


@dataclass
class Attempt:
    """One start of the run, which was killed, or has finished.

    Attributes:
        layout: keys of [parallel].
        victim: "all", "rank N", or "" for the start that has finished.
        step: recorded steps at its end.
        resumed, source: step from which it resumed, and where that state came from.
        first_step: seconds from the start to its first recorded step, None without such a step.
    """

    layout: dict[str, Any]
    victim: str = ""
    step: int = 0
    resumed: int = 0
    source: str = "nothing"
    first_step: float | None = None


@dataclass
class Comparison:
    """Differences between the killed and the undisturbed run: all zero and true if they are equal bit for bit."""

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
        [], help="Further layout for some starts, such as tensor=1,pipeline=2,data=2; may be repeated."
    ),
    memory: bool = typer.Option(True, help="Copy every step to host memory; else save every fifth step to storage."),
    within: float = typer.Option(1e-3, help="With --layout: exit 1 if a loss differs by more than this, relatively."),
    seed: int = typer.Option(0, help="Seed of the kills."),
    out: Path = typer.Option(Path("bench-restarts.json"), help="JSON file for the metrics."),
) -> None:
    """Kill a training run at random moments, restart it, and compare it with an undisturbed one.

    Any setting can be given as --section.key=value. Exit 1 if losses, ledger or weights differ. The runs are removed.

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
            lay_out(item, count_processes(item, api.visible_gpus()))  # check all before the first one trains
        bar = progress.add_task("undisturbed", total=steps)
        calm = RestartedRun(configs[0], "calm")
        calm.attempt(None, 0.0, report=lambda step: progress.update(bar, completed=step))
        calm.must_have_finished()
        progress.reset(bar, description="killed 0 times")
        rng = random.Random(seed)
        killed = RestartedRun(configs[0], "killed")
        attempts: list[Attempt] = []
        while (done := killed.steps()) < steps:
            progress.update(bar, completed=done, description=f"killed {len(attempts)} times")
            last = len(attempts) == kills
            chosen = 0 if last or len(configs) == 1 else rng.randrange(len(configs))
            killed.config = configs[chosen]
            attempts.append(killed.attempt(None if last else rng, (steps - done) / (kills + 1 - len(attempts))))
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
            f"the killed run differs from the undisturbed one: {result.steps} of {steps} steps, difference of losses "
            f"{result.loss:.1e}, of weights {result.weights:.1e}, ledger {'equal' if result.ledger else 'DIFFERENT'}; "
            f"see {out}"
        )


class RestartedRun:
    """Run folder, and the processes that train in it."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.folder = Path(config.train.runs) / name
        self.log = Path(config.train.runs) / f"{name}.log"

    def start(self) -> None:
        """Start the run, or resume it."""
        file = Path(self.config.train.runs) / f"{self.name}.toml"
        self.config.write(file)
        command = [sys.executable, "-m", "megascale.cli.main", "train", str(file), f"--train.name={self.name}"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def steps(self) -> int:
        """Return the last recorded step, 0 before the first."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        for line in reversed(lines[-3:]):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue  # the line is being written
        return 0

    def attempt(self, rng: random.Random | None, pace: float, report: Callable[[int], None] | None = None) -> Attempt:
        """Start the run, and with `rng` kill it at a random moment, on average after `pace` steps.

        Args:
            report: called with each new step.

        Raises:
            TrainingError: the run hangs, or has ended with an error before it was killed.
        """
        result = Attempt(self.config.parallel.model_dump(exclude_none=True))
        resumed_before = self._resumes()
        begun = newest = self.steps()
        started = time.monotonic()
        goal = begun + round(rng.uniform(0.0, 2.0 * pace)) if rng is not None else sys.maxsize
        early = rng is not None and rng.random() < _EARLY
        deadline = time.monotonic() + _GRACE_PERIOD
        self.start()
        try:
            if early:
                assert rng is not None
                time.sleep(rng.uniform(0.0, 5.0))
            while not early and self.process.poll() is None and time.monotonic() < deadline:
                step = self.steps()
                if step != newest:
                    newest = step
                    deadline = time.monotonic() + _GRACE_PERIOD
                    if report is not None:
                        report(step)
                if step != begun and result.first_step is None:
                    result.first_step = time.monotonic() - started
                if result.first_step is not None and step >= goal:
                    break
                time.sleep(0.02)
            if time.monotonic() >= deadline:
                raise TrainingError(
                    f"run {self.name} has made no step after step {newest} in {_GRACE_PERIOD:g} s: {self._read_end()}"
                )
            if rng is not None and self.process.poll() is None:
                time.sleep(rng.uniform(0.0, 0.3))  # a moment of a step or a save
                result.victim = self._kill(rng)
        except BaseException:
            self._end(0.0)
            raise
        if not self._end(_END_SECONDS):
            raise TrainingError(
                f"run {self.name} has not ended {_END_SECONDS:g} s after the kill of {result.victim or 'no rank'}: "
                f"{self._read_end()}"
            )
        if rng is not None and not result.victim and self.process.returncode:
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

    def _kill(self, rng: random.Random) -> str:
        from megascale.core.status import read_status

        result = [read_status(p) for p in sorted((self.folder / "status").glob("rank-*.status"))]
        children = _children(self.process.pid)
        ranks = [s for s in result if s is not None and s.pid in children]
        if ranks and rng.random() < _ONE_RANK:
            victim = rng.choice(ranks)
            os.kill(victim.pid, signal.SIGKILL)
            return f"rank {victim.rank}"
        self.process.kill()  # the kernel ends the ranks with it
        return "all"

    def _end(self, grace_period: float) -> bool:
        """Wait at most `grace_period` seconds for the end of this attempt, then kill its processes.

        Returns:
            Whether the attempt has ended by itself.
        """
        ranks = _children(self.process.pid) if self.process.poll() is None else []
        has_ended = True
        try:
            self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            has_ended = False
        finally:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 30
        while any(_alive(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        return has_ended

    def must_have_finished(self) -> None:
        """Raise TrainingError with the last lines of the log if the run has failed."""
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
    """Return the differences between the folders of two finished runs."""
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
    # A start that was killed before it had read a state has lost nothing.
    began = [a for a in result.attempts if a.resumed or a.first_step is not None]
    sources = Counter(a.source for a in began)
    sources["killed before that"] = len(result.attempts) - len(began)
    lost = [before.step - after.resumed for before, after in itertools.pairwise(began)]
    waits = [a.first_step for a in result.attempts if a.first_step is not None]
    layouts = len({strict_json.dumps(a.layout, sort_keys=True) for a in result.attempts})
    for name, value in {
        "killed": ", ".join(f"{subject} {count}" for subject, count in victims.items()),
        "resumed from": ", ".join(f"{origin} {count}" for origin, count in sources.items() if count),
        "layouts": str(layouts),
        "steps trained again": f"{sum(lost)} in total, at most {max(lost, default=0)} per kill",
        "start to first step": f"median {statistics.median(waits):.1f} s" if waits else "-",
        "difference of losses": f"{result.loss:.1e}",
        "difference of weights": f"{result.weights:.1e}",
        "ledger": "equal" if result.ledger else "DIFFERENT",
    }.items():
        table.add_row(name, value)
    Console().print(table)
