"""Hugging Face Trainer with a small model, its progress bar and its own checkpoints, on gloo."""

from __future__ import annotations

from typing import Any

import torch
from injected import Plan, read_plan
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Regression(torch.nn.Module):
    """A linear layer with a loss, as Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the loss."""
        output = self.layer(x)
        return {"loss": output.square().mean(), "logits": output}


class FaultyTrainer(Trainer):
    """Trainer whose steps take the plan's time."""

    plan: Plan

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss after the time of the computation."""
        self.plan.compute()
        return super().compute_loss(*args, **kwargs)


class FaultCallback(TrainerCallback):
    """Gathers a metric in each step, as callbacks do, with the plan's fault."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather the metric."""
        self._plan.gather_loss(state.global_step, torch.zeros(()))


def main() -> None:
    """Train, and resume from the newest checkpoint."""
    plan = read_plan()
    folder = plan.folder / "huggingface"
    folder.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=plan.steps,
        per_device_train_batch_size=2,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    callbacks: list[TrainerCallback] = [FaultCallback(plan)]
    if plan.uses_watch:
        from megascale.watch.huggingface import WatchCallback

        callbacks.append(WatchCallback())
    data = [{"x": torch.ones(8), "labels": torch.ones(8)} for _ in range(4 * plan.steps)]
    torch.manual_seed(0)
    trainer = FaultyTrainer(model=Regression(), args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.plan = plan
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))


if __name__ == "__main__":
    main()
