"""The cost of the start times in NCCL's flight record, which `megascale launch -- COMMAND` switches on.

Each rank trains two equal DDP models in one process, in pairs of steps in random order. The communicator of the one
records start times of its calls (TORCH_NCCL_ENABLE_TIMING=1), that of the other does not.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json

WARM_UP = 10  # pairs
TIMING = "TORCH_NCCL_ENABLE_TIMING"


def make_model(width: int, layers: int, device: str, group: dist.ProcessGroup) -> torch.nn.Module:
    """Return a DDP model of linear layers."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    return torch.nn.parallel.DistributedDataParallel(network.to(device, dtype), process_group=group)


def time_step(model: torch.nn.Module, inputs: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass, to the end of the device's work."""
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    if inputs.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def run_rank(rank: int, world: int, folder: str, options: dict[str, Any]) -> None:
    """Measure the pairs on one rank; rank 0 writes the relative differences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=120)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    models = []
    for value in ("0", "1"):
        os.environ[TIMING] = value  # read when the communicator is made
        group = dist.new_group(backend=backend)
        models.append(make_model(options["width"], options["layers"], device, group))
    inputs = torch.randn(options["rows"], options["width"], device=device, dtype=next(models[0].parameters()).dtype)
    generator = random.Random(0)  # all ranks have the same order
    differences = []
    seconds = []
    for pair in range(WARM_UP + options["pairs"]):
        order = generator.sample((0, 1), 2)
        times = {index: time_step(models[index], inputs) for index in order}
        if pair >= WARM_UP:
            differences.append(times[1] / times[0] - 1)
            seconds.append(times[0])
    if rank == 0:
        result = {"seconds": statistics.median(seconds), "differences": differences, "device": device}
        with open(f"{folder}/result.json", "w") as file:
            file.write(strict_json.dumps(result))
    dist.destroy_process_group()


def summarise(differences: list[float]) -> tuple[float, float, float]:
    """Return the median and the bounds of its 95% confidence interval, by order statistics."""
    ordered = sorted(differences)
    count = len(ordered)
    margin = 0.98 * count**0.5
    low = max(0, int(count / 2 - margin))
    high = min(count - 1, int(count / 2 + margin))
    return statistics.median(ordered), ordered[low], ordered[high]


def call_timing(
    ranks: int = typer.Option(2, "--ranks", min=1, help="Ranks: one per GPU, or processes on gloo."),
    pairs: int = typer.Option(200, "--pairs", min=10, help="Pairs of steps."),
    width: int = typer.Option(4096, "--width", help="Width of the linear layers."),
    layers: int = typer.Option(16, "--layers", help="Number of linear layers."),
    rows: int = typer.Option(8192, "--rows", help="Tokens per rank."),
) -> None:
    """Measure how much longer a DDP step takes with start times of NCCL's calls."""
    options = {"width": width, "layers": layers, "rows": rows, "pairs": pairs}
    with temporary_folder("ms-call-timing-") as folder:
        torch.multiprocessing.spawn(run_rank, args=(ranks, str(folder), options), nprocs=ranks)
        with open(f"{folder}/result.json") as file:
            result = strict_json.loads(file.read())
    median, low, high = summarise(result["differences"])
    name = torch.cuda.get_device_name() if result["device"] == "cuda" else "CPU, gloo: the option has no effect"
    typer.echo(f"{ranks} ranks on {name}, torch {torch.__version__}, step {1000 * result['seconds']:.2f} ms")
    typer.echo(f"start times: {median:+.2%} per step (95%: {low:+.2%} to {high:+.2%}, {pairs} pairs)")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(call_timing)
