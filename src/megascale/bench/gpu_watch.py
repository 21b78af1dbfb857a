"""What a GPU does while steps run: its clock, power and temperature, as nvidia-smi tells them twice a second."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence

from megascale.errors import ConfigError, TrainingError

PERIOD = 500  # milliseconds between samples
FIRST = 30.0  # seconds within which nvidia-smi must have said something
_FIELDS = (("clock", "MHz"), ("power", "W"), ("temperature", "C"))

Values = tuple[float | None, float | None, float | None]  # MHz, W, C; None: this device does not tell


def find_nvidia_smi(cuda: bool) -> str:
    """The path of nvidia-smi. ConfigError where steps run without a GPU (`cuda` false) or it is not installed."""
    if not cuda:
        raise ConfigError("--watch samples a GPU, and these steps run on none; leave it out")
    found = shutil.which("nvidia-smi")
    if found is None:
        raise ConfigError(
            "--watch asks nvidia-smi, which is not on PATH; install the driver's tools, or leave --watch out"
        )
    return found


def parse_sample(line: str) -> Values | None:
    """A line such as "1755, 690.12, 45"; None for one that holds no sample. "[N/A]" and the like give None each."""
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
    """Samples one GPU from `with` to its end, by a child process and a thread that reads it.

    Args:
        gpu: its UUID, since CUDA_VISIBLE_DEVICES numbers GPUs anew.

    Raises TrainingError, on entering, if nvidia-smi has no sample to give.
    """

    def __init__(self, gpu: str) -> None:
        self._command = [find_nvidia_smi(True), "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
        self._command += ["--format=csv,noheader,nounits", "-i", gpu, "-lms", str(PERIOD)]
        self._samples: list[tuple[float, Values]] = []
        self._said: list[str] = []  # what is no sample: why it has none
        self._told = threading.Event()
        self.problem: str | None = None

    def __enter__(self) -> GpuWatch:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._thread = threading.Thread(target=self._read, name="megascale-watch", daemon=True)
        self._thread.start()
        try:
            self._told.wait(FIRST)
            if not self._samples:
                raise TrainingError(f"--watch: nvidia-smi gave no sample: {' '.join(self._said) or 'it said nothing'}")
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
                self._told.set()
            elif line.strip():
                self._said = [*self._said[-2:], line.strip()]
        self._told.set()

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is not None:
            self.problem = f"nvidia-smi ended before the steps: {' '.join(self._said) or self._process.returncode}"
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def samples_since(self, began: float) -> list[list[float | None]]:
        """[seconds since `began` (time.perf_counter), MHz, W, C] of each sample from then on."""
        return [[round(at - began, 3), *values] for at, values in list(self._samples) if at >= began]


def summarize_samples(samples: Sequence[Sequence[float | None]]) -> str:
    """Medians of the first and of the last tenth of what `GpuWatch.since` gave."""
    if not samples:
        return "no sample while the steps ran"
    tenth = max(1, len(samples) // 10)
    said = []
    for place, (name, unit) in enumerate(_FIELDS, 1):
        ends = []
        for part in (samples[:tenth], samples[-tenth:]):
            values = [v for sample in part if (v := sample[place]) is not None]
            ends.append(f"{statistics.median(values):,.0f}" if values else "?")
        said.append(f"{name} {ends[0]} -> {ends[1]} {unit}")
    return ", ".join(said)
