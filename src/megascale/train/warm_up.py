"""Warm-up of a new process on a GPU, before its attempt is ordered."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from pathlib import Path

import torch

log = logging.getLogger("megascale.train")


# Modules that torch imports when an engine on a GPU first needs them: 1.5 s, and 5 s where no bytecode is cached.
_LATE_MODULES = ("torch._dynamo", "torch._higher_order_ops.triton_kernel_wrap", "torch.nn.attention.flex_attention")


def import_late_modules(devices: Path = Path("/dev")) -> None:
    """Import once, for all processes that are forked later, what torch imports late on a GPU; without one nothing.

    Args:
        devices: folder of device files, which shows GPUs without a context that a fork would inherit.
    """
    if torch.version.cuda is None or not any(devices.glob("nvidia[0-9]*")):
        return
    # A module that asks for GPUs must not initialise the driver here, which processes that are forked cannot use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        for name in _LATE_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


def warm_up(local_rank: int, use_gpu: bool) -> None:
    """Make the GPU's context and the libraries' handles. Failures are left to the start.

    Modules are imported by the fork server. Further imports here would take longer than the driver's judgement.
    """
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
