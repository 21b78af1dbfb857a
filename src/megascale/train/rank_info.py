"""Rank, device and number of threads of this process, by torchrun's variables or as a single process without them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.core.preflight import IMPORTED_PIPE_VARIABLE
from megascale.errors import ConfigError

_DEFAULTS_BY_VARIABLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True)
class RankInfo:
    """This process's position in the world.

    Attributes:
        rank: rank over all hosts.
        world: number of ranks over all hosts.
        local_rank, local_world: rank and number of ranks on this host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device


def find_rank_info(config: Config) -> RankInfo:
    """Return the rank and device of this process, by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and train.device.

    On a CPU also set the number of threads. Raises ConfigError if the variables are not ranks, or if train.device is
    unavailable.
    """
    _report_imported()
    values = [os.environ.get(variable, default) for variable, default in _DEFAULTS_BY_VARIABLE.items()]
    try:
        rank, world, local_rank, local_world = [int(value) for value in values]
    except ValueError:
        raise ConfigError(
            f"{', '.join(_DEFAULTS_BY_VARIABLE)} must be whole numbers; start with torchrun or `megascale train`"
        ) from None
    if world <= 1:
        # A rank outside of a larger world raises an alarm when it meets the others (rendezvous/agree.py). An error here
        # would let them wait for the rank that is missing.
        _check_ranks(rank, world, "RANK", "WORLD_SIZE")
        if local_rank != 0 and "LOCAL_WORLD_SIZE" not in os.environ:
            raise ConfigError(
                f"LOCAL_RANK={local_rank} is set in the environment of a single process, whose local rank is 0; unset "
                "it (an earlier job may have left it in the shell), or start with torchrun or `megascale train`"
            )
    if "LOCAL_WORLD_SIZE" in os.environ and rank < world:  # some launchers set the local rank alone
        _check_ranks(local_rank, local_world, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
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


def _check_ranks(rank: int, size: int, rank_variable: str, size_variable: str) -> None:
    """Raise ConfigError for a rank that is not in a group of `size` ranks."""
    if 0 <= rank < size:
        return
    raise ConfigError(
        f"{rank_variable}={rank} with {size_variable}={size} is not a rank from 0 to {size_variable} - 1; set both "
        "variables, or start with torchrun or `megascale train`"
    )


def choose_device(name: str) -> torch.device:
    """Return the device that the option --device names: auto (a GPU if there is one), cpu, cuda or cuda:N.

    Raises ConfigError for any other name, and if this process does not see the GPU.
    """
    if torch.cuda.is_available():
        gpu_count = torch.cuda.device_count()
    else:
        gpu_count = 0
    if name == "auto":
        return torch.device("cuda" if gpu_count else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, index = name.partition(":")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ConfigError(f"--device={name} is unknown; use auto, cpu, cuda or cuda:N")
    if not gpu_count:
        raise ConfigError(f"--device={name} but this process sees no CUDA device; use --device=cpu or auto")
    if colon and int(index) >= gpu_count:
        raise ConfigError(f"--device={name} but this process sees {gpu_count} CUDA devices, numbered from 0")
    return torch.device(name)


def find_device_kind(device: torch.device) -> str:
    """Return the GPU's model name, such as NVIDIA H100 80GB HBM3; for other devices their type, such as cpu."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 at full rate: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _report_imported() -> None:
    """Report that this rank has imported its modules, if a launcher that starts ranks in waves waits for that."""
    descriptor = os.environ.pop(IMPORTED_PIPE_VARIABLE, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")
            os.close(int(descriptor))


def count_threads(local_world: int) -> int:
    """Return the host's cores divided by its ranks, or OMP_NUM_THREADS if that is less.

    Too many threads are worse than too few: threads of two runs on two cores wait for each other, and a step takes
    thirty times as long.
    """
    cores_per_rank = max(1, (os.cpu_count() or 1) // local_world)
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if limit.isdecimal() and int(limit) > 0:
        return min(int(limit), cores_per_rank)
    return cores_per_rank


_earlier_peaks: dict[torch.device, int] = {}  # bytes by GPU, of peaks that `exclude_from_peak` has reset


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _earlier_peaks.get(device, 0)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reset_peak(device: torch.device) -> None:
    """Let `memory_gib` count the peak on a GPU from now on."""
    torch.cuda.reset_peak_memory_stats(device)
    _earlier_peaks.pop(device, None)


@contextlib.contextmanager
def exclude_from_peak(device: torch.device) -> Iterator[None]:
    """Let `memory_gib` ignore what the context allocates on a GPU and frees again."""
    earlier_peak = torch.cuda.max_memory_allocated(device)
    try:
        yield
    finally:
        torch.cuda.reset_peak_memory_stats(device)
        _earlier_peaks[device] = max(earlier_peak, _earlier_peaks.get(device, 0))


def count_device_allocations(device: torch.device) -> int:
    """Return how often torch's allocator has requested memory from a GPU's driver in this process; 0 on a CPU.

    Each request waits for the driver. A process whose allocator keeps its memory makes none.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))
