"""A trainer that averages gradients itself. It loads torch alone: half the time of DDP with an optimizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos" / "foreign" / "trainers"))
from injected import read_plan


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.eye(8, requires_grad=True)
    file = plan.folder / "checkpoint.pt"
    step = 0
    if file.exists():
        saved = torch.load(file)
        with torch.no_grad():
            weight.copy_(saved["weight"])
        step = saved["step"]
    while step < plan.steps:
        step += 1
        plan.compute()
        loss = (torch.full((4, 8), float(rank)) @ weight).square().mean()
        (gradient,) = torch.autograd.grad(loss, [weight])
        dist.all_reduce(gradient)
        with torch.no_grad():
            weight -= 0.01 * gradient / dist.get_world_size()
        mean = plan.gather_loss(step, loss)
        if rank == 0:
            print(f"iter {step}, loss {mean:.5f}", flush=True)
            temporary_file = Path(f"{file}.tmp")
            torch.save({"weight": weight.detach(), "step": step}, temporary_file)
            os.replace(temporary_file, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
