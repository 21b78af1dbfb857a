"""Warm-up of a process that waits for the order of its attempt."""

from __future__ import annotations

import logging

import torch

from megascale.checkpoint.live_state import rehearse_live_load
from megascale.config import Config
from megascale.core.stopwatch import Stopwatch
from megascale.ops.dispatch import prepare_workspace
from megascale.rendezvous.start_job import warm_up_nccl
from megascale.train.attention_choice import read_choices
from megascale.train.rehearsal import rehearse

log = logging.getLogger("megascale.train")


def warm_up(config: Config, local_rank: int, use_gpu: bool) -> str:
    """Rehearse a load, create the context of the rank's GPU, load NCCL, and rehearse a step. Errors are only logged.

    The fork server has imported modules already. Imports here could take longer than the driver's judgement of a
    fault, for which this process waits.

    Returns:
        The seconds of each part, and whether the step was rehearsed, as text for the log. A process that waits has no
        log yet.
    """
    try:
        if not rehearse_live_load():
            log.warning("the rehearsal of a load gave other elements")
    except Exception as error:  # the load of the attempt raises it, if it is lasting
        log.warning("the rehearsal of a load failed: %s", str(error) or repr(error))
    if not use_gpu or not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return "no GPU"
    stopwatch = Stopwatch()
    try:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if config.requested_determinism is not False:
            prepare_workspace()  # before the first GEMM, at which torch reads it
        matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        (matrix @ matrix).sum().item()
        stopwatch.end_phase("context")
        warm_up_nccl(device)
        stopwatch.end_phase("NCCL")
    except RuntimeError as error:
        log.warning("the GPU could not be prepared: %s", error)
        return f"the GPU could not be prepared: {error}"
    checkpoints = config.checkpoint.location or config.run_folder / "checkpoints"
    has_rehearsed = rehearse(config, device, read_choices(config.run_folder, checkpoints, config.checkpoint.resume))
    stopwatch.end_phase("rehearsed step" if has_rehearsed else "no rehearsed step")
    return stopwatch.describe()
