"""Measurement of training steps on random tokens, through the engine that training uses."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.bench.random_samples import RandomSamples, make_samples, select_evenly
from megascale.bench.step_monitor import StepMonitor
from megascale.core.batch import Batch
from megascale.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megascale.bench.gpu_watch import GpuWatch
    from megascale.config import Config
    from megascale.core.layout import Layout
    from megascale.rendezvous.groups import Groups
    from megascale.train.engine import Engine
    from megascale.train.rank_info import RankInfo

# Configuration sections that determine a step's time. The result includes them; they hold no address and no secret.
REPORTED_SECTIONS = {"model", "optimizer", "parallel", "overlap", "kernels", "train"}
LEARNING_RATE = 1e-4  # small, so that the loss stays finite; the time of a step does not depend on it
HOST_STEPS = 3  # steps that measure the host's launch time
GEMM_SECONDS = 2.0  # duration of each measurement of the sustained GEMM rate


@dataclass
class _StepRecords:
    """Records of the steps.

    Attributes:
        seconds: seconds of each timed step.
        losses: loss of each step, warm-up included.
        largest_loads: load of the most loaded expert rank of each timed step, relative to the mean load.
        recomputed_count: timed steps that were recomputed, because a rank received more tokens than it had room for.
        first_timed_start: time.perf_counter() at the begin of the first timed step.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    largest_loads: list[float] = field(default_factory=list)
    recomputed_count: int = 0
    first_timed_start: float = 0.0


@dataclass
class _DeviceRecords:
    """Records of a GPU; empty on the CPU.

    Attributes:
        gemm_rates: FLOP/s that plain GEMMs sustain, before and after the steps.
        peak_memory_gib: GiB in tensors, at most; memory of exchanges included.
        exchange_memory_gib: GiB of the exchanges between GPUs, which torch's statistics do not count.
        used_memory_gib: GiB of the device that are in use after the steps.
        host_seconds: seconds in which the host launches a step, per measured step; empty with a pipeline.
    """

    gemm_rates: list[float] = field(default_factory=list)
    peak_memory_gib: float | None = None
    exchange_memory_gib: float = 0.0
    used_memory_gib: float | None = None
    host_seconds: list[float] = field(default_factory=list)


def join_groups(config: Config, name_suffix: str = "") -> tuple[RankInfo, Groups | None]:
    """Return this process's rank information and its process groups; None for a single process. Collective.

    Args:
        name_suffix: as for `rendezvous.groups.make_groups`.
    """
    from megascale.core.layout import lay_out
    from megascale.rendezvous.start_job import initialise
    from megascale.train.host_check import check_local_ranks
    from megascale.train.rank_info import find_rank_info

    rank_info = find_rank_info(config)
    check_local_ranks(lay_out(config, rank_info.world), rank_info, saves_checkpoints=False)
    if rank_info.world == 1:
        return rank_info, None
    groups = initialise(
        config,
        rank=rank_info.rank,
        world=rank_info.world,
        local_rank=rank_info.local_rank,
        device=rank_info.device,
        name_suffix=name_suffix,
    )
    return rank_info, groups


def measure_training(
    config: Config,
    steps: int,
    warmup: int,
    profile: Path | None,
    *,
    watch: bool = False,
    mean_document: int = 512,
    even_experts: bool = False,
) -> dict[str, Any] | None:
    """Run the steps. Return the content of the JSON result on rank 0, None on other ranks.

    Raises ConfigError for `even_experts` if the model has no experts.

    Args:
        warmup: untimed steps before the timed steps.
        profile: file of the Chrome trace of one step, or None.
        watch: sample clock, power and temperature of rank 0's GPU.
        mean_document: mean tokens of a random document under data.document_mask.
        even_experts: select experts in turn instead of by score.
    """
    from megascale.rendezvous.groups import shutdown

    check_even_experts(config, even_experts)
    rank_info, groups = join_groups(config)
    result = measure_steps(
        config,
        rank_info,
        groups=groups,
        steps=steps,
        warmup=warmup,
        profile=profile,
        watch=watch,
        mean_document=mean_document,
        even_experts=even_experts,
    )
    if groups is not None:
        shutdown(groups)
    return result


def check_even_experts(config: Config, even_experts: bool) -> None:
    """Raise ConfigError if experts are to be selected in turn and the model has none."""
    from megascale.core.inventory import resolve_layers
    from megascale.core.layer_spec import ExpertsSpec

    if even_experts and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(config.model)):
        raise ConfigError("--even-experts: the model has no experts; set --model.mlp=experts, or leave it out")


def measure_steps(
    config: Config,
    rank_info: RankInfo,
    *,
    groups: Groups | None,
    steps: int,
    warmup: int,
    profile: Path | None = None,
    watch: bool = False,
    mean_document: int = 512,
    even_experts: bool = False,
    gemm_seconds: float = GEMM_SECONDS,
    host_steps: int = HOST_STEPS,
    monitor: StepMonitor | None = None,
) -> dict[str, Any] | None:
    """Run the steps in process groups that exist. Return the content of the JSON result on rank 0, None on others.

    The arguments are those of `measure_training`, and:

    Args:
        rank_info, groups: the result of `join_groups`. The caller shuts the groups down.
        gemm_seconds: duration of the sustained GEMMs before and after the steps, on a GPU.
        host_steps: further steps that measure the host's launch time; 0 leaves the time out.
        monitor: receives each step, and on rank 0 the function that returns the figures so far. Default: one that
            prints lines on rank 0.
    """
    from megascale.core.layout import lay_out
    from megascale.train.engine import Engine

    device = rank_info.device
    if monitor is None:
        monitor = StepMonitor(config.model.preset or "model", warmup=warmup, steps=steps, prints=rank_info.rank == 0)
    device_records = _DeviceRecords()
    _measure_gemm_rate(device, device_records, gemm_seconds)
    start = time.perf_counter()
    layout = lay_out(config, rank_info.world)
    samples = make_samples(
        config, layout.grid.replica(rank_info.rank), layout.microbatches, mean_document=mean_document, device=device
    )
    watcher = None
    if watch and rank_info.rank == 0:
        watcher = _make_watcher(device)
    engine = Engine(layout, groups, device, fields=samples.fields)
    # Figures at a time limit contain the memory too, and no step changes it.
    monitor.exchange_bytes = engine.count_exchange_bytes()
    device_records.exchange_memory_gib = monitor.exchange_bytes / 2**30
    if even_experts:
        _select_experts_evenly(engine)
    start_seconds = time.perf_counter() - start
    step_records = _StepRecords()

    def make_result() -> dict[str, Any] | None:
        if not step_records.seconds:
            return None
        return _make_result(layout, samples, step_records, device_records=device_records, device=device)

    if rank_info.rank == 0:
        monitor.make_result = make_result
    with close_engine_at_end(engine):
        with watcher or contextlib.nullcontext():
            _time_steps(
                engine,
                samples,
                steps,
                warmup=warmup,
                gc_interval=config.train.gc_interval,
                records=step_records,
                monitor=monitor,
            )
        next_step = warmup + steps + 1
        if device.type == "cuda":
            _measure_memory(device, device_records)
            _measure_gemm_rate(device, device_records, gemm_seconds)
            # With a pipeline, a device also waits for the messages of other stages.
            if config.parallel.pipeline == 1:
                for _ in range(host_steps):
                    device_records.host_seconds.append(_measure_host_seconds(engine, samples, next_step))
                    next_step += 1
        if profile is not None:
            _profile_step(engine, samples, next_step, out=profile, rank=rank_info.rank, is_cuda=device.type == "cuda")
        engine.synchronize()
    if rank_info.rank != 0:
        return None
    result = _make_result(layout, samples, step_records, device_records=device_records, device=device)
    result |= {
        "watched": None if watcher is None else watcher.list_samples(step_records.first_timed_start),
        "watch_trouble": None if watcher is None else watcher.error,
        "start_seconds": start_seconds,
        "active": engine.active | engine.runtime.kernels.list_choices(),
    }
    return result


@contextlib.contextmanager
def close_engine_at_end(engine: Engine) -> Iterator[None]:
    """Close the engine after the block. If the block raised an error, the engine's peers learn that it failed."""
    try:
        yield
    except BaseException:
        engine.close(failed=True)
        raise
    engine.close()


def _select_experts_evenly(engine: Engine) -> None:
    from megascale.model.experts import list_expert_layers

    for layer in list_expert_layers(engine.chunks):
        layer.selection_override = select_evenly


def _make_watcher(device: torch.device) -> GpuWatch:
    import torch

    from megascale.bench.gpu_watch import GpuWatch

    return GpuWatch(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _measure_gemm_rate(device: torch.device, records: _DeviceRecords, seconds: float) -> None:
    """Add the sustained GEMM rate of a GPU, measured for `seconds`, to its records."""
    from megascale.bench.timing import measure_sustained_gemm_rate

    if device.type == "cuda":
        records.gemm_rates.append(measure_sustained_gemm_rate(device, seconds))


def _measure_memory(device: torch.device, records: _DeviceRecords) -> None:
    """Add the peak of this rank's memory and the device's memory in use to the records."""
    import torch

    records.peak_memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 + records.exchange_memory_gib
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    records.used_memory_gib = (total_bytes - free_bytes) / 2**30


def _time_steps(
    engine: Engine,
    samples: RandomSamples,
    steps: int,
    *,
    warmup: int,
    gc_interval: int,
    records: _StepRecords,
    monitor: StepMonitor,
) -> None:
    """Run `warmup` untimed and `steps` timed steps, and add them to the records."""
    from megascale.train.host_pauses import GarbageCollector

    with contextlib.closing(GarbageCollector(gc_interval)) as garbage_collector:
        for step in range(1, warmup + steps + 1):
            start = time.perf_counter()
            if step == warmup + 1:
                records.first_timed_start = start
            engine.start_gather()
            result = engine.step(
                samples.read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights
            )
            garbage_collector.collect(step)  # as in training
            records.losses.append(float(result.loss))  # waits for the update, not for work that overlaps the next step
            seconds = time.perf_counter() - start
            expert_counts = result.expert_counts
            rank_load = None
            if expert_counts is not None:
                rank_load = expert_counts.summarise()["expert_rank_load_max"]
            if step > warmup:
                records.seconds.append(seconds)
                if expert_counts is not None and rank_load is not None:
                    records.largest_loads.append(rank_load)
                    records.recomputed_count += int(expert_counts.is_repeated)
            monitor.record_step(rank_load)


def _make_result(
    layout: Layout,
    samples: RandomSamples,
    step_records: _StepRecords,
    *,
    device_records: _DeviceRecords,
    device: torch.device,
) -> dict[str, Any]:
    """Return the content of the JSON result that the records determine."""
    import torch

    import megascale
    from megascale.core.flops import CONVENTION, DOCUMENT_CONVENTION, device_peak_tflops, document_flops, mfu

    config = layout.config
    model, train = config.model, config.train
    world = layout.grid.world_size
    step_seconds = statistics.median(step_records.seconds)
    tokens_per_second = train.global_batch * model.sequence_length / step_seconds
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = "CPU"
    peak_tflops = config.observe.peak_tflops or device_peak_tflops(device_name)
    if samples.document_lengths:
        flop_count = document_flops(model, Counter(samples.document_lengths))
        convention = DOCUMENT_CONVENTION
    else:
        flop_count = None  # `mfu` counts attention over the whole sequence
        convention = CONVENTION
    has_experts = bool(step_records.largest_loads)
    return {
        "model": model.preset,
        "settings": config.model_dump(mode="json", exclude_none=True, include=REPORTED_SECTIONS),
        "processes": world,
        "global_batch": train.global_batch,
        "sequence_length": model.sequence_length,
        "date": date.today().isoformat(),
        "device": f"{world} x {device_name}",
        "versions": {"megascale": megascale.__version__, "torch": torch.__version__},
        "step_seconds": step_seconds,
        "all_step_seconds": step_records.seconds,
        "step_seconds_min_max": [min(step_records.seconds), max(step_records.seconds)],
        "host_seconds": statistics.median(device_records.host_seconds) if device_records.host_seconds else None,
        "tokens_per_second_per_device": tokens_per_second / world,
        "mfu": mfu(model, tokens_per_second, world, peak_tflops, flop_count) if peak_tflops else None,
        "mfu_convention": f"{convention}; peak {peak_tflops} TFLOP/s",
        "documents": len(samples.document_lengths) or None,
        "expert_rank_load_max": statistics.median(step_records.largest_loads) if has_experts else None,
        "redone_steps": step_records.recomputed_count if has_experts else None,
        "gemm_flop_per_s": device_records.gemm_rates or None,
        "peak_memory_gib": device_records.peak_memory_gib,
        "exchange_memory_gib": device_records.exchange_memory_gib,
        "device_memory_gib": device_records.used_memory_gib,
        "losses": [step_records.losses[0], step_records.losses[-1]],
    }


def _measure_host_seconds(engine: Engine, samples: RandomSamples, step: int) -> float:
    """Return the seconds that the host takes to launch a step.

    The host waits for the device before each micro-batch, because a full launch queue would block it. These waits are
    subtracted.
    """
    import torch

    wait_seconds = 0.0
    assert samples.batch.tokens is not None
    device = samples.batch.tokens.device

    def read_batch(i: int) -> Batch[torch.Tensor]:
        nonlocal wait_seconds
        start = time.perf_counter()
        torch.cuda.synchronize(device)
        wait_seconds += time.perf_counter() - start
        return samples.batch

    torch.cuda.synchronize(device)
    start = time.perf_counter()
    engine.start_gather()
    result = engine.step(read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights)
    elapsed = time.perf_counter() - start - wait_seconds
    float(result.loss)  # waits for the step's end
    return elapsed


def _profile_step(engine: Any, samples: RandomSamples, step: int, *, out: Path, rank: int, is_cuda: bool) -> None:
    """Profile one step on all ranks; rank 0 writes a table of kernels (.txt) and the Chrome trace `out`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    # Without `acc_events` some releases of torch warn that a further cycle would clear the events of this one.
    with profile(activities=activities, acc_events=True) as profiler:
        engine.start_gather()
        engine.step(samples.read_batch, step, LEARNING_RATE, has_next_step=True, sum_weights=samples.sum_weights)
        # The next step's gathers have begun. torch records their ends in the profiler, and crashes after its end.
        engine.synchronize()
        if is_cuda:
            torch.cuda.synchronize()
    if rank != 0:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_cuda:
        sort_key = "self_cuda_time_total"
    else:
        sort_key = "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=sort_key, row_limit=40, max_name_column_width=70)
    out.with_suffix(".txt").write_text(table)
    if not os.environ.get("MEGASCALE_NO_TRACE"):  # a trace of a large model has hundreds of megabytes
        profiler.export_chrome_trace(str(out))
