"""`python -m benchmarks open-run`: a model trained in the open, killed on the way, with results stated before.

GPT-2 124M learns Python source. The command prints the predicted held-out bits per byte and time, trains, kills all
processes twice and starts the run again, and compares each repeated step with the one from before the kill. It can be
stopped at any time: the next call goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.console import Console

from benchmarks.harness.carried_folder import list_pieces, pack_folder, unpack_folder
from benchmarks.training.convergence import _device, _fingerprint, _versions, collect
from benchmarks.training.open_run_plan import PLANS, OpenRunPlan
from benchmarks.training.open_run_report import (
    Kill,
    OpenRunRecord,
    compare_repeated_steps,
    list_failures,
    read_records,
    show_plan,
    show_result,
    step_values,
    summarise,
)
from megascale.errors import EXIT_INTERRUPTED, ConfigError, DataError, TrainingError

RECORD = "open-run.json"
POLL_SECONDS = 0.1
# The state of an unfinished run: all but spans, logs and plots, and the data, which the next machine builds again.
CARRIED = (
    RECORD,
    "run/checkpoints",
    "run/config.toml",
    "run/identity",
    "run/metrics.jsonl",
    "run/events.jsonl",
    "run/samples",
    "run/tokenizer.json",
)
CARRIED_FILES = 6
# Files that a reader needs, copied to `--out`.
SHOWN = (RECORD, "loss.png", "output.log", "run/events.jsonl", "run/metrics.jsonl", "run/config.toml")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("open-run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(open_run)


def open_run(
    context: typer.Context,
    size: str = typer.Option(
        "four", help="four: 600 M tokens on four GPUs. one: 50 M on one GPU. tiny: seconds on a CPU."
    ),
    folder: Path = typer.Option(Path("runs/open-run"), help="Data, run and record; the next call goes on there."),
    minutes: float = typer.Option(9.0, min=0.01, help="Stop after this time, save, and let the next call go on."),
    out: Path | None = typer.Option(None, help="Folder for copies of the record, curve, events and metrics."),
    carry: Path | None = typer.Option(
        None, help="Folder that keeps an unfinished run in six files, where --folder is lost between calls."
    ),
    uninterrupted: bool = typer.Option(False, help="Then train the same without kills, and compare the final state."),
) -> None:
    """Train gpt2-124m on Python source, kill it twice, and compare with the results that were stated before.

    Any setting can be given as --section.key=value; the predictions then do not apply. Exit code 1 if a kill is
    missing, no step was repeated, or bits differ.

    Examples:

      python -m benchmarks open-run

      python -m benchmarks open-run --size one --minutes 4.5 --out results
    """
    plan = select_plan(size, context.args)
    deadline = time.monotonic() + 60 * minutes
    console = Console()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if carry is not None and not (folder / RECORD).exists() and list_pieces(carry):
        unpack_folder(carry, folder)
        console.print(f"the run of {carry} goes on in {folder}")
    record = OpenRunRecord.read(folder / RECORD, size)
    if record.size != size:
        raise ConfigError(f"--folder={folder} holds an open run of --size={record.size}; name another folder")
    show_plan(plan, console)
    record.predicted = asdict(plan.prediction) if plan.prediction else None
    record.versions = _versions()
    record.devices = list_devices(record.devices, list(context.args) + list(plan.settings))
    session = OpenRun(plan, folder, record, list(context.args), console)
    with session.count_call():
        session.prepare_data()
        finished = session.train(deadline)
        if finished and uninterrupted:
            finished = session.train_uninterrupted(deadline)
    if finished:
        session.finish()
    elif carry is not None:
        size_bytes = pack_folder(folder, CARRIED, carry, CARRIED_FILES)
        console.print(f"packed the run into {carry}: {size_bytes / 1e6:,.0f} MB in {len(list_pieces(carry))} files")
    if out is not None:
        session.copy_results(out)
    failures = list_failures(record, plan) if finished else []
    if failures:
        raise TrainingError(f"{folder} does not show what the open run claims: " + "; ".join(failures))


def select_plan(size: str, settings: list[str]) -> OpenRunPlan:
    """Return the plan of a size, without its prediction if settings change the run. ConfigError for another size."""
    if size not in PLANS:
        raise ConfigError(f"--size={size}: choose one of {', '.join(PLANS)}")
    plan = PLANS[size]
    if settings:
        plan = replace(plan, prediction=None)
    return plan


class OpenRun:
    """The run of one folder, continued by each call."""

    def __init__(
        self, plan: OpenRunPlan, folder: Path, record: OpenRunRecord, settings: list[str], console: Console
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.record = record
        self.settings = settings
        self.console = console
        self.run = folder / "run"

    def write(self) -> None:
        """Write the record."""
        self.record.write(self.folder / RECORD)

    @contextlib.contextmanager
    def count_call(self) -> Iterator[None]:
        """Record the time of this call."""
        begin = time.monotonic()
        call: dict[str, float | str] = {"begin": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": 0.0}
        self.record.calls.append(call)
        try:
            yield
        finally:
            call["seconds"] = time.monotonic() - begin
            self.write()

    def prepare_data(self) -> None:
        """Build the data set if it is absent. DataError if this machine's source differs from that of earlier calls."""
        from megascale.data.prepare.builder import build

        data = self.folder / "data"
        if not (data / "train.idx").exists():
            begin = time.monotonic()
            text = self.folder / "python.jsonl"
            collect(text, self.plan.text_bytes)
            self.record.data_bytes = text.stat().st_size
            build(
                data,
                inputs=[text],
                vocab_size=self.plan.vocab_size,
                held_out=self.plan.held_out,
                progress=False,
            )
            text.unlink()
            self.record.data_seconds = time.monotonic() - begin
            self.console.print(f"built {data} of Python source in {self.record.data_seconds:.0f} s")
        fingerprint = _fingerprint(data)
        if self.record.data not in ("", fingerprint):
            raise DataError(
                f"{data} has the fingerprint {fingerprint}, and earlier calls trained on {self.record.data}; "
                "continue on a machine with the same Python source, or name another --folder"
            )
        self.record.data = fingerprint
        self.write()

    def train(self, deadline: float) -> bool:
        """Start the run until it is finished or the time is over; return whether it is finished."""
        while not is_finished(self.run):
            if time.monotonic() >= deadline:
                self._report_stop()
                return False
            kill_steps = self.plan.kill_steps()[len(self.record.kills) :]
            code = self._start("run", deadline, kill_steps[0] if kill_steps else None)
            self._compare()
            if code == EXIT_INTERRUPTED:
                self._report_stop()
                return False
        return True

    def train_uninterrupted(self, deadline: float) -> bool:
        """Train the same settings without a kill until the end or the deadline; return whether it is finished."""
        if not is_finished(self.folder / "uninterrupted"):
            self._start("uninterrupted", deadline, kill_step=None)
        return is_finished(self.folder / "uninterrupted")

    def finish(self) -> None:
        """Draw the curve, compare and print the results."""
        from benchmarks.training.open_run_report import fingerprint_state
        from megascale.observe.plots import plot_runs

        self._compare()
        self.record.result = summarise(self.record, self.run)
        reference = self.folder / "uninterrupted"
        if is_finished(reference):
            self.record.result["uninterrupted"] = fingerprint_state(reference / "checkpoints")
        self.write()
        show_result(self.record, self.plan, self.console)
        plot_runs([self.run], self.folder / "loss.png")
        self.console.print(f"record: {self.folder / RECORD}; curve: {self.folder / 'loss.png'}")

    def copy_results(self, out: Path) -> None:
        """Copy what a reader needs to one folder without subfolders."""
        out.mkdir(parents=True, exist_ok=True)
        for name in SHOWN:
            source = self.folder / name
            if source.exists():
                shutil.copyfile(source, out / source.name)

    def _report_stop(self) -> None:
        steps = [record["step"] for record in read_records(self.run) if "loss" in record]
        self.console.print(
            f"stopped after step {max(steps, default=0):,} of {self.plan.steps:,}; the same command goes on"
        )

    def _start(self, name: str, deadline: float, kill_step: int | None) -> int:
        """Run `megascale train` until it ends, the time is over, or step `kill_step` is recorded; return its code."""
        run = self.folder / name
        command = [sys.executable, "-m", "megascale.cli.main", "train", *self.plan.command_line(self.folder, name)]
        command += self.settings
        begin = time.monotonic()
        stopping = False
        with open(self.folder / "output.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"COLUMNS": "120"},
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    if kill_step is not None and last_step(run) >= kill_step:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                        self._record_kill(run)
                        return process.returncode
                    if not stopping and time.monotonic() >= deadline:
                        stopping = True
                        process.send_signal(signal.SIGTERM)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait()
        seconds = time.monotonic() - begin
        self.console.print(f"{name}: step {last_step(run):,} after {seconds:.0f} s, exit code {process.returncode}")
        if process.returncode not in (0, EXIT_INTERRUPTED):
            lines = (self.folder / "output.log").read_text(errors="replace").strip().splitlines()[-8:]
            raise TrainingError(f"{name} ended with exit code {process.returncode}: " + "\n  ".join(lines))
        return process.returncode

    def _record_kill(self, run: Path) -> None:
        """Keep the steps since the last checkpoint, which the next start will repeat."""
        from megascale.checkpoint import latest

        records = read_records(run)
        saved = latest(run / "checkpoints") or 0
        step = max(record["step"] for record in records if "loss" in record)
        self.record.kills.append(Kill(step, step_values(records, saved), resumed_from=saved))
        self.write()
        self.console.print(f"killed all processes after step {step:,}; the newest checkpoint has step {saved:,}")

    def _compare(self) -> None:
        """Compare the repeated steps of each kill whose steps are there again."""
        records = read_records(self.run)
        recorded = max((record["step"] for record in records if "loss" in record), default=0)
        for number, kill in enumerate(self.record.kills):
            is_last = number == len(self.record.kills) - 1
            if not is_last or recorded > kill.step or is_finished(self.run):
                compare_repeated_steps(kill, records)
        self.write()


def is_finished(run: Path) -> bool:
    """Return whether a run has its last evaluation, of the whole held-out file."""
    return any("valid_whole_loss" in record for record in read_records(run))


def list_devices(earlier: list[str], settings: list[str]) -> list[str]:
    """Return the names of the devices that this call and earlier ones used."""
    if "--train.device=cpu" in settings:
        return sorted({*earlier, f"CPU ({os.cpu_count()} cores)"})
    return sorted({*earlier, _device()})


def last_step(run: Path) -> int:
    """Return the last recorded step of a run, 0 before the first."""
    from megascale.core import strict_json

    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    with open(file, "rb") as metrics:
        metrics.seek(max(0, file.stat().st_size - 4096))
        lines = metrics.read().split(b"\n")[:-1]
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError):
            return int(strict_json.loads(line.decode())["step"])
    return 0
