"""A script in the manner of nanochat: gradients averaged by hand, a line of nanochat's form, checkpoints by step."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from injected import read_plan


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saves = sorted(plan.folder.glob("model_[0-9]*.pt"))
    step = 0
    if saves:
        model.load_state_dict(torch.load(saves[-1]))
        step = int(saves[-1].stem.removeprefix("model_"))
    while step < plan.steps:
        step += 1
        plan.compute()
        tokens = torch.randint(32, (64,))
        loss = torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = plan.gather_loss(step, loss)
        if plan.uses_watch:
            import megascale.watch

            megascale.watch.step(step)
        if rank == 0:
            percent = 100 * step / plan.steps
            print(
                f"step {step:05d}/{plan.steps:05d} ({percent:.2f}%) | loss: {mean:.6f} | grad norm: {norm:.4f} | "
                "lrm: 1.00 | dt: 1403.20ms | tok/sec: 373,644 | mfu: 48.12 | total time: 0.23m",
                flush=True,
            )
            temporary = plan.folder / "model.tmp"
            torch.save(model.state_dict(), temporary)
            os.replace(temporary, plan.folder / f"model_{step:06d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
