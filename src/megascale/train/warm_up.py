"""What the start and the first step of a new process load, before its attempt is ordered."""

from __future__ import annotations

import importlib
import logging

import torch

log = logging.getLogger("megascale.train")
# Loaded by the first step or by the checkpointer otherwise.
_MODULES = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "megascale.checkpoint.background.snapshot",
    "megascale.data.loader.feed",
)


def warm_up(local_rank: int, use_gpu: bool) -> None:
    """Import modules and, on a GPU, make the context and the libraries' handles. Failures are left to the start."""
    for name in _MODULES:
        importlib.import_module(name)
    if not use_gpu or not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return
    try:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        (matrix @ matrix).sum().item()
        torch.cuda.nccl.version()
    except RuntimeError as error:
        log.warning("the GPU could not be prepared: %s", error)
