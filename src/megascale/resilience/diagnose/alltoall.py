"""All-to-all among the GPUs of this host through NCCL, with one process per GPU; received bits are checked.

`python -m megascale.resilience.diagnose.alltoall RANK WORLD PORT DEVICE BYTES` runs one of the processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from megascale.core.addresses import find_free_port
from megascale.core.python_process import module_command
from megascale.resilience.diagnose.check import SelfCheck, make_absent_check, make_failed_check

_BYTES_PER_PROCESS = 256 << 20  # that each process sends
_TIMEOUT_SECONDS = 90.0  # for all processes
_START_SECONDS = 60.0  # for the processes to meet
_KILL_SECONDS = 5.0  # to wait for the end of a killed process
_REPEATS = 4  # all-to-alls, the fastest of which counts
_ERROR_CHARACTERS = 300  # of the last line of a failed process


def check_all_to_all() -> Iterator[SelfCheck]:
    """Start one process per GPU and yield the slowest rate."""
    import torch

    world = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world < 2:
        yield make_absent_check("all-to-all in host", f"{world} CUDA devices on this host")
        return
    yield run_all_to_all(world)


def run_all_to_all(world: int, device: str = "cuda", size: int = _BYTES_PER_PROCESS) -> SelfCheck:
    """Run an all-to-all of `size` bytes per process among `world` processes on "cuda" (NCCL) or "cpu" (gloo)."""
    module = "megascale.resilience.diagnose.alltoall"
    port = find_free_port("127.0.0.1")
    processes = []
    for rank in range(world):
        command = module_command(module, str(rank), str(world), str(port), device, str(size))
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    name = "all-to-all in host"
    if device == "cpu":
        name += " cpu"
    rates: list[float] = []
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    try:
        for rank, process in enumerate(processes):
            stdout, stderr = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if process.returncode:
                lines = stderr.strip().splitlines() or ["no output"]
                return make_failed_check(name, f"rank {rank}: {lines[-1][:_ERROR_CHARACTERS]}")
            rates.append(float(json.loads(stdout.strip().splitlines()[-1])["rate"]))
    except subprocess.TimeoutExpired:
        return make_failed_check(name, f"rank {len(rates)} did not end within {_TIMEOUT_SECONDS:g} s")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a failed GPU may keep the kernel from ending it
                    process.wait(_KILL_SECONDS)
    details = f"{world} processes, {size >> 20} MiB each; rate of the slowest"
    return SelfCheck(name, "passed", min(rates), "GB/s", details=details)


def _run_rank(rank: int, world: int, port: int, device_type: str, size: int) -> float:
    """Return the rate at which this process sends to other ranks, in GB/s.

    Rank r sends the words r * n to (r + 1) * n - 1, where n is the number of words per rank, in blocks to all ranks.
    Raises RuntimeError if received bits are wrong.
    """
    import torch
    import torch.distributed as dist

    from megascale.resilience.diagnose.compute import synchronize

    device = torch.device("cpu")
    backend = "gloo"
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        backend = "nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_START_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    words_per_block = size // 8 // world
    words_per_rank = words_per_block * world
    source = torch.arange(words_per_rank, dtype=torch.int64, device=device) + rank * words_per_rank
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        dist.all_to_all_single(target, source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    # Block `rank` of every sender arrives, in the order of the senders.
    first_words = torch.arange(world, device=device) * words_per_rank + rank * words_per_block
    expected = (first_words[:, None] + torch.arange(words_per_block, device=device)).flatten()
    if not torch.equal(target, expected):
        raise RuntimeError(f"rank {rank} received other bits than were sent")
    dist.barrier()
    dist.destroy_process_group()
    return words_per_block * 8 * (world - 1) / best / 1e9  # The block for the rank itself is not sent.


def main(arguments: list[str]) -> None:
    """Run one process and print its rate as JSON."""
    rank, world, port, device_type, size = arguments
    rate = _run_rank(int(rank), int(world), int(port), device_type=device_type, size=int(size))
    print(json.dumps({"rate": rate}))


if __name__ == "__main__":
    main(sys.argv[1:])
