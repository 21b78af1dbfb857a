"""`python -m benchmarks observe`: what timers cost, what the span store takes in, and what a kill leaves of it.

And what-if next to published results; how often slow machines and causes of a decline are detected.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import require_folder, temporary_folder
from megascale.core import strict_json

PARTS = ("ingest", "kills", "cost", "device", "whatif", "stragglers", "decline")

# Shapes and bounds of the cost: (name, words of `alternate`, most share of a step). Steps of few micro-batches:
# what a step's own timers cost weighs most there, and 200 pairs take minutes.
HALF_13B = [
    "gpt-13b", "observe.timers=false,true", "--model.layers=20", "--each=1", "--untimed=0", "--parallel.tensor=2",
]  # fmt: skip
ON_GPUS = (
    ("half of gpt-13b, TP2, micro-batch 4", HALF_13B + ["--train.micro_batch=4", "--train.global_batch=4"], 0.004),
    ("half of gpt-13b, TP2, micro-batch 1", HALF_13B + ["--train.micro_batch=1", "--train.global_batch=1"], 0.01),
)
ON_GPU = tuple(
    (name.replace("TP2, ", ""), [argument for argument in arguments if argument != "--parallel.tensor=2"], bound)
    for name, arguments, bound in ON_GPUS
)
# On four and more: what is fast there, each replica with one round of four micro-batches so that pairs take seconds.
FAST_LAYOUT = [
    "gpt-13b", "observe.timers=false,true", "--each=1", "--model.block=parallel", "--parallel.tensor=2",
    "--parallel.pipeline=2", "--parallel.virtual_stages=5", "--parallel.micro_batch_group_size=4",
    "--train.micro_batch=4",
]  # fmt: skip
ALL_LAYERS = ("--parallel.layer_split=[4,4,4,4,4,4,4,4,5,3]",)
HALF_LAYERS = ("--model.layers=20", "--parallel.layer_split=[2,2,2,2,2,2,2,2,3,1]")
ALL_GIB = 120  # of a GPU, that all layers need: 103 of tensors
ON_CPU = (
    (
        "2 layers of 128, micro-batch 1, one process",
        [
            "gpt2-124m", "observe.timers=false,true", "--each=4", "--model.layers=2", "--model.hidden=128",
            "--model.heads=4", "--model.sequence_length=64", "--model.vocab_size=256", "--train.micro_batch=1",
            "--train.global_batch=8", "--train.precision=float32", "--train.device=cpu",
        ],
        0.02,
    ),
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("observe")(observe)


def observe(
    parts: str = typer.Option("ingest,kills,cost,device", help=f"Which of {', '.join(PARTS)}."),
    full_steps: int = typer.Option(2, min=1, help="ingest: steps of which all spans come."),
    rollup_steps: int = typer.Option(100, min=1, help="ingest: steps of which roll-ups come."),
    data: int = typer.Option(192, min=1, help="ingest: data-parallel ranks; the job has 64 times as many in all."),
    kills: int = typer.Option(100, min=1, help="kills: how many services are killed."),
    turns: int = typer.Option(200, min=1, help="cost: pairs of steps."),
    runs: int = typer.Option(20, min=1, help="stragglers: replayed runs, healthy and not; decline: a quarter of each."),
    rates: bool = typer.Option(True, help="stragglers: error rates of small jobs, too (4 minutes)."),
    minutes: float = typer.Option(
        0.0,
        min=0,
        help="stragglers: begin no other replayed run after so long, go on in the next call with the same "
        "--folder; 0: all.",
    ),
    local: float = typer.Option(60.0, min=0, help="stragglers: seconds of a real job of two ranks; 0: none."),
    device: str = typer.Option(
        "", help="stragglers: of the real job, cpu or cuda; by default cuda where two GPUs are."
    ),
    layout: str = typer.Option(
        "data=2", help="stragglers: of the real job, as keys of \\[parallel]: tensor=2,pipeline=2,data=2."
    ),
    seed: int = typer.Option(1, help="kills: of the moments; stragglers, decline: of the noise and the faults."),
    traces: Path | None = typer.Option(None, help="whatif: folder of StragglerAnalysis' traces and results."),
    folder: Path | None = typer.Option(None, help="Where files are made; default: a temporary folder, removed."),
    out: Path = typer.Option(Path("bench-observe.json"), help="JSON file for the metrics."),
) -> None:
    """Measure ingest, kills of the span service and the cost of timers. Exit code 1 if a bound is missed.

    ingest: 12,288 ranks made from the schedule, through rings, spool and Parquet, on two threads; then questions.
    kills: a span service killed at random moments; what it acknowledged must be there once.
    device: on a GPU, timers next to CUDA's own events, and the device's clock next to the host's.
    cost: timers off and on in turn within one engine (benchmarks alternate); on GPUs half of gpt-13b (on two with
    tensor parallelism of 2; on four and more all of it in TP2 PP2x5, if their memory holds it), else a small model on
    the CPU.
    whatif: traces in --traces replayed; total, ideal and slow-down within 1% of the results next to them, in 5 s.
    stragglers: 12,288 ranks (--data) replayed from their schedule with the noise of real machines, 50 steps: healthy,
    with a GPU 5% slow and a slow link, with two slow GPUs; error rates of small jobs; and two real ranks, one 10% slow
    (more with --layout).
    decline: 128 ranks replayed for 300 steps that grow for a known reason.

    Examples:

      python -m benchmarks observe --parts ingest,kills

      python -m benchmarks observe --parts device,cost --turns 200

      python -m benchmarks observe --parts whatif --traces StragglerAnalysis/data

      python -m benchmarks observe --parts stragglers,decline

      python -m benchmarks observe --parts stragglers --runs 1 --data 4 --device cuda

      python -m benchmarks observe --parts stragglers --runs 1 --data 4 --no-rates --layout tensor=2,pipeline=2,data=2
    """
    from benchmarks.observe import decline as decline_bench
    from benchmarks.observe import device_check, ingest
    from benchmarks.observe import kills as killing
    from benchmarks.observe import stragglers as straggler_bench
    from benchmarks.observe import whatif as whatif_bench
    from benchmarks.observe.synthetic_spans import Job
    from megascale.errors import ConfigError
    from megascale.train.rank_info import choose_device

    expected = parts.split(",")
    wrong = [part for part in expected if part not in PARTS]
    if wrong:
        raise ConfigError(f"--parts={parts}: there is no part {wrong[0]!r}; there are {', '.join(PARTS)}")
    if "whatif" in expected and traces is None:
        raise ConfigError("--parts=whatif needs --traces=FOLDER: others' traces with their results")
    if device not in ("", "cpu", "cuda"):
        raise ConfigError(f"--device={device} is neither cpu nor cuda")
    if device and "stragglers" in expected and local:
        choose_device(device)
    axes = straggler_bench.axes(layout)
    record: dict[str, Any] = {"date": date.today().isoformat()}
    missed: list[str] = []
    if folder is not None:
        require_folder(folder)
    with temporary_folder() as temporary:
        location = folder or Path(temporary)
        if "ingest" in expected:
            record["ingest"] = ingest.measure(location / "ingest", full_steps, rollup_steps, Job(data=data))
            missed += _show_ingest(record["ingest"])
        if "kills" in expected:
            record["kills"] = killing.measure(location / "kills", kills, seed)
            typer.echo(
                "kills: {kills} services killed, {steps} steps all there once (seed {seed})".format(**record["kills"])
            )
        if "device" in expected and _shapes() is not ON_CPU:
            record["device_check"] = device_check.measure()
            typer.echo("device: " + ", ".join(f"{name} {value:.6g}" for name, value in record["device_check"].items()))
            missed += device_check.missed(record["device_check"])
        if "cost" in expected:
            record["cost"] = []
            for name, arguments, bound in _shapes():
                record["cost"].append(_cost(name, arguments, bound, turns, location))
                missed += _show_cost(record["cost"][-1:])
        if "whatif" in expected and traces is not None:
            record["whatif"] = whatif_bench.measure(traces)
            for line in whatif_bench.lines(record["whatif"]):
                typer.echo(line)
            missed += whatif_bench.missed(record["whatif"])
        if "stragglers" in expected:
            record["stragglers"], missed_bounds = _measure_stragglers(
                location / "stragglers", runs, data=data, seed=seed, minutes=minutes, with_rates=rates
            )
            missed += missed_bounds
            if local:
                missed += _local(record, location / "local", device, local, axes)
        if "decline" in expected:
            record["decline"] = decline_bench.measure(location / "decline", max(1, runs // 4), seed)
            for line in decline_bench.lines(record["decline"]):
                typer.echo(line)
            missed += decline_bench.missed(record["decline"])
    record |= _machine()  # last: the memory of an ingest is without torch
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    typer.echo(f"metrics: {out}")
    for text in missed:
        typer.secho(f"missed: {text}", fg="red")
    if missed:
        raise typer.Exit(1)


def _measure_stragglers(
    folder: Path, runs: int, *, data: int, seed: int, minutes: float, with_rates: bool
) -> tuple[dict[str, Any], list[str]]:
    """Measure the detection of slow machines in replayed runs. Return the record and the missed bounds.

    Args:
        minutes: time after which no other run begins; 0: no limit.
        with_rates: also measure the error rates of small jobs.
    """
    from benchmarks.observe import stragglers

    record = stragglers.measure(folder, runs, data, seed, minutes or math.inf)
    for line in stragglers.lines(record):
        typer.echo(line)
    if with_rates:
        record["rates"] = stragglers.error_rates(seed)
        for line in stragglers.rate_lines(record["rates"]):
            typer.echo(line)
    return record, stragglers.missed(record)


def _local(record: dict[str, Any], location: Path, device: str, seconds: float, axes: dict[str, int]) -> list[str]:
    """Real ranks in a layout, on GPUs where there is one for each; what was missed. Without them it is blocked, and
    said."""
    import torch

    from benchmarks.observe import stragglers as straggler_bench

    world, present = straggler_bench.ranks(axes), torch.cuda.device_count()
    device = device or ("cuda" if present >= world else "cpu")
    if device == "cuda" and present < world:
        text = f"blocked: a slow GPU is told from healthy ones of {world}, a rank each; here are {present}"
        record["local"] = {"device": device, "blocked": text}
        typer.echo(f"  cuda, {world} ranks: {text}")
        return []
    record["local"] = straggler_bench.local(location, device, seconds, axes=axes)
    for line in straggler_bench.local_lines(record["local"]):
        typer.echo(line)
    return straggler_bench.local_missed(record["local"])


def _machine() -> dict[str, Any]:
    import platform

    import duckdb
    import torch

    import megascale

    devices = torch.cuda.device_count()
    if devices:
        device = f"{devices} x {torch.cuda.get_device_name()}"
    else:
        device = f"CPU, {os.cpu_count()} cores"
    versions = {"megascale": megascale.__version__, "torch": torch.__version__, "duckdb": duckdb.__version__}
    return {"device": f"{device}, {platform.machine()}", "versions": versions}


def _shapes() -> tuple[tuple[str, list[str], float], ...]:
    import torch

    devices = torch.cuda.device_count()
    if devices > 3:
        return (_fast(devices),)
    return ON_GPUS if devices > 1 else ON_GPU if devices else ON_CPU


def _fast(devices: int) -> tuple[str, list[str], float]:
    """The fast layout of gpt-13b, with as many replicas of four GPUs as there are; of half its layers on small GPUs."""
    import torch

    replicas = devices // 4
    small = torch.cuda.get_device_properties(0).total_memory < ALL_GIB * 2**30
    layers, subject = (HALF_LAYERS, "half of gpt-13b") if small else (ALL_LAYERS, "gpt-13b")
    arguments = FAST_LAYOUT + list(layers) + [f"--parallel.data={replicas}", f"--train.global_batch={16 * replicas}"]
    return f"{subject}, TP2 PP2x5 DP{replicas}, micro-batch 4", arguments, 0.004


def _cost(name: str, arguments: list[str], bound: float, turns: int, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "alternate.json"
    command = [sys.executable, "-m", "benchmarks", "alternate"] + arguments + [f"--turns={turns}", "--out", str(file)]
    # On a CPU one thread: threads that wait for each other on busy cores are what would be timed.
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"OMP_NUM_THREADS": "1"} | dict(os.environ))
    result = strict_json.loads(file.read_text())
    # One process of a busy machine: its time is others' too, its processor time its own.
    if "--train.device=cpu" in arguments:
        by = "cpu_seconds"
    else:
        by = "seconds"
    middle, low, high = result["differences"]["true"][by]
    pairs = len(result["values"][0]["seconds"])
    step = sorted(result["values"][0]["seconds"])[pairs // 2]
    report = {"by": by, "pairs": pairs, "step": step, "share": middle, "low": low, "high": high, "bound": bound}
    return {"name": name, **report, "of_time": result["differences"]["true"]["seconds"]}


def _show_ingest(record: dict[str, Any]) -> list[str]:
    """Print it; which bounds are missed."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, missed = Console(highlight=False), []
    for name in ("spans", "rollups"):
        item = record[name]
        console.print(
            f"{name}: {item['rows']:,} of {record['world']:,} ranks in {item['seconds']:.1f} s, "
            f"{item['rows_per_second'] / 1e6:.2f} M/s ({item['cpu_seconds']:.1f} CPU seconds)"
        )
    if record["spans"]["rows_per_second"] < 1e6:
        missed.append(f"{record['spans']['rows_per_second'] / 1e6:.2f} M spans a second, 1 wanted")
    console.print(
        f"peak memory {record['peak_memory_mib']:.0f} MiB, {record['bytes_on_disk'] / 2**20:.0f} MiB on disk, "
        f"{record['lost_spans']} spans lost"
    )
    table = Table("question", "first, s", "median, s", "rows", box=box.SIMPLE_HEAD)
    for name, item in record["questions"].items():
        if item["median"] is None:
            median = ""
        else:
            median = f"{item['median']:.3f}"
        table.add_row(name, f"{item['first']:.3f}", median, "" if item["rows"] is None else str(item["rows"]))
        if item["median"] is not None and item["median"] > 0.5:
            missed.append(f"{name}: {item['median']:.2f} s, 0.5 wanted")
    console.print(table)
    return missed


def _show_cost(result: list[dict[str, Any]]) -> list[str]:
    missed = []
    for item in result:
        typer.echo(
            f"cost: {item['name']}: {item['share']:+.2%} of a step's {item['by'].replace('_', ' ')} (a step takes "
            f"{item['step']:.4f} s; median of {item['pairs']} pairs; 95%: {item['low']:+.2%} to {item['high']:+.2%}; "
            f"at most {item['bound']:.1%})"
        )
        if item["high"] > item["bound"]:
            missed.append(
                f"timers cost up to {item['high']:.2%} of a step of {item['name']}, {item['bound']:.1%} wanted"
            )
    return missed
