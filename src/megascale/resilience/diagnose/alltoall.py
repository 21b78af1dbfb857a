"""All-to-all among the devices of this host through NCCL: each process a device, bits checked.

Run as a module it is one of the processes: `python -m megascale.resilience.diagnose.alltoall RANK WORLD PORT`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from megascale.core.python_process import module_command
from megascale.resilience.diagnose.check import SelfCheck, absent

_BYTES = 256 << 20  # that each process sends
_SECONDS = 90.0


def all_to_all() -> Iterator[SelfCheck]:
    """The check: starts a process a device and reads the slowest rate."""
    import torch

    world = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world < 2:
        yield absent("all-to-all in host", f"{world} CUDA devices on this host")
        return
    yield exchange(world)


def exchange(world: int, device: str = "cuda", bytes_: int = _BYTES) -> SelfCheck:
    """All-to-all among `world` processes on "cuda" (NCCL) or "cpu" (gloo)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = module_command("megascale.resilience.diagnose.alltoall")
    words = [str(world), str(port), device, str(bytes_)]
    processes = [
        subprocess.Popen([*module, str(r), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(world)
    ]
    name = "all-to-all in host" if device == "cuda" else "all-to-all in host cpu"
    rates, deadline = [], time.monotonic() + _SECONDS
    try:
        for rank, process in enumerate(processes):
            out, error = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if process.returncode:
                last = (error.strip().splitlines() or ["no output"])[-1]
                return SelfCheck(name, "failed", details=f"rank {rank}: {last[:300]}")
            rates.append(float(json.loads(out.strip().splitlines()[-1])["rate"]))
    except subprocess.TimeoutExpired:
        return SelfCheck(name, "failed", details=f"rank {len(rates)} did not end within {_SECONDS:g} s")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = f"{world} processes, {bytes_ >> 20} MiB each; rate of the slowest"
    return SelfCheck(name, "passed", min(rates), "GB/s", details=text)


def _one(rank: int, world: int, port: int, kind: str, size: int) -> float:
    """Bytes this process sent to others a second, in GB/s. Raises where wrong bits arrive."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    part = size // 8 // world
    source = torch.arange(part * world, dtype=torch.int64, device=device) + rank * part * world
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        dist.barrier()
        _wait(device)
        started = time.perf_counter()
        dist.all_to_all_single(target, source)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    base = torch.arange(world, device=device).repeat_interleave(part) * part * world + rank * part
    if not torch.equal(target, base + torch.arange(part, device=device).repeat(world)):
        raise RuntimeError(f"rank {rank} received other bits than were sent")
    dist.barrier()
    dist.destroy_process_group()
    return part * 8 * (world - 1) / best / 1e9


def _wait(device) -> None:  # type: ignore[no-untyped-def]
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    rank_, world_, port_ = map(int, sys.argv[1:4])
    print(json.dumps({"rate": _one(rank_, world_, port_, sys.argv[4], int(sys.argv[5]))}))
