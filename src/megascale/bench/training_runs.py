"""Whole training runs for benches that compare them: `megascale train` as a user starts it, and what it measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.config import Config
from megascale.core import strict_json

if TYPE_CHECKING:
    import torch

    from megascale.rendezvous.groups import Groups
    from megascale.train.rank_info import RankInfo

VOCABULARY = 50304  # tokens of a model that is only timed
LAST_LINES = 8  # of a failed run's output that the error shows


def train(
    config: Config,
    processes: int,
    folder: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
    at_step: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Train `config` with `processes` ranks in `folder`, which is made; the records of its metrics file.

    Args:
        name: what errors call it.
        environment: variables beside this process's own.
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
                at_step(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
                time.sleep(0.1)
        finally:
            # Only a person's interruption leaves it running here; it ends its own ranks.
            process.terminate()
            process.wait()
    if process.returncode:
        said = (folder / "output.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise TrainingError(f"the run of {name} ended with exit code {process.returncode}: " + "\n  ".join(said))
    return [strict_json.loads(line) for line in metrics.read_text().splitlines()]


def load_shape(settings: list[str]) -> Config:
    """The configuration of overrides alone, with a vocabulary where the shape they name has none."""
    from megascale.config import load_command_line

    config = load_command_line(None, settings)
    if config.model.vocab_size is not None:
        return config
    return load_command_line(None, [*settings, f"--model.vocab_size={VOCABULARY}"])


def join_groups(config: Config) -> tuple[RankInfo, Groups | None]:
    """This process's place, and its groups where there are others; collective."""
    from megascale.rendezvous.start_job import initialise
    from megascale.train.rank_info import check_place, find_rank_info

    place = find_rank_info(config)
    check_place(config, place, saves_checkpoints=False)
    if place.world == 1:
        return place, None
    where = {"rank": place.rank, "world": place.world, "local_rank": place.local_rank}
    return place, initialise(config, **where, device=place.device)


def random_rows(config: Config, data_rank: int, device: torch.device) -> torch.Tensor:
    """One micro-batch for steps that are only timed, and the token after each: int64 [sequence + 1, micro_batch]."""
    import torch

    shape = (config.model.sequence_length + 1, config.train.micro_batch)
    generator = torch.Generator().manual_seed(7 + data_rank)
    return torch.randint(0, config.model.vocab, shape, generator=generator).to(device)


def make_timing_config(config: Config, steps: int) -> dict[str, Any]:
    """The tree of a configuration that is only compared: no evaluation, no checkpoint, the file's learning rates."""
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
    """Device and versions, for a bench's record."""
    import torch

    import megascale

    cuda = torch.cuda.is_available() and config.train.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({os.cpu_count()} cores, {platform.machine()})",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
    }
