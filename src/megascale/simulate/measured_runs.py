"""Runs of this project as measurements: step times out of a run folder or a bench's file, and predictions written
before measuring."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale import config as configuration
from megascale.config import Config
from megascale.config.text_files import read_toml
from megascale.core.calls import MAX_RANKS
from megascale.core.json_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.core.untrusted_files import is_small_file
from megascale.errors import ConfigError, DataError
from megascale.simulate.cluster import ClusterSpec

# Steps at the start of a run that compile, allocate and measure kernels.
WARM_UP = 5
# Fewer steps than this after the warm-up are not a measurement.
LEAST_STEPS = 3
_LONGEST = 1e9  # seconds; a longer step is damage


@dataclass(frozen=True)
class MeasuredRun:
    """A run's steps.

    Attributes:
        folder: the run, or the file of `bench train --out`.
        config: what it ran.
        gpus: ranks.
        seconds: median step after the warm-up.
        spread: half the distance from the 10th to the 90th percentile, relative.
        steps: how many steps that is.
        device: what it ran on, "cpu" or "cuda".
    """

    folder: Path
    config: Config
    gpus: int
    seconds: float
    spread: float
    steps: int
    device: str = "cuda"


@dataclass(frozen=True)
class Prediction:
    """An entry of a predictions file, written before the run was measured.

    Attributes:
        name: the run's train.name.
        gpus, settings: how to start it: `megascale train` with these overrides on so many GPUs.
        software: the stack assumed.
        seconds, low, high: the step, P10 and P90.
    """

    name: str
    gpus: int
    settings: tuple[str, ...]
    software: str
    seconds: float
    low: float
    high: float

    def config(self, graphs: str = "off") -> Config:
        """The configuration that the settings describe; the stack says whether it replays graphs.

        graphs: kernels.graphs where the settings do not have it: the engine they were written for had none.
        """
        has_graphs_setting = any(setting.startswith("--kernels.graphs=") for setting in self.settings)
        return configuration.load(
            None, list(self.settings) + ([] if has_graphs_setting else [f"--kernels.graphs={graphs}"])
        )


def measure(folder: Path, gpus: int | None = None) -> MeasuredRun:
    """Return the median step of a run folder, or of a file that `bench train --out FILE.json` wrote.

    Args:
        gpus: ranks of the run; default: from its events or parallel.data.

    Raises:
        DataError: the folder is not a run, is too short, or does not contain the number of ranks.
    """
    if folder.is_file():
        try:
            report = json.loads(folder.read_text())
        except ValueError as error:
            raise DataError(f"{folder} is not valid JSON: {error}; name a file of `bench train --out`") from None
        return _benched(folder, report)
    if not is_small_file(folder / "config.toml"):
        raise DataError(
            f"{folder} is not a run folder: it has no config.toml that can be read; name one such as runs/NAME, or a "
            "file of `bench train --out`"
        )
    try:
        config = configuration.load(folder / "config.toml", keep_unknown_parts=True)
        metrics = list(_step_seconds(folder / "metrics.jsonl"))
    except (OSError, ConfigError) as error:
        raise DataError(
            f"{folder} is not a run folder: {error}; name one such as runs/NAME, or a file of `bench train --out`"
        ) from None
    records: dict[int, float] = {}
    world, device = gpus, config.train.device if config.train.device != "auto" else "cpu"
    for step, seconds, has_mfu in metrics:
        records[step] = seconds
        if has_mfu:  # of a GPU whose peak is known; a CPU has none
            device = "cuda"
    steps = [seconds for step, seconds in sorted(records.items())][WARM_UP:]
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{folder}/metrics.jsonl has {len(steps)} steps after {WARM_UP} of warm-up; a measurement needs at least "
            f"{LEAST_STEPS}: run more steps"
        )
    parallel = config.parallel
    world = world or _world(folder / "events.jsonl")
    if not world and parallel.data:
        world = parallel.model_ranks * parallel.data
    if not world:
        raise DataError(f"{folder} does not say on how many GPUs it ran; give --gpus")
    return _measured(folder, config, int(world), steps, device)


def _measured(source: Path, config: Config, gpus: int, steps: list[float], device: str) -> MeasuredRun:
    ordered = sorted(steps)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    middle = statistics.median(steps)
    return MeasuredRun(source, config, gpus, middle, (high - low) / (2 * middle), len(steps), device)


def measures(source: Path, gpus: int | None = None) -> list[MeasuredRun]:
    """Return the measured runs of `source`, one per timed run of a `benchmarks targets --out FILE.json` file."""
    try:
        if source.is_file():
            cases = json.loads(source.read_text())["cases"]
        else:
            cases = None
    except (ValueError, KeyError, TypeError):
        cases = None
    if cases is None:
        return [measure(source, gpus)]
    timed_runs = []
    for name, repeats in cases.items():
        for repeat, run in repeats.items():
            report = run["told"]
            # A command that begins with variables ran on other links, which no calibration describes.
            is_plain = run["command"].startswith(("megascale ", "python "))
            if report is not None and "all_step_seconds" in report and is_plain:
                timed_runs.append(_benched(Path(f"{source.name}, {name}, repeat {int(repeat) + 1}"), report))
    if not timed_runs:
        raise DataError(f"{source} holds no timed run that ended; run `python -m benchmarks targets --out {source}`")
    return timed_runs


def _benched(source: Path, report: Any) -> MeasuredRun:
    """The timed steps that a bench tells of; it has warmed up before them."""
    try:
        config = configuration.from_tree(report["settings"])
        steps = [float(seconds) for seconds in report["all_step_seconds"]]
        gpus = int(report["processes"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(
            f"{source} is not what `megascale bench train --out` writes: {type(error).__name__}: {error}"
        ) from None
    if len(steps) < LEAST_STEPS:
        raise DataError(f"{source} has {len(steps)} timed steps; a measurement needs at least --steps {LEAST_STEPS}")
    if config.train.device == "cpu" or "cpu" in str(report.get("device", "")).lower():
        device = "cpu"
    else:
        device = "cuda"
    return _measured(source, config, gpus, steps, device)


def check_device(run: MeasuredRun, cluster: ClusterSpec) -> None:
    """ConfigError if the run was made on a CPU and the cluster is of GPUs: one says nothing of the other."""
    if run.device == "cpu" and cluster.gpu.name != "cpu":
        raise ConfigError(
            f"{run.folder} ran on a CPU and cluster {cluster.name} is of {cluster.gpu.name}: nothing can be learnt or "
            "judged from one about the other; name a cluster file of that machine (`megascale simulate measure`)"
        )


def _step_seconds(metrics: Path) -> Iterator[tuple[int, float, bool]]:
    """Yield (step, seconds, whether its MFU is known) of each sound record. OSError if the file cannot be read."""
    for record in RecordReader(metrics):
        step, seconds = to_float(record.get("step")), to_float(record.get("seconds"))
        if 0 <= step < 1 << 53 and 0 < seconds < _LONGEST:
            yield int(step), seconds, "mfu" in record


def _world(events: Path) -> int | None:
    """Return the number of ranks of the last start in a run's events, None if they do not say it."""
    world = None
    with contextlib.suppress(OSError):
        for record in RecordReader(events):
            count = record.get("world")
            if isinstance(count, int) and 0 < count <= MAX_RANKS:
                world = count
    return world


def load_predictions(file: Path) -> tuple[str, list[Prediction]]:
    """Return the provenance and the predictions of a file of `simulate predict`. ConfigError if it is damaged."""
    tree = read_toml(file, "predictions")
    try:
        rows = [
            Prediction(
                str(r["name"]),
                int(r["gpus"]),
                tuple(map(str, r["settings"])),
                str(r["software"]),
                float(r["seconds"]),
                float(r["p10"]),
                float(r["p90"]),
            )
            for r in tree["run"]
        ]
        return str(tree["provenance"]), rows
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"predictions {str(file)!r} are damaged: {type(error).__name__}: {error}") from None


def matching(predictions: list[Prediction], runs: Path) -> list[tuple[Prediction, MeasuredRun]]:
    """Predictions whose run folder `runs`/NAME exists, with what it measured. DataError if one is of another layout."""
    matches = []
    for prediction in predictions:
        folder = runs / prediction.name
        if not (folder / "metrics.jsonl").is_file():
            continue
        measured = measure(folder, prediction.gpus)
        for section in ("model", "parallel"):
            predicted_section, measured_section = (
                getattr(prediction.config(), section),
                getattr(measured.config, section),
            )
            predicted_section, measured_section = (
                x.model_copy(update={"preset": None} if section == "model" else {})
                for x in (predicted_section, measured_section)
            )
            if predicted_section != measured_section:
                raise DataError(
                    f"{folder} ran another {section} section than {prediction.name} was predicted for; "
                    f"start it with {' '.join('--' + s for s in prediction.settings)}"
                )
        matches.append((prediction, measured))
    return matches
