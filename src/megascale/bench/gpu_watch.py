"""Clock, power and temperature of a GPU while steps run, sampled by nvidia-smi twice per second."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence

from megascale.errors import ConfigError, TrainingError

PERIOD = 500  # milliseconds between samples
FIRST_SAMPLE_SECONDS = 30.0  # limit for nvidia-smi's first line
_FIELDS = (("clock", "MHz"), ("power", "W"), ("temperature", "C"))

Values = tuple[float | None, float | None, float | None]  # MHz, W, C; None if the device does not report it


def find_nvidia_smi(cuda: bool) -> str:
    """Return the path of nvidia-smi. Raises ConfigError without a GPU (`cuda` false) or without nvidia-smi."""
    if not cuda:
        raise ConfigError("--watch samples a GPU, and these steps run on none; leave it out")
    path = shutil.which("nvidia-smi")
    if path is None:
        raise ConfigError(
            "--watch needs nvidia-smi, which is not on PATH; install the driver's tools, or leave --watch out"
        )
    return path


def parse_sample(line: str) -> Values | None:
    """Parse a line such as "1755, 690.12, 45"; "[N/A]" gives None for a value, a line without a sample gives None."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_FIELDS):
        return None
    values: list[float | None] = []
    for part in parts:
        try:
            values.append(float(part))
        except ValueError:
            if not part.startswith("["):
                return None
            values.append(None)
    return values[0], values[1], values[2]


class GpuWatch:
    """Context that samples one GPU, by a child process and a thread that reads it.

    Args:
        gpu: its UUID, since CUDA_VISIBLE_DEVICES numbers GPUs anew.

    Entering raises TrainingError if nvidia-smi gives no sample.
    """

    def __init__(self, gpu: str) -> None:
        self._command = [find_nvidia_smi(True), "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
        self._command += ["--format=csv,noheader,nounits", "-i", gpu, "-lms", str(PERIOD)]
        self._samples: list[tuple[float, Values]] = []
        self._messages: list[str] = []  # the last lines without a sample
        self._has_output = threading.Event()
        self.problem: str | None = None

    def __enter__(self) -> GpuWatch:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._thread = threading.Thread(target=self._read, name="megascale-watch", daemon=True)
        self._thread.start()
        try:
            self._has_output.wait(FIRST_SAMPLE_SECONDS)
            if not self._samples:
                raise TrainingError(f"--watch: nvidia-smi gave no sample: {' '.join(self._messages) or 'no output'}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values = parse_sample(line)
            if values is not None:
                self._samples.append((time.perf_counter(), values))
                self._has_output.set()
            elif line.strip():
                self._messages = self._messages[-2:] + [line.strip()]
        self._has_output.set()

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is not None:
            self.problem = f"nvidia-smi ended before the steps: {' '.join(self._messages) or self._process.returncode}"
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def samples_since(self, start: float) -> list[list[float | None]]:
        """Return [seconds since `start` (time.perf_counter), MHz, W, C] of each sample from then on."""
        return [[round(moment - start, 3), *values] for moment, values in list(self._samples) if moment >= start]


def summarize_samples(samples: Sequence[Sequence[float | None]]) -> str:
    """Return the medians of the first and the last tenth of the samples of `GpuWatch.samples_since`."""
    if not samples:
        return "no sample while the steps ran"
    tenth = max(1, len(samples) // 10)
    ranges = []
    for column, (name, unit) in enumerate(_FIELDS, 1):
        first = _median(samples[:tenth], column)
        last = _median(samples[-tenth:], column)
        ranges.append(f"{name} {first} -> {last} {unit}")
    return ", ".join(ranges)


def _median(samples: Sequence[Sequence[float | None]], column: int) -> str:
    values = [sample[column] for sample in samples]
    numbers = [value for value in values if value is not None]
    if numbers:
        return f"{statistics.median(numbers):,.0f}"
    return "?"
