"""Measured step times from run folders and benchmark files, and predictions that were written before measuring."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megascale import config as configuration
from megascale.config import Config
from megascale.config.text_files import read_toml
from megascale.core.calls import MAX_RANKS
from megascale.core.json_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.core.untrusted_files import is_small_file
from megascale.errors import ConfigError, DataError
from megascale.simulate.cluster import ClusterSpec

# Number of steps at the start of a run that are left out, because they compile, allocate and measure kernels.
WARM_UP = 5
# Minimum number of steps of a measurement, after the warm-up.
MIN_STEPS = 3
_MAX_SECONDS = 1e9  # a record with a longer step is damaged


@dataclass(frozen=True)
class MeasuredRun:
    """Measured step time of a run.

    Attributes:
        folder: the run folder, or the file of a benchmark; for one of several runs in a file, a description of it.
        config: the run's configuration.
        gpus: number of ranks.
        seconds: median step after the warm-up.
        spread: half the distance from the 10th to the 90th percentile, relative to the median.
        steps: number of steps after the warm-up.
        device: "cpu" or "cuda".
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
        gpus: number of GPUs of the run.
        settings: overrides with which `megascale train` starts the run.
        software: name of the assumed software stack.
        seconds, low, high: predicted time of a step, its P10 and its P90.
    """

    name: str
    gpus: int
    settings: tuple[str, ...]
    software: str
    seconds: float
    low: float
    high: float

    def config(self, graphs: str = "off") -> Config:
        """Return the configuration that the settings describe.

        Args:
            graphs: value of kernels.graphs if the settings leave it out; old predictions are of an engine without
                graphs.
        """
        settings = list(self.settings)
        if not any(setting.startswith("--kernels.graphs=") for setting in settings):
            settings.append(f"--kernels.graphs={graphs}")
        return configuration.load(None, settings)


def measure_run(folder: Path, gpus: int | None = None) -> MeasuredRun:
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
        return _measure_report(folder, report)
    if not is_small_file(folder / "config.toml"):
        raise DataError(
            f"{folder} is not a run folder: it has no config.toml that can be read; name one such as runs/NAME, or a "
            "file of `bench train --out`"
        )
    try:
        config = configuration.load(folder / "config.toml", keep_unknown_parts=True)
        step_records = list(_read_steps(folder / "metrics.jsonl"))
    except (OSError, ConfigError) as error:
        raise DataError(
            f"{folder} is not a run folder: {error}; name one such as runs/NAME, or a file of `bench train --out`"
        ) from None
    # The last record of a step that was repeated after a restart counts.
    seconds_by_step: dict[int, float] = {}
    device = "cpu" if config.train.device == "auto" else config.train.device
    for record in step_records:
        seconds_by_step[record.step] = record.seconds
        if record.has_mfu:  # only GPUs with a known peak have an MFU
            device = "cuda"
    step_seconds = [seconds for _, seconds in sorted(seconds_by_step.items())][WARM_UP:]
    if len(step_seconds) < MIN_STEPS:
        raise DataError(
            f"{folder}/metrics.jsonl has {len(step_seconds)} steps after {WARM_UP} of warm-up; a measurement needs at "
            f"least {MIN_STEPS}: run more steps"
        )
    parallel = config.parallel
    world = gpus or _read_world(folder / "events.jsonl")
    if not world and parallel.data:
        world = parallel.model_ranks * parallel.data
    if not world:
        raise DataError(f"{folder} does not say on how many GPUs it ran; give --gpus")
    return _make_run(folder, config, gpus=int(world), step_seconds=step_seconds, device=device)


def _make_run(source: Path, config: Config, *, gpus: int, step_seconds: list[float], device: str) -> MeasuredRun:
    ordered = sorted(step_seconds)
    tail_count = len(ordered) // 10  # steps beyond the 10th and the 90th percentile
    low = ordered[tail_count]
    high = ordered[-1 - tail_count]
    median = statistics.median(step_seconds)
    spread = (high - low) / (2 * median)
    return MeasuredRun(source, config, gpus, seconds=median, spread=spread, steps=len(step_seconds), device=device)


def list_measured_runs(source: Path, gpus: int | None = None) -> list[MeasuredRun]:
    """Return the measured runs of a run folder or file.

    A file of `benchmarks targets --out FILE.json` has several runs, any other source has one. Raises the errors of
    `measure_run`, and DataError for a file without a timed run.
    """
    cases = None
    if source.is_file():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            cases = json.loads(source.read_text())["cases"]
    if cases is None:
        return [measure_run(source, gpus)]
    timed_runs = []
    for name, repeats in cases.items():
        for repeat, run in repeats.items():
            report = run["told"]  # what `bench train` wrote, None without a result
            # A command that begins with environment variables ran over other links, which no calibration describes.
            is_plain = run["command"].startswith(("megascale ", "python "))
            if report is not None and "all_step_seconds" in report and is_plain:
                run_source = Path(f"{source.name}, {name}, repeat {int(repeat) + 1}")
                timed_runs.append(_measure_report(run_source, report))
    if not timed_runs:
        raise DataError(f"{source} holds no timed run that ended; run `python -m benchmarks targets --out {source}`")
    return timed_runs


def _measure_report(source: Path, report: Any) -> MeasuredRun:
    """Return the measured run of a benchmark's report, whose steps contain no warm-up."""
    try:
        config = configuration.from_tree(report["settings"])
        step_seconds = [float(seconds) for seconds in report["all_step_seconds"]]
        gpus = int(report["processes"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(
            f"{source} is not what `megascale bench train --out` writes: {type(error).__name__}: {error}"
        ) from None
    if len(step_seconds) < MIN_STEPS:
        raise DataError(
            f"{source} has {len(step_seconds)} timed steps; a measurement needs at least --steps {MIN_STEPS}"
        )
    device = "cuda"
    if config.train.device == "cpu" or "cpu" in str(report.get("device", "")).lower():
        device = "cpu"
    return _make_run(source, config, gpus=gpus, step_seconds=step_seconds, device=device)


def check_device(run: MeasuredRun, cluster: ClusterSpec) -> None:
    """Raise ConfigError if the run was on a CPU and the cluster has GPUs."""
    if run.device == "cpu" and cluster.gpu.name != "cpu":
        raise ConfigError(
            f"{run.folder} ran on a CPU and cluster {cluster.name} is of {cluster.gpu.name}, so their step times are "
            "not comparable; name a cluster file of the machine that ran it (`megascale simulate measure`)"
        )


class _StepRecord(NamedTuple):
    """Time of a step, and whether the run's metrics have an MFU of it."""

    step: int
    seconds: float
    has_mfu: bool


def _read_steps(metrics: Path) -> Iterator[_StepRecord]:
    """Yield the step of each valid record. Raises OSError for an unreadable file."""
    for record in RecordReader(metrics):
        step = to_float(record.get("step"))
        seconds = to_float(record.get("seconds"))
        if 0 <= step < 1 << 53 and 0 < seconds < _MAX_SECONDS:
            yield _StepRecord(int(step), seconds, has_mfu="mfu" in record)


def _read_world(events: Path) -> int | None:
    """Return the number of ranks of the last start in a run's events, or None if no event has it."""
    world = None
    with contextlib.suppress(OSError):
        for record in RecordReader(events):
            count = record.get("world")
            if isinstance(count, int) and 0 < count <= MAX_RANKS:
                world = count
    return world


def load_predictions(file: Path) -> tuple[str, list[Prediction]]:
    """Return the provenance and the predictions in a file of `simulate predict`.

    Raises ConfigError if it is damaged.
    """
    tree = read_toml(file, "predictions")
    try:
        rows = [
            Prediction(
                name=str(row["name"]),
                gpus=int(row["gpus"]),
                settings=tuple(str(setting) for setting in row["settings"]),
                software=str(row["software"]),
                seconds=float(row["seconds"]),
                low=float(row["p10"]),
                high=float(row["p90"]),
            )
            for row in tree["run"]
        ]
        return str(tree["provenance"]), rows
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"predictions {str(file)!r} are damaged: {type(error).__name__}: {error}") from None


def match_predictions(predictions: list[Prediction], runs: Path) -> list[tuple[Prediction, MeasuredRun]]:
    """Return the predictions whose run folder `runs`/NAME exists, each with its measured run.

    Raises DataError if a run has another model or layout than its prediction.
    """
    matches = []
    for prediction in predictions:
        folder = runs / prediction.name
        if not (folder / "metrics.jsonl").is_file():
            continue
        measured = measure_run(folder, prediction.gpus)
        for section in ("model", "parallel"):
            predicted_section = getattr(prediction.config(), section)
            measured_section = getattr(measured.config, section)
            if section == "model":
                # The name of a preset does not matter if its values are equal.
                predicted_section = predicted_section.model_copy(update={"preset": None})
                measured_section = measured_section.model_copy(update={"preset": None})
            if predicted_section != measured_section:
                raise DataError(
                    f"{folder} ran another {section} section than {prediction.name} was predicted for; "
                    f"start it with {' '.join('--' + s for s in prediction.settings)}"
                )
        matches.append((prediction, measured))
    return matches
