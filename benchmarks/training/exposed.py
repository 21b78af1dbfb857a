"""`python -m benchmarks exposed`: how much of each kind of communication shows in a step, against the same run alone.

One step is traced on every rank, as it is between others: from the sum of one step's gradient norm, after which weights
change and the first of them are gathered, to the next one's. Exposed is the time in which a kind's kernels or copies
run and no GEMM, norm or other computation does; where several kinds run at once they share it. A kernel that has
begun before its other members have moves nothing yet: until the last of them has come it waits, for their compute and
not for a network (a pipeline's bubble, uneven stages, uneven GPUs). Then the collectives that the step made are made
again with nothing next to them: the share that shows is what overlap leaves (MegaScale section 3.2).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.core.batch import Batch
from megascale.core.calls import NullCallLog
from megascale.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.train.engine import Engine

KINDS = ("tensor", "pipeline", "data gather", "data reduce", "other")
COMPUTE, IDLE = "compute", "idle"
WAITS = " waits"  # behind a kind: its kernels before all their members have begun
# Purpose of a communicator by the first part of its name (rendezvous/group_plan.py).
_KIND_OF = {
    "tensor": "tensor",
    "forward": "pipeline",
    "backward": "pipeline",
    "data_gather": "data gather",
    "data_reduce": "data reduce",
}


@dataclass(frozen=True)
class BusyTime:
    """A stretch of a device's time: seconds from the trace's first event, what ran (COMPUTE, one of KINDS, or one of
    them and WAITS), and whose collective it was, if that is known."""

    start: float
    stop: float
    kind: str
    group: str = ""


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("exposed", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(exposed)


def exposed(
    context: typer.Context,
    preset: str = typer.Argument("gpt-13b", help="A shipped model shape."),
    warmup: int = typer.Option(5, min=2, help="Steps before the traced one."),
    plot: Path | None = typer.Option(None, help="Draw the step's timeline, a track a kind, into this PNG."),
    out: Path = typer.Option(Path("bench-exposed.json"), help="JSON file for the metrics."),
) -> None:
    """Trace a step and say how much of each kind of communication is not hidden under compute.

    Needs GPUs, more than one. Any setting can be given as --section.key=value.

    Example: python -m benchmarks exposed gpt-13b --parallel.tensor=2 --parallel.pipeline=2 --plot timeline.png
    """
    from megascale import api
    from megascale.bench.train import load_shape_config
    from megascale.core.layout import lay_out
    from megascale.train import launcher

    settings = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"] + context.args
    config = load_shape_config(["--train.name=bench-exposed"] + settings)
    if not launcher.is_launched_rank():
        gpus = api.visible_gpus()
        if gpus < 2:
            raise ConfigError(f"benchmarks exposed needs GPUs that talk to each other, and this machine shows {gpus}")
        world = launcher.count_processes(config, gpus)
        layout = lay_out(config, world)
        raise typer.Exit(launcher.launch(sys.argv[1:], layout, program="benchmarks"))
    record = measure(config, warmup)
    if record is not None:
        show(record)
        out.write_text(strict_json.dumps(record, indent=1) + "\n")
        if plot is not None:
            draw(record, plot)
            typer.echo(f"timeline: {plot}")
        typer.echo(f"metrics: {out}")


class Counting(NullCallLog):
    """Counts what a step asks of each communicator.

    Attributes:
        made: (group, operation, bytes) -> times.
        others: the groups of calls of the kind "other", in order.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.other_calls: list[str] = []

    def begin_call(self, group: str, op: str, nbytes: int) -> int:
        self.calls[group, op, nbytes] += 1
        if _kind_of(group) == "other":
            self.other_calls.append(group)
        return -1


def measure(config: Config, warmup: int) -> dict[str, Any] | None:
    """Trace a step on each rank; the figures of all on rank 0, None elsewhere."""
    import torch
    import torch.distributed as dist

    from benchmarks.harness.training_runs import describe_machine
    from megascale.bench.random_samples import draw_tokens
    from megascale.core.layout import lay_out
    from megascale.rendezvous.groups import shutdown
    from megascale.rendezvous.start_job import initialise
    from megascale.train.engine import Engine
    from megascale.train.host_pauses import GarbageCollector
    from megascale.train.rank_info import find_rank_info

    location = find_rank_info(config)
    groups = initialise(
        config, rank=location.rank, world=location.world, local_rank=location.local_rank, device=location.device
    )
    engine = Engine(lay_out(config, location.world), groups, location.device)
    copy_kind = find_copy_kind(engine)
    model, train = config.model, config.train
    rows = draw_tokens(config, engine.data_rank, location.device)
    seconds: list[float] = []
    garbage = GarbageCollector(train.gc_interval)

    def step(number: int) -> None:
        began = time.perf_counter()
        engine.start_gather()
        result = engine.step(lambda i: Batch(rows[:-1], rows[1:]), number, 1e-4, has_next_step=True)
        garbage.collect(number)  # as in training
        float(result.loss)  # waits for the update, not for what goes on under the next step
        seconds.append(time.perf_counter() - began)

    def run_traced(first: int, count: int) -> None:
        """Run steps, and end the gathers that they begin: torch records the ends in the profiler of the begin."""
        for number in range(first, first + count):
            step(number)
        engine.synchronize()

    counting = Counting()
    for number in range(1, warmup + 1):
        if number == warmup:
            engine.runtime.calls = counting
        step(number)
    engine.runtime.calls = NullCallLog()
    plain = statistics.median(seconds[1:])
    device, host = torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU
    # Which group a stream serves is known only with the host's side in the trace, which slows the step: once for that.
    serves = groups_of(_traced(lambda: run_traced(warmup + 1, 1), [device, host]))
    stretches = after_meeting(busy(_traced(lambda: run_traced(warmup + 2, 2), [device]), serves, copy_kind))
    local = (engine.pipeline.stage, alone(engine, counting), stretches, counting.other_calls)
    report: list[Any] = [None] * location.world
    dist.all_gather_object(report, local)
    engine.close()
    shutdown(groups)
    if location.rank:
        return None
    stages, by_itself, pair, peers = zip(*report, strict=True)
    traces = [between_norms(trace, calls_) for trace, calls_ in zip(with_waits(pair), peers, strict=True)]
    return {
        "date": date.today().isoformat(),
        **describe_machine(config),
        "preset": model.preset,
        "layers": model.layers,
        "processes": location.world,
        "parallel": config.parallel.model_dump(exclude_none=True),
        "micro_batch": train.micro_batch,
        "global_batch": train.global_batch,
        "step_seconds": plain,
        "traced_step_seconds": statistics.mean(max(b.stop for b in trace) for trace in traces),
        "active": engine.active,
        "ranks": [
            {
                "stage": stage,
                "times": shares(trace),
                "alone": alone_,
                "stretches": [(round(b.start, 7), round(b.stop, 7), b.kind) for b in trace],
            }
            for stage, alone_, trace in zip(stages, by_itself, traces, strict=True)
        ],
    }


def find_copy_kind(engine: Engine) -> str:
    """Return the kind of communication of the engine's exchange; "tensor" without one.

    A trace does not name the exchange of a copy. Raises ConfigError if copies belong to several exchanges, or to
    another axis than those of KINDS.
    """
    kinds = []
    if engine.tensor_axis.exchange is not None:
        kinds.append("tensor")
    if engine.gather_exchange is not None:
        kinds.append("data gather")
    if engine.reduction_exchange is not None:
        kinds.append("data reduce")
    has_other_axes = len(engine.list_exchanges()) > len(kinds)
    if len(kinds) > 1 or has_other_axes:
        names = kinds + ["context or expert"] * has_other_axes
        raise ConfigError(
            f"copies between GPUs serve {', '.join(names)}, and a trace does not name the exchange of a copy; use "
            "collectives for all but one of tensor, data gather and data reduce: --overlap.tensor=async, "
            "--overlap.gathers=collectives, --overlap.reductions=collectives, --overlap.context=collectives, "
            "--overlap.expert=collectives"
        )
    return next(iter(kinds), "tensor")


def _traced(step: Callable[[], None], activities: list[Any]) -> list[dict[str, Any]]:
    """The events of a step as torch's profiler writes them."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
        # Profilers come up one after another: the first collective would wait for the last of them.
        dist.barrier()
        step()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        result: list[dict[str, Any]] = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return result


def groups_of(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Stream -> name of the group whose collectives run on it, of a trace that has the host's side."""
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        group = _group(event)
        if group:
            votes[event["args"].get("stream", -1)][group] += 1
    return {stream: names.most_common(1)[0][0] for stream, names in votes.items()}


def _group(event: dict[str, Any]) -> str:
    details = event.get("args", {})
    if event.get("cat") != "kernel" or "nccl" not in event["name"].lower():
        return ""
    return str(details.get("Process Group Name") or details.get("Process Group Description", ""))


def busy(
    events: Iterable[dict[str, Any]], serves: dict[int, str] | None = None, copy_kind: str = "tensor"
) -> list[BusyTime]:
    """Return the busy times of a device in order of time, from a Chrome trace of torch's profiler.

    Args:
        serves: by stream, the group whose collectives it runs, if the trace does not name the group (groups_of).
        copy_kind: kind of copies between GPUs (find_copy_kind).
    """
    result = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        result.append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) + _kind(event, serves or {}, copy_kind))
    first = min((start for start, *_ in result), default=0.0)
    return sorted((BusyTime(a - first, b - first, *subject) for a, b, *subject in result), key=lambda b: b.start)


def after_meeting(stretches: list[BusyTime]) -> list[BusyTime]:
    """Return the step without the barrier at the start, which does not belong to it."""
    begun = next((i for i, b in enumerate(stretches) if b.kind != "other"), 0)
    zero = stretches[begun].start if stretches else 0.0
    return [replace(b, start=b.start - zero, stop=b.stop - zero) for b in stretches[begun:]]


def _kind(event: dict[str, Any], serves: dict[int, str], copy_kind: str) -> tuple[str, str]:
    """Return an event's kind and its group's name, or an empty string if it is not a collective."""
    name = event["name"]
    if "nccl" in name.lower():
        group = _group(event) or serves.get(event.get("args", {}).get("stream", -1), "")
        return _kind_of(group), group
    if "PtoP" in name:
        return copy_kind, ""
    return COMPUTE, ""


def _kind_of(group: str) -> str:
    return _KIND_OF.get(group.split("/")[0], "other")


def between_norms(stretches: list[BusyTime], peers: Sequence[str]) -> list[BusyTime]:
    """One step of a trace of two: from the end of the first sum of gradient norms to that of the second.

    others: the groups of a step's calls of the kind "other", in order; the norm is the one over the "world".
    TrainingError if the trace does not have two steps of them.
    """
    ends = [stretch.stop for stretch in stretches if stretch.kind == "other"]
    if len(ends) != 2 * len(peers) or peers.count("world") != 1:
        raise TrainingError(
            f"the trace has {len(ends)} collectives in addition to the known kinds; two steps make {2 * len(peers)} "
            f"({', '.join(peers)}), one a step over the world"
        )
    norm = peers.index("world")
    start, stop = ends[norm], ends[len(peers) + norm]
    return [
        replace(b, start=max(b.start, start) - start, stop=min(b.stop, stop) - start)
        for b in stretches
        if b.stop > start and b.start < stop
    ]


def with_waits(traces: Sequence[list[BusyTime]]) -> list[list[BusyTime]]:
    """The ranks' stretches, each collective cut in two where the last of its group's members begins it.

    A group's n-th kernel on one member is its n-th on every other. Their clocks need not agree: such kernels end
    together (within microseconds), so the median difference of two members' ends is that of their clocks. A group of
    which members' traces have different numbers of kernels is left whole.
    """
    built: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # group -> rank -> places
    for rank, trace in enumerate(traces):
        for location, stretch in enumerate(trace):
            if stretch.group:
                built[stretch.group][rank].append(location)
    met: list[dict[int, float]] = [{} for _ in traces]
    for members in built.values():
        if len(members) < 2 or len({len(locations) for locations in members.values()}) > 1:
            continue
        first = min(members)
        ahead = {
            rank: statistics.median(
                traces[rank][a].stop - traces[first][b].stop for a, b in zip(positions, members[first], strict=True)
            )
            for rank, positions in members.items()
        }
        for places_at_once in zip(*members.values(), strict=True):
            last = max(traces[r][p].start - ahead[r] for r, p in zip(members, places_at_once, strict=True))
            for rank, location in zip(members, places_at_once, strict=True):
                met[rank][location] = last + ahead[rank]
    cut: list[list[BusyTime]] = []
    for trace, meetings in zip(traces, met, strict=True):
        parts = []
        for location, stretch in enumerate(trace):
            at = min(max(meetings.get(location, stretch.start), stretch.start), stretch.stop)
            if at > stretch.start:
                parts.append(replace(stretch, stop=at, kind=stretch.kind + WAITS))
            parts.append(replace(stretch, start=at))
        cut.append(sorted(parts, key=lambda b: b.start))
    return cut


def shares(stretches: list[BusyTime]) -> dict[str, dict[str, float]]:
    """Seconds by kind: "busy" while any of it runs, "exposed" while no compute runs (shared between kinds that run
    or wait at once). COMPUTE has "busy" alone, IDLE is the time in which nothing runs."""
    points = sorted([(b.start, 1, b.kind) for b in stretches] + [(b.stop, -1, b.kind) for b in stretches])
    waits = [kind + WAITS for kind in KINDS]
    result = {kind: {"busy": 0.0, "exposed": 0.0} for kind in (COMPUTE, *KINDS, *waits, IDLE)}
    running: Counter[str] = Counter()
    last = points[0][0] if points else 0.0
    for at, change, kind in points:
        span, last = at - last, at
        active = [k for k, n in running.items() if n > 0]
        if not active:
            result[IDLE]["busy"] += span
        for item in active:
            result[item]["busy"] += span
            if not running[COMPUTE]:
                result[item]["exposed"] += span / len(active)
        running[kind] += change
    return result


def alone(engine: Engine, counting: Counting) -> dict[str, float]:
    """Seconds of the counted collectives by kind, each communicator's in turn with nothing else running.

    Collective over all ranks: a communicator is timed on all its members at once. Transfers between stages run on all
    streams at once, as they do in a step.
    """
    import torch
    import torch.distributed as dist

    device = engine.device
    axes = {axis.name: axis for axis in (engine.tensor_axis, *_axes(engine)) if axis.size > 1}
    expected: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(expected, sorted({name.split("/")[0] for name, _, _ in counting.calls}))
    duration: dict[str, float] = defaultdict(float)
    for purpose in sorted({p for purposes in expected for p in purposes} - {"forward", "backward"}):
        local = [(key, times) for key, times in sorted(counting.calls.items()) if key[0].split("/")[0] == purpose]
        for warm in (True, False):
            torch.cuda.synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            for (name, op, size), times in local:
                _repeat(axes[name], op, size, 1 if warm else times, device)
            torch.cuda.synchronize(device)
            if not warm:
                duration[_KIND_OF.get(purpose, "other")] += time.perf_counter() - began
    streams = engine.pipeline.streams
    for warm in (True, False):
        torch.cuda.synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        for track in streams.values():
            for (name, op, size), times in sorted(counting.calls.items()):
                if name == track.name:
                    _move(track, op, size, 1 if warm else times, device)
        torch.cuda.synchronize(device)
        if not warm:
            duration["pipeline"] = time.perf_counter() - began
    return dict(duration)


def _axes(engine: Engine) -> list[Any]:
    flat = engine.buffers[0].axes
    return [flat.data, flat.reduce, flat.tied, engine.world_axis, engine.optimizer.rule.shards.stage]


def _repeat(axis: Any, op: str, size: int, times: int, device: Any) -> None:
    """Make a collective of `size` bytes some times; sums of gradients are of float32, the rest of bfloat16."""
    import torch

    from megascale.parallel.collectives import all_gather_into, all_reduce, reduce_scatter_in_place

    wide = axis.name.startswith("data_reduce")
    if wide and op != "all_to_all":
        dtype = torch.float32
    else:
        dtype = torch.bfloat16
    count = max(axis.size, size // dtype.itemsize)
    full = torch.zeros(count - count % axis.size, dtype=dtype, device=device)
    part = full.view(axis.size, -1)[axis.rank]
    for _ in range(times):
        if op in ("all_gather", "fused_gather"):
            all_gather_into(full, part, axis).wait()
        elif op in ("reduce_scatter", "fused_scatter"):
            reduce_scatter_in_place(full, axis).wait()
        elif op == "all_to_all":
            torch.distributed.all_to_all_single(torch.empty_like(full), full, group=axis.group)
        else:
            all_reduce(full, axis).wait()


def _move(track: Any, op: str, size: int, times: int, device: Any) -> None:
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    for _ in range(times):
        move = dist.isend if op == "send" else dist.irecv
        move(buffer, track.peer, group=track.group)


def table(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a kind: means over ranks of the time in which it moves bytes, in which it does so exposed, its time
    alone, the share of that which shows, and the time without compute in which it waits for other members."""
    ranks = record["ranks"]

    def mean(kind: str, subject: str) -> float:
        return statistics.mean(rank["times"][kind][subject] for rank in ranks)

    result = []
    for kind in KINDS:
        running = mean(kind, "busy")
        if not running:
            continue
        shown = mean(kind, "exposed")
        by_itself = statistics.mean(rank["alone"].get(kind, 0.0) for rank in ranks)
        result.append(
            {
                "kind": kind,
                "busy": running,
                "exposed": shown,
                "alone": by_itself,
                "share": shown / by_itself if by_itself else None,
                "waits": mean(kind + WAITS, "exposed"),
            }
        )
    return result


def bounding(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the exposed transfers of the stage that computes longest, None for one stage.

    The other stages wait for that one, so their exposed transfers need not lengthen the step.
    """
    stages: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for rank in record["ranks"]:
        stages[rank["stage"]].append(rank)
    if len(stages) < 2:
        return None

    def mean(stage: int, kind: str, subject: str) -> float:
        return statistics.mean(rank["times"][kind][subject] for rank in stages[stage])

    most = max(stages, key=lambda stage: mean(stage, COMPUTE, "busy"))
    shown = mean(most, "pipeline", "exposed")
    by_itself = statistics.mean(rank["alone"].get("pipeline", 0.0) for rank in stages[most])
    return {"stage": most, "exposed": shown, "share": shown / by_itself if by_itself else None}


def show(record: dict[str, Any]) -> None:
    """The table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    ranks = record["ranks"]
    console.print(
        f"{record['preset']}, {record['global_batch']} sequences a step, micro-batch {record['micro_batch']}, "
        f"{record['processes']} x {record['device']}, {record['date']}: {record['step_seconds']:.4f} s a step, "
        f"{record['traced_step_seconds']:.4f} s traced"
    )
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(("milliseconds, mean of ranks", "runs", "alone", "exposed", "of alone", "waits")):
        shown.add_column(column, justify="right" if number else "left", no_wrap=True)
    for item in table(record):
        shown.add_row(
            item["kind"],
            f"{1e3 * item['busy']:,.1f}",
            f"{1e3 * item['alone']:,.1f}" if item["alone"] else "",
            f"{1e3 * item['exposed']:,.1f}",
            f"{100 * item['share']:.1f}%" if item["share"] is not None else "",
            f"{1e3 * item['waits']:,.1f}" if item["waits"] else "",
        )
    for kind in (COMPUTE, IDLE):
        mean = statistics.mean(rank["times"][kind]["busy"] for rank in ranks)
        shown.add_row(kind, f"{1e3 * mean:,.1f}", "", "", "", "")
    console.print(shown)
    console.print(
        "exposed: bytes move and nothing computes. waits: nothing computes, and a transfer that has begun here has not "
        "on its other ranks, which still compute (bubble, uneven stages or devices)."
    )
    most = bounding(record)
    if most is not None and most["share"] is not None:
        console.print(
            f"pipeline on stage {most['stage']}, which computes most and so bounds the step: "
            f"{1e3 * most['exposed']:,.1f} ms, {100 * most['share']:.1f}% of alone"
        )
    for subject, choice in record["active"].items():
        console.print(f"{subject}: {choice}", soft_wrap=True, markup=False)


_BINS = 800


def share_of_time(runs: list[tuple[float, float]], start: float, stop: float, bins: int) -> list[float]:
    """Part of each of `bins` equal stretches between start and stop in which one of the runs (from, to) was on."""
    import numpy as np

    edges = np.linspace(start, stop, bins + 1)
    merged: list[list[float]] = []
    for a, b in sorted(runs):
        if merged and a <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], b)
        else:
            merged.append([a, b])
    if not merged:
        return [0.0] * bins
    a, b = np.array(merged).T
    done = np.concatenate([[0.0], np.cumsum(b - a)])
    # Time on before each edge: whole runs that ended, and what of the current one is over.
    number = np.searchsorted(a, edges, side="right")
    before = done[number] - np.where(number > 0, np.clip(b[number - 1] - edges, 0.0, None), 0.0)
    return [float(x) for x in np.diff(before) / np.diff(edges)]


def _busiest(ranks: Iterable[dict[str, Any]], end: float, length: float) -> tuple[float, float]:
    """The piece of a step, of those in a row, in which communication runs most, the ends left out."""
    moving = [(a, b) for rank in ranks for a, b, kind in rank["stretches"] if kind in KINDS[:-1]]
    pieces = max(1, int(end / length))
    shares_ = share_of_time(moving, 0.0, pieces * length, pieces)
    inner = range(pieces // 10, pieces - pieces // 10)
    start = length * max(inner, key=lambda i: shares_[i])
    return start, start + length


def draw(record: dict[str, Any], out: Path) -> None:
    """The traced step of the first rank of each stage, a track for compute and one for each kind that runs, pale where
    it waits: the whole step (height: part of the time), and below the piece of it with the most communication."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    firsts: dict[int, dict[str, Any]] = {}
    for rank in record["ranks"]:
        firsts.setdefault(rank["stage"], rank)
    present = {kind.removesuffix(WAITS) for rank in firsts.values() for _, _, kind in rank["stretches"]}
    streams = [kind for kind in (COMPUTE,) + KINDS if kind in present]
    end = max(stop for rank in firsts.values() for _, stop, _ in rank["stretches"])
    piece = _busiest(firsts.values(), end, min(end, 0.03))
    height = 1.4 + 0.34 * len(streams) * 2 * len(firsts)
    figure, axes = plt.subplots(2 * len(firsts), 1, figsize=(13, height), squeeze=False, layout="constrained")
    for number, (stage, rank) in enumerate(sorted(firsts.items())):
        full, near = axes[number, 0], axes[len(firsts) + number, 0]
        for row, kind in enumerate(streams):
            colour = f"C{((COMPUTE,) + KINDS).index(kind)}"
            for name, alpha in ((kind + WAITS, 0.3), (kind, 1.0)):
                runs = [(a, b) for a, b, k in rank["stretches"] if k == name]
                shares_ = 0.8 * np.array(share_of_time(runs, 0.0, end, _BINS))
                at, drawn = np.linspace(0.0, 1e3 * end, _BINS), {"color": colour, "alpha": alpha, "linewidth": 0}
                full.fill_between(at, row + 0.4, row + 0.4 - shares_, step="mid", **drawn)
                bars = [(1e3 * a, 1e3 * (b - a)) for a, b in runs if b > piece[0] and a < piece[1]]
                near.broken_barh(bars, (row - 0.4, 0.8), **drawn)
        near.set_xlim(1e3 * piece[0], 1e3 * piece[1])
        full.set_xlim(0.0, 1e3 * end)
        for location in (full, near):
            location.set_yticks(range(len(streams)), streams)
            location.set_ylim(len(streams) - 0.5, -0.5)
            location.set_ylabel(f"stage {stage}" if len(firsts) > 1 else "")
            location.spines[["top", "right"]].set_visible(False)
    axes[len(firsts) - 1, 0].set_xlabel(
        "milliseconds: the whole step, height is the part of the time in which it runs, pale: waits for other ranks"
    )
    axes[-1, 0].set_xlabel("milliseconds: the piece in which communication runs most")
    if "layers" in record:
        cut = f" with {record['layers']} layers"
    else:
        cut = ""
    axes[0, 0].set_title(f"{record['preset']}{cut} on {record['processes']} x {record['device']}, {record['date']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
