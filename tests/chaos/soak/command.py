"""`python -m tests.chaos soak`: faults by the hundred, each with the result that it must have.

A part makes random cases from a seed, runs each with real processes and says whether it held: the run was refused with
the right exit code, or its losses, weights and ledger are those of an undisturbed run.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json

# Part -> number of cases without --count. Each part is a module of this package with
# `run(cases, seed, folder, report)`, where `cases` is a range of numbers.
PARTS: dict[str, int] = {
    "layouts": 100,  # random layouts equal one process
    "huggingface": 200,  # random configurations give the logits of transformers
    "resumes": 50,  # one setting changed at random: refused, or the ledger exact
    "crashes": 10,  # a job that crashes at one step for ever ends with a verdict
    "journal": 100,  # a damaged journal under a running job
}

# Parts whose cases depend on those before them, so that none can be left out.
IN_ORDER = ("resumes", "journal")


@dataclass(frozen=True)
class SoakCase:
    """One case of a part.

    Attributes:
        name: what was done, enough to do it again.
        held: whether what came of it was right.
        outcome: what came of it.
    """

    name: str
    held: bool
    outcome: str


Report = Callable[[SoakCase], None]


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("soak")(soak)


def soak(
    parts: str = typer.Option(",".join(PARTS), help="Which parts, comma-separated."),
    count: int | None = typer.Option(None, min=1, help="Cases of each part (default: each part's own number)."),
    first: int = typer.Option(1, min=1, help="Begin at this case of each part, to go on with one that was ended."),
    seed: int = typer.Option(0, help="Of the random cases: the same seed makes the same cases."),
    keep: Path | None = typer.Option(None, help="Keep the cases' folders here instead of deleting them."),
    out: Path = typer.Option(Path("bench-soak.json"), help="JSON file for the results."),
    minutes: float | None = typer.Option(
        None, min=2.0, help="In place of the parts: random faults of one job for so long, added to those of --out."
    ),
    every: float = typer.Option(120.0, min=1.0, help="With --minutes: seconds between faults, on average."),
    resume: Path | None = typer.Option(None, help="With --minutes: add to this report, by its --seed and --every."),
    report: list[Path] = typer.Option(
        [], help="Run nothing; print the tables of this report of --minutes. Repeat it to add up several soaks."
    ),
) -> None:
    """Run random faults and changes against real runs, and print which held.

    Exit 1 if one did not. All parts together take hours on two cores; start with one.

    With --minutes one launched job is struck by random faults instead: ranks and nodes are killed and hang. The command
    prints what they cost and what the job has left behind. Called again, it goes on with its report. --resume names a
    report that must exist.

    Example: python -m tests.chaos soak --parts resumes --count 10

    Example: python -m tests.chaos soak --minutes 10 --out soak.json

    Example: python -m tests.chaos soak --report soak-1.json --report soak-2.json
    """
    from rich.console import Console
    from rich.table import Table

    from megascale.errors import ConfigError, TrainingError

    if report:
        from tests.chaos.soak.fault_tables import make_tables

        if minutes is not None or resume is not None:
            raise ConfigError("--report prints tables and runs nothing; leave out --minutes and --resume")
        print(make_tables(report))
        return
    if minutes is not None:
        from tests.chaos.soak import endurance

        if resume is not None:
            seed, every = endurance.read_settings(resume)
            out = resume
        problems = endurance.show(endurance.endure(minutes, every, seed, out))
        if problems:
            raise TrainingError(f"{len(problems)} problems: {'; '.join(problems[:5])}")
        return
    if resume is not None:
        raise ConfigError(f"--resume={resume} needs --minutes; parts go on with --first")
    chosen = [part.strip() for part in parts.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in PARTS]
    if unknown or not chosen:
        raise ConfigError(f"--parts={parts}: choose from {', '.join(PARTS)}")
    if first > 1 and (late := [part for part in chosen if part in IN_ORDER]):
        raise ConfigError(f"--first={first}: each case of {', '.join(late)} depends on those before it; leave it out")
    short = [part for part in chosen if first > (count or PARTS[part])]
    if short:
        raise ConfigError(f"--first={first}: {short[0]} has {count or PARTS[short[0]]} cases; choose one of them")
    console = Console()
    results: dict[str, list[SoakCase]] = {}
    seconds: dict[str, float] = {}
    with temporary_folder(prefix="megascale-soak-") as temporary:
        for part in chosen:
            cases = results[part] = []
            numbers = range(first - 1, count or PARTS[part])
            began = time.monotonic()

            def report_case(
                case: SoakCase, cases: list[SoakCase] = cases, part: str = part, of: range = numbers
            ) -> None:
                cases.append(case)
                mark = "[green]held[/]" if case.held else "[red]FAILED[/]"
                number = f"{of.start + len(cases)}/{of.stop}"
                console.print(f"{part} {number}  {mark}  {case.name}: {case.outcome}", highlight=False)

            folder = (keep or Path(temporary)) / part
            folder.mkdir(parents=True, exist_ok=True)
            importlib.import_module(f"tests.chaos.soak.{part}").run(numbers, seed, folder, report_case)
            seconds[part] = time.monotonic() - began

    table = Table(title="soak")
    for column in ("part", "cases", "held", "time"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, cases in results.items():
        table.add_row(part, str(len(cases)), str(sum(case.held for case in cases)), f"{seconds[part]:.0f} s")
    console.print(table)
    record = {part: [asdict(case) for case in cases] for part, cases in results.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    out.write_text(strict_json.dumps({"date": date, "seed": seed, "seconds": seconds, "parts": record}, indent=1))
    failed = [f"{part}: {case.name}" for part, cases in results.items() for case in cases if not case.held]
    if failed:
        raise TrainingError(f"{len(failed)} cases did not hold: " + "; ".join(failed[:5]))
