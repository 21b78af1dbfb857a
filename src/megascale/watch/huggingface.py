"""A callback for Hugging Face Trainer that reports each step: `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megascale import watch


class WatchCallback(TrainerCallback):
    """Reports each optimizer step, and the loss and gradient norm when Trainer logs them."""

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
        """Report the loss, which is the mean since the last log."""
        if logs is None or "loss" not in logs:
            return
        grad_norm = float(logs["grad_norm"]) if "grad_norm" in logs else None
        watch.step(state.global_step, loss=float(logs["loss"]), grad_norm=grad_norm)
