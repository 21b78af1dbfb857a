#!/usr/bin/env python3
"""Measure the runs whose step times the simulator predicted, on a machine with GPUs.

    scripts/measure_predictions.py --gpus 1 --budget 540 --out rows.jsonl
    scripts/measure_predictions.py --gpus 4 --list

Each run is one `megascale bench train` process. A JSON line is appended to --out as soon as a run ends. Runs that --out
has already are left out, so that a second call continues. The predictions are those of
benchmarks/simulate/predictions/; the H100's are shown on an H100, the H200's elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulate.published_rows import load_round_predictions
from megascale.errors import MegascaleError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_runs import Prediction
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import find_stack

# Predictions file and cluster by what the GPU's name contains.
MACHINES = {"H100": ("h100-fifth", "h100-dgx"), "H200": ("h200-fifth", "h200-host")}
# Seconds of timed steps that a run aims at, with the fewest and the most steps.
TIMED_SECONDS = 4.0
FEWEST_STEPS = 8
MOST_STEPS = 40
WARM_UP = 5
# Seconds that a run takes in addition to its steps: the start, two GEMM measurements, the host's own steps.
START_SECONDS = 16.0
# Seconds after which a run counts as hung.
LONGEST = 150.0
LAST_LINES = 12


@dataclass
class RunningCase:
    """A started benchmark process with its files."""

    prediction: Prediction
    devices: list[str]
    process: subprocess.Popen[bytes]
    began: float
    folder: Path


def main() -> int:
    """Run the cases of one number of GPUs; return 1 if any of them failed."""
    arguments = parse_arguments()
    name, memory_gib, devices = describe_machine(arguments)
    file, cluster = next((value for key, value in MACHINES.items() if key in name), MACHINES["H200"])
    predictions = [p for p in load_round_predictions(file)[1] if p.gpus == arguments.gpus]
    if arguments.only:
        predictions = [p for p in predictions if p.name in arguments.only]
    if arguments.list:
        for prediction in predictions:
            print(f"{prediction.name:42} {prediction.seconds:.4f} s  megascale {shlex.join(bench_words(prediction))}")
        return 0
    done = read_names(arguments.out)
    waiting = []
    for prediction in predictions:
        needed = plan_memory(prediction, cluster)
        if prediction.name in done:
            print(f"{prediction.name}: measured before, left out")
        elif needed > memory_gib:
            print(f"{prediction.name}: the plan needs {needed:.1f} GiB and the GPU has {memory_gib:.1f}, left out")
        else:
            waiting.append(prediction)
    if len(devices) < arguments.gpus:
        print(f"--gpus={arguments.gpus}: this machine shows {len(devices)} GPUs", file=sys.stderr)
        return 2
    if not arguments.side_by_side:
        devices = devices[: arguments.gpus]
    return run_cases(waiting, devices, arguments)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), required=True, help="run the cases of so many GPUs")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds after which no run starts or continues")
    parser.add_argument("--out", type=Path, default=Path("unseen-rows.jsonl"), help="file of JSON lines to append to")
    parser.add_argument("--side-by-side", action="store_true", help="use all GPUs of the machine for several cases")
    parser.add_argument("--only", action="append", help="run this case alone; may be repeated")
    parser.add_argument("--list", action="store_true", help="print commands and predictions, run nothing")
    parser.add_argument("--device-name", help="GPU's name, instead of asking nvidia-smi (for --list without a GPU)")
    return parser.parse_args()


def describe_machine(arguments: argparse.Namespace) -> tuple[str, float, list[str]]:
    """Return the GPUs' name, the memory of each in GiB, and their device numbers."""
    if arguments.list:
        return arguments.device_name or "H200", float("inf"), []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().splitlines()
    name, memory_mib = lines[0].rsplit(",", 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(len(lines))]
    return name, float(memory_mib) / 1024, devices


def read_names(file: Path) -> set[str]:
    """Return the names of the cases that the file has a measurement of."""
    if not file.exists():
        return set()
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return {row["name"] for row in rows if row.get("seconds") is not None}


def plan_memory(prediction: Prediction, cluster_name: str) -> float:
    """Return the GiB that the fullest rank needs by plan."""
    cluster = load_cluster(cluster_name)
    config = prediction.config("auto")
    software = make_engine_software(config, find_stack(prediction.software))
    calibration = load_calibration(None, cluster.name)
    return Scenario(config, prediction.gpus, cluster, calibration, software).memory_gib()


def bench_words(prediction: Prediction) -> list[str]:
    """Return the words after `megascale` that run the case."""
    settings = dict(item.split("=", 1) for item in prediction.settings)
    preset = settings.pop("model.preset")
    settings.pop("train.name", None)
    count = round(TIMED_SECONDS / prediction.seconds)
    steps = max(FEWEST_STEPS, min(MOST_STEPS, count))
    arguments = ["bench", "train", preset] + [f"--{key}={value}" for key, value in settings.items()]
    return list(arguments) + [f"--steps={steps}", f"--warmup={WARM_UP}"]


def estimate_seconds(prediction: Prediction) -> float:
    """Return the seconds that a case is expected to take."""
    steps = max(FEWEST_STEPS, min(MOST_STEPS, round(TIMED_SECONDS / prediction.seconds)))
    return START_SECONDS + (steps + WARM_UP + 3) * prediction.seconds


def run_cases(waiting: list[Prediction], devices: list[str], arguments: argparse.Namespace) -> int:
    """Run the cases on groups of devices, append their rows, and print a table at the end."""
    deadline = time.monotonic() + arguments.budget
    free = [devices[i : i + arguments.gpus] for i in range(0, len(devices), arguments.gpus)]
    free = [group for group in free if len(group) == arguments.gpus]
    running: list[RunningCase] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while waiting or running:
                remaining = deadline - time.monotonic()
                while waiting and free and estimate_seconds(waiting[0]) <= remaining:
                    running.append(start_case(waiting.pop(0), free.pop(0), Path(folder)))
                if not running:
                    break
                time.sleep(0.2)
                for case in list(running):
                    hung = time.monotonic() - case.began > LONGEST
                    if case.process.poll() is None and not hung:
                        continue
                    end_case(case)
                    running.remove(case)
                    free.append(case.devices)
                    rows.append(read_row(case))
                    append_row(arguments.out, rows[-1])
                    print(describe_row(rows[-1]), flush=True)
                if time.monotonic() > deadline:
                    break
        finally:
            for case in running:
                end_case(case)
    print_table(rows)
    left_out = [p.name for p in waiting] + [case.prediction.name for case in running]
    if left_out:
        print(f"not measured within --budget={arguments.budget:g}: {', '.join(left_out)}")
    return 1 if any(row["seconds"] is None for row in rows) else 0


def start_case(prediction: Prediction, devices: list[str], folder: Path) -> RunningCase:
    """Start the benchmark of one case in a session of its own."""
    local = folder / prediction.name
    local.mkdir()
    arguments = list(bench_words(prediction)) + [f"--train.runs={local}", f"--out={local / 'result.json'}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices), "COLUMNS": "120"}
    with open(local / "output.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megascale.cli.main"] + list(arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return RunningCase(prediction, devices, process, time.monotonic(), local)


def end_case(case: RunningCase) -> None:
    """End the session of a case that still runs."""
    if case.process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(case.process.pid, number)
        try:
            case.process.wait(timeout=10)
            return
        except subprocess.TimeoutExpired:
            continue


def read_row(case: RunningCase) -> dict[str, Any]:
    """Return a case's measurement next to its prediction; `seconds` is None if the run failed."""
    prediction = case.prediction
    row: dict[str, Any] = {
        "name": prediction.name,
        "gpus": prediction.gpus,
        "command": "megascale " + shlex.join(bench_words(prediction)),
        "predicted": prediction.seconds,
        "p10": prediction.low,
        "p90": prediction.high,
        "wall_seconds": round(time.monotonic() - case.began, 1),
        "seconds": None,
    }
    try:
        result = json.loads((case.folder / "result.json").read_text())
    except (OSError, ValueError):
        lines = (case.folder / "output.log").read_text(errors="replace").strip().splitlines()
        return row | {"exit_code": case.process.returncode, "failure": lines[-LAST_LINES:]}
    row |= {
        "seconds": result["step_seconds"],
        "min_max": result["step_seconds_min_max"],
        "host_seconds": result["host_seconds"],
        "mfu": result["mfu"],
        "peak_memory_gib": result["peak_memory_gib"],
        "device_memory_gib": result["device_memory_gib"],
        "gemm_tflops": [rate / 1e12 for rate in result["gemm_flop_per_s"] or []],
        "device": result["device"],
        "date": result["date"],
        "versions": result["versions"],
        "active": result["active"],
    }
    return row


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Append a row as a JSON line and flush it to disk."""
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def describe_row(row: dict[str, Any]) -> str:
    """Return one line of text for a row."""
    if row["seconds"] is None:
        return "\n  ".join([f"{row['name']}: failed after {row['wall_seconds']} s"] + list(row["failure"]))
    error = row["predicted"] / row["seconds"] - 1.0
    rates = "-".join(f"{rate:.0f}" for rate in sorted(row["gemm_tflops"]))
    return (
        f"{row['name']:42} {row['seconds']:8.4f} s  predicted {row['predicted']:.4f} ({error:+.1%})  "
        f"MFU {row['mfu'] or 0.0:.1%}  {row['device_memory_gib'] or 0.0:.1f} GiB  GEMM {rates}  "
        f"{row['wall_seconds']:.0f} s"
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all rows and their mean absolute error."""
    print(f"\n{rows[0].get('device', '')}, {len(rows)} runs" if rows else "no runs")
    for row in rows:
        print(describe_row(row))
    errors = [abs(row["predicted"] / row["seconds"] - 1.0) for row in rows if row["seconds"]]
    if errors:
        print(f"mean absolute error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MegascaleError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
