"""`benchmarks overlap`: what each tensor-parallel GEMM costs fused with its collective, overlapped, and alone.

For every GEMM of a layer, forward and forward + backward: the GEMM without any collective, the collectives without
the GEMM, then both in each way of overlapping. Exposed (non-overlapped) is what a way costs over the GEMM alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json

if TYPE_CHECKING:
    import torch

    from megascale.config import Config
    from megascale.parallel.collectives import Axis

WAYS = ("off", "async", "fused")
CALLS = 10  # a timed run


@dataclass(frozen=True)
class Gemm:
    """A GEMM of a layer.

    Attributes:
        name: what it makes.
        gathers: whether its input is gathered (column-parallel); else its result is scattered (row-parallel).
        inner: widths that are multiplied out, on one rank; several for a sum of GEMMs.
        outer: width of the result on one rank.
    """

    name: str
    gathers: bool
    inner: tuple[int, ...]
    outer: int


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("overlap", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(overlap)


def overlap(
    context: typer.Context,
    preset: str = typer.Argument("gpt-13b", help="A shipped model shape; its layer's sizes are used."),
    repeats: int = typer.Option(9, min=1, help=f"Timed runs of {CALLS} calls; the median counts."),
    out: Path = typer.Option(Path("bench-overlap.json"), help="JSON file for the metrics."),
) -> None:
    """Time a layer's tensor-parallel GEMMs with their collectives: fused, overlapped, one after the other.

    Any setting can be given as --section.key=value. Starts a process for each tensor-parallel rank.

    Examples:

      python -m benchmarks overlap gpt-13b --parallel.tensor=2 --train.micro_batch=2

      python -m benchmarks overlap gpt-13b --parallel.tensor=4 --model.block=parallel
    """
    from megascale import api
    from megascale.bench.train import load_shape_config
    from megascale.core.layout import lay_out
    from megascale.errors import ConfigError
    from megascale.train import launcher

    settings = [f"--model.preset={preset}", "--parallel.tensor=2", "--parallel.data=1", "--train.name=bench-overlap"]
    settings += ["--train.micro_batch=2", "--train.global_batch=2"] + context.args
    if api.visible_gpus():
        settings.insert(0, "--train.precision=bfloat16")
    config = load_shape_config(settings)
    if config.parallel.tensor < 2 or config.parallel.pipeline > 1 or config.parallel.data != 1:
        raise ConfigError(
            "benchmarks overlap times tensor parallelism alone: set --parallel.tensor=2 or more and nothing else of "
            "parallel.tensor, pipeline, data"
        )
    if not launcher.is_launched_rank():
        world = launcher.count_processes(config, api.visible_gpus())
        layout = lay_out(config, world)
        raise typer.Exit(launcher.launch(sys.argv[1:], layout, holds_model=False, program="benchmarks"))
    record = measure(config, repeats)
    if record is not None:
        show(record)
        out.write_text(strict_json.dumps(record, indent=1) + "\n")
        typer.echo(f"metrics: {out}")


def gemms_of(config: Config) -> list[Gemm]:
    """A layer's GEMMs on one tensor-parallel rank, as the model makes them."""
    model, t = config.model, config.parallel.tensor
    attended = model.heads * model.head_size // t
    qkv = attended + 2 * model.num_kv_heads * model.head_size // t
    ffn = model.ffn // t
    inside = ffn * (2 if model.has_gated_mlp else 1)
    if model.block == "parallel" and model.parallel_norms == 1:
        return [
            Gemm("QKV and MLP in", True, (model.hidden,), qkv + inside),
            Gemm("attention and MLP out", False, (attended, ffn), model.hidden),
        ]
    into = [Gemm("QKV", True, (model.hidden,), qkv), Gemm("MLP in", True, (model.hidden,), inside)]
    if model.block == "parallel":
        return into + [Gemm("attention and MLP out", False, (attended, ffn), model.hidden)]
    return [
        into[0],
        Gemm("attention out", False, (attended,), model.hidden),
        into[1],
        Gemm("MLP out", False, (ffn,), model.hidden),
    ]


def measure(config: Config, repeats: int) -> dict[str, Any] | None:
    """The metrics on rank 0, None elsewhere."""
    from dataclasses import replace

    import torch

    from benchmarks.harness.training_runs import describe_machine
    from megascale.parallel import symmetric
    from megascale.parallel.collectives import SINGLE_RANK, Axis
    from megascale.rendezvous.groups import shutdown
    from megascale.rendezvous.start_job import initialise
    from megascale.train.engine_parts import DTYPES
    from megascale.train.rank_info import find_rank_info

    location = find_rank_info(config)
    groups = initialise(
        config, rank=location.rank, world=location.world, local_rank=location.local_rank, device=location.device
    )
    axis = Axis(groups.by_kind.get("tensor"), config.parallel.tensor, location.rank)
    dtype, model = DTYPES[config.train.precision], config.model
    rows = model.sequence_length * config.train.micro_batch
    part = rows // axis.size * model.hidden * torch.empty(0, dtype=dtype).element_size()
    found_exchange = symmetric.make_exchange(axis, part, location.device)
    if isinstance(found_exchange, str):
        why_not = found_exchange
    else:
        why_not = None
    ways = {"alone": SINGLE_RANK} | {way: replace(axis, overlap=way) for way in WAYS if way != "fused"}
    if not isinstance(found_exchange, str):
        ways["fused"] = replace(axis, overlap="fused", exchange=found_exchange)
    result = []
    for gemm in gemms_of(config):
        for backward in (False, True):
            case = _Case(gemm, config, dtype, location.device, axis, backward)
            turns: dict[str, list[float]] = {name: [] for name in (*ways, "collectives")}
            for turn in range(repeats + 1):
                for name in turns:
                    if name == "collectives":
                        call = case.collectives
                    else:
                        call = case.gemm(ways[name])
                    seconds = _seconds(call, axis, location.device)
                    if turn:  # the first warms up
                        turns[name].append(seconds)
            _agree(gemm.name, {name: case.gemm(ways[name])() for name in ways if name != "alone"})
            result.append(
                {
                    "gemm": gemm.name,
                    "gathers": gemm.gathers,
                    "backward": backward,
                    "rows": rows,
                    "inner": gemm.inner,
                    "outer": gemm.outer,
                    "seconds": {name: statistics.median(values) for name, values in turns.items()},
                }
            )
    shutdown(groups)
    if location.rank:
        return None
    return {
        "date": date.today().isoformat(),
        **describe_machine(config),
        "preset": model.preset,
        "tensor": axis.size,
        "micro_batch": config.train.micro_batch,
        "block": model.block,
        "not_fused": why_not,
        "cases": result,
    }


def _agree(name: str, results: dict[str, Any]) -> None:
    """A time of a GEMM whose result is wrong counts for nothing."""
    import torch

    def flat(result: Any) -> torch.Tensor:
        if isinstance(result, tuple):
            parts = result
        else:
            parts = (result,)
        return torch.cat([part.detach().double().flatten() for part in parts])

    reference = flat(results["off"])
    for way, result in results.items():
        separate = float((flat(result) - reference).norm() / reference.norm())
        if not separate < 0.01:
            raise RuntimeError(
                f"{name}: the result with overlap.tensor={way} is {separate:.2%} away from that with off"
            )


class _Case:
    """One GEMM with its tensors: what to call to time it with or without its collectives."""

    def __init__(
        self,
        gemm: Gemm,
        config: Config,
        dtype: torch.dtype,
        device: torch.device,
        axis: Axis,
        backward: bool,
    ) -> None:
        import torch

        from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach

        s = config.model.sequence_length
        b = config.train.micro_batch
        t = axis.size
        generator = torch.Generator(device).manual_seed(axis.rank)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.operation = gemm
        self.axis = axis
        self.backward = backward
        self.part = make(s // t, b, gemm.inner[0] if gemm.gathers else gemm.outer)
        self.sent = make(s, b, self.part.shape[-1])
        self.inputs = [make(s, b, width) for width in gemm.inner]
        self.weights = [SinkParameter(make(gemm.outer, width).mul_(0.01)) for width in gemm.inner]
        for weight in self.weights:
            attach(weight, GradientSink(torch.zeros_like(weight, dtype=torch.float32)))
        self.upstream = make(s, b, gemm.outer)

    def gemm(self, axis: Axis) -> Callable[[], Any]:
        """Return a call of the GEMM over `axis`. An axis of one rank runs the same GEMM on complete tensors."""
        import torch

        from megascale.parallel.linear import LinearPrecision
        from megascale.parallel.tensor import gather_linear, linear_scatter

        present = axis.size == 1
        if present or not self.operation.gathers:
            inputs = self.inputs
        else:
            inputs = [self.part]
        inputs = [x.detach().requires_grad_() for x in inputs]
        if present or self.operation.gathers:
            grad = self.upstream
        else:
            grad = self.part

        def call() -> Any:
            with torch.set_grad_enabled(self.backward):
                if self.operation.gathers:
                    y = gather_linear(inputs[0], self.weights[0], None, LinearPrecision(axis))
                else:
                    pairs = [tensor for pair in zip(inputs, self.weights, strict=True) for tensor in pair]
                    y = linear_scatter(LinearPrecision(axis), *pairs)
            if self.backward:
                return torch.autograd.grad(y, inputs, grad)
            return y

        return call

    def collectives(self) -> Any:
        """The collectives that it makes, one after another, and nothing else."""
        from megascale.parallel.collectives import all_gather, reduce_scatter

        if self.operation.gathers or self.backward:
            all_gather(self.part, self.axis).wait()
        if not self.operation.gathers or self.backward:
            reduce_scatter(self.sent, self.axis).wait()
        if self.operation.gathers and self.backward:
            all_gather(self.part, self.axis).wait()  # the input, gathered again


def _seconds(call: Callable[[], Any], axis: Axis, device: torch.device) -> float:
    """Seconds of one call on this rank, all ranks starting together."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    call()
    dist.barrier(axis.group)
    if cuda:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(CALLS if cuda else 1):
        call()
    if cuda:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / (CALLS if cuda else 1)


def exposed(seconds: dict[str, float], way: str) -> float:
    """Part of the collectives' own time that a way of overlapping does not hide; below 0: it beats the plain GEMM."""
    return (seconds[way] - seconds["alone"]) / seconds["collectives"]


def show(record: dict[str, Any]) -> None:
    """The table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{record['preset']}, {record['block']} block, TP{record['tensor']}, micro-batch {record['micro_batch']}, "
        f"{record['device']}, {record['date']}\n"
        "Microseconds, and what part of the collectives' own time is not hidden. (b: forward and backward)"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    ways = [way for way in WAYS if way in record["cases"][0]["seconds"]]
    for number, column in enumerate(("gemm", "alone", "collectives", *ways)):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for case in record["cases"]:
        seconds = case["seconds"]
        table.add_row(
            case["gemm"] + (" b" if case["backward"] else ""),
            f"{1e6 * seconds['alone']:,.0f}",
            f"{1e6 * seconds['collectives']:,.0f}",
            *(f"{1e6 * seconds[way]:,.0f} {100 * exposed(seconds, way):4.0f}%" for way in ways),
        )
    console.print(table)
    for case in record["cases"]:
        if not case["backward"]:
            inner = " + ".join(str(width) for width in case["inner"])
            console.print(f"{case['gemm']}: {case['rows']} rows, {inner} wide, to {case['outer']}")
    if record["not_fused"]:
        console.print(f"fused: not here, {record['not_fused']}", soft_wrap=True, markup=False)
