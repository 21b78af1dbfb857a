"""`python -m benchmarks peers`: our training steps beside torchtitan's and Megatron-Core's, taking turns in one run.

Each contestant is a process group of its own that trains the same model on the same number of random tokens with the
same layout; MFU counts the same FLOPs for all. Peers run at the best settings found for them, which are printed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.bench.step_monitor import StepMonitor
from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from megascale.config import Config

OURS = "megascale"
RECOMPUTE = ("none", "selective", "full")
# What each can do in float8, the fastest that was found for it first.
CONTEXT_EXCHANGES = ("a2a", "p2p", "all_gather")
FLOAT8 = {"torchtitan": ("tensorwise", "rowwise"), "megatron-core": ("delayed", "tensorwise")}
# Name -> the package that must be there, and the child that runs it.
PEERS = {
    "torchtitan": ("torchtitan", "benchmarks.training.peer_torchtitan"),
    "megatron-core": ("megatron.core", "benchmarks.training.peer_megatron"),
}


@dataclass(frozen=True)
class PeerJob:
    """Training job of a compared system.

    Attributes:
        model: layers, hidden, heads, kv_heads, ffn, vocab (rows in memory), sequence, norm, activation, positions,
            rotary_base, tied, bias, head_size, head_norms.
        tensor, pipeline, virtual, world: the layout; data parallelism is what is left.
        recompute: of RECOMPUTE, in the peer's own meaning.
        float8: its recipe for linear layers, of FLOAT8; "" for bfloat16.
        steps, warmup: timed ones, and those before.
        out: where rank 0 writes its figures.
        context: ranks that divide the tokens of each sequence.
        context_exchange: how their attention communicates, of CONTEXT_EXCHANGES.
        experts: number, top_k, width, selected (whether weights are normalised after the selection), ranks (that divide
            the experts) and even (whether the load is forced); None for a dense model.
        settings, data_settings: overrides of Megatron-Core's TransformerConfig and DistributedDataParallelConfig.
    """

    model: dict[str, Any]
    tensor: int
    pipeline: int
    virtual: int
    world: int
    micro_batch: int
    global_batch: int
    recompute: str
    steps: int
    warmup: int
    out: str
    float8: str = ""
    context: int = 1
    context_exchange: str = "a2a"
    experts: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    data_settings: dict[str, Any] = field(default_factory=dict)

    def rows(self, data_rank: int, device: torch.device, count: int | None = None) -> torch.Tensor:
        """Random tokens of a data-parallel rank, int64 [sequence + 1, count or micro_batch]."""
        import torch

        generator = torch.Generator().manual_seed(7 + data_rank)
        size = (self.model["sequence"] + 1, count or self.micro_batch)
        return torch.randint(0, self.model["vocab"], size, generator=generator).to(device)


@dataclass
class Timed:
    """A peer that is ready to train.

    Attributes:
        step: makes one step, and may return a loss.
        versions, settings: of the peer.
        measure_load: makes one more step and returns the largest load of a rank with experts over the mean load, in
            any layer; None if the step replays a graph. The function is None for a dense model. Collective.
        close: ends what `prepare` began in this process.
    """

    step: Callable[[], Any]
    versions: dict[str, str]
    settings: str
    measure_load: Callable[[], float | None] | None = None
    close: Callable[[], None] = lambda: None


@dataclass
class PeerResult:
    """One turn of one contestant: seconds of each timed step, peak memory of rank 0 in GiB, versions and settings."""

    name: str
    turn: int
    seconds: list[float]
    memory_gib: float | None
    versions: dict[str, str]
    settings: str
    sustained: float | None = None
    losses: list[float] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("peers", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(peers)


def peers(
    context: typer.Context,
    preset: str = typer.Argument(
        "llama-8b", help="A shipped model shape (torchtitan trains Llama shapes only), or a TOML file of shapes."
    ),
    peer: list[str] = typer.Option([], help=f"Of {', '.join(PEERS)}; default: all that are installed."),
    turns: int = typer.Option(2, min=1, help="Turns of each contestant, in alternating order."),
    steps: int = typer.Option(10, min=1, help="Timed steps a turn."),
    warmup: int = typer.Option(5, min=1, help="Steps before them."),
    peer_micro_batch: int | None = typer.Option(
        None, help="Micro-batch of the peers, where another suits them better."
    ),
    peer_recompute: str = typer.Option("none", help="Of the peers, where they need it to fit: none, selective, full."),
    peer_float8: str = typer.Option(
        "auto",
        help="Recipe of the peers' linear layers: tensorwise, rowwise, delayed or none; auto: where "
        "train.linear_precision is one of float8, the fastest that was found for each.",
    ),
    peer_context_exchange: str = typer.Option(
        "a2a",
        help="With parallel.context: attention's communication in Megatron-Core: a2a, p2p (a ring) or all_gather.",
    ),
    even_experts: bool = typer.Option(
        False,
        "--even-experts",
        help="With model.mlp=experts: force an even load, here by turns, there by random scores.",
    ),
    peers_only: bool = typer.Option(
        False, "--peers-only", help="Train the peers alone, for a comparison with rows of ours from the same machine."
    ),
    peer_seconds: float = typer.Option(
        600, min=1, help="Seconds that a turn of a peer may take before the bench gives it up."
    ),
    rows: list[Path] = typer.Option(
        [], help="With a TOML file: compare the rows that `benchmarks shapes` wrote to this file; may be repeated."
    ),
    out: Path = typer.Option(Path("bench-peers.json"), help="JSON file for the metrics."),
) -> None:
    """Train a model here and in peers, turn by turn on the same GPUs, and compare step times.

    Any setting of ours can be given as --section.key=value; layout and batch hold for the peers too.
    Peers are not installed with Megascale: put torchtitan or megatron-core into the same environment.

    Examples:

      python -m benchmarks peers llama-8b --train.global_batch=16 --train.micro_batch=2

      python -m benchmarks peers gpt-13b --peer megatron-core --parallel.tensor=2 --parallel.pipeline=2 --turns 3

      python -m benchmarks peers llama-8b --model.layers=12 --train.micro_batch=1 --train.linear_precision=float8

      python -m benchmarks peers shapes.toml --turns 1 --peer megatron-core --peer-seconds 200

      python -m benchmarks peers shapes.toml --rows ours.json --rows megatron.json
    """
    if preset.endswith(".toml"):
        from benchmarks.training.peer_shapes import compare_files, compare_shapes, refuse_options_of_shapes

        refuse_options_of_shapes(context)
        if peers_only:
            raise ConfigError("--peers-only: with a file of shapes, run `benchmarks shapes FILE --trainer=NAME`")
        if rows:
            compare_files(Path(preset), rows)
            return
        trainers = peer or ["megatron-core"]
        check_peers_of_shapes(Path(preset), trainers)
        compare_shapes(Path(preset), trainers, turns=turns, peer_seconds=peer_seconds, out=out, options=context.args)
        return
    if rows:
        raise ConfigError("--rows needs a TOML file of shapes in place of the model shape")
    from rich.progress import Progress

    from megascale import api
    from megascale.bench.train import load_shape_config
    from megascale.core.layout import lay_out
    from megascale.train.launcher import count_processes

    settings = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"] + context.args
    config = load_shape_config(settings)
    gpus = api.visible_gpus()
    if not gpus:
        raise ConfigError("benchmarks peers compares GPUs, and this machine shows none")
    world = count_processes(config, gpus)
    lay_out(config, world)
    chosen, left_out = choose(peer, config, peer_float8)
    names = list_contestants(chosen, left_out, peers_only)
    if peer_recompute not in RECOMPUTE:
        raise ConfigError(f"--peer-recompute={peer_recompute}: there are {', '.join(RECOMPUTE)}")
    if peer_context_exchange not in CONTEXT_EXCHANGES:
        raise ConfigError(f"--peer-context-exchange={peer_context_exchange}: there are {', '.join(CONTEXT_EXCHANGES)}")
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": _device(),
        "processes": world,
        "preset": preset,
        "settings": settings,
        "left_out": left_out,
    }
    results: list[PeerResult] = []
    with temporary_folder() as folder, Progress(transient=True) as progress:
        bar = progress.add_task("", total=turns * len(names))
        for turn in range(turns):
            for name in names if turn % 2 == 0 else names[::-1]:
                progress.update(bar, description=f"{name}, turn {turn + 1}")
                location = Path(folder) / f"{turn}-{name}.json"
                if name == OURS:
                    forced = ["--even-experts"] if even_experts else []
                    result = _ours(preset, settings + forced, steps, warmup, location)
                else:
                    job = make_job(config, world, steps, warmup, location, peer_micro_batch, peer_recompute)
                    if job.experts is not None:
                        job = replace(job, experts=job.experts | {"even": even_experts})
                    recipe = choose_recipe(name, config, peer_float8)
                    job = replace(job, float8=recipe, context_exchange=peer_context_exchange)
                    result = _theirs(name, job, peer_seconds)
                result.turn = turn
                results.append(result)
                # Write after each turn, so that an interrupted bench keeps its results.
                out.write_text(strict_json.dumps(record | {"runs": [asdict(r) for r in results]}, indent=1) + "\n")
                progress.advance(bar)
    show(record, config, results)
    typer.echo(f"metrics: {out}")


def check_peers_of_shapes(file: Path, trainers: Sequence[str]) -> None:
    """Raise ConfigError if a peer cannot train a shape of a file, before anything is measured."""
    from benchmarks.training.shape_file import load_shapes

    for shape in load_shapes(file):
        for trainer in trainers:
            if trainer != "megatron-core":
                raise ConfigError(f"--peer={trainer}: shapes of a file are trained by megatron-core only")
            obstacle = find_obstacle(trainer, shape.load_config()) if shape.list_peer_runs(trainer) else ""
            if obstacle:
                raise ConfigError(f"shape {shape.name}: {trainer} cannot train it: {obstacle}")


def choose_recipe(name: str, config: Config, requested: str) -> str:
    """Return the float8 recipe that a peer trains with, "" for none; `requested` is --peer-float8."""
    from megascale.config.parts import LINEAR_PRECISIONS

    if requested == "auto":
        if LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms != "none":
            return FLOAT8[name][0]
        return ""
    return "" if requested == "none" else requested


def choose(expected: list[str], config: Config, float8: str = "auto") -> tuple[list[str], dict[str, str]]:
    """Return the peers to run, and why others are skipped. Raise ConfigError for a requested peer that cannot run."""
    unknown = set(expected) - set(PEERS)
    if unknown:
        raise ConfigError(f"--peer={unknown.pop()}: there are {', '.join(PEERS)}")
    if float8 not in (every := {"auto", "none", *(item for of in FLOAT8.values() for item in of)}):
        raise ConfigError(f"--peer-float8={float8}: there are {', '.join(sorted(every))}")
    chosen, left_out = [], {}
    for name in expected or PEERS:
        why = find_obstacle(name, config) or _float8_obstacle(name, choose_recipe(name, config, float8))
        if not why:
            chosen.append(name)
        elif expected:
            raise ConfigError(f"--peer={name}: {why}")
        else:
            left_out[name] = why
    return chosen, left_out


def list_contestants(chosen: list[str], left_out: dict[str, str], peers_only: bool) -> list[str]:
    """Return the trainers of a turn, given the peers of `choose`. Raise ConfigError if there are none."""
    if not peers_only:
        return [OURS, *chosen]
    if not chosen:
        obstacles = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"--peers-only: no peer can train this ({obstacles}); install one, or omit --peers-only")
    return chosen


def find_obstacle(name: str, config: Config) -> str:
    """Return why a peer cannot train a configuration, "" if it can."""
    package, _ = PEERS[name]
    try:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    except ModuleNotFoundError:
        return f"the package {package} is not installed"
    model = config.model
    if model.block == "parallel" or model.window is not None:
        return "it has no parallel block and no sliding window; compare with --model.block=serial and no window"
    settings = model.experts
    has_experts = model.mlp == "experts"
    if has_experts and name == "torchtitan":
        return "its experts are not set up here; compare with megatron-core"
    if has_experts and importlib.util.find_spec("transformer_engine") is None:
        return "its grouped GEMMs need the package transformer_engine, which is not installed"
    if has_experts and settings and (settings.biases or settings.shared_width or settings.dense_layers):
        return "its experts are compared without biases, shared experts and dense layers"
    allowed_norms = ("none", "head") if name == "megatron-core" else ("none",)
    has_other_norms = model.qk_norm not in allowed_norms or model.norm_placement != "pre"
    if model.layer_kinds or has_other_norms or model.rotary_scaling is not None:
        return (
            "its layers are alike; leave out model.layer_kinds, model.qk_norm, model.norm_placement and "
            "model.rotary_scaling"
        )
    llama = (model.norm, model.activation, model.positions) == ("rmsnorm", "swiglu", "rotary")
    biased = model.attention_bias or model.mlp_bias
    if name == "torchtitan" and (not llama or biased or model.tied_embeddings):
        return "it trains Llama shapes only (RMSNorm, SwiGLU, rotary positions, no biases, untied embeddings)"
    if name == "megatron-core" and model.attention_bias != model.mlp_bias:
        return "it has biases in all linear layers or in none"
    if config.parallel.context > 1 and name == "torchtitan":
        return "its context parallelism is not set up here; compare with --parallel.context=1"
    if config.parallel.context > 1 and importlib.util.find_spec("transformer_engine") is None:
        return "its context parallelism needs the package transformer_engine, which is not installed"
    if config.optimizer.name != "adamw":
        return "its optimizer is AdamW; compare with --optimizer.name=adamw"
    return ""


def _float8_obstacle(name: str, recipe: str) -> str:
    """Why a peer cannot train with this recipe, "" if it can."""
    if not recipe:
        return ""
    if recipe not in FLOAT8[name]:
        return f"it has no float8 recipe {recipe}, but {', '.join(FLOAT8[name])} (--peer-float8)"
    package = {"torchtitan": "torchao", "megatron-core": "transformer_engine"}[name]
    if importlib.util.find_spec(package) is None:
        return f"its float8 needs the package {package}, which is not installed"
    return ""


def make_job(
    config: Config,
    world: int,
    steps: int,
    warmup: int,
    out: Path,
    micro_batch: int | None = None,
    recompute: str = "none",
) -> PeerJob:
    """Return the job description for a peer."""
    model = config.model
    parallel = config.parallel
    train = config.train
    shape = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "ffn": model.ffn,
        "vocab": model.padded_vocab,
        "sequence": model.sequence_length,
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions,
        "rotary_base": model.rotary_base,
        "tied": model.tied_embeddings,
        "bias": model.mlp_bias,
        "head_size": model.head_size,
        "head_norms": model.qk_norm == "head",
    }
    experts = None
    settings = model.experts
    if model.mlp == "experts" and settings is not None:
        experts = {
            "number": settings.number,
            "top_k": settings.top_k,
            "width": settings.width or model.ffn,
            "selected": settings.normalize == "selected",
            "ranks": parallel.tensor * parallel.expert,
            "even": False,
        }
        # The ranks that divide the experts read other samples there, whichever axis they are of here.
        parallel = parallel.model_copy(update={"tensor": 1})
    return PeerJob(
        shape,
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_stages,
        world,
        micro_batch or train.micro_batch,
        train.global_batch,
        recompute,
        steps,
        warmup,
        str(out),
        context=parallel.context,
        experts=experts,
    )


def connect(device: torch.device, store: Store | None = None) -> None:
    """Join the other ranks, for a peer that does not do so itself.

    Args:
        store: where ranks meet; None for MASTER_ADDR and MASTER_PORT. With a store, the process outlives its groups.
    """
    import torch.distributed as dist

    from megascale.rendezvous.start_job import set_watchdog

    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if store is None:
        dist.init_process_group(backend, device_id=device_id)
        return
    set_watchdog(is_persistent=True)
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=device_id)


def run_child(prepare: Callable[[PeerJob, torch.device], Timed], file: str) -> None:
    """Prepare a peer, make the steps, and write the figures on the last rank, which knows the loss."""
    import torch
    import torch.distributed as dist

    job = PeerJob(**json.loads(Path(file).read_text()))
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        device = torch.device("cuda", local)
    else:
        device = torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    timed = prepare(job, device)
    monitor = StepMonitor("peer", warmup=job.warmup, steps=job.steps, prints=rank == 0)
    seconds, losses = time_steps(timed, job, device, monitor)
    if rank == job.world - 1:
        if cuda:
            memory = torch.cuda.max_memory_allocated(device) / 2**30
        else:
            memory = None
        versions = {"torch": torch.__version__, **timed.versions}
        report = {"seconds": seconds, "memory_gib": memory, "versions": versions, "settings": timed.settings}
        Path(job.out).write_text(strict_json.dumps(report | {"losses": losses}))
    dist.barrier()
    if cuda:
        os._exit(0)  # Megatron-Core's communicators of experts did not end within a minute
    dist.destroy_process_group()


def time_steps(
    timed: Timed, job: PeerJob, device: torch.device, monitor: StepMonitor
) -> tuple[list[float], list[float]]:
    """Make all steps of a job; return the seconds of each timed step, and the losses that this rank knows.

    The lists are those of the monitor. A warm-up step measures the load of experts about every ten seconds.

    Raises TrainingError for a loss that is not finite.
    """
    import torch

    from megascale.errors import TrainingError

    def read_clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    measure_load = timed.measure_load
    if job.settings.get("cuda_graph_impl", "none") != "none":
        measure_load = None  # a capture would keep the hooks that count
    seconds = monitor.seconds
    losses = monitor.losses
    for number in range(job.warmup + job.steps):
        is_warmup = number < job.warmup
        if is_warmup and number > 0 and measure_load is not None:
            is_last = number == job.warmup - 1
            if is_last or agree(monitor.is_load_due(), device):
                load = measure_load()
                monitor.record_step(load)
                continue
        start = read_clock()
        loss = timed.step()
        elapsed = read_clock() - start
        if not is_warmup:
            seconds.append(elapsed)
        if loss is not None:
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise TrainingError(f"the loss of step {number + 1} is {losses[-1]}, so its time cannot be compared")
        monitor.record_step()
    return seconds, losses


def agree(choice: bool, device: torch.device) -> bool:
    """Return the choice of rank 0. Collective."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(choice)], device=device)
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _ours(preset: str, settings: list[str], steps: int, warmup: int, out: Path) -> PeerResult:
    arguments = ["bench", "train", preset, f"--steps={steps}", f"--warmup={warmup}", f"--out={out}"] + settings
    _run([sys.executable, "-m", "megascale.cli.main"] + arguments, OURS)
    report = json.loads(out.read_text())
    active = "; ".join(f"{subject}: {choice}" for subject, choice in report["active"].items())
    rate = statistics.mean(report["gemm_flop_per_s"])
    seconds = [report["step_seconds"]]
    return PeerResult(OURS, 0, seconds, report["peak_memory_gib"], report["versions"], active, rate, report["losses"])


def _theirs(name: str, job: PeerJob, limit: float) -> PeerResult:
    file = Path(job.out).with_suffix(".job.json")
    file.write_text(strict_json.dumps(asdict(job)))
    arguments = [
        "--nproc-per-node",
        str(job.world),
        "--master-port",
        str(_free_port()),
        "-m",
        PEERS[name][1],
        str(file),
    ]
    # Megatron's training script insists on CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism. With CUDA's default
    # a step took 13% less at micro-batch 1 and no more at 4 (docs/comparison.md), so the variable is left as it is.
    _run([sys.executable, "-m", "torch.distributed.run"] + arguments, name, limit)
    return PeerResult(name, 0, **json.loads(Path(job.out).read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(command: list[str], name: str, limit: float | None = None) -> None:
    """TrainingError with the end of what it said if it fails or takes longer than `limit` seconds."""
    from megascale.errors import TrainingError

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ended = ""
    try:
        output, _ = process.communicate(timeout=limit)
        if process.returncode:
            ended = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        output, _ = process.communicate()
        ended = f"had not ended after {limit:g} s"
    finally:
        process.terminate()
        process.wait()
    if ended:
        last = output.decode(errors="replace").strip().splitlines()[-12:]
        raise TrainingError(f"{name} {ended}:\n  " + "\n  ".join(last))


def _device() -> str:
    import torch

    return torch.cuda.get_device_name()


def figures(
    config: Config, processes: int, peak_tflops: float | None, results: list[PeerResult]
) -> list[dict[str, Any]]:
    """One entry a contestant: median step, how far its turns are apart, tokens/s and MFU of one count for all."""
    from megascale.core.flops import mfu

    output: list[dict[str, Any]] = []
    for name in dict.fromkeys(result.name for result in results):
        local = [result for result in results if result.name == name]
        turns = [statistics.median(result.seconds) for result in local]
        seconds = statistics.median(turns)
        rate = config.train.global_batch * config.model.sequence_length / seconds
        memory = [result.memory_gib for result in local if result.memory_gib is not None]
        output.append(
            {
                "name": name,
                "seconds": seconds,
                "spread": (max(turns) - min(turns)) / seconds,
                "rate": rate / processes,
                "mfu": mfu(config.model, rate, processes, peak_tflops) if peak_tflops else None,
                "memory_gib": max(memory) if memory else None,
                "settings": local[-1].settings,
                "versions": local[-1].versions,
            }
        )
    return output


def show(record: dict[str, Any], config: Config, results: list[PeerResult]) -> None:
    """The table, and what each contestant ran with."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from megascale.core.flops import CONVENTION, device_peak_tflops

    console = Console(highlight=False)
    peak = config.observe.peak_tflops or device_peak_tflops(record["device"])
    output = figures(config, record["processes"], peak, results)
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(("", "s/step", "spread", "tokens/s each", "MFU", "GiB", "ours over it")):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    ours = next((item for item in output if item["name"] == OURS), None)
    for outcome in output:
        ratio = ""
        if ours is not None and outcome is not ours:
            ratio = f"{outcome['seconds'] / ours['seconds']:.3f}x"
        table.add_row(
            outcome["name"],
            f"{outcome['seconds']:.4f}",
            f"{100 * outcome['spread']:.1f}%",
            f"{outcome['rate']:,.0f}",
            f"{100 * outcome['mfu']:.1f}%" if outcome["mfu"] else "",
            f"{outcome['memory_gib']:.1f}" if outcome["memory_gib"] else "",
            ratio,
        )
    rates = [result.sustained for result in results if result.sustained]
    console.print(
        f"{record['preset']}, {config.train.global_batch} x {config.model.sequence_length} tokens a step, "
        f"{record['processes']} x {record['device']}, {record['date']}"
    )
    console.print(table)
    console.print(f"MFU: {CONVENTION}; peak {peak} TFLOP/s")
    if rates:
        console.print(f"sustained GEMM in the same run: {statistics.mean(rates) / 1e12:.0f} TFLOP/s")
    for outcome in output:
        versions = ", ".join(f"{name} {version}" for name, version in outcome["versions"].items())
        console.print(f"{outcome['name']}: {versions}; {outcome['settings']}")
    for name, why in record["left_out"].items():
        console.print(f"{name}: left out, {why}")
