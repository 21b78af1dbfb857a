"""Clock, power and temperature of a GPU while steps run, sampled by nvidia-smi twice per second."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence

from megascale.errors import ConfigError, TrainingError

PERIOD_MS = 500  # time between samples
FIRST_SAMPLE_SECONDS = 30.0  # limit for nvidia-smi's first line
_FIELDS = (("clock", "MHz"), ("power", "W"), ("temperature", "C"))  # name and unit, in nvidia-smi's order

# Clock in MHz, power in W, temperature in degrees Celsius; None for a value that the GPU does not report.
Values = tuple[float | None, float | None, float | None]


def check_watch(uses_gpu: bool) -> None:
    """Raise ConfigError if --watch cannot work: the steps do not use a GPU, or nvidia-smi is not on PATH."""
    if not uses_gpu:
        raise ConfigError("--watch samples a GPU, but these steps run on the CPU; leave --watch out")
    find_nvidia_smi()


def find_nvidia_smi() -> str:
    """Return the path of nvidia-smi. Raises ConfigError if nvidia-smi is not on PATH."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise ConfigError(
            "--watch needs nvidia-smi, which is not on PATH; install the driver's tools, or leave --watch out"
        )
    return path


def parse_values(line: str) -> Values | None:
    """Parse a line such as "1755, 690.12, 45"; a field such as "[N/A]" becomes None.

    Returns None for a line without these values, such as an error message.
    """
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_FIELDS):
        return None
    values: list[float | None] = []
    for field in fields:
        try:
            values.append(float(field))
        except ValueError:
            if not field.startswith("["):
                return None
            values.append(None)
    return values[0], values[1], values[2]


class GpuWatch:
    """Context manager that samples one GPU: a child process runs nvidia-smi, and a thread reads its output.

    Entering it raises TrainingError if nvidia-smi gives no sample.

    Args:
        gpu: UUID of the GPU. An index is ambiguous, since CUDA_VISIBLE_DEVICES renumbers GPUs.

    Attributes:
        error: after the context, why nvidia-smi ended early; None if nvidia-smi ran until the end.
    """

    def __init__(self, gpu: str) -> None:
        self._command = [find_nvidia_smi(), "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
        self._command += ["--format=csv,noheader,nounits", "-i", gpu, "-lms", str(PERIOD_MS)]
        self._samples: list[tuple[float, Values]] = []  # time.perf_counter, values
        self._messages: list[str] = []  # the last three lines that hold no values
        self._ready = threading.Event()  # set by the first sample, or by the end of the output
        self.error: str | None = None

    def __enter__(self) -> GpuWatch:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._thread = threading.Thread(target=self._read_output, name="megascale-watch", daemon=True)
        self._thread.start()
        try:
            self._ready.wait(FIRST_SAMPLE_SECONDS)
            if not self._samples:
                raise TrainingError(f"--watch: nvidia-smi gave no sample: {' '.join(self._messages) or 'no output'}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values = parse_values(line)
            if values is not None:
                self._samples.append((time.perf_counter(), values))
                self._ready.set()
            elif line.strip():
                self._messages = self._messages[-2:] + [line.strip()]
        self._ready.set()

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is not None:
            reason = " ".join(self._messages) or f"exit code {self._process.returncode}"
            self.error = f"nvidia-smi ended while steps still ran: {reason}"
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def list_samples(self, start: float) -> list[list[float | None]]:
        """Return [seconds since `start`, MHz, W, C] for each sample taken after `start` (time.perf_counter)."""
        samples = list(self._samples)  # a copy, since the thread may append
        return [[round(time_s - start, 3), *values] for time_s, values in samples if time_s >= start]


def summarize_samples(samples: Sequence[Sequence[float | None]]) -> str:
    """Describe how clock, power and temperature changed: medians of the first and of the last tenth of the samples.

    Args:
        samples: as `GpuWatch.list_samples` returns them.
    """
    if not samples:
        return "no sample while the steps ran"
    tenth = max(1, len(samples) // 10)
    changes = []
    for column, (name, unit) in enumerate(_FIELDS, 1):
        first = _format_median(samples[:tenth], column)
        last = _format_median(samples[-tenth:], column)
        changes.append(f"{name} {first} -> {last} {unit}")
    return ", ".join(changes)


def _format_median(samples: Sequence[Sequence[float | None]], column: int) -> str:
    values = [sample[column] for sample in samples]
    reported_values = [value for value in values if value is not None]
    if reported_values:
        return f"{statistics.median(reported_values):,.0f}"
    return "?"
