"""Random losses of replicas in a job that goes on without them, compared with an undisturbed run in one process."""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, has_copies, make
from benchmarks.harness.temporary import temporary_folder
from megascale.config import load
from megascale.core import strict_json
from megascale.core.recovery_record import RecoveryRecord
from megascale.errors import ConfigError

SETTINGS = [
    "--resilience.spares=0",
    "--train.micro_batch=1",
    "--train.precision=float64",
    "--train.steps=100000",
    # Training amplifies differences of rounding. With a peak of 1e-2, two undisturbed runs on one and on three replicas
    # differ by 5e-8 of a loss after 2,300 steps; with this one, by 3e-16.
    "--lr.peak=1e-5",
]
LIMIT_OF_DIFFERENCE = 1e-12  # relative, of a loss and of the weights' norm
CONTINUED = [
    "--resilience.continue_replicas=true",
    "--resilience.budget_seconds=30",
    "--resilience.no_progress_limit=20",
    "--resilience.keep_seconds=20",
    "--resilience.window=20",
    "--checkpoint.memory_wait=true",
    "--checkpoint.linger=40",
]
# Of 6 micro-batches 4 replicas have two or one, three have two, and two have three.
BATCH = 6
# A job whose numbers are not compared writes no checkpoint at an interval. A large one would slow the steps down.
NOT_COMPARED = ["--checkpoint.interval=0", "--checkpoint.at_end=false"]
# Sections of settings that change neither the samples nor the arithmetic.
SECTIONS_WITHOUT_NUMBERS = ("rendezvous.", "resilience.")
PREPARED = "were made during the attempt before"  # in the start-up line of groups that were prepared
_PART = re.compile(r"([a-zA-Z' ]+) (\d+\.\d\d)(?=[,;)]|$)")  # name and seconds of a part in a log line
KINDS = {"kill-rank": 3, "kill-agent": 1}  # and how often each is drawn
SECOND_LOSS = 0.2  # share of the losses during which another replica is lost
LIMIT = 180.0  # seconds in which copies must be complete, and in which the missing replicas must have joined
PACE = 0.1  # least seconds of a step


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos continue`."""
    app.command("continue")(continue_replicas)


def continue_replicas(
    losses: int = typer.Option(100, min=1, help="Replicas that are lost one after the other, and join again."),
    seed: int = typer.Option(0, help="Seed of the losses and their times."),
    out: Path = typer.Option(Path("chaos-continue.json"), help="JSON file for the figures."),
    picture: Path | None = typer.Option(None, help="PNG file for the throughput over the first loss and join."),
    replicas: int = typer.Option(4, min=2, help="Replicas, each on a node of its own."),
    setting: list[str] = typer.Option(
        [], help="Further setting, SECTION.KEY=VALUE. Nothing is compared if it may change what is trained."
    ),
) -> None:
    """Lose replicas of a launched job at random times, and compare its losses and weights with one process's.

    Exit code 1 if a loss or a weight differs by more than rounding in float64, the ledger is not exact, or the job does
    not take a replica in again. Needs no GPU.

    Example: python -m tests.chaos continue --losses 5

    Example: python -m tests.chaos continue --losses 2 --replicas 2 --setting train.device=cuda
    """
    from tests.chaos.faults.report import describe_machine

    with temporary_folder(prefix="megascale-continue-") as name:
        report = run(make(Path(name)), losses, seed, replicas=replicas, settings=setting, picture=picture)
    out.write_text(strict_json.dumps(describe_machine() | report, indent=1) + "\n")
    show(report)
    if report["problems"]:
        raise typer.Exit(1)


def check_settings(file: Path, words: Sequence[str], settings: Sequence[str]) -> None:
    """Check further settings in the job's configuration, before it starts. Raises ConfigError that names the option.

    Args:
        file: configuration file of the job.
        words: overrides of the campaign, `settings` included.
    """
    try:
        load(file, words)
    except ConfigError as error:
        raise ConfigError(f"--setting {', '.join(settings)}: {error}") from None


def run(
    file: Path,
    losses: int,
    seed: int,
    *,
    replicas: int = 4,
    settings: Sequence[str] = (),
    picture: Path | None = None,
) -> dict[str, Any]:
    """Run the job and, if further settings change no numbers, the undisturbed one; return the report."""
    batch = f"--train.global_batch={BATCH}"
    words = [f"--parallel.data={replicas}", f"--resilience.nodes={replicas}"] + SETTINGS + [batch] + CONTINUED
    words += [f"--resilience.max_missing_replicas={min(2, replicas - 1)}"]
    is_compared = all(text.startswith(SECTIONS_WITHOUT_NUMBERS) for text in settings)
    if not is_compared:
        words += NOT_COMPARED
    words += [f"--{text}" for text in settings]
    if settings:
        check_settings(file, words, settings)
    job = Launched(file, "continued", words, pace=PACE if is_compared else 0.0)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        start = time.monotonic()
        if job.first(lambda e: e.kind == "first_step") is None:
            problems.append("the job came to no first step")
        print(f"first step after {time.monotonic() - start:.1f} s", file=sys.stderr)
        for number in range(losses):
            if problems:
                break
            row = lose_replica(job, random.Random(f"{seed}-{number}"), replicas)
            rows.append(row)
            print(strict_json.dumps(row), flush=True)
            if row["problem"]:
                problems.append(f"loss {number}: {row['problem']}")
    finally:
        code = end_job(job, saves=is_compared)
        prepared_groups = job.read_prepared_groups()
        second_steps = job.read_second_steps()
    if is_compared and code != 130:
        problems.append(f"the job ended with exit code {code} instead of 130")
    comparison: dict[str, Any] = {}
    if not problems and is_compared:
        comparison, differences = compare(file, job, batch)
        problems += differences
    if picture is not None and rows and "time" in rows[0]:
        draw(job, rows[0], picture)
    report = {"seed": seed, "settings": list(settings), "losses": rows, "prepared_groups": prepared_groups}
    report["second_steps"] = second_steps
    return report | comparison | {"problems": problems}


def end_job(job: Launched, *, saves: bool) -> int:
    """End the job and its agents, and return the driver's exit code.

    Args:
        saves: whether the job first saves its state to storage. Otherwise its processes are killed at once, since
            saves under way may have tens of gigabytes.
    """
    from megascale.resilience.agent.node_folder import end_checkpoint_services

    if saves:
        job.process.send_signal(signal.SIGINT)
    else:
        job.process.kill()
    code = job.end()
    job.end_agents()
    for folder in (job.run / "nodes").glob("*"):
        end_checkpoint_services(job.run, folder.name)
    return code


def await_copies(job: Launched) -> bool:
    """Wait until each rank's state is in a peer's memory, and return whether it is. A loss before it costs all steps.

    All memory for snapshots must be prepared too, since a step before it may have no copy.
    """
    start = time.monotonic()
    while time.monotonic() < start + LIMIT and not job.over():
        if has_copies(job.run, len(read_placement(job))) and job.has_memory():
            print(f"all ranks have copies after {time.monotonic() - start:.1f} s", file=sys.stderr)
            return True
        if list_failed_copies(job):
            return False
        time.sleep(0.05)
    return False


def list_failed_copies(job: Launched) -> list[str]:
    """Return why copies to peers failed since the last start of the trainers."""
    reasons: list[str] = []
    for event in job.trainer_events():
        if event["event"] in ("run_started", "resumed"):
            reasons = []
        elif event["event"] == "replica_failed":
            reasons.append(event["message"])
    return reasons


def describe_missing_copies(job: Launched) -> str:
    """Return why no replica can be lost yet."""
    reasons = list_failed_copies(job)
    if reasons:
        return f"a copy of a rank's state to its peer failed: {reasons[-1]}"
    return f"the ranks' states were not complete in peers' memory after {LIMIT:g} s"


def lose_replica(job: Launched, dice: random.Random, replicas: int) -> dict[str, Any]:
    """Lose a replica, sometimes two, wait until all train again, and return what it cost."""
    row: dict[str, Any] = {"problem": ""}
    if not await_copies(job):
        return row | {"problem": describe_missing_copies(job)}
    time.sleep(dice.uniform(0.5, 4.0))
    row |= {"kind": _inject(job, dice), "time": time.time()}
    after = job.events()[-1].id
    missing = job.first(lambda e: e.kind == "replicas_missing" and e.id > after, LIMIT)
    if missing is None:
        return row | {"problem": "the job did not go on without the replica"}
    went_on = job.first(lambda e: e.kind == "recovered" and e.id > missing.id, LIMIT)
    if went_on is None:
        return row | {"problem": "no step without the replica"}
    row["ready"] = job.read_starts()
    row["left"] = job.read_leaves()
    has_second = replicas > 2 and dice.random() < SECOND_LOSS
    # The missing replica may join while this waits. Then its join is awaited below, and no other replica is lost.
    has_second = has_second and await_copies(job) and len(read_placement(job)) < replicas
    if has_second:
        _inject(job, dice)
    row["second"] = has_second
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        placed = [e for e in job.events() if e.kind == "attempt_started"][-1]
        complete = [e for e in job.events(placed.id) if e.kind == "recovered"]
        if len(placed.nodes) == replicas and complete:
            record = RecoveryRecord.from_details(went_on.details)
            joined = RecoveryRecord.from_details(complete[-1].details)
            assert record is not None
            assert joined is not None
            if record.source == "nothing":
                row["problem"] = "the job began again at step 0, although all ranks had copies"
            return row | {
                "without": record.total,
                "phases": record.seconds,
                "decide": record.decide_seconds,
                "lost_steps": record.lost_steps,
                "missing": complete[-1].time - row["time"],
                "joining": joined.total,
                "joining_phases": joined.seconds,
                "joining_decide": joined.decide_seconds,
                "kept": len(joined.reused_ranks),
                "doubts": record.doubts | joined.doubts,
                "sources": [record.source, joined.source],
                "last_step": joined.last_step_seconds,
                "joining_ready": job.read_starts(),
                "joining_left": job.read_leaves(),
                "joining_first_step": {rank: lines[-1] for rank, lines in job.read_first_steps().items()},
                "joining_groups": job.read_groups(),
            }
        if job.over():
            break
        time.sleep(0.1)
    return row | {"problem": f"not all replicas train again after {LIMIT:g} s"}


def read_placement(job: Launched) -> Sequence[str]:
    """Return the nodes of the present attempt."""
    nodes: Sequence[str] = [e for e in job.events() if e.kind == "attempt_started"][-1].nodes
    return nodes


def _inject(job: Launched, dice: random.Random) -> str:
    """Kill a rank or an agent of the present attempt; return the kind."""
    from megascale.resilience.faults.inject import Options, inject

    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    placed = read_placement(job)
    where = dice.randrange(len(placed))
    inject(job.run, kind, Options(node=placed[where]) if kind == "kill-agent" else Options(rank=where))
    return kind


def compare(file: Path, job: Launched, batch: str) -> tuple[dict[str, Any], list[str]]:
    """Train as far in one process; return the differences, and what is wrong."""
    import numpy as np

    from benchmarks.harness.launched import weights

    steps = read_losses(job.run)
    command = [sys.executable, "-m", "megascale.cli.main"]
    last = max(steps)
    words = SETTINGS + [batch, "--parallel.data=1", "--train.name=calm", f"--train.stop_after={last}"]
    calm_run = job.run.parent / "calm"
    subprocess.run(command + ["train", str(file)] + words, check=True, capture_output=True)
    expected = read_losses(calm_run)
    problems = []
    missing = sorted(set(range(1, last + 1)) - set(steps))
    if missing:
        problems.append(f"the metrics lack the steps {missing}; {describe_starts(job)}")
    difference = max(abs(steps[step] - expected[step]) / abs(expected[step]) for step in steps)
    if not difference < LIMIT_OF_DIFFERENCE:
        problems.append(f"a loss differs by {difference:.1e}")
    calm_weights = weights(calm_run)
    own_weights = weights(job.run)
    distance = sum(float(np.square(own_weights[name] - calm_weights[name]).sum()) for name in calm_weights)
    length = sum(float(np.square(tensor).sum()) for tensor in calm_weights.values())
    moved = float(np.sqrt(distance / length))
    if not moved < LIMIT_OF_DIFFERENCE:
        problems.append(f"the weights differ by {moved:.1e} of their norm")
    ledger = subprocess.run(command + ["data", "ledger", str(job.run)], capture_output=True, text=True)
    if ledger.returncode:
        problems.append(f"the ledger is not exact: {(ledger.stderr or ledger.stdout)[-500:]}")
    return {"steps": last, "loss_difference": difference, "weight_difference": moved}, problems


def describe_starts(job: Launched) -> str:
    """Return the step from which each start went on, with its cause, source and lost steps."""
    texts = []
    for event in job.events():
        record = RecoveryRecord.from_details(event.details)
        if event.kind == "recovered" and record is not None:
            texts.append(f"{record.cause} {record.resumed_step} ({record.source}, {record.lost_steps} lost)")
    return "starts went on after: " + ", ".join(texts)


def read_losses(run_folder: Path) -> dict[int, float]:
    """Return the loss of each step, of its last repetition."""
    losses = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses[record["step"]] = record["loss"]
    return losses


def draw(job: Launched, row: dict[str, Any], picture: Path) -> None:
    """Draw the throughput over the first loss and join."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    begin, end = row["time"] - 5.0, row["time"] + row.get("missing", 20.0) + 5.0
    joined = row["time"] + row.get("missing", 20.0)
    next_losses = [event.time for event in job.events() if event.kind == "replicas_missing" and event.time > joined]
    end = min([end, *(time - 1.0 for time in next_losses)])
    records = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    times = sorted(record["time"] for record in records if "loss" in record)
    tokens = next(record["tokens"] / record["step"] for record in records if "loss" in record)
    seconds = [begin + second for second in range(int(end - begin))]
    rates = [tokens * sum(second <= time < second + 1 for time in times) for second in seconds]
    figure, axes = plt.subplots(figsize=(8, 3))
    axes.step([second - row["time"] for second in seconds], rates, where="post")
    names = {"replicas_missing": "goes on without it", "replicas_joining": "it joins", "recovered": "next new step"}
    for event in job.events():
        if event.kind in names and begin < event.time < end:
            axes.axvline(event.time - row["time"], color="0.6", linewidth=0.8)
            axes.text(event.time - row["time"], max(rates), names[event.kind], rotation=90, va="top", fontsize=7)
    axes.set(xlabel="seconds since the loss of a replica", ylabel="tokens per second", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def show(report: dict[str, Any]) -> None:
    """Print the figures."""
    good = [row for row in report["losses"] if not row["problem"]]
    if good:
        print(f"{len(good)} losses, {sum(row['second'] for row in good)} of them with a second one")
        for name, text in (
            ("without", "fault to the next step without the replica"),
            ("joining", "last step before the join to the next step with all"),
        ):
            values = [row[name] for row in good]
            print(f"{text}: mean {statistics.fmean(values):.2f} s, longest {max(values):.2f} s")
        prepared = sum(PREPARED in row["joining_groups"] for row in good)
        print(f"joins with groups that were made while the others trained: {prepared} of {len(good)}")
        print(f"mean seconds of a join by phase: {_average_phases(good)}")
        for line in describe_parts(row["joining_left"] for row in good):
            print(f"ms of leaving for a join, {line}")
        for line in describe_parts(row["joining_ready"] for row in good):
            print(f"ms of the state of a join, {line}")
        print(f"steps lost per loss: at most {max(row['lost_steps'] for row in good)}")
    if "steps" in report:
        print(f"largest relative difference of a loss in {report['steps']} steps: {report['loss_difference']:.1e}")
        print(f"norm of the weights' difference over that of the weights: {report['weight_difference']:.1e}")
    _print_all(report["problems"])


def _average_phases(rows: Sequence[dict[str, Any]]) -> str:
    """Return the mean seconds of each phase of the joins."""
    phases = list(rows[0]["joining_phases"])
    means = [statistics.fmean(row["joining_phases"].get(phase, 0.0) for row in rows) for phase in phases]
    return ", ".join(f"{phase} {mean:.2f}" for phase, mean in zip(phases, means, strict=True))


def describe_parts(lines_by_rank: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a line per section of ranks' log lines, with the milliseconds of each part.

    A section begins with its name and a colon, and sections are separated by semicolons. Seconds are means over the
    given joins, and of these means the longest of any rank.
    """
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {}  # by section, part and rank
    for lines in lines_by_rank:
        for rank, line in lines.items():
            for section in line.split(";"):
                name, _, parts = section.strip().rpartition(": " if ": " in section else "(")
                name = "all" if re.match(r"\d", name) else name
                for part, value in _PART.findall(parts):
                    by_rank = seconds.setdefault(name, {}).setdefault(part.strip(), {})
                    by_rank.setdefault(rank, []).append(float(value))
    texts = []
    for name, parts_of_section in seconds.items():
        longest = {part: max(map(statistics.fmean, ranks.values())) for part, ranks in parts_of_section.items()}
        texts.append(f"{name}: " + ", ".join(f"{part} {value * 1e3:.0f}" for part, value in longest.items()))
    return texts


def _print_all(problems: Sequence[str]) -> None:
    for problem in problems:
        print(problem)
