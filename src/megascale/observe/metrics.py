"""Sinks of a run's metrics, one record per step: metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

`observe.sinks` selects further sinks. Another package adds a sink with `register`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megascale.config import Config
from megascale.config.parts import SINKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.json_lines import append_record
from megascale.errors import ConfigError, describe_install


class MetricSink(Protocol):
    """A receiver of records."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; `record["step"]` orders the records."""

    def close(self) -> None:
        """Flush and close."""


@dataclass(frozen=True)
class SinkRequest:
    """Arguments of the function that makes a sink. Only rank 0 makes sinks.

    Attributes:
        run: the run folder, which exists.
        config: configuration of the run.
        step: last step before this start; records of later steps may have been written and are repeated.
    """

    run: Path
    config: Config
    step: int


class JsonLines:
    """Appends records to a file, one JSON object per line.

    Each record opens the file by its name. Rank 0 of another start may replace the file by a shorter one, and an open
    file would then be the replaced one, whose records no reader sees.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._file.touch()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        append_record(self._file, record)

    def close(self) -> None:
        """Do nothing: no file is open."""


# Groups of metrics in TensorBoard and Weights & Biases, by prefix of the name; for other names by the whole name.
_PREFIXES = {"valid_": "valid", "wait_": "waits", "loader_": "data", "float8_": "precision", "expert_": "experts"}
_GROUPS = {
    "train": ("loss", "grad_norm", "learning_rate", "skipped_steps"),
    "speed": ("seconds", "tokens_per_second", "mfu", "compute_seconds", "memory_gib"),
    "progress": ("tokens", "epoch"),
    "experts": ("dead_experts",),
}


def get_metric_tag(key: str) -> str:
    """Return a metric's group and name, such as train/loss, speed/mfu, waits/tensor_seconds."""
    for prefix, group in _PREFIXES.items():
        if key.startswith(prefix):
            return f"{group}/{key.removeprefix(prefix)}"
    for group, names in _GROUPS.items():
        if key in names:
            return f"{group}/{key}"
    return f"other/{key}"


def list_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by tag (`get_metric_tag`), for TensorBoard and Weights & Biases."""
    return {
        get_metric_tag(key): value
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    }


class TensorBoard:
    """Writes scalars for TensorBoard to `folder`.

    Args:
        step: last step before this start; scalars that an earlier start wrote for later steps are hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        """Write a scalar for each number of the record."""
        for tag, value in list_scalars(record).items():
            self._writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class Wandb:
    """Sends values to Weights & Biases. A resumed run continues under the id that its folder stores.

    Raises ConfigError if the package is missing or the service refuses the run.
    """

    def __init__(self, project: str, run: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"observe.wandb={project!r} needs the package wandb; {describe_install('wandb')} or leave the key out"
            ) from None
        identity_file = run / "wandb-id"
        if identity_file.exists():
            identity = identity_file.read_text().strip()
        else:
            identity = secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project, name=run.name, id=identity, resume="allow", dir=str(run), config=config
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"observe.wandb={project!r}: Weights & Biases cannot be used ({error}); run `wandb login`, set "
                "WANDB_MODE=offline to keep the records in the run folder, or leave the key out"
            ) from None
        identity_file.write_text(identity + "\n")

    def write(self, record: dict[str, Any]) -> None:
        """Send a value for each number of the record. The service drops steps that a resumed run repeats."""
        self._run.log(list_scalars(record), step=record["step"])

    def close(self) -> None:
        """Send the remaining values."""
        self._run.finish()


_BAR_COLUMNS = 20  # width of the progress bar
_WARM_UP_STEPS = 2  # steps in which kernels are compiled and tuned
_RECENT_STEPS = 100  # the time of these steps predicts the remaining time


class _Console(Console):
    """A console that drops lines that it cannot write, since a lost terminal must not end training."""

    def print(self, *values: Any, **options: Any) -> None:
        """Print a line, or drop it if the terminal is lost."""
        with contextlib.suppress(OSError):
            super().print(*values, **options)

    def on_broken_pipe(self) -> None:
        """Drop the line. The method of the base class ends the process."""


class Terminal:
    """Shows progress: a bar on a terminal, otherwise a line every `interval` steps.

    Args:
        steps: last step of the run.
        interval: steps between printed lines.
        live: show a bar if the output is a terminal.
    """

    def __init__(self, steps: int, interval: int, live: bool) -> None:
        self._console = _Console(highlight=False, soft_wrap=True)
        self._interval = interval
        self._steps = steps
        self._start_step: int | None = None  # last step before this start; None before the first record
        # Steps and their end times, the newest last, for the remaining time.
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._bar: Progress | None = None
        if live and sys.stdout is not None and sys.stdout.isatty():
            self._bar = Progress(BarColumn(_BAR_COLUMNS), TextColumn("{task.description}"), console=self._console)
            with contextlib.suppress(OSError):
                self._bar.start()
            self._task = self._bar.add_task("starting", total=steps)

    def write(self, record: dict[str, Any]) -> None:
        """Show a training record, or print an evaluation record, which has a held-out loss only."""
        step = record["step"]
        if "valid_loss" in record and "loss" not in record:
            text = f"step {step}: held-out loss {record['valid_loss']:.4f}"
            tokens = record.get("valid_tokens")
            if record.get("valid_whole_tokens", tokens) != tokens:
                text += f", of the whole file {record['valid_whole_loss']:.4f}"
            if "valid_bits_per_byte" in record:
                text += f"  bits per byte {record['valid_bits_per_byte']:.3f}"
            self.print_line(text)
            return
        if self._start_step is None:
            self._start_step = step - 1
        elif step > self._start_step + _WARM_UP_STEPS:
            self._ends.append((step, time.monotonic()))
        line = self._format_line(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        elif step % self._interval == 0 or step == self._steps or step == self._start_step + 1:
            self._console.print(line)

    def _format_line(self, record: dict[str, Any]) -> str:
        """Return the values that fit the width of the terminal; without a terminal, 80 columns.

        metrics.jsonl has all values.
        """
        step = record["step"]
        remaining_seconds = self._estimate_remaining_seconds()
        texts = {
            "step": f"step {step}/{self._steps}",
            "loss": f"loss {record['loss']:#.4g}",
            "lr": f"lr {record['learning_rate']:.1e}".replace("e-0", "e-"),
            "norm": f"norm {record['grad_norm']:.2f}",
            "tokens": f"{_format_count(record['tokens_per_second'])} tok/s",
        }
        if "skipped_steps" in record:
            texts["skipped"] = f"{record['skipped_steps']} steps skipped"
        if "float8_clipped" in record:
            texts["float8"] = f"float8 clipped {record['float8_clipped']:.0e}, flushed {record['float8_flushed']:.0e}"
        if "expert_rank_load_max" in record:
            texts["experts"] = f"rank load {record['expert_rank_load_max']:.2f}x, {record['dead_experts']:.0f} dead"
        if "mfu" in record:
            texts["mfu"] = f"MFU {100 * record['mfu']:.0f}%"
        memory_digits = 0 if record["memory_gib"] >= 10 else 1
        texts["memory"] = f"{record['memory_gib']:.{memory_digits}f} GiB"
        if remaining_seconds is not None:
            texts["remaining"] = f"{_format_duration(remaining_seconds)} left"
        width = self._console.width
        if self._bar is not None:
            width -= _BAR_COLUMNS + 1  # the bar and a space
        # Leave out values, the least important first, until the line fits.
        for name in ("memory", "lr", "norm", "remaining"):
            if len("  ".join(texts.values())) <= width:
                break
            texts.pop(name, None)
        return "  ".join(texts.values())

    def _estimate_remaining_seconds(self) -> float | None:
        """Return the seconds to the last step at the speed of recent steps; None before two steps after the warm-up."""
        if len(self._ends) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._ends[0], self._ends[-1]
        return (last_time - first_time) / (last_step - first_step) * (self._steps - last_step)

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            console = self._bar.console
        else:
            console = self._console
        console.print(text, markup=False)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()


MakeSink = Callable[[SinkRequest], MetricSink]


def _make_wandb(request: SinkRequest) -> Wandb:
    project = request.config.observe.wandb or request.run.name
    return Wandb(project, request.run, request.config.model_dump(exclude_none=True))


def _make_tensorboard(request: SinkRequest) -> TensorBoard:
    return TensorBoard(request.run / "tensorboard", request.step)


SINK_FACTORIES: Registry[MakeSink] = Registry(SINKS.key, {"tensorboard": _make_tensorboard, "wandb": _make_wandb})


def register(name: str, make: MakeSink, description: str = "") -> None:
    """Register a sink for `observe.sinks`. Rank 0 calls `make(request)` before the first step of each start."""
    SINKS.register(name, PartFacts(description))
    SINK_FACTORIES.register(name, make)


def has_tensorboard() -> bool:
    """Return whether TensorBoard, an optional package, is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def open_sinks(request: SinkRequest) -> Iterator[MetricSink]:
    """Open and yield the configured sinks: TensorBoard, Weights & Biases and those of observe.sinks, each once."""
    observe = request.config.observe
    enabled = {"tensorboard": observe.tensorboard and has_tensorboard(), "wandb": observe.wandb is not None}
    names = [name for name, is_enabled in enabled.items() if is_enabled]
    for name in dict.fromkeys(names + observe.sinks):
        sink = SINK_FACTORIES[name](request)
        if name not in SINK_FACTORIES.builtin_names:
            _check_sink(name, sink)
        yield sink


def _check_sink(name: str, sink: object) -> None:
    """Raise ConfigError if a package's sink lacks a method."""
    for method in ("write", "close"):
        if not callable(getattr(sink, method, None)):
            raise ConfigError(
                f"observe.sinks={name}: {type(sink).__name__} has no method `{method}`; a sink has write(record) and "
                "close()"
            )


def _format_count(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:.2f}M"
    if count >= 1e3:
        return f"{count / 1e3:.1f}k"
    return f"{count:.0f}"


def _format_duration(seconds: float) -> str:
    total_minutes, seconds_of_minute = divmod(int(seconds), 60)
    hours, minutes_of_hour = divmod(total_minutes, 60)
    if hours:
        return f"{hours}h{minutes_of_hour:02d}m"
    return f"{minutes_of_hour}m{seconds_of_minute:02d}s"
