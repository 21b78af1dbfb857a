"""Measure a shape with a peer in the ranks of `python -m benchmarks shapes`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.training.peer_choice import PEERS, choose_recipe
from benchmarks.training.peer_job import PeerJob, PreparedPeer, make_job, time_steps
from megascale import torch_private
from megascale.bench.timing import measure_sustained_gemm_rate
from megascale.core.flops import CONVENTION, device_peak_tflops, mfu
from megascale.rendezvous.abort import GroupAbort
from megascale.train.rank_info import find_rank_info

if TYPE_CHECKING:
    from benchmarks.harness.rank_series import Item
    from benchmarks.training.shape_file import PeerRun, Shape
    from megascale.bench.step_monitor import StepMonitor
    from megascale.config import Config

ABORT_SECONDS = 30.0  # limit for the abort of a peer's communicators


def make_shape_job(shape: Shape, peer: PeerRun, config: Config, world: int) -> PeerJob:
    """Return the job of a peer for a shape."""
    job = make_job(
        config,
        world,
        steps=shape.steps,
        warmup=shape.warmup,
        out=Path(os.devnull),
        micro_batch=peer.micro_batch,
        recompute=peer.recompute,
    )
    job = replace(
        job,
        float8=choose_recipe(peer.trainer, config, peer.float8),
        context_exchange=peer.context_exchange,
        virtual=peer.virtual_stages or job.virtual,
        settings=dict(peer.settings),
        data_settings=dict(peer.data_settings),
    )
    if job.experts is not None:
        job = replace(job, experts=job.experts | {"even": shape.even_experts})
    return job


def measure_peer(
    shape: Shape, peer: PeerRun, *, config: Config, item: Item, monitor: StepMonitor, gemm_seconds: float
) -> dict[str, Any] | None:
    """Train a shape with a peer; return the figures on the last rank, which knows the loss, and None on others.

    Args:
        monitor: receives each step, and on the last rank the function that returns the figures so far.
    """
    rank_info = find_rank_info(config)
    device, world = rank_info.device, rank_info.world
    is_cuda = device.type == "cuda"
    module = importlib.import_module(PEERS[peer.trainer][1])
    job = make_shape_job(shape, peer, config, world)
    group_abort = GroupAbort()

    def leave(failed: bool) -> None:
        if is_cuda:
            module.drop_graphs()
            gc.collect()
            # torch's destruction of Megatron-Core's communicators of experts did not end within a minute.
            group_abort.start()
            group_abort.finish(ABORT_SECONDS)
        module.close()
        if dist.is_initialized():
            torch_private.abort_process_group()

    item.on_end(abort=group_abort.start, leave=leave)
    gemm_rates: list[float] = []
    if is_cuda:
        gemm_rates.append(measure_sustained_gemm_rate(device, gemm_seconds))
    timed = module.prepare(job, device, item.open_store())

    def make_result() -> dict[str, Any] | None:
        if not monitor.seconds:
            return None
        return make_figures(job, config, timed, monitor=monitor, device=device, gemm_rates=gemm_rates)

    is_last = rank_info.rank == world - 1
    if is_last:
        monitor.make_result = make_result
    with contextlib.closing(timed):
        time_steps(timed, job, device, monitor)
        if timed.measure_load is not None:
            monitor.record_load(timed.measure_load())
    if is_cuda:
        torch.cuda.synchronize(device)
        gemm_rates.append(measure_sustained_gemm_rate(device, gemm_seconds))
    if not is_last:
        return None
    return make_result()


def make_figures(
    job: PeerJob,
    config: Config,
    timed: PreparedPeer,
    *,
    monitor: StepMonitor,
    device: torch.device,
    gemm_rates: list[float],
) -> dict[str, Any]:
    """Return the figures of the timed steps so far, of which there is at least one."""
    world = job.world
    seconds = list(monitor.seconds)  # another thread may append
    losses = list(monitor.losses)
    device_name = "CPU"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    peak_tflops = config.observe.peak_tflops or device_peak_tflops(device_name)
    step_seconds = statistics.median(seconds)
    rate = job.global_batch * job.model["sequence"] / step_seconds
    return {
        "model": config.model.preset,
        "processes": world,
        "global_batch": job.global_batch,
        "sequence_length": job.model["sequence"],
        "date": date.today().isoformat(),
        "device": f"{world} x {device_name}",
        "versions": {"torch": torch.__version__, **timed.versions},
        "step_seconds": step_seconds,
        "all_step_seconds": seconds,
        "step_seconds_min_max": [min(seconds), max(seconds)],
        "tokens_per_second_per_device": rate / world,
        "mfu": mfu(config.model, rate, world, peak_tflops) if peak_tflops else None,
        "mfu_convention": f"{CONVENTION}; peak {peak_tflops} TFLOP/s",
        "expert_rank_load_max": monitor.rank_load,
        "expert_rank_load_step": monitor.rank_load_step or None,
        "gemm_flop_per_s": gemm_rates or None,
        "peak_memory_gib": None,
        "losses": [losses[0], losses[-1]] if losses else [],
        "peer_settings": timed.settings,
    }
