"""Callback for Lightning that reports each step: `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megascale import watch

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class WatchCallback(Callback):
    """Callback that reports each optimizer step, and the loss every `log_every_n_steps` steps.

    Reading the loss waits for the GPU, so the callback does not read the loss of every step.
    """

    def __init__(self) -> None:
        self._last_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step unless this batch only accumulates gradients."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        log_interval = getattr(trainer, "log_every_n_steps", 50)  # 50 is Lightning's default
        if loss is None or step % max(1, log_interval):
            watch.step(step)
        else:
            watch.step(step, loss=float(loss))
