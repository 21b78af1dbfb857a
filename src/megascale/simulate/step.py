"""Estimated step times of a configuration on N GPUs under a software stack, with parts and an error band.

An estimate is made at one of two levels: in closed form (closed.py), or event by event (event.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from megascale.config import Config, ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core import flops
from megascale.core.inventory import resolve_layers
from megascale.core.layers import LayerSums
from megascale.core.layout import Layout
from megascale.core.memory import gathers_float8
from megascale.core.rank_memory import estimate_rank_memory, explain_no_graphs
from megascale.errors import ConfigError, FitError
from megascale.simulate.calibration import Calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.event import SimulatedStep, draw_hosts, simulate_step
from megascale.simulate.network import Network
from megascale.simulate.planner.layout_cost import GIB, RESERVE_GIB, lay_out_priced
from megascale.simulate.prediction_band import estimate_band_width, list_cautions
from megascale.simulate.software import MEGASCALE_H200, MEGASCALE_H200_GRAPHS, MEGATRON_2023, Software

Level = Literal["closed", "event"]


@dataclass(frozen=True)
class Scenario:
    """A configuration on a number of GPUs of a cluster, under a software stack.

    Attributes:
        config: the configuration.
        gpus: number of GPUs.
        cluster: figures of the GPUs, hosts and network.
        calibration: fitted constants and their errors.
        software: the stack, with the switches that the configuration sets (`make_engine_software` or
            `make_baseline_software`).
        label: name in messages and tables.
        experts, top_k, expert_parallel: experts of a rough estimate for a dense model.
        base: the named stack from which `software` was made; None if the caller gave `software`.
        is_baseline: whether `software` was made by `make_baseline_software`.
    """

    config: Config
    gpus: int
    cluster: ClusterSpec
    calibration: Calibration
    software: Software
    label: str = "as configured"
    experts: int = 1
    top_k: int = 1
    expert_parallel: int = 1
    base: Software | None = None
    is_baseline: bool = False

    def with_config(self, config: Config) -> Scenario:
        """Return the scenario with another configuration, and with the software's switches set accordingly."""
        if self.base is None:
            return replace(self, config=config)
        make_software = make_baseline_software if self.is_baseline else make_engine_software
        return replace(self, config=config, software=make_software(config, self.base))

    @property
    def layout(self) -> Layout:
        """The layout. Raises FitError if sizes do not divide."""
        return lay_out_priced(self.config, self.gpus)

    @property
    def uses_closed_form_only_features(self) -> bool:
        """True if the scenario has experts for a dense model, which only the closed level prices, without memory."""
        return max(self.experts, self.top_k, self.expert_parallel) > 1

    def make_case(self) -> Case:
        """Return the case with which both levels compute. Raises FitError if sizes do not divide."""
        layout = self.layout
        parallel = self.config.parallel
        layers_by_stage = self.count_chunk_layers().sum(axis=1)
        last_stage = layout.chunk_map.last_stage
        middle_layers = float(layers_by_stage[0])
        if parallel.pipeline > 1:
            middle_layers = float(np.delete(layers_by_stage, last_stage).max())
        return Case.from_model(
            self.config.model,
            self.software,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual=parallel.virtual_stages,
            data=layout.grid.shards // layout.grid.size("context"),
            micro=self.config.train.micro_batch,
            batch=self.config.train.global_batch,
            middle_layers=middle_layers,
            last_layers=float(layers_by_stage[last_stage]),
            micro_batch_group_size=parallel.micro_batch_group_size or 0,
            context=parallel.context,
            experts=self.experts,
            top_k=self.top_k,
            expert_parallel=self.expert_parallel,
        )

    def count_chunk_layers(self) -> np.ndarray:
        """Return the layers of each chunk, weighted by their FLOPs: [stages, chunks]. A mean layer has weight 1."""
        layout = self.layout
        sums = _sum_flops(self.config.model)
        mean = sums.running[-1] / self.config.model.layers
        counts = np.array([sums.of_chunk(chunk) / mean for chunk in layout.layers])
        return counts[layout.chunk_map.positions]

    def memory_gib(self) -> float:
        """Return the memory of the fullest rank with the reserve, in GiB (core/memory.py)."""
        layout = self.layout
        schedule = (
            layout.unchecked_schedule()
        )  # a search estimates many layouts; `estimate_step` checks those that it prices
        pipeline = self.config.parallel.pipeline
        stages = sorted({0, pipeline // 2, pipeline - 1, *layout.chunk_map.end_stages})
        block = "parallel" if self.software.parallel_block else "serial"
        model = self.config.model.model_copy(update={"block": block})
        config = self.config.model_copy(update={"model": model})
        available_bytes = (self.cluster.gpu.memory_gib - RESERVE_GIB) * GIB
        # Only graphs have launches as short as those of MEGASCALE_H200_GRAPHS.
        has_graphs = self.software.launch_us <= MEGASCALE_H200_GRAPHS.launch_us
        totals = []
        for stage in stages:
            memory, _ = estimate_rank_memory(
                config, layout.grid, schedule=schedule, stage=stage, available_bytes=available_bytes, has_gpu=has_graphs
            )
            totals.append(memory.total)
        return max(totals) / GIB + RESERVE_GIB


# Cached because a search calls it for every layout.
@lru_cache(maxsize=64)
def _sum_flops(model: ModelConfig) -> LayerSums:
    """Return the sums of forward FLOPs per token over layers."""
    flops_by_layer = []
    for layer in resolve_layers(model):
        count = flops.layer_flops(layer, model.sequence_length)
        flops_by_layer.append((count.forward, count.projections + count.attention, count.mlp))
    return LayerSums.collect(flops_by_layer)


@dataclass(frozen=True)
class StepEstimate:
    """The estimated time of a step and its parts.

    Attributes:
        scenario: the estimated scenario.
        level: level of the estimate.
        seconds: time of the step.
        low, high: P10 and P90 of the step's time (prediction_band.py).
        parts: seconds by part, which add up to `seconds`. At the event level they are those of the closed form, and
            `interplay` is the difference of the two levels.
        memory_gib: memory of the fullest rank.
        event: result of the event level; None at the closed level.
        cautions: reasons why the error may be larger than the band, such as extrapolation or assumed figures.
    """

    scenario: Scenario
    level: Level
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    memory_gib: float
    event: SimulatedStep | None = None
    cautions: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all GPUs."""
        config = self.scenario.config
        return config.train.global_batch * config.model.sequence_length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, relative to the bf16 peak (megascale.core.flops.CONVENTION)."""
        if self.scenario.uses_closed_form_only_features:
            case = self.scenario.make_case()
            peak = self.scenario.cluster.gpu.peak_tflops * 1e12
            return float(case.flops) / (self.seconds * self.scenario.gpus * peak)
        model = self.scenario.config.model.model_copy(update={"window": self.scenario.software.window})
        peak = self.scenario.cluster.gpu.peak_tflops
        return flops.mfu(model, self.tokens_per_second, self.scenario.gpus, peak)

    def days(self, tokens: float) -> float:
        """Return the days for training on `tokens` tokens, without failures."""
        return tokens / self.tokens_per_second / 86400.0

    def as_dict(self) -> dict[str, object]:
        """Return the fields of --json and CSV."""
        scenario = self.scenario
        parallel, train = scenario.config.parallel, scenario.config.train
        return {
            "label": scenario.label,
            "level": self.level,
            "cluster": scenario.cluster.name,
            "calibration": scenario.calibration.name,
            "gpus": scenario.gpus,
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "virtual": parallel.virtual_stages,
            "context": parallel.context,
            "data": scenario.layout.grid.shards // scenario.layout.grid.size("context"),
            "micro_batch": train.micro_batch,
            "global_batch": train.global_batch,
            "precision": scenario.software.precision,
            "recompute": scenario.software.recompute,
            "zero": parallel.zero,
            "seconds": self.seconds,
            "p10": self.low,
            "p90": self.high,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_convention": flops.CONVENTION,
            "memory_gib": self.memory_gib,
            "parts": self.parts,
            "cautions": list(self.cautions),
        }


# Values of parallel.schedule that the closed level can price.
CLOSED_FORM = ("auto", "1f1b", "interleaved")
# By value of kernels.attention: the kernel whose rates are used. Other values use the stack's kernel.
ATTENTION = {"cudnn": "cudnn", "cudnn_frontend": "cudnn", "flash": "flash2", "flash_window": "flash2", "sdpa": "flash2"}


def make_engine_software(config: Config, base: Software) -> Software:
    """Return `base` with the switches that the configuration sets.

    Block, window, ZeRO, recomputation, float8 and a named attention kernel are those of the configuration. Overlaps and
    fused operators are off if the stack or the configuration switches them off.
    """
    model = config.model
    parallel = config.parallel
    overlap = config.overlap
    kernels = config.kernels
    float8 = LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms
    # This engine runs graphs where the configuration allows them. A stack with other launch times keeps its own.
    has_engine_launches = _launch_times(base) == _launch_times(MEGASCALE_H200)
    if has_engine_launches and not explain_no_graphs(config):
        graphs = MEGASCALE_H200_GRAPHS
        base = replace(base, launch_us=graphs.launch_us, region_host_us=graphs.region_host_us)
    return replace(
        base,
        parallel_block=model.block == "parallel",
        window=model.window,
        distributed_optimizer=parallel.zero > 0,
        reduces_each_microbatch=parallel.zero == 2,
        full_sharding=base.full_sharding or parallel.zero == 3,
        float8=base.float8 or float8 != "none",
        bf16_weight_gradients=float8 == "all but weight gradients",
        gather_bytes=1 if gathers_float8(parallel, config.train.linear_precision, 2) else base.gather_bytes,
        reduce_bytes=2 if parallel.reduce_dtype == "bfloat16" else base.reduce_bytes,
        recompute=parallel.recompute,
        tp_overlap=base.tp_overlap and overlap.tensor in ("auto", "fused"),
        pp_overlap=base.pp_overlap and overlap.pipeline,
        dp_overlap=base.dp_overlap and overlap.data,
        fused_operators=base.fused_operators and kernels.mode != "reference",
        attention=ATTENTION.get(kernels.attention, base.attention),
    )


def _launch_times(software: Software) -> tuple[float, float]:
    return software.launch_us, software.region_host_us


def make_baseline_software(config: Config, base: Software = MEGATRON_2023) -> Software:
    """Return `base` with the configuration's sharding, recomputation and float8, but without its block and window.

    A stack that supports float8 uses it for all three GEMMs of a linear layer.
    """
    parallel = config.parallel
    return replace(
        base,
        distributed_optimizer=parallel.zero > 0,
        reduces_each_microbatch=parallel.zero == 2,
        full_sharding=base.full_sharding or parallel.zero == 3,
        float8=base.has_float8 and _requests_float8(config),
        recompute=parallel.recompute,
    )


def _requests_float8(config: Config) -> bool:
    return LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms != "none"


def estimate_step(
    scenario: Scenario,
    level: Level = "closed",
    *,
    network: Network | None = None,
    fleet: int | None = None,
    slow_hosts: dict[int, float] | None = None,
    jitter: bool = True,
    seed: int = 0,
    check_memory: bool = True,
) -> StepEstimate:
    """Estimate the step of a scenario.

    Args:
        level: "closed" (takes microseconds to milliseconds) or "event" (takes tens of milliseconds and more).
        network: network model; default: rings. Flow and packet models are given here.
        fleet: for the event level, seed of randomly drawn slow hosts, which replace `slow_hosts`.
        slow_hosts: for the event level, factor on the compute time by host.
        jitter: for the event level, whether compute times vary by the cluster's figure.
        seed: seed of the jitter.
        check_memory: whether a layout that does not fit the GPUs is an error.

    Raises FitError if sizes do not divide or memory is insufficient, and ConfigError if the level, the cluster or the
    calibration does not support the configuration.
    """
    case = scenario.make_case()
    constants = scenario.calibration.constants
    schedule = scenario.config.parallel.schedule
    if level == "closed" and schedule not in CLOSED_FORM:
        raise ConfigError(
            f"parallel.schedule={schedule} has no closed form, which {', '.join(CLOSED_FORM)} have; price it event by "
            "event (--level event), or set --parallel.schedule=auto"
        )
    memory = scenario.memory_gib()
    if scenario.uses_closed_form_only_features and not bool(case.fits()):
        raise FitError(
            f"{scenario.label}: --experts={scenario.experts}, --top-k={scenario.top_k}, "
            f"--expert-parallel={scenario.expert_parallel} do not divide: experts over their ranks, replicas over "
            "them, and a token's experts must be at most all experts"
        )
    if check_memory and not scenario.uses_closed_form_only_features and memory > scenario.cluster.gpu.memory_gib:
        if scenario.software.is_memory_modelled:
            memory_note = ""
        else:
            memory_note = f" (the figure is this engine's; {scenario.label} needs another amount)"
        raise FitError(
            f"{scenario.label}: the fullest rank needs {memory:.1f} GiB and a {scenario.cluster.gpu.name} has "
            f"{scenario.cluster.gpu.memory_gib:g}{memory_note}; raise parallel.tensor, parallel.pipeline or the number "
            "of GPUs, lower train.micro_batch, set parallel.recompute=full, or price it all the same with --no-memory"
        )
    if level == "event" and scenario.config.parallel.context > 1:
        raise ConfigError(
            f"{scenario.label}: parallel.context={scenario.config.parallel.context} is priced in closed form only; "
            "leave out --level event"
        )
    if level == "event" and scenario.software.full_sharding:
        raise ConfigError(f"{scenario.label}: full sharding is priced in closed form only; leave out --level event")
    scenario.layout.schedule()  # raises an error if the schedule deadlocks
    if scenario.software.float8 and scenario.cluster.gpu.float8_tflops is None:
        raise ConfigError(
            f"train.linear_precision={scenario.config.train.linear_precision}: cluster {scenario.cluster.name} gives "
            f"{scenario.cluster.gpu.name} no float8 rate (gpu.float8_tflops); set --train.linear_precision=default or "
            "name another --cluster"
        )
    if scenario.software.attention not in ("unfused", *scenario.cluster.kernels.attention):
        raise ConfigError(
            f"cluster {scenario.cluster.name} gives no rate for attention kernel {scenario.software.attention!r}; "
            f"add kernels.attention.{scenario.software.attention} to its file"
        )
    closed_parts = compute_step_parts(scenario.cluster, case, constants, network)
    parts = {name: float(value) for name, value in closed_parts.as_dict().items()}
    seconds = float(closed_parts.total)
    event = None
    if level == "event":
        hosts = slow_hosts
        if fleet is not None:
            hosts = draw_hosts(scenario.cluster, case, fleet, constants.slow_by)

        def simulate_hosts(slow: dict[int, float] | None) -> SimulatedStep:
            return simulate_step(
                scenario.cluster,
                case,
                constants,
                network,
                slow_hosts=slow,
                jitter=scenario.cluster.stragglers.jitter if jitter else 0.0,
                seed=seed,
                layers=scenario.count_chunk_layers(),
                schedule=schedule,
            )

        event = simulate_hosts(hosts)
        healthy_seconds = simulate_hosts(None).seconds if hosts else event.seconds
        parts["stragglers"] = event.seconds - healthy_seconds
        parts["interplay"] = healthy_seconds - sum(value for name, value in parts.items() if name != "stragglers")
        seconds = event.seconds
    family = scenario.software.family
    launch_share = parts["host"] / seconds
    width = estimate_band_width(scenario.cluster, case, scenario.calibration, family, launch_share)
    low, high = (float(bound) for bound in width.around(seconds))
    notes = list_cautions(scenario.cluster, case, scenario.calibration, family, launch_share)
    if not scenario.software.is_memory_modelled:
        notes += (f"memory is this engine's: that of {scenario.label} is not modelled (--no-memory skips the check)",)
    if _requests_float8(scenario.config) and not scenario.software.float8:
        notes += (f"{scenario.label} has no float8: it is priced in bfloat16",)
    if scenario.config.optimizer.offload:
        notes += ("optimizer.offload moves state over the host's bus in each update, which has no price",)
    if scenario.config.parallel.zero3_keep_layers:
        notes += ("parallel.zero3_keep_layers saves gathers, which the price of ZeRO-3 includes all the same",)
    if scenario.uses_closed_form_only_features:
        notes += ("experts: not compared with any measured step, and not counted in the memory",)
    if scenario.config.parallel.context > 1:
        notes += ("context parallelism: not compared with any measured step",)
    return StepEstimate(
        scenario,
        level,
        seconds=seconds,
        low=low,
        high=high,
        parts=parts,
        memory_gib=memory,
        event=event,
        cautions=notes,
    )
