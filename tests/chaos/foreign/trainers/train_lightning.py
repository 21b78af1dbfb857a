"""Lightning with a small module, its progress bar and its own checkpoints, on gloo."""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as pl
import torch
from injected import Plan, read_plan
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar


class Regression(pl.LightningModule):
    """A linear layer that gathers a metric in each step with the plan's fault."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self._plan = plan

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss after the time of the computation."""
        self._plan.compute()
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gather the metric."""
        self._plan.gather_loss(self.global_step, torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    folder = plan.folder / "lightning"
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(dirpath=folder, every_n_train_steps=10, save_last=True),
        TQDMProgressBar(refresh_rate=1),
    ]
    if plan.uses_watch:
        from megascale.watch.lightning import WatchCallback

        callbacks.append(WatchCallback())
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=plan.steps,
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_model_summary=False,
    )
    samples: Any = torch.ones(4 * plan.steps, 8)
    data: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(samples, batch_size=1)
    last = folder / "last.ckpt"
    trainer.fit(Regression(plan), data, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
