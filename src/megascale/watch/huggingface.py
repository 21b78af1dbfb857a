"""Callback for the Hugging Face Trainer that reports each step: `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megascale import watch


class WatchCallback(TrainerCallback):
    """Callback that reports each optimizer step, and the loss and gradient norm whenever the Trainer logs them."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the step."""
        watch.step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the gradient norm and the loss, which the Trainer averages over the steps since its last log."""
        if logs is None or "loss" not in logs:
            return
        grad_norm = float(logs["grad_norm"]) if "grad_norm" in logs else None
        watch.step(state.global_step, loss=float(logs["loss"]), grad_norm=grad_norm)
