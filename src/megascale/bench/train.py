"""`megascale bench train`: steps of a model on random tokens through the engine that training uses.

Prints tokens/s and MFU with its convention, beside the rate that plain GEMMs sustain on the same GPUs right before
and after: GPUs and power limits differ, so a share of that rate is what can be compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megascale.config import Config
    from megascale.train.engine import Engine

TOLD = {
    "model",
    "optimizer",
    "parallel",
    "overlap",
    "kernels",
    "train",
}  # what a step depends on; no address, no secret
HOST_STEPS = 3  # in which the host's own time is taken
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the bench."""

    @app.command(context_settings=OVERRIDES)
    def train(
        context: typer.Context,
        preset: str = typer.Argument(..., help="A shipped model shape, such as gpt-1.3b."),
        steps: int = typer.Option(20, min=1, help="Timed steps."),
        warmup: int = typer.Option(5, min=1, help="Steps before them."),
        profile: Path | None = typer.Option(None, help="Write a Chrome trace of one step and a table of its kernels."),
        cores: int | None = typer.Option(
            None, min=1, help="Let each rank run on so many cores, its own ones, as taskset would. \\[default: all]"
        ),
        watch: bool = typer.Option(
            False, "--watch", help="Sample clock, power and temperature of the first GPU by nvidia-smi, for --out too."
        ),
        out: Path | None = typer.Option(None, help="Write the figures as JSON."),
    ) -> None:
        """Step time, tokens/s and MFU of a model on random tokens, with any setting as --section.key=value.

        Starts one process a GPU as training does.

        Examples:

          megascale bench train gpt-1.3b --train.micro_batch=8 --train.global_batch=64

          megascale bench train gpt-1.3b --train.micro_batch=8 --steps 500 --watch

          megascale bench train gpt-13b --model.layers=20 --parallel.tensor=2 --train.micro_batch=1 --cores 1
        """
        from megascale.bench import gpu_watch as watching
        from megascale.bench.training_runs import load_shape
        from megascale.core.layout import lay_out
        from megascale.train import launcher

        defaults = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"]
        defaults.append("--train.name=bench-train")
        config = load_shape([*defaults, *context.args])
        if not launcher.started_by_launcher():
            import torch

            if watch:
                watching.find_nvidia_smi(torch.cuda.is_available() and config.train.device != "cpu")
            world = launcher.processes_wanted(config, torch.cuda.device_count())
            if cores is not None:
                cores_of(cores, world - 1)
            if world > 1:
                lay_out(config, world)
                words = sys.argv[sys.argv.index("train") :]
                raise typer.Exit(launcher.launch(["bench", *words], world, config))
        if cores is not None:
            own = cores_of(cores, int(os.environ.get("LOCAL_RANK", "0")))
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread), own)
        result = measure(config, steps, warmup, profile, watch)
        if result is not None:
            show(result)
            if out is not None:
                out.write_text(strict_json.dumps(result, indent=2) + "\n")


def cores_of(cores: int, local_rank: int) -> set[int]:
    """The `cores` cores that a rank of this host has for itself. ConfigError where it has too few, or is no Linux."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(f"--cores={cores}: only Linux keeps threads to cores; leave it out")
    there = sorted(os.sched_getaffinity(0))
    own = set(there[cores * local_rank : cores * (local_rank + 1)])
    if len(own) < cores:
        raise ConfigError(
            f"--cores={cores}: {len(there)} cores may be used here, and {local_rank + 1} ranks would take "
            f"{cores * (local_rank + 1)}; give each fewer"
        )
    return own


def gemm_rate(device: torch.device, seconds: float) -> float:
    """FLOP/s of bf16 GEMMs of a layer's size, held for `seconds`."""
    import torch

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    began, calls = time.perf_counter(), 0
    torch.cuda.synchronize(device)
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize(device)
        calls += 20
    return calls * 2 * 8192**3 / (time.perf_counter() - began)


def measure(
    config: Config, steps: int, warmup: int, profile: Path | None, watch: bool = False
) -> dict[str, Any] | None:
    """Run the steps; the figures on rank 0, None elsewhere."""
    import torch

    import megascale
    from megascale.bench.gpu_watch import GpuWatch
    from megascale.bench.training_runs import join_groups, random_rows
    from megascale.core.flops import CONVENTION, device_peak, mfu
    from megascale.core.layout import lay_out
    from megascale.rendezvous.groups import shutdown
    from megascale.train.engine import Engine
    from megascale.train.garbage_collection import Garbage

    place, groups = join_groups(config)
    cuda = place.device.type == "cuda"
    before = gemm_rate(place.device, 2.0) if cuda else None
    began = time.perf_counter()
    engine = Engine(lay_out(config, place.world), groups, place.device)
    model, train = config.model, config.train
    rows = random_rows(config, engine.data_rank, place.device)
    start_seconds = time.perf_counter() - began
    seconds, losses = [], []
    first = 0.0  # when the first timed step began
    watched = None
    if watch and not place.rank:
        watched = GpuWatch(f"GPU-{torch.cuda.get_device_properties(place.device).uuid}")
    garbage = Garbage(train.gc_interval)
    with watched or contextlib.nullcontext():
        for step in range(1, warmup + steps + 1):
            began = time.perf_counter()
            if step == warmup + 1:
                first = began
            engine.start_gather()
            result = engine.step(lambda i: (rows[:-1], rows[1:]), step, 1e-4, more=True)
            garbage.collect(step)  # as in training
            losses.append(float(result.loss))  # waits for the update, not for what goes on under the next step
            if step > warmup:
                seconds.append(time.perf_counter() - began)
    garbage.close()
    peak_memory = torch.cuda.max_memory_allocated(place.device) / 2**30 if cuda else None
    free, whole = torch.cuda.mem_get_info(place.device) if cuda else (0, 0)
    after = gemm_rate(place.device, 2.0) if cuda else None
    taken = range(warmup + steps + 1, warmup + steps + 1 + HOST_STEPS) if cuda and config.parallel.pipeline == 1 else ()
    host_seconds = [_host_seconds(engine, rows, step) for step in taken]
    if profile is not None:
        _profile(engine, rows, warmup + steps + 1 + len(taken), profile, place.rank, cuda)
    engine.synchronize()
    if groups is not None:
        shutdown(groups)
    if place.rank:
        return None
    step_seconds = statistics.median(seconds)
    rate = train.global_batch * model.sequence_length / step_seconds
    name = torch.cuda.get_device_name(place.device) if cuda else "CPU"
    peak = config.observe.peak_tflops or device_peak(name)
    return {
        "model": model.preset,
        "settings": config.model_dump(mode="json", exclude_none=True, include=TOLD),
        "processes": place.world,
        "global_batch": train.global_batch,
        "sequence_length": model.sequence_length,
        "date": date.today().isoformat(),
        "device": f"{place.world} x {name}",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
        "step_seconds": step_seconds,
        "all_step_seconds": seconds,
        "step_seconds_min_max": [min(seconds), max(seconds)],
        "host_seconds": statistics.median(host_seconds) if host_seconds else None,
        "tokens_per_second_per_device": rate / place.world,
        "mfu": mfu(model, rate, place.world, peak) if peak else None,
        "mfu_convention": f"{CONVENTION}; peak {peak} TFLOP/s",
        "gemm_flop_per_s": None if before is None or after is None else [before, after],
        "peak_memory_gib": peak_memory,
        "device_memory_gib": (whole - free) / 2**30 if cuda else None,
        "watched": None if watched is None else watched.samples_since(first),
        "watch_trouble": None if watched is None else watched.problem,
        "start_seconds": start_seconds,
        "losses": [losses[0], losses[-1]],
        "active": engine.active | engine.runtime.kernels.active(),
    }


def _host_seconds(engine: Engine, rows: torch.Tensor, step: int) -> float:
    """What the host takes to launch a step: its time without that in which it waits, before each micro-batch, for the
    device to be done. A host that runs on would be held up by full queues, which is no work of its own."""
    import torch

    waited = 0.0

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal waited
        since = time.perf_counter()
        torch.cuda.synchronize(rows.device)
        waited += time.perf_counter() - since
        return rows[:-1], rows[1:]

    torch.cuda.synchronize(rows.device)
    began = time.perf_counter()
    engine.start_gather()
    result = engine.step(batch, step, 1e-4, more=True)
    taken = time.perf_counter() - began - waited
    float(result.loss)
    return taken


def _profile(engine: Any, rows: Any, step: int, out: Path, rank: int, cuda: bool) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as recorded:
        engine.start_gather()
        engine.step(lambda i: (rows[:-1], rows[1:]), step, 1e-4, more=True)
        if cuda:
            torch.cuda.synchronize()
    if rank:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)
    out.with_suffix(".txt").write_text(table)
    if not os.environ.get("MEGASCALE_NO_TRACE"):
        recorded.export_chrome_trace(str(out))


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    from megascale.bench import gpu_watch as watching

    table = Table.grid(padding=(0, 2))
    low, high = result["step_seconds_min_max"]
    rows = [
        ("model", f"{result['model']}, {result['global_batch']} x {result['sequence_length']} tokens a step"),
        ("device", f"{result['device']}, torch {result['versions']['torch']}, {result['date']}"),
        ("step", f"{result['step_seconds']:.4f} s (median; {low:.4f} to {high:.4f})"),
        ("tokens/s a device", f"{result['tokens_per_second_per_device']:,.0f}"),
        ("loss", f"{result['losses'][0]:.4f} -> {result['losses'][1]:.4f}"),
    ]
    if result["mfu"] is not None:
        rows.append(("MFU", f"{100 * result['mfu']:.1f}% ({result['mfu_convention']})"))
    if result["gemm_flop_per_s"] is not None:
        if (host := result["host_seconds"]) is not None:
            rows.append(("host", f"launches a step in {host:.4f} s, {host / result['step_seconds']:.1%} of it"))
        before, after = (x / 1e12 for x in result["gemm_flop_per_s"])
        rows.append(("sustained GEMM", f"{before:.0f} TFLOP/s before, {after:.0f} after, in the same run"))
        memory = f"{result['peak_memory_gib']:.1f} GiB in tensors, {result['device_memory_gib']:.1f} GiB of the device"
        rows.append(("peak memory", f"{memory} (as NVML has it: the allocator's reserve, CUDA, NCCL)"))
    if result["watched"] is not None:
        rows.append(
            ("watched", f"{watching.summarize_samples(result['watched'])} (medians of the first and last tenth)")
        )
        rows += [("", result["watch_trouble"])] if result["watch_trouble"] else []
    rows += [("active", f"{op}: {what}") for op, what in result["active"].items()]
    for label, value in rows:
        table.add_row(f"[dim]{label}[/dim]", value)
    Console(highlight=False, width=160).print(table)
