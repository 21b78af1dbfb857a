"""Training runs for benchmarks that compare them: `megascale train` as a user starts it, and its metrics."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.core import strict_json

LAST_LINES = 8  # of a failed run's output that the error shows


def train(
    config: Config,
    processes: int,
    folder: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda records: None,
) -> list[dict[str, Any]]:
    """Train `config` with `processes` ranks in `folder`, which is made; the records of its metrics file.

    Args:
        name: what errors call it.
        environment: variables in addition to this process's own.
        at_step: told how many records there are, now and then.

    Raises TrainingError with the end of its output if it fails.
    """
    from megascale.errors import TrainingError

    config = config.model_copy(
        update={"train": config.train.model_copy(update={"runs": str(folder), "name": "compared"})}
    )
    folder.mkdir(parents=True)
    config.write(folder / "config.toml")
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(folder / "config.toml")]
    command += [f"--parallel.data={processes // (config.parallel.tensor * config.parallel.pipeline)}"]
    metrics = config.run_folder / "metrics.jsonl"
    variables = os.environ | {"COLUMNS": "120"} | dict(environment or {})
    with open(folder / "output.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        try:
            while process.poll() is None:
                on_progress(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
                time.sleep(0.1)
        finally:
            # It runs on only after an interruption; it ends its own ranks.
            process.terminate()
            process.wait()
    if process.returncode:
        output = (folder / "output.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise TrainingError(f"the run of {name} ended with exit code {process.returncode}: " + "\n  ".join(output))
    return [strict_json.loads(line) for line in metrics.read_text().splitlines()]


def make_timing_config(config: Config, steps: int) -> dict[str, Any]:
    """Return the tree of a configuration for timing: no evaluation, no checkpoint, the file's learning rates."""
    tree = config.model_dump(exclude_none=True)
    tree["lr"].setdefault("decay_steps", max(1, config.train.steps))
    tree["data"].pop("valid", None)
    tree["train"].pop("sample_prompt", None)
    tree["train"] |= {"steps": steps, "eval_interval": 0}
    tree["checkpoint"] = {"interval": 0, "at_end": False, "resume": False}
    peak = config.observe.peak_tflops
    tree["observe"] = {"tensorboard": False, **({} if peak is None else {"peak_tflops": peak})}
    return tree


def describe_machine(config: Config) -> dict[str, Any]:
    """Return device and versions for a benchmark's record."""
    import torch

    import megascale

    cuda = torch.cuda.is_available() and config.train.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({os.cpu_count()} cores, {platform.machine()})",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
    }
