"""A plain FSDP2 script with sharded checkpoints. It prints torchtitan's line."""

from __future__ import annotations

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from injected import read_plan
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saves = sorted(plan.folder.glob("step-[0-9][0-9][0-9][0-9]"))
    step = 0
    if saves:
        state = get_model_state_dict(model)
        checkpoint.load(state, checkpoint_id=saves[-1])
        set_model_state_dict(model, state)
        step = int(saves[-1].name.removeprefix("step-"))
    while step < plan.steps:
        step += 1
        plan.compute()
        loss = model(torch.full((4, 24), float(rank))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = plan.gather_loss(step, loss, reduces=True)
        if plan.uses_watch:
            import megascale.watch

            megascale.watch.step(step)
        if rank == 0:
            print(
                f"step: {step:2}  loss: {mean:8.5f}  grad_norm:  1.0000  memory: 0.1GiB(0.10%)  tps: 7,123", flush=True
            )
        if step % 10 == 0:
            save(plan.folder / f"step-{step:04}", model, rank)
    dist.destroy_process_group()


def save(folder: os.PathLike[str], model: torch.nn.Module, rank: int) -> None:
    """Save a checkpoint under its final name once it is complete."""
    temporary = f"{folder}.tmp"
    checkpoint.save(get_model_state_dict(model), checkpoint_id=temporary)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    dist.barrier()


if __name__ == "__main__":
    main()
