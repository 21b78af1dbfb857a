"""`python -m benchmarks alternate`: step times of one engine whose setting changes back and forth between steps.

GPUs, clocks and hosts often differ by more than the values of a setting. Here all values have the same GPUs and clocks,
so that a difference of 0.2% is measurable. The learning rate is zero, so losses and gradient norms are comparable too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.core.batch import Batch
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.core.spans import Recorder
    from megascale.ops.attention import AttentionChoice, AttentionShape
    from megascale.train.engine import Engine

GRAPHS = "kernels.graphs"  # the engine captures graphs with both values
BACKWARD = "backward"  # thread of the backward: autograd's own ("apart") or the calling thread; not a configuration key

# Values of each setting that can change between two steps of one engine.
SETTINGS = {
    BACKWARD: ("apart", "here"),
    GRAPHS: ("off", "on"),
    "observe.timers": ("false", "true"),
    "observe.spans": ("0", "1"),  # spans of no step, or of every step
    "kernels.deterministic": ("false", "true"),
    "overlap.gemms": ("off", "on"),
    "resilience.replay_interval": ("0", "1"),  # an interval of N steps costs 1/N of the difference
    "parallel.recompute": ("none", "norms", "activation", "selective", "full"),
}


@dataclass
class Value:
    """Results of one value of the setting.

    Attributes:
        name: the value.
        seconds: seconds of each timed step.
        cpu_seconds: processor seconds of this process in each timed step.
        losses, norms: loss and gradient norm of each timed step.
        memory_gib: peak memory in tensors and exchanges, in GiB; None on a CPU.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    memory_gib: float | None = None


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("alternate", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(alternate)


def alternate(
    context: typer.Context,
    preset: str = typer.Argument(..., help="A shipped model shape, such as gpt-13b."),
    setting: str = typer.Argument(..., help="Setting and values: overlap.gemms=off,on."),
    turns: int = typer.Option(8, min=1, help="Turns of each value; every second round goes in reverse order."),
    each: int = typer.Option(2, min=1, help="Timed steps of a turn."),
    untimed: int = typer.Option(1, min=0, help="Steps of a turn before those that are timed."),
    out: Path = typer.Option(Path("bench-alternate.json"), help="JSON file for the metrics."),
) -> None:
    """Compare the step times of several values of a setting, which take turns in one process.

    Settings that can change between steps: overlap.gemms, parallel.recompute, kernels.graphs,
    kernels.deterministic (each value with the attention kernels that are fastest then),
    resilience.replay_interval=0,1 (checks in no step and in each), observe.timers (with
    roll-ups; with observe.spans=0,1 all spans too), and the thread that runs backward (backward=apart,here; training
    has it here). All others stay as given. The bound is of the median over pairs of turns, and holds with 95%
    confidence.

    Examples:

      python -m benchmarks alternate gpt-13b overlap.gemms=off,on --model.layers=8 --train.global_batch=16

      python -m benchmarks alternate gpt-13b parallel.recompute=none,activation --model.layers=8 --parallel.tensor=2

      python -m benchmarks alternate gpt-13b observe.timers=false,true --turns=200 --each=1 --model.layers=20
    """
    from megascale import api
    from megascale.bench.train import load_shape_config
    from megascale.core.layout import lay_out
    from megascale.train import launcher

    key, values = parse(setting)
    settings = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"] + context.args
    config = load_shape_config(
        ["--train.name=bench-alternate"] + settings + ([] if key in (BACKWARD, GRAPHS) else [f"--{key}={values[0]}"])
    )
    if not launcher.is_launched_rank():
        world = launcher.count_processes(config, api.visible_gpus())
        layout = lay_out(config, world)
        if world > 1:
            raise typer.Exit(launcher.launch(sys.argv[1:], layout, program="benchmarks"))
    record = measure(config, key, values, turns, each, untimed)
    if record is not None:
        show(record)
        out.write_text(strict_json.dumps(record, indent=1) + "\n")
        typer.echo(f"metrics: {out}")


def parse(setting: str) -> tuple[str, list[str]]:
    """Return key and values of text such as "overlap.gemms=off,on". Raises ConfigError if one of them is unknown."""
    key, _, report = setting.partition("=")
    expected = SETTINGS.get(key)
    if expected is None:
        raise ConfigError(
            f"{setting}: {key} cannot change between the steps of one engine; {', '.join(SETTINGS)} can. Compare runs "
            "of bench train, or cases of benchmarks targets --file, for others"
        )
    values = report.split(",")
    wrong = [value for value in values if value not in expected]
    if wrong:
        raise ConfigError(f"{setting}: there is no value {wrong[0]!r}; there are {', '.join(expected)}")
    if len(values) < 2 or len(set(values)) < len(values):
        raise ConfigError(f"{setting}: name two values or more, each once, such as {key}={','.join(expected[:2])}")
    return key, values


def order(values: list[str], turns: int) -> list[str]:
    """Return the values in the order of all turns. Every second turn has the reverse order."""
    return [value for turn in range(turns) for value in (values if turn % 2 == 0 else values[::-1])]


def measure(
    config: Config, key: str, values: list[str], turns: int, each: int, untimed: int = 1
) -> dict[str, Any] | None:
    """Run the steps. Return the figures on rank 0, None on other ranks.

    Args:
        turns: turns of each value.
        each, untimed: timed steps of a turn, and untimed steps before them.
    """
    import torch
    from rich.progress import Progress

    from benchmarks.harness.training_runs import describe_machine
    from megascale.bench.measured_steps import join_groups
    from megascale.bench.random_samples import draw_tokens
    from megascale.bench.timing import measure_sustained_gemm_rate
    from megascale.core.flops import CONVENTION, device_peak_tflops, mfu
    from megascale.core.layout import lay_out
    from megascale.rendezvous.groups import shutdown
    from megascale.train.engine import Engine
    from megascale.train.host_pauses import GarbageCollector

    location, groups = join_groups(config)
    cuda = location.device.type == "cuda"
    engine = Engine(lay_out(config, location.world), groups, location.device)
    model, train = config.model, config.train
    rows = draw_tokens(config, engine.data_rank, location.device)
    garbage = GarbageCollector(train.gc_interval)
    set_to, built = change(engine, key, location.rank), 0
    output = {value: Value(value) for value in values}

    def step() -> tuple[float, float, float, float]:
        nonlocal built
        built += 1
        began, busy = time.perf_counter(), time.process_time()
        recorder = engine.runtime.recorder
        recorder.begin_step(built)
        engine.start_gather()
        result = engine.step(lambda i: Batch(rows[:-1], rows[1:]), built, 0.0, has_next_step=True)
        recorder.end_step()
        garbage.collect(built)
        loss, norm = float(result.loss), float(result.grad_norm)  # waits for the update
        return time.perf_counter() - began, time.process_time() - busy, loss, norm

    for value in values:  # loads kernels, and allocates the memory of each value
        set_to(value)
        step()
        step()
    exchange_gib = engine.count_exchange_bytes() / 2**30  # torch's statistics do not count exchanges
    if cuda:
        before = measure_sustained_gemm_rate(location.device, 2.0)
    else:
        before = None
    with Progress(transient=True, disable=location.rank > 0) as progress:
        for value in progress.track(order(values, turns), description=key):
            item = output[value]
            set_to(value)
            if cuda:
                torch.cuda.reset_peak_memory_stats(location.device)
            for _ in range(untimed):
                step()
            for _ in range(each):
                seconds, cpu_seconds, loss, norm = step()
                item.seconds.append(seconds)
                item.cpu_seconds.append(cpu_seconds)
                item.losses.append(loss)
                item.norms.append(norm)
            if cuda:
                peak_gib = exchange_gib + torch.cuda.max_memory_allocated(location.device) / 2**30
                item.memory_gib = max(item.memory_gib or 0.0, peak_gib)
    if cuda:
        after = measure_sustained_gemm_rate(location.device, 2.0)
    else:
        after = None
    garbage.close()
    engine.synchronize()
    engine.close()
    if groups is not None:
        shutdown(groups)
    if location.rank:
        return None
    details = describe_machine(config)
    peak = config.observe.peak_tflops or device_peak_tflops(details["device"])
    tokens = train.global_batch * model.sequence_length

    def share(single: Value) -> float | None:
        if peak:
            return mfu(model, tokens / statistics.median(single.seconds), location.world, peak)
        return None

    return {
        "date": date.today().isoformat(),
        **details,
        "preset": model.preset,
        "setting": key,
        "command": " ".join(["python -m benchmarks"] + sys.argv[1:]),
        "processes": location.world,
        "global_batch": train.global_batch,
        "sequence_length": model.sequence_length,
        "mfu_convention": f"{CONVENTION}; peak {peak} TFLOP/s",
        "gemm_flop_per_s": None if before is None or after is None else [before, after],
        "active": engine.active,
        "differences": {
            result.name: {
                "seconds": difference(output[values[0]].seconds, result.seconds),
                "cpu_seconds": difference(output[values[0]].cpu_seconds, result.cpu_seconds),
            }
            for result in list(output.values())[1:]
        },
        "values": [vars(item) | {"mfu": share(item)} for item in output.values()],
    }


def change(engine: Engine, key: str, rank: int) -> Callable[[str], object]:
    """Return the function that sets the setting to a value. Call it between steps."""
    if key == "resilience.replay_interval":
        return _replays(engine, rank)
    if key == "kernels.deterministic":
        return _set_determinism(engine)
    if key == "overlap.gemms":
        return lambda value: engine.run_gemms_on_side_stream(value == "on")
    if key == BACKWARD:
        mode = engine.config.kernels.mode
        if mode != "auto":
            raise ConfigError(
                f"kernels.mode={mode!r} has no effect in autograd's own thread, which backward=apart uses; set "
                "--kernels.mode=auto"
            )
        return lambda value: setattr(engine, "backward_in_own_thread", value == "apart")
    if key == GRAPHS:
        return lambda value: engine.use_graphs(value == "on")
    if key.startswith("observe."):
        return _timers(engine, key)
    return engine.set_recompute


def _replays(engine: Engine, rank: int) -> Callable[[str], object]:
    """Return a function that turns replays of each step on and off.

    Raises ConfigError without replicas. A step raises TrainingError at a mismatch.
    """
    from megascale.errors import TrainingError
    from megascale.train.rank_info import find_device_kind
    from megascale.train.replay_check import ReplayCheck, ReplayEvidence

    def fail(evidence: ReplayEvidence) -> None:
        raise TrainingError(evidence.message)

    replicas = engine.layout.grid.replicas
    is_deterministic = engine.runtime.kernels.deterministic
    if replicas < 2 or not is_deterministic:
        raise ConfigError(
            f"resilience.replay_interval=1 compares bits of two replicas or more, and there is {replicas} with "
            f"kernels.deterministic={str(is_deterministic).lower()}; set --parallel.data=2 and "
            "--kernels.deterministic=true"
        )
    kind = find_device_kind(engine.device)
    check = ReplayCheck(engine, rank, f"{kind} {rank}", kind, interval=1, on_mismatch=fail)

    def set_to(value: str) -> None:
        engine.replay_check = check if value == "1" else None

    return set_to


def _set_determinism(engine: Engine) -> Callable[[str], object]:
    """Return a function that turns determinism on and off, each with its fastest attention kernels. Collective.

    Raises ConfigError if cuBLAS cannot be deterministic in this process.
    """
    from megascale.ops.dispatch import Kernels, prepare_workspace
    from megascale.train.attention_choice import agree_on_kernels

    problem = prepare_workspace()
    if problem:
        raise ConfigError(f"kernels.deterministic=true needs {problem}; unset it")
    kernels, chooser = engine.runtime.kernels, engine.runtime.attention
    grid = engine.layout.grid
    choices: dict[str, dict[AttentionShape, AttentionChoice]] = {}
    for value in SETTINGS["kernels.deterministic"]:
        chooser.choices = {}
        with Kernels(kernels.mode, deterministic=value == "true").as_current():
            agree_on_kernels(
                engine.config,
                grid.tensor,
                engine.dtype,
                engine.device,
                {},
                chooser,
                engine.fields.max_documents,
                grid.context,
            )
        choices[value] = chooser.choices
        names = dict.fromkeys(choice.name for choice in chooser.choices.values())
        engine.active[f"attention with kernels.deterministic={value}"] = ", ".join(names)

    def set_to(value: str) -> None:
        kernels.deterministic = value == "true"
        chooser.choices = choices[value]
        if engine.graphs is not None:
            engine.graphs.clear()

    return set_to


def _timers(engine: Engine, key: str) -> Callable[[str], object]:
    """Return a function that turns timers on and off.

    It empties their ring between turns, which the span service does in a process of its own.
    """
    from megascale.core.spans import Recorder
    from megascale.observe.store.span_ring import SpanRing
    from megascale.train.rank_timers import make_timers

    ring = SpanRing()
    built: dict[str, Recorder] = {}  # reused, as in training, so that their CUDA events exist

    def set_to(value: str) -> None:
        ring.release(len(ring.read()))
        if value not in built:
            off = key == "observe.timers" and value == "false"
            every = int(value) if key == "observe.spans" else 0
            if off:
                built[value] = Recorder()
            else:
                built[value] = make_timers(engine.device, ring, every)
        engine.runtime.recorder = built[value]

    return set_to


def difference(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Return the growth of steps from `first` to `second` as a share: median, lower and upper bound over pairs.

    The i-th timed steps of both make a pair. Bounds are order statistics of the pairs' ratios, which hold the median
    with 95% confidence for any distribution: the k-th smallest and largest, k by the binomial law.
    """
    ratios = sorted(b / a - 1 for a, b in zip(first, second, strict=True))
    below, k = 0.5 ** len(ratios), 0
    total = below
    while total <= 0.025 and k < len(ratios) // 2:
        k += 1
        below *= (len(ratios) - k + 1) / k
        total += below
    at = max(0, k - 1)
    return statistics.median(ratios), ratios[at], ratios[-1 - at]


def show(record: dict[str, Any]) -> None:
    """Print a table with a row per value, and the differences to the first value."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, 100)  # digits must not be cut
    console.print(
        f"{record['preset']}, {record['global_batch']} x {record['sequence_length']} tokens per step, "
        f"{record['processes']} x {record['device']}, torch {record['versions']['torch']}, {record['date']}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = [record["setting"], "step, s", "from", "to", "faster", "MFU", "GiB", "loss", "gradient norm"]
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    first = statistics.median(record["values"][0]["seconds"])
    for item in record["values"]:
        median = statistics.median(item["seconds"])
        table.add_row(
            item["name"],
            f"{median:.4f}",
            f"{min(item['seconds']):.4f}",
            f"{max(item['seconds']):.4f}",
            f"{first / median - 1:+.2%}",
            f"{item['mfu']:.1%}" if item["mfu"] is not None else "",
            f"{item['memory_gib']:.1f}" if item["memory_gib"] is not None else "",
            f"{statistics.median(item['losses']):.6f}",
            f"{statistics.median(item['norms']):.5f}",
        )
    console.print(table)
    for name, by in record["differences"].items():
        for subject, key in (("time", "seconds"), ("of this process's processor time", "cpu_seconds")):
            middle, low, high = by[key]
            console.print(
                f"{name} takes {middle:+.2%} more {subject} per step than {record['values'][0]['name']} "
                f"(median of {len(record['values'][0]['seconds'])} pairs; 95%: {low:+.2%} to {high:+.2%})"
            )
    if record["gemm_flop_per_s"] is not None:
        before, after = (x / 1e12 for x in record["gemm_flop_per_s"])
        console.print(f"sustained GEMM: {before:.0f} TFLOP/s before, {after:.0f} after, in the same run")
    for subject, choice in record["active"].items():
        if subject != "independent GEMMs" or record["setting"] != "overlap.gemms":
            console.print(f"{subject}: {choice}", soft_wrap=True, markup=False)
