"""`python -m benchmarks exchange`: the exchange of the GPUs of one host compared with NCCL, and the end of a peer.

Gather, scatter and all-to-all are timed at several sizes, launched call by call and replayed from a CUDA graph, and
their results are compared with NCCL's bit for bit. Then a rank is killed, or stopped, while the others wait for it. The
benchmark measures the seconds until the survivors raise an error.

With `--variant` it compares ways to move the data (exchange_variants.py) in graphs instead.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.kernels.exchange_operations import MEGABYTES, REPLAYS
from benchmarks.kernels.exchange_ranks import SCENARIOS
from benchmarks.kernels.exchange_tables import print_results, print_variants
from benchmarks.kernels.exchange_variants import VARIANTS
from megascale.core import strict_json
from megascale.errors import ConfigError

VARIANT_SECONDS = 110.0  # limit of a comparison of variants


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("exchange")(main)


def main(
    gpus: int = typer.Option(0, min=0, help="Ranks, one per GPU; 0: all GPUs of this machine."),
    deaths: bool = typer.Option(True, help="Also end a peer, and measure the time to the survivors' errors."),
    variant: list[str] = typer.Option([], help="Compare this way to move the data; repeatable; all: every way."),
    out: Path = typer.Option(Path("bench-exchange.json"), help="JSON file to write."),
) -> None:
    """Time the exchange of this host's GPUs against NCCL, and the error after a peer's death.

    It takes about two minutes, half a minute with --no-deaths, and reports each part as it ends. Exit code 1 if a
    result differs from NCCL's, or if a survivor gets no error.

    With --variant it compares ways to move the data, ends no peer, and takes about a minute for all of them.
    """
    variants = list(VARIANTS) if "all" in variant else variant
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise ConfigError(f"--variant={unknown[0]} is unknown; known are: all, {', '.join(VARIANTS)}")
    world = gpus or torch.cuda.device_count()
    if world < 2 or world > torch.cuda.device_count():
        raise ConfigError(
            f"benchmarks exchange needs two GPUs or more, and {torch.cuda.device_count()} are visible for {world} "
            "ranks; run it on a machine with several GPUs"
        )
    if variants:
        compare_variants(variants, world, out)
        return
    compare_with_nccl(world, deaths=deaths, out=out)


def compare_with_nccl(world: int, *, deaths: bool, out: Path) -> None:
    """Time the operations, end peers, print the tables, and write the JSON file. Exit code 1 as for `main`."""
    rates = run_ranks("rates", world, seconds=120.0)[0]
    for row in rates.get("rows", []):
        speeds = ", ".join(f"{way} {rate:.0f}" for way, rate in row["rates"].items())
        typer.echo(f"{row['operation']} of {row['megabytes']} MB: {speeds} GB/s; equal: {row['equal']}", err=True)
    ends = {}
    for scenario in SCENARIOS if deaths else ():
        end = find_end(run_ranks(scenario, world, seconds=45.0))
        ends[scenario] = end
        typer.echo(f"{scenario}: {end.seconds} s, {end.message}", err=True)
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ranks": world,
        "replays": REPLAYS,
        "rates": rates.get("rows", []),
        "error": rates.get("error", ""),
        "seconds_to_error": {scenario: end.seconds for scenario, end in ends.items()},
        "messages": {scenario: end.message for scenario, end in ends.items()},
    }
    print_results(record)
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    typer.echo(f"metrics: {out}")
    has_failed = bool(record["error"]) or not all(row["equal"] for row in rates.get("rows", []))
    if has_failed or any(end.seconds is None for end in ends.values()):
        raise typer.Exit(1)


def compare_variants(variants: list[str], world: int, out: Path) -> None:
    """Time the variants, print a table, and write the JSON file. Exit code 1 if a result differs from NCCL's."""
    result = run_ranks("variants", world, seconds=VARIANT_SECONDS, variants=variants)[0]
    rows = result.get("rows", [])
    expected_rows = sum(len(VARIANTS[name].operations) for name in variants) * len(MEGABYTES)
    error = result.get("error", "")
    if not error and len(rows) < expected_rows:
        error = f"{len(rows)} of {expected_rows} rows were measured within {VARIANT_SECONDS:g} s"
    for name, message in result.get("failures", {}).items():
        error += f"; {name}: {message}"
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ranks": world,
        "nccl": result.get("nccl", []),
        "variants": rows,
        "failures": result.get("failures", {}),
        "floors": result.get("floors", {}),
        "error": error,
    }
    print_variants(record)
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    typer.echo(f"metrics: {out}")
    if error or not all(row["equal"] for row in rows):
        raise typer.Exit(1)


@dataclass
class End:
    """End of the survivors of a scenario.

    Attributes:
        seconds: from the victim's end to the last survivor's error; None if a survivor raised no error.
        message: a survivor's error, or the reason why a survivor raised no error.
    """

    seconds: float | None
    message: str


def run_ranks(scenario: str, world: int, seconds: float, variants: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run a process per rank, and return the record of each; a rank without a record has its exit code."""
    with tempfile.TemporaryDirectory(prefix="bench-exchange-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernels.exchange_ranks",
            scenario,
            folder,
            str(find_free_port()),
            str(world),
        ]
        processes = []
        for rank in range(world):
            with (Path(folder) / f"rank-{rank}.err").open("w") as errors:
                processes.append(subprocess.Popen([*command, str(rank), *variants], stderr=errors))
        survivors = processes
        if scenario in SCENARIOS:
            survivors = processes[:-1]
        deadline = time.monotonic() + seconds
        end_times: dict[int, float] = {}
        while time.monotonic() < deadline and len(end_times) < len(survivors):
            time.sleep(0.05)
            for rank, process in enumerate(survivors):
                if process.poll() is not None:
                    end_times.setdefault(rank, time.time())
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        return [read_record(Path(folder), rank, code, end_times.get(rank)) for rank, code in enumerate(codes)]


def read_record(folder: Path, rank: int, code: int, end_time: float | None) -> dict[str, Any]:
    """Return a rank's record, or a record of its end if it wrote none.

    Args:
        code: exit code.
        end_time: time at which the rank ended by itself; None: it was killed.
    """
    file = folder / f"rank-{rank}.json"
    errors_text = file.with_suffix(".err").read_text()
    if file.exists():
        record: dict[str, Any] = strict_json.loads(file.read_text())
        return record
    messages = [line for line in errors_text.splitlines() if "; ending: " in line]
    if end_time is not None and messages:
        # The watch of peers ended a process that could not reach a check.
        return {"raised": end_time, "message": messages[0]}
    sys.stderr.write(errors_text[-2000:])
    return {"error": f"rank {rank} ended with code {code} and no result"}


def find_end(records: list[dict[str, Any]]) -> End:
    """Return how the survivors ended; the last rank is the victim."""
    ended = records[-1].get("ended")
    survivors = records[:-1]
    for survivor in survivors:
        if "raised" not in survivor:
            return End(None, survivor.get("error", "no error"))
    if ended is None:
        return End(None, records[-1].get("error", "the victim did not end"))
    return End(max(survivor["raised"] for survivor in survivors) - ended, survivors[0]["message"])


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
