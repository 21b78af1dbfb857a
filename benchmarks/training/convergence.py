"""`python -m benchmarks convergence`: loss against tokens of what makes a step faster, beside what it replaces.

Serial, parallel and parallel windowed blocks under AdamW, and LAMB at a larger batch, as the paper's Figure 10 (section
6.2): the same tokens in the same order, several seeds. A faster step that learns worse is not a gain.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import typer

from benchmarks.training.convergence_report import ConvergenceOutcome, draw, show
from megascale.core import strict_json
from megascale.core.gpus import visible_gpu_names

VARIANTS = ("serial", "parallel", "window", "lamb")
# AdamW at LAMB's batch: tells what the batch costs from what LAMB does. Plain PyTorch with the same first weights and
# samples: tells what the model does from what we do. Float8: its recipes, against serial.
FLOAT8 = ("float8", "float8_rowwise", "float8_rowwise_wgrad")
ON_REQUEST = ("large", "plain", "plain-parallel") + FLOAT8
PLAIN = "evaluated-without-float8.json"


@dataclass(frozen=True)
class Variant:
    """One thing to train.

    Attributes:
        name: in the table: its kind, with the peak learning rate where several are trained.
        kind: of VARIANTS or ON_REQUEST.
        peak: learning rate.
        batch: sequences a step.
        settings: what differs from the serial block under AdamW.
    """

    name: str
    kind: str
    peak: float
    batch: int
    settings: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("convergence", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(convergence)


def convergence(
    context: typer.Context,
    data: Path = typer.Option(
        Path("datasets/python"), help="Data set; made of all Python source on this machine if it is not there."
    ),
    preset: str = typer.Option("gpt2-124m", help="Model shape."),
    tokens: float = typer.Option(60e6, min=1, help="Tokens of each run."),
    batch: int = typer.Option(64, min=1, help="Sequences a step of AdamW."),
    times: int = typer.Option(4, min=1, help="Batch of lamb and large, in those."),
    peak: list[float] = typer.Option([1e-3], help="Peak learning rate of AdamW; given again, each is trained."),
    lamb_peak: list[float] = typer.Option([1e-2], help="Peak learning rate of LAMB, likewise."),
    lamb_micro_batch: int | None = typer.Option(
        None, min=1, help="Micro-batch of lamb and large; default: as the others', --train.micro_batch."
    ),
    window: int | None = typer.Option(None, min=1, help="Of the windowed variant; default: a quarter of the sequence."),
    variants: list[str] = typer.Option(
        list(VARIANTS),
        "--variant",
        help="Which; may be given again. large: serial at LAMB's batch. plain, plain-parallel: the same model, weights "
        "and samples in plain PyTorch. float8, float8_rowwise, float8_rowwise_wgrad: serial with that "
        "train.linear_precision.",
    ),
    seeds: int = typer.Option(2, min=1, help="Runs of each variant."),
    first_seed: int = typer.Option(0, min=0, help="Number of the first of them."),
    earlier: list[Path] = typer.Option(
        [],
        help="Metrics of an earlier call, which may have been on another machine: its runs count, and those of "
        "them that are requested again are not repeated.",
    ),
    at_once: int = typer.Option(1, min=1, help="Runs on one GPU at a time: small models leave most of it idle."),
    folder: Path = typer.Option(Path("runs/convergence"), help="Run folders; finished ones are not run again."),
    plot: Path = typer.Option(Path("convergence.png"), help="PNG to draw."),
    out: Path = typer.Option(Path("convergence.json"), help="JSON file for the metrics."),
) -> None:
    """Train variants of a model on the same tokens and compare their held-out losses. One run a process.

    Any setting can be given as --section.key=value. Stopped and called again it goes on. Runs of one seed begin alike
    and read the same samples, so that variants are compared in pairs: mean difference and its standard
    error.

    Examples:

      python -m benchmarks convergence

      python -m benchmarks convergence --variant serial --variant lamb --lamb-peak 5e-3 --lamb-peak 1e-2 --tokens 2e7

      python -m benchmarks convergence --batch 4 --train.micro_batch=4 --lamb-micro-batch 16 --at-once 3

      python -m benchmarks convergence --variant serial --variant plain --seeds 1

      benchmarks convergence --variant serial --variant float8 --seeds 1 --first-seed 2 --earlier two-seeds.json
    """
    from rich.console import Console

    from megascale import api
    from megascale.config import read_preset as shape
    from megascale.data.prepare.builder import build
    from megascale.errors import ConfigError

    unknown = set(variants) - {*VARIANTS, *ON_REQUEST}
    if unknown:
        raise ConfigError(f"--variant={unknown.pop()}: there are {', '.join(VARIANTS + ON_REQUEST)}")
    console = Console()
    if not (data / "train.idx").exists():
        console.print(f"making {data} of all Python source on this machine")
        text = data.with_name(f"{data.name}.jsonl")
        collect(text)
        build(data, use_stdlib=False, inputs=[text], vocab_size=32768, held_out=0.005, progress=True)
    length = _length(context.args, shape(preset))
    every = _variants(batch, times, peak, lamb_peak, window or max(1, length // 4))
    chosen = [variant for variant in every if variant.kind in variants]
    corpus = _fingerprint(data)

    def plan(variant: Variant, seed: int) -> tuple[list[str], str]:
        steps = max(1, round(tokens / (variant.batch * length)))
        arguments = list(context.args)
        if variant.kind in ("lamb", "large") and lamb_micro_batch is not None:
            arguments.append(f"--train.micro_batch={lamb_micro_batch}")
        command = _command(folder, data, preset, variant, seed, steps, arguments)
        return command, _key(command, corpus)

    before = _read_earlier(earlier, {variant.name: variant for variant in every}, lambda v, seed: plan(v, seed)[1])
    expected = {(outcome.variant, outcome.seed) for outcome in before}
    # A seed's runs side by side: pairs are there early.
    planned = [(v, seed) + plan(v, seed) for seed in range(first_seed, first_seed + seeds) for v in chosen]
    work = [item for item in planned if (item[0].name, item[1]) not in expected]
    _refuse_mixed_data(before, [(seed, key) for _, seed, _, key in work])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").touch()
    devices = visible_gpu_names(api.visible_gpus()) or [""]
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": ", ".join(sorted({o.device or _device() for o in before} | ({_device()} if work else set()))),
        "versions": _versions(),
        "data": str(data),
        "preset": preset,
        "tokens": tokens,
        "runs": [asdict(outcome) for outcome in before],
    }
    outcomes = list(before)
    for outcome in _run_all(work, devices * at_once, console):
        outcomes.append(outcome)
        record["runs"].append(asdict(outcome))
        out.write_text(strict_json.dumps(record, indent=1) + "\n")  # each at once: a call may be cut short
    names = [variant.name for variant in every]
    outcomes.sort(key=lambda o: (names.index(o.variant) if o.variant in names else len(names), o.seed))
    record["runs"] = [asdict(outcome) for outcome in outcomes]
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    show(outcomes, console)
    if at_once > 1:
        console.print(f"tokens/s: of one run while up to {at_once} shared its device")
    draw(outcomes, plot, f"{preset}, {length:,} tokens a sequence, {record['device']}")
    console.print(f"metrics: {out}; plot: {plot}")


def collect(out: Path, most_bytes: int | None = None) -> int:
    """Write the source of the standard library and of installed packages as jsonl, each text once; how many.

    Args:
        most_bytes: end with the file that reaches this size; None: write all.
    """
    paths = sysconfig.get_paths()
    files = sorted(
        {file for key in ("stdlib", "purelib", "platlib") for file in Path(paths[key]).resolve().rglob("*.py")}
    )
    observed: set[bytes] = set()
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w", encoding="utf-8") as sink:
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if text.strip() and digest not in observed:
                observed.add(digest)
                sink.write(strict_json.dumps({"text": text}) + "\n")
                if most_bytes is not None and sink.tell() >= most_bytes:
                    break
    return len(observed)


def _variants(
    batch: int, times: int, peaks: Sequence[float], lamb_peaks: Sequence[float], window: int
) -> list[Variant]:
    kinds: list[tuple[str, Sequence[float], int, tuple[str, ...]]] = [
        ("serial", peaks, batch, ()),
        ("parallel", peaks, batch, ("--model.block=parallel",)),
        ("window", peaks, batch, ("--model.block=parallel", f"--model.window={window}")),
        ("lamb", lamb_peaks, batch * times, ("--optimizer.name=lamb",)),
        ("large", peaks, batch * times, ()),
        ("plain", peaks, batch, ()),
        ("plain-parallel", peaks, batch, ("--model.block=parallel",)),
    ]
    for precision in FLOAT8:
        kinds.append((precision, peaks, batch, (f"--train.linear_precision={precision}",)))
    return [
        Variant(f"{kind} {peak:g}" if len(of) > 1 else kind, kind, peak, size, (f"--lr.peak={peak}",) + settings)
        for kind, of, size, settings in kinds
        for peak in dict.fromkeys(of)
    ]


def _length(arguments: list[str], model: dict[str, Any]) -> int:
    local = [w.split("=", 1)[1] for w in arguments if w.startswith("--model.sequence_length=")]
    if local:
        return int(local[-1])
    return int(model["sequence_length"])


def _command(
    folder: Path, data: Path, preset: str, variant: Variant, seed: int, steps: int, arguments: list[str]
) -> list[str]:
    every = max(1, steps // 20)
    settings = [
        f"--model.preset={preset}",
        f"--data.train={data}/train",
        f"--data.valid={data}/valid",
        f"--train.runs={folder}",
        f"--train.name={variant.kind}-{variant.peak:g}-{seed}",
        f"--train.seed={1000 + seed}",
        f"--train.steps={steps}",
        f"--train.global_batch={variant.batch}",
        f"--train.eval_interval={every}",
        f"--lr.warmup_steps={max(1, steps // 20)}",
        "--parallel.data=1",
        "--checkpoint.interval=0",
        "--checkpoint.keep=1",
        "--observe.tensorboard=false",
        "--observe.progress=false",
    ]
    return [
        sys.executable,
        "-m",
        *(("benchmarks.training.plain",) if variant.kind.startswith("plain") else ("megascale.cli.main", "train")),
        str(folder / "base.toml"),
        *settings,
        *variant.settings,
        *arguments,
    ]


def _fingerprint(data: Path) -> str:
    """Return a hash of a data set's sequences: of the tokens and their positions."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("train.idx", "valid.idx"):
        digest.update((data / name).read_bytes())
    return digest.hexdigest()


def _key(command: list[str], corpus: str) -> str:
    """A run's settings without what says where it is; the data by its fingerprint."""
    locations = ("--train.runs=", "--data.train=", "--data.valid=")
    return " ".join([w for w in command if w.startswith("--") and not w.startswith(locations)] + [f"data={corpus}"])


def _read_earlier(
    files: Sequence[Path], variants: dict[str, Variant], key_of: Callable[[Variant, int], str]
) -> list[ConvergenceOutcome]:
    """The runs of earlier calls, each once. ConfigError for one of other settings than this call would give it: a
    difference of losses would be that of the settings."""
    from megascale.errors import ConfigError

    result: dict[str, ConvergenceOutcome] = {}
    for file in files:
        try:
            record = strict_json.loads(file.read_text())
            outcomes = [ConvergenceOutcome(**({"device": record.get("device", "")} | run)) for run in record["runs"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--earlier={file} holds no metrics of benchmarks convergence: {error}") from None
        for outcome in outcomes:
            if outcome.variant not in variants:
                raise ConfigError(
                    f"--earlier={file}: this call has no variant {outcome.variant!r}, but {', '.join(variants)}"
                )
            current, then = (
                {word for word in key.split() if not word.startswith("data=")}
                for key in (key_of(variants[outcome.variant], outcome.seed), outcome.key)
            )
            if current != then:
                raise ConfigError(
                    f"--earlier={file}: {outcome.variant}, seed {outcome.seed}, was run with "
                    f"{' '.join(sorted(then - current)) or 'less'}, and this call would run it with "
                    f"{' '.join(sorted(current - then)) or 'less'}; give this call the same settings, "
                    "or leave the file out"
                )
            result.setdefault(outcome.key, outcome)
    return list(result.values())


def _refuse_mixed_data(before: Sequence[ConvergenceOutcome], to_run: Sequence[tuple[int, str]]) -> None:
    """ConfigError where runs of one seed would be on different data. Seeds may differ: only a seed's runs are compared,
    and another machine has other Python source."""
    from megascale.errors import ConfigError

    data_of: dict[int, set[str]] = {}
    for seed, key in [(outcome.seed, outcome.key) for outcome in before] + list(to_run):
        data_of.setdefault(seed, set()).update(word for word in key.split() if word.startswith("data="))
    for seed, data in sorted(data_of.items()):
        if len(data) > 1:
            raise ConfigError(
                f"seed {seed} has runs on different data ({', '.join(sorted(data))}): their losses cannot be compared; "
                "run all variants of a seed on one machine, or choose another --first-seed"
            )


def _run_all(
    work: list[tuple[Variant, int, list[str], str]], devices: list[str], console: Any
) -> Iterator[ConvergenceOutcome]:
    """Run each command, one on each of `devices` (which may name one twice); outcomes as they come."""
    from rich.progress import Progress

    from megascale.errors import TrainingError

    waiting = list(range(len(work)))
    running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
    evaluated: set[int] = set()
    # Runs that share cores must not each have threads for all of them.
    threads = max(1, (os.cpu_count() or 1) // max(1, min(len(devices), len(work))))
    with Progress(console=console, transient=True) as progress:
        bars = [progress.add_task(f"{v.name}, seed {s}", total=1.0) for v, s, _, _ in work]
        try:
            while waiting or running:
                for location, device in enumerate(devices):
                    if location not in running and waiting:
                        running[location] = _start(work[number := waiting.pop(0)][2], device, threads), number
                for location, (process, number) in list(running.items()):
                    run = _folder(work[number][2])
                    progress.update(bars[number], completed=_share(run, work[number][2]))
                    if process.poll() is None:
                        continue
                    del running[location]
                    if process.returncode:
                        output = (run.parent / f"{run.name}.log").read_text(errors="replace").strip().splitlines()[-8:]
                        raise TrainingError(
                            f"{run.name} ended with exit code {process.returncode}: " + "\n  ".join(output)
                        )
                    variant, seed, command, key = work[number]
                    if variant.kind in FLOAT8 and number not in evaluated:
                        evaluated.add(number)
                        running[location] = _evaluate(command, device, threads), number
                        continue
                    yield read(variant.name, seed, _folder(command), key)
                time.sleep(0.1)
        finally:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.wait()


def _start(command: list[str], device: str, threads: int) -> subprocess.Popen[bytes]:
    run = _folder(command)
    run.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    with open(run.parent / f"{run.name}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _evaluate(command: list[str], device: str, threads: int) -> subprocess.Popen[bytes]:
    """The held-out loss of a float8 run's weights without float8, which tells learning from evaluating in float8."""
    run = _folder(command)
    inputs = [word for word in command if word.startswith("--train.device=")]
    where = [f"--device={word.partition('=')[2]}" for word in inputs[-1:]]
    arguments = ["evaluate", str(run), "--linear-precision=default", "--json"] + where
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    with open(run / PLAIN, "wb") as out, open(run.parent / f"{run.name}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megascale.cli.main"] + arguments, stdout=out, stderr=log, env=environment
        )


def _value(command: list[str], key: str) -> str:
    return next(word.split("=", 1)[1] for word in command if word.startswith(f"--{key}="))


def _folder(command: list[str]) -> Path:
    return Path(_value(command, "train.runs")) / _value(command, "train.name")


def _share(run: Path, command: list[str]) -> float:
    try:
        last = (run / "metrics.jsonl").read_bytes().rstrip().rsplit(b"\n", 1)[-1]
        return float(json.loads(last)["step"]) / int(_value(command, "train.steps"))
    except (OSError, ValueError, KeyError):
        return 0.0


def read(variant: str, seed: int, run: Path, key: str = "") -> ConvergenceOutcome:
    """Return the outcome of a finished run."""
    records = [strict_json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    at = {r["step"]: r["tokens"] for r in steps}
    measured = [r for r in records if "valid_loss" in r and r["step"] in at]
    stored = [(at[r["step"]], r.get("valid_whole_loss", r["valid_loss"])) for r in measured]
    rate = statistics.median(r["tokens_per_second"] for r in steps)
    if (run / PLAIN).exists():
        plain = strict_json.loads((run / PLAIN).read_text())["loss"]
    else:
        plain = None
    losses = [loss for _, loss in stored]
    return ConvergenceOutcome(variant, seed, str(run), [t for t, _ in stored], losses, rate, key, plain, _device())


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})"


def _versions() -> dict[str, str]:
    import torch

    import megascale

    return {"megascale": megascale.__version__, "torch": torch.__version__}
