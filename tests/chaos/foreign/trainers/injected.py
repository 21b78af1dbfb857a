"""The faults that the trainers of this folder inject into themselves, and their command line.

`python TRAINER.py STEPS FOLDER FAULT RANK`: FAULT occurs in step 18 of rank RANK, in the first start only, except for
`raise`, which repeats, and `slow`, which lasts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

FAULT_STEP = 18  # a flight record shows the usual order of the calls by then
PAUSE = 0.05  # seconds of each step
SLOW_PAUSE = 0.3  # seconds of each step of a run with a slow rank
SLOWER = 1.2


@dataclass(frozen=True)
class Plan:
    """The command line.

    Attributes:
        steps: number of the last step.
        folder: folder of the checkpoints.
        fault: none, kill, skip, sleep, loop, kernel, raise, memory or slow.
        rank: the rank in which it occurs.
    """

    steps: int
    folder: Path
    fault: str
    rank: int

    @property
    def uses_watch(self) -> bool:
        """True if the trainer calls `megascale.watch`."""
        return self.fault == "slow"

    def is_due(self, step: int) -> bool:
        """Return whether the fault occurs in this step of this rank."""
        is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        return step == FAULT_STEP and dist.get_rank() == self.rank and (is_first_start or self.fault == "raise")

    def compute(self, device: str = "cpu") -> None:
        """Take the time of a step's computation; a slow rank takes longer."""
        seconds = PAUSE
        if self.fault == "slow":
            seconds = SLOW_PAUSE * (SLOWER if dist.get_rank() == self.rank else 1.0)
        if device == "cuda":
            torch.cuda.synchronize()
        time.sleep(seconds)

    def gather_loss(
        self, step: int, loss: torch.Tensor, reduces: bool = False, group: dist.ProcessGroup | None = None
    ) -> float:
        """Return the mean loss of all ranks, as trainers do for their log. The faults occur before or in this call.

        Gloo aborts the process if calls of one kind and other sizes meet. So the call differs from the trainer's own.

        Args:
            step: number of the step.
            loss: loss of this rank.
            reduces: call all_reduce instead of all_gather.
            group: group of the call; default: all ranks' own.
        """
        if self.is_due(step):
            break_rank(self.fault)
        is_skipped = self.fault == "skip" and self.is_due(step)
        total = loss.detach().clone()
        losses = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
        if reduces and not is_skipped:
            dist.all_reduce(total, group=group)
        elif not is_skipped:
            dist.all_gather(losses, total, group=group)
            total = torch.stack(losses).sum()
        return total.item() / dist.get_world_size()


def read_plan() -> Plan:
    """Return the command line."""
    return Plan(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))


def break_rank(fault: str) -> None:
    """Inject a fault into this rank."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sleep":
        time.sleep(1e6)
    elif fault == "loop":
        while True:
            pass
    elif fault == "kernel":
        torch.cuda._sleep(1 << 60)  # cycles
    elif fault == "raise":
        raise KeyError("text")
    elif fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
