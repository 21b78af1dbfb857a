"""Where this process stands in the world: rank, device, threads. Set by torchrun's variables or alone."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.core.preflight import CAME, CHECKED, Share, check_host
from megascale.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """This process among the others.

    Attributes:
        rank, world: over all hosts.
        local_rank, local_world: on this host.
        device: what it computes on.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device


def find_rank_info(config: Config) -> RankInfo:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (all absent: one process) and choose the device.

    Raises ConfigError if they do not fit together or the device that was asked for is not there.
    """
    _say_come()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world, local_rank, local_world = (
            int(os.environ.get(name, "1" if name.endswith("SIZE") else "0")) for name in names
        )
    except ValueError:
        raise ConfigError(
            f"{', '.join(names)} must be whole numbers; start with torchrun or `megascale train`"
        ) from None
    wanted = config.train.device
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("train.device=cuda but this process sees no CUDA device; use --train.device=cpu or auto")
    if there and wanted != "cpu":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible; "
                "start fewer processes on this host"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(config.train.threads or _threads(local_world))
    return RankInfo(rank, world, local_rank, local_world, device)


def has_bfloat16(device: torch.device) -> bool:
    """Whether a rank's device computes in bfloat16 at full rate: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _say_come() -> None:
    """Tell whoever starts ranks in waves that this one has imported everything."""
    channel = os.environ.pop(CAME, "")
    if channel.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(channel), b".")
            os.close(int(channel))


def check_place(config: Config, place: RankInfo, *, saves_checkpoints: bool) -> None:
    """Whether this host holds what its ranks of the run of `config` (resolved) will take; asked by the first of them.

    Nothing is asked where whoever started them (`megascale train` of several ranks, a driver) has. FitError if not.
    """
    if place.local_rank or os.environ.get(CHECKED) or os.environ.get("MEGASCALE_NODE"):
        return
    gpus = place.device.type == "cuda"
    first = place.rank - place.local_rank
    check_host(config, Share(place.world, first, place.local_world, gpus=gpus, keeps=saves_checkpoints, running=True))


def _threads(local_world: int) -> int:
    """This rank's share of the cores, or OMP_NUM_THREADS if that is less. More threads than cores are worse than few:
    those of two runs on two cores wait for each other, and a step takes thirty times as long."""
    share = max(1, (os.cpu_count() or 1) // local_world)
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(int(told), share) if told.isdecimal() and int(told) > 0 else share


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process: allocated on the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
