"""Warm-up of a new process on a GPU, before its attempt is ordered."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("megascale.train")


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
