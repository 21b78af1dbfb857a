"""One rank's share of the model: chunks in flat buffers, the optimizer, and a training step over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.model.transformer import Chunk, Step
from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel.buffers import FlatChunk
from megascale.parallel.parameters import initialise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# Given the micro-batch number, tokens and targets, each int64 [sequence, micro_batch] on the device.
Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class StepResult:
    """What a step gives, still on the device: reading it makes the host wait.

    Attributes:
        loss: mean over the global batch's tokens.
        grad_norm: of the whole model, before clipping.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor


class Engine:
    """Model, buffers and optimizer of this rank."""

    def __init__(self, config: Config, grid: Grid, device: torch.device) -> None:
        self.config, self.grid, self.device = config, grid, device
        model, dtype = config.model, DTYPES[config.train.precision]
        self.microbatches = config.microbatches(grid.data)
        self.chunk = Chunk(model, range(model.layers), first=True, last=True, dtype=dtype)
        self.flat = FlatChunk(self.chunk, device)
        initialise(self.chunk, config.train.seed)
        self.optimizer = ShardedOptimizer(config.optimizer, [self.flat])

    def step(self, batches: Batches, step: int, learning_rate: float) -> StepResult:
        """Forward and backward over all micro-batches, then the update.

        Args:
            batches: gives the micro-batches of this rank.
            step: number of this optimizer step, from 1; dropout masks depend on it.
            learning_rate: of this step.
        """
        train = self.config.train
        tokens = train.global_batch * self.config.model.sequence_length
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.flat.zero_grads()
        for i in range(self.microbatches):
            last = i == self.microbatches - 1
            inputs_SB, targets_SB = batches(i)
            where = Step(dropout_key=train.seed + step, sample_start=i * train.micro_batch)
            loss = self.chunk(inputs_SB, targets_SB, where).sum() / tokens
            self.flat.begin_backward(last)
            loss.backward()
            self.flat.end_backward(last)
            total += loss.detach()
        self.flat.finish_reduction()
        norm = self.optimizer.step(learning_rate, step)
        return StepResult(total, norm)

    @torch.no_grad()
    def loaded(self) -> None:
        """After a checkpoint has filled the master weights: make the weights in use from them."""
        self.optimizer.copy_to_params()

    @torch.no_grad()
    def losses(self, inputs_SB: torch.Tensor, targets_SB: torch.Tensor) -> torch.Tensor:
        """Loss of every token [s, b]; targets of -100 count nothing and give 0."""
        return self.chunk(inputs_SB, targets_SB)
