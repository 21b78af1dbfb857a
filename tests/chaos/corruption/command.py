"""`python -m tests.chaos corruption`: wrong bits on one rank, and whether replays find it and name the rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import typer

from megascale.core import strict_json
from megascale.errors import ConfigError, TrainingError
from tests.chaos.corruption.bit_flips import COMPUTE_KINDS, KINDS, STATE_KINDS, UPDATE_KINDS, BitFlip

TRIALS_PER_JOB = 5
JOB_SECONDS = 1800.0  # the machine may be busy with other work
INTERVALS = 2  # within which a fault must be named
_BITS = 64


def register(app: typer.Typer) -> None:
    """Add the campaign."""
    app.command("corruption")(corruption)


@dataclass
class Count:
    """Outcomes of one layout and kind of fault.

    Attributes:
        injected: trials in which a bit was flipped.
        detected: trials with a mismatch.
        named: trials whose verdict is the faulty rank alone.
        of_two: trials whose verdict is the faulty rank or the same rank of the other replica.
        wrong: trials whose verdict lacks the faulty rank.
        intervals: checks until the mismatch, at most.
        replays: replays of micro-batches on healthy ranks.
        alarms: mismatches among these.
        misses: the faults that were missed or whose rank was named wrongly.
    """

    layout: str
    kind: str
    injected: int = 0
    detected: int = 0
    named: int = 0
    of_two: int = 0
    wrong: int = 0
    intervals: int = 0
    replays: int = 0
    alarms: int = 0
    misses: list[Any] = field(default_factory=list)


def corruption(
    trials: int = typer.Option(200, min=1, help="faults over all layouts and kinds"),
    replays: int = typer.Option(2000, min=0, help="replays on healthy ranks over all layouts"),
    layouts: str = typer.Option("", help="layouts, comma-separated; default: all"),
    seed: int = typer.Option(0, help="seed of the faults"),
    out: Path = typer.Option(Path("bench-corruption.json"), help="JSON file for the results, written per layout"),
    proceed: bool = typer.Option(False, help="keep the layouts that --out has results of, and run the others"),
) -> None:
    """Flip a bit on one rank, once or from a step on, and count the verdicts. Replay healthy micro-batches too.

    Passing faults are in the micro-batch that is checked: replays do not see others. Exit 1 if a fault is missed, its
    rank is not among those named, or a healthy replay differs.
    Example: python -m tests.chaos corruption --trials 40 --replays 100
    """
    from rich.console import Console
    from rich.table import Table

    from tests.chaos.corruption.layouts import LAYOUTS
    from tests.exact.pool import Pool

    chosen = [name.strip() for name in layouts.split(",") if name.strip()] or list(LAYOUTS)
    unknown = [name for name in chosen if name not in LAYOUTS]
    if unknown:
        raise ConfigError(f"--layouts={layouts}: {unknown[0]} is unknown; choose among {', '.join(LAYOUTS)}")
    console = Console(highlight=False)
    console.width = max(console.width, 150)
    campaign = {"seed": seed, "trials": trials, "replays": replays, "layouts": chosen}
    counts, seconds = _read_results(out, campaign) if proceed else ([], 0.0)
    finished = {count.layout for count in counts}
    start = time.monotonic()
    pool = Pool()
    try:
        for number, name in enumerate(chosen):
            if name in finished:
                continue
            layout = LAYOUTS[name]
            share = _divide(trials, len(chosen), number)
            rng = np.random.default_rng((seed, number))
            by_kind = {kind: Count(name, kind) for kind in KINDS}
            faults = list(_draw_faults(layout, share, rng))
            for first in range(0, len(faults), TRIALS_PER_JOB):
                _run_faults(pool, layout, faults[first : first + TRIALS_PER_JOB], by_kind)
            healthy = Count(name, "healthy")
            _run_healthy(pool, layout, _divide(replays, len(chosen), number), healthy)
            counts += [count for count in by_kind.values() if count.injected] + [healthy]
            console.print(f"{name}: {len(faults)} faults, {healthy.replays} healthy replays")
            date = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"date": date, **campaign, "seconds": seconds + time.monotonic() - start}
            out.write_text(strict_json.dumps(record | {"counts": [asdict(count) for count in counts]}) + "\n")
    finally:
        pool.close()
    table = Table(title=f"wrong bits, seed {seed}")
    columns = ("layout", "kind", "injected", "detected", "rank named", "one of two", "wrong rank", "intervals")
    for column in (*columns, "false alarms"):
        table.add_column(column, justify="left" if column in ("layout", "kind") else "right")
    for count in counts:
        alarm_share = f"{count.alarms} of {count.replays}" if count.replays else ""
        numbers = (count.injected, count.detected, count.named, count.of_two, count.wrong, count.intervals)
        table.add_row(count.layout, count.kind, *[str(number) for number in numbers], alarm_share)
    totals = [sum(getattr(count, key) for count in counts) for key in ("injected", "detected", "named", "of_two")]
    wrong = sum(count.wrong for count in counts)
    alarms = sum(count.alarms for count in counts)
    healthy_replays = sum(count.replays for count in counts)
    most = max((count.intervals for count in counts), default=0)
    summary = [str(number) for number in (*totals, wrong, most)]
    table.add_row("all", "", *summary, f"{alarms} of {healthy_replays}", style="bold")
    console.print(table)
    if totals[0] != totals[1] or totals[1] != totals[2] + totals[3] or alarms:
        raise TrainingError(
            f"{totals[1]} of {totals[0]} faults were detected, {totals[2] + totals[3]} named, and {alarms} healthy "
            f"replays differed; {out} lists them"
        )


def _read_results(out: Path, campaign: dict[str, Any]) -> tuple[list[Count], float]:
    """Return the counts of an interrupted campaign and its seconds. Raises ConfigError if it was another one."""
    record = json.loads(out.read_text())
    earlier = {key: record[key] for key in campaign}
    if earlier != campaign:
        raise ConfigError(f"--proceed: {out} has the results of {earlier}, and this campaign is {campaign}")
    return [Count(**count) for count in record["counts"]], record["seconds"]


def _divide(total: int, parts: int, number: int) -> int:
    """Return the size of one of `parts` nearly equal parts."""
    return total // parts + (number < total % parts)


def _draw_faults(layout: Any, count: int, rng: np.random.Generator) -> Iterator[BitFlip]:
    """Yield faults of all kinds that the layout can have, passing and persistent in turn; steps are set by the job."""
    has_stages = layout.tree["parallel"]["pipeline"] > 1
    kinds = [kind for kind in COMPUTE_KINDS if has_stages or kind != "activation gradient"]
    kinds += UPDATE_KINDS
    variants = [(kind, is_persistent) for kind in kinds for is_persistent in (False, True)]
    variants += [(kind, False) for kind in STATE_KINDS]
    for number in range(count):
        kind, is_persistent = variants[number % len(variants)]
        rank = int(rng.integers(layout.world))
        if kind == "activation gradient":  # the first stage sends none
            rank = layout.world // 2 + rank % (layout.world // 2)
        yield BitFlip(kind, rank, 0, is_persistent, int(rng.integers(1 << 20)), int(rng.integers(_BITS)))


def _run_faults(pool: Any, layout: Any, faults: list[BitFlip], by_kind: dict[str, Count]) -> None:
    """Inject faults one after another into one training, and count the outcomes."""
    from tests.chaos.corruption.checked_training import run_trials

    reports = pool.run(run_trials, layout.world, layout.tree, faults, timeout=JOB_SECONDS)
    replicas = layout.tree["parallel"]["data"]
    for number, fault in enumerate(faults):
        trial = reports[0][number]
        count = by_kind[fault.kind]
        if not any(report[number].flips for report in reports):
            continue
        count.injected += 1
        count.alarms += trial.alarms
        count.replays += trial.healthy_checks * replicas
        if trial.verdict is None or trial.intervals > INTERVALS:
            count.misses.append(asdict(fault))
            continue
        count.detected += 1
        count.intervals = max(count.intervals, trial.intervals)
        if trial.verdict.ranks == (fault.rank,):
            count.named += 1
        elif fault.rank in trial.verdict.ranks and len(trial.verdict.ranks) == 2 and replicas == 2:
            count.of_two += 1
        else:
            count.wrong += 1
            count.misses.append(asdict(fault) | {"verdict": asdict(trial.verdict)})


def _run_healthy(pool: Any, layout: Any, replays: int, count: Count) -> None:
    """Replay on healthy ranks."""
    from tests.chaos.corruption.checked_training import train_checked

    replicas = layout.tree["parallel"]["data"]
    steps = -(-replays // replicas)
    if not steps:
        return
    # The first step is not checked.
    reports = pool.run(train_checked, layout.world, layout.tree, steps + 1, 1, None, timeout=JOB_SECONDS)
    count.replays = steps * replicas
    count.alarms = len(reports[0].verdicts)
