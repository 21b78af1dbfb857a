"""`python -m benchmarks peers`: our training steps compared with torchtitan's and Megatron-Core's, in turns of one run.

Each contestant is a process group of its own that trains the same model on the same number of random tokens with the
same layout. MFU counts the same FLOPs for all. Peers run with their fastest known settings, which are printed.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.harness.temporary import temporary_folder
from benchmarks.training.peer_choice import (
    OURS,
    PEERS,
    check_peers_of_shapes,
    choose_peers,
    choose_recipe,
    list_contestants,
)
from benchmarks.training.peer_job import CONTEXT_EXCHANGES, RECOMPUTE, PeerJob, make_job
from benchmarks.training.peer_results import PeerResult, print_results
from megascale.core import strict_json
from megascale.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from megascale.config import Config


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison on one model.

    Attributes:
        preset: name of the model's shape.
        settings: overrides of our configuration.
        config: our configuration.
        world: number of processes of each contestant.
        steps, warmup: timed steps per turn, and steps before them.
        peer_micro_batch: micro-batch of the peers; None: ours.
        peer_recompute: recomputation of the peers, a value of RECOMPUTE.
        peer_float8: --peer-float8.
        peer_context_exchange: communication of Megatron-Core's attention, a value of CONTEXT_EXCHANGES.
        even_experts: whether the load of experts is forced to be even.
        peer_seconds: time limit of a peer's turn.
    """

    preset: str
    settings: list[str]
    config: Config
    world: int
    steps: int
    warmup: int
    peer_micro_batch: int | None
    peer_recompute: str
    peer_float8: str
    peer_context_exchange: str
    even_experts: bool
    peer_seconds: float

    def __post_init__(self) -> None:
        if self.peer_recompute not in RECOMPUTE:
            raise ConfigError(f"--peer-recompute={self.peer_recompute}: there are {', '.join(RECOMPUTE)}")
        if self.peer_context_exchange not in CONTEXT_EXCHANGES:
            raise ConfigError(
                f"--peer-context-exchange={self.peer_context_exchange}: there are {', '.join(CONTEXT_EXCHANGES)}"
            )

    def run_turn(self, name: str, out: Path) -> PeerResult:
        """Run a turn of a contestant, which writes its measurements to `out`."""
        if name == OURS:
            return self._run_ours(out)
        return run_peer(name, self._make_peer_job(name, out), self.peer_seconds)

    def _run_ours(self, out: Path) -> PeerResult:
        arguments = ["bench", "train", self.preset, f"--steps={self.steps}", f"--warmup={self.warmup}", f"--out={out}"]
        arguments += self.settings
        if self.even_experts:
            arguments.append("--even-experts")
        run_process([sys.executable, "-m", "megascale.cli.main"] + arguments, OURS)
        report = json.loads(out.read_text())
        return PeerResult(
            OURS,
            turn=0,
            seconds=[report["step_seconds"]],
            memory_gib=report["peak_memory_gib"],
            versions=report["versions"],
            settings="; ".join(f"{subject}: {choice}" for subject, choice in report["active"].items()),
            sustained=statistics.mean(report["gemm_flop_per_s"]),
            losses=report["losses"],
        )

    def _make_peer_job(self, name: str, out: Path) -> PeerJob:
        job = make_job(
            self.config,
            self.world,
            steps=self.steps,
            warmup=self.warmup,
            out=out,
            micro_batch=self.peer_micro_batch,
            recompute=self.peer_recompute,
        )
        if job.experts is not None:
            job = replace(job, experts=job.experts | {"even": self.even_experts})
        recipe = choose_recipe(name, self.config, self.peer_float8)
        return replace(job, float8=recipe, context_exchange=self.peer_context_exchange)


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("peers", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(peers)


def peers(
    context: typer.Context,
    preset: str = typer.Argument(
        "llama-8b", help="A shipped model shape (torchtitan trains Llama shapes only), or a TOML file of shapes."
    ),
    peer: list[str] = typer.Option([], help=f"Peer to compare: {', '.join(PEERS)}; default: all that are installed."),
    turns: int = typer.Option(2, min=1, help="Turns of each contestant, in alternating order."),
    steps: int = typer.Option(10, min=1, help="Timed steps per turn."),
    warmup: int = typer.Option(5, min=1, help="Steps before the timed steps of a turn."),
    peer_micro_batch: int | None = typer.Option(None, help="Micro-batch of the peers, if another is faster for them."),
    peer_recompute: str = typer.Option("none", help="Recomputation of the peers: none, selective, full."),
    peer_float8: str = typer.Option(
        "auto",
        help="Float8 recipe of the peers' linear layers: tensorwise, rowwise, delayed or none; auto: the fastest known "
        "recipe of each peer if train.linear_precision is a float8 one, else none.",
    ),
    peer_context_exchange: str = typer.Option(
        "a2a",
        help="With parallel.context: attention's communication in Megatron-Core: a2a, p2p (a ring) or all_gather.",
    ),
    even_experts: bool = typer.Option(
        False,
        "--even-experts",
        help="With model.mlp=experts: force an even load, by turns in ours and by random scores in the peers.",
    ),
    peers_only: bool = typer.Option(
        False, "--peers-only", help="Train the peers alone, for a comparison with rows of ours from the same machine."
    ),
    peer_seconds: float = typer.Option(600, min=1, help="Seconds after which a turn of a peer is ended with an error."),
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
        from benchmarks.training.peer_shapes import refuse_options_of_shapes

        refuse_options_of_shapes(context)
        if peers_only:
            raise ConfigError("--peers-only: with a file of shapes, run `benchmarks shapes FILE --trainer=NAME`")
        compare_shapes_of_file(
            Path(preset), peer, turns=turns, peer_seconds=peer_seconds, out=out, row_files=rows, options=context.args
        )
        return
    if rows:
        raise ConfigError("--rows needs a TOML file of shapes in place of the model shape")
    settings = [f"--model.preset={preset}", "--train.precision=bfloat16", "--train.global_batch=64"] + context.args
    config, world = load_config(settings)
    chosen, obstacles = choose_peers(peer, config, peer_float8)
    names = list_contestants(chosen, obstacles, peers_only)
    comparison = Comparison(
        preset=preset,
        settings=settings,
        config=config,
        world=world,
        steps=steps,
        warmup=warmup,
        peer_micro_batch=peer_micro_batch,
        peer_recompute=peer_recompute,
        peer_float8=peer_float8,
        peer_context_exchange=peer_context_exchange,
        even_experts=even_experts,
        peer_seconds=peer_seconds,
    )
    compare(comparison, names, turns=turns, obstacles=obstacles, out=out)


def load_config(settings: list[str]) -> tuple[Config, int]:
    """Return our configuration and the number of processes. Raise ConfigError without GPUs or a possible layout."""
    from megascale import api
    from megascale.bench.train import load_shape_config
    from megascale.core.layout import lay_out
    from megascale.train.launcher import count_processes

    config = load_shape_config(settings)
    gpus = api.visible_gpus()
    if not gpus:
        raise ConfigError("benchmarks peers compares GPUs, and this machine shows none")
    world = count_processes(config, gpus)
    lay_out(config, world)
    return config, world


def compare_shapes_of_file(
    file: Path,
    requested_peers: list[str],
    *,
    turns: int,
    peer_seconds: float,
    out: Path,
    row_files: list[Path],
    options: list[str],
) -> None:
    """Compare the shapes of a TOML file, or the rows that `benchmarks shapes` has written for them."""
    from benchmarks.training.peer_shapes import compare_files, compare_shapes

    if row_files:
        compare_files(file, row_files)
        return
    trainers = requested_peers or ["megatron-core"]
    check_peers_of_shapes(file, trainers)
    compare_shapes(file, trainers, turns=turns, peer_seconds=peer_seconds, out=out, options=options)


def compare(comparison: Comparison, names: list[str], *, turns: int, obstacles: dict[str, str], out: Path) -> None:
    """Run all turns, in alternating order of the contestants, write the results, and print them.

    Args:
        names: contestants.
        obstacles: why each other peer does not take part.
        out: JSON file to write.
    """
    import torch
    from rich.progress import Progress

    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "processes": comparison.world,
        "preset": comparison.preset,
        "settings": comparison.settings,
        "left_out": obstacles,
    }
    results: list[PeerResult] = []
    with temporary_folder() as folder, Progress(transient=True) as progress:
        bar = progress.add_task("", total=turns * len(names))
        for turn in range(turns):
            for name in names if turn % 2 == 0 else names[::-1]:
                progress.update(bar, description=f"{name}, turn {turn + 1}")
                result = comparison.run_turn(name, Path(folder) / f"{turn}-{name}.json")
                result.turn = turn
                results.append(result)
                # Write after each turn, so that an interrupted benchmark keeps its results.
                out.write_text(strict_json.dumps(record | {"runs": [asdict(r) for r in results]}, indent=1) + "\n")
                progress.advance(bar)
    print_results(record, comparison.config, results)
    typer.echo(f"metrics: {out}")


def run_peer(name: str, job: PeerJob, seconds: float) -> PeerResult:
    """Run a job of a peer by torchrun, for at most `seconds`."""
    file = Path(job.out).with_suffix(".job.json")
    file.write_text(strict_json.dumps(asdict(job)))
    arguments = [
        "--nproc-per-node",
        str(job.world),
        "--master-port",
        str(find_free_port()),
        "-m",
        PEERS[name][1],
        str(file),
    ]
    # Megatron's training script requires CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism. With CUDA's default
    # a step took 13% less at micro-batch 1 and no more at 4 (docs/comparison.md), so the variable is not set here.
    run_process([sys.executable, "-m", "torch.distributed.run"] + arguments, name, seconds)
    return PeerResult(name, turn=0, **json.loads(Path(job.out).read_text()))


def find_free_port() -> int:
    """Return a port of the loopback interface that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_process(command: list[str], name: str, seconds: float | None = None) -> None:
    """Run a contestant's command.

    Raise TrainingError with the last lines of the output if the command fails or takes longer than `seconds`.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    failure = ""
    try:
        output, _ = process.communicate(timeout=seconds)
        if process.returncode:
            failure = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        output, _ = process.communicate()
        failure = f"had not ended after {seconds:g} s"
    finally:
        process.terminate()
        process.wait()
    if failure:
        last_lines = output.decode(errors="replace").strip().splitlines()[-12:]
        raise TrainingError(f"{name} {failure}:\n  " + "\n  ".join(last_lines))
