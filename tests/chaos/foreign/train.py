"""A small trainer without MegaScale: DDP on gloo, with its own checkpoints, and a fault on request.

`python train.py STEPS FOLDER FAULT RANK`. FAULT is none, skip, sleep, loop, raise or memory. It occurs in step 8 of
rank RANK, in the first start only, except for raise.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAULT_STEP = 8
PAUSE = 0.05  # seconds of each step


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    steps, folder, fault, faulty_rank = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = folder / "checkpoint.pt"
    step = 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while step < steps:
        step += 1
        is_faulty = rank == faulty_rank and step == FAULT_STEP and (is_first_start or fault == "raise")
        loss = model(torch.full((4, 8), float(rank))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_faulty:
            break_rank(fault)
        losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
        if not (is_faulty and fault == "skip"):
            dist.all_gather(losses, loss.detach())
        time.sleep(PAUSE)
        if rank == 0:
            print(f"step: {step}  loss: {torch.stack(losses).mean().item():.5f}  grad_norm: 1.0", flush=True)
            torch.save({"model": model.state_dict(), "step": step}, folder / "checkpoint.tmp")
            os.replace(folder / "checkpoint.tmp", file)
    dist.destroy_process_group()


def break_rank(fault: str) -> None:
    """Inject a fault into this rank."""
    if fault == "sleep":
        time.sleep(1e6)
    elif fault == "loop":
        while True:
            pass
    elif fault == "raise":
        raise KeyError("text")
    elif fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if __name__ == "__main__":
    main()
