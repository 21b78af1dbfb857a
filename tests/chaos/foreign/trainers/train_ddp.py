"""A plain DistributedDataParallel script, on gloo, or on NCCL where each rank has a GPU. It prints `iter N, loss L`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from injected import read_plan


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # NCCL does not notice that calls of two kinds meet in one communicator, so losses have their own, as is usual.
    metrics = dist.new_group() if device == "cuda" else None
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = plan.folder / "checkpoint.pt"
    step = 0
    if file.exists():
        saved = torch.load(file, map_location=device)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    while step < plan.steps:
        step += 1
        plan.compute(device)
        loss = model(torch.full((4, 8), float(rank), device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = plan.gather_loss(step, loss, group=metrics)
        if plan.uses_watch:
            import megascale.watch

            megascale.watch.step(step)
        if rank == 0:
            print(f"iter {step}, loss {mean:.5f}", flush=True)
            torch.save({"model": model.state_dict(), "step": step}, plan.folder / "checkpoint.tmp")
            os.replace(plan.folder / "checkpoint.tmp", file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
