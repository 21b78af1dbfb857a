"""This process's rank, device and threads, from torchrun's variables or from none."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.core.layout import Layout
from megascale.core.preflight import CHECKED_VARIABLE, IMPORTED_PIPE_VARIABLE, HostShare, check_host
from megascale.errors import ConfigError

_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # with their defaults


@dataclass(frozen=True)
class RankInfo:
    """This process's position in the world.

    Attributes:
        rank, world: rank, and number of ranks, over all hosts.
        local_rank, local_world: the same on this host.
        device: device that the rank computes on.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device


def find_rank_info(config: Config) -> RankInfo:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (all absent: one process) and choose the device.

    Raises ConfigError if they are not integers, or if train.device is unavailable.
    """
    _report_imported()
    try:
        rank, world, local_rank, local_world = [int(os.environ.get(*item)) for item in _VARIABLES.items()]
    except ValueError:
        raise ConfigError(
            f"{', '.join(_VARIABLES)} must be whole numbers; start with torchrun or `megascale train`"
        ) from None
    has_cuda = torch.cuda.is_available()
    if config.train.device == "cuda" and not has_cuda:
        raise ConfigError("train.device=cuda but this process sees no CUDA device; use --train.device=cpu or auto")
    if has_cuda and config.train.device != "cpu":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible; "
                "start fewer processes on this host"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(config.train.threads or count_threads(local_world))
    return RankInfo(rank, world, local_rank, local_world, device)


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`: auto (a GPU if there is one), cpu, cuda or cuda:N.

    Raises ConfigError for any other name, and if this process does not see the GPU.
    """
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    else:
        gpus = 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ConfigError(f"--device={name} is unknown; use auto, cpu, cuda or cuda:N")
    if not gpus:
        raise ConfigError(f"--device={name} but this process sees no CUDA device; use --device=cpu or auto")
    if colon and int(number) >= gpus:
        raise ConfigError(f"--device={name} but this process sees {gpus} CUDA devices, numbered from 0")
    return torch.device(name)


def find_device_kind(device: torch.device) -> str:
    """Return the GPU's name, or the type of another device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 at full rate: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _report_imported() -> None:
    """Report to a launcher that starts ranks in waves that this rank has imported its modules."""
    descriptor = os.environ.pop(IMPORTED_PIPE_VARIABLE, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")
            os.close(int(descriptor))


def check_local_ranks(layout: Layout, rank_info: RankInfo, *, saves_checkpoints: bool) -> None:
    """Check on local rank 0 that this host holds its ranks of the run. FitError if not.

    The check is skipped if the process that started the ranks (`megascale train`, a driver) has made it.
    """
    if rank_info.local_rank or os.environ.get(CHECKED_VARIABLE) or os.environ.get("MEGASCALE_NODE"):
        return
    share = HostShare(
        rank_info.world,
        rank_info.rank - rank_info.local_rank,
        rank_info.local_world,
        uses_gpus=rank_info.device.type == "cuda",
        writes_checkpoints=saves_checkpoints,
        is_running=True,
    )
    check_host(layout, share)


def count_threads(local_world: int) -> int:
    """Return this rank's share of the cores, or OMP_NUM_THREADS if that is less.

    Too many threads are worse than too few: threads of two runs on two cores wait for each other, and a step takes
    thirty times as long.
    """
    share = max(1, (os.cpu_count() or 1) // local_world)
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if limit.isdecimal() and int(limit) > 0:
        return min(int(limit), share)
    return share


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
