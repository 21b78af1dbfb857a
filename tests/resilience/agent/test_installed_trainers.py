"""What trainers that are installed print and save: torchtitan's own logger, and Megatron-Core's example loop."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.resilience.agent.progress_patterns import ProgressReader, Reading
from megascale.resilience.agent.saved_checkpoints import find_saved_step
from tests.chaos.foreign.job import FOLDER

# The methods that print, on a processor that is not built, since that needs a GPU.
PRINT_TORCHTITAN = """
import sys
import time
from types import SimpleNamespace
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.tools.logging import init_logger
from torchtitan.tools.utils import Color

memory = DeviceMemStats(1.0, 2.0, 36.98, 46.74, 0, 0)
processor = SimpleNamespace(
    num_flops_per_token=6e9, time_last_log=time.perf_counter() - 1, ntokens_since_last_log=7123.4,
    parallel_dims=SimpleNamespace(non_data_parallel_size=1), has_quantization=False, gpu_peak_flops=989e12,
    config=SimpleNamespace(log_freq=10), data_loading_times=[0.1], color=Color(),
    device_memory_monitor=SimpleNamespace(get_peak_stats=lambda: memory, reset_peak_stats=lambda: None),
    logger=SimpleNamespace(log=lambda metrics, step: None),
)
init_logger()
MetricsProcessor.log(processor, step=20, global_avg_loss=7.03125, global_max_loss=8.0, grad_norm=1.25)
processor.ntokens_since_last_log, processor.data_loading_times = 1, [0.1]
MetricsProcessor.log_validation(processor, loss=6.5, step=20)
MetricsProcessor.log(processor, step=30, global_avg_loss=-1.0, global_max_loss=-1.0, grad_norm=1.25)
"""


def run_python(arguments: list[str], **variables: str) -> list[str]:
    """Return the lines that a Python process prints, with further environment variables."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    environment.pop("PYTHONSAFEPATH", None)  # a script may import its neighbours
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return (result.stdout + result.stderr).splitlines()


def test_lines_of_torchtitans_logger_are_read():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed; pip install torchtitan")
    lines = run_python(["-c", PRINT_TORCHTITAN])
    assert any("\x1b[" in line for line in lines)
    readings = [reading for reading in map(ProgressReader([]).read, lines) if reading is not None]
    assert [(r.step, r.loss, r.grad_norm) for r in readings] == [(20, 7.03125, 1.25), (30, None, 1.25)]
    assert readings[0].tokens_per_second == pytest.approx(7123, rel=0.05)


def test_lines_and_checkpoints_of_megatron_cores_example_are_seen(tmp_path: Path):
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed; pip install megatron-core")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    variables["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes as long as the steps and prints nothing
    lines = run_python([str(FOLDER / "train_megatron.py"), "15", str(tmp_path), "none", "0"], **variables)
    readings = [reading for reading in map(ProgressReader([]).read, lines) if reading is not None]
    assert [reading.step for reading in readings] == list(range(1, 16))
    losses = [reading.loss for reading in readings if reading.loss is not None]
    assert 3.5 < losses[-1] < losses[0] < 4.5
    assert readings[0] == Reading(1, loss=losses[0])
    assert find_saved_step(str(tmp_path / "iter_{step}/.metadata")) == 15
