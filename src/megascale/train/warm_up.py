"""Warm-up of the GPU in a process that waits for the order of its attempt."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("megascale.train")


def warm_up(local_rank: int, use_gpu: bool) -> None:
    """Create the context of the rank's GPU, and handles of cuBLAS and NCCL. Errors are only logged.

    The fork server has imported modules already. Imports here could take longer than the driver's judgement of a
    fault, for which this process waits.
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
