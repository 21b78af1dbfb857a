"""Scenarios: configurations on a number of GPUs under a software stack, which the simulator prices.

A software stack ("the stack", `Software`) is a trainer: its kernels, overlaps and launch times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megascale.config import Config, ModelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core import flops
from megascale.core.copy_choice import find_copied_reduction_tokens, read_shard_switch
from megascale.core.inventory import resolve_layers
from megascale.core.layers import LayerSums
from megascale.core.layout import Layout
from megascale.core.memory import gathers_float8
from megascale.core.rank_memory import estimate_rank_memory, explain_no_graphs
from megascale.core.traffic import compute_gather_share
from megascale.simulate.calibration import Calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.planner.layout_figures import GIB, RESERVE_GIB, lay_out_priced
from megascale.simulate.software import MEGASCALE_H200, MEGASCALE_H200_GRAPHS, MEGATRON_2023, Software

# By value of kernels.attention: the kernel whose rates are used. Other values use the stack's kernel.
ATTENTION = {"cudnn": "cudnn", "cudnn_frontend": "cudnn", "flash": "flash2", "flash_window": "flash2", "sdpa": "flash2"}


@dataclass(frozen=True)
class Scenario:
    """A configuration on a number of GPUs of a cluster, under a software stack.

    Attributes:
        cluster: figures of the GPUs, hosts and network.
        calibration: fitted constants and their errors.
        software: the stack, with the switches that the configuration sets (`make_engine_software` or
            `make_baseline_software`).
        label: name in messages and tables.
        experts, top_k, expert_parallel: experts of a rough estimate for a dense model.
        base: the named stack from which `software` was made; None if the caller made `software` itself.
        is_baseline: whether `software` was made by `make_baseline_software` rather than by `make_engine_software`.
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
        """Return the scenario with another configuration, and with the software's switches set accordingly.

        The cluster's hosts change if the configuration's do.
        """
        cluster = self.cluster
        gpus_per_host = config.parallel.gpus_per_host
        if gpus_per_host != self.config.parallel.gpus_per_host:
            cluster = cluster.model_copy(update={"gpus_per_host": gpus_per_host})
        if self.base is None:
            return replace(self, config=config, cluster=cluster)
        if self.is_baseline:
            software = make_baseline_software(config, self.base)
        else:
            software = make_engine_software(config, self.base)
        return replace(self, config=config, cluster=cluster, software=software)

    @cached_property
    def layout(self) -> Layout:
        """The layout. Raises FitError if sizes do not divide."""
        return lay_out_priced(self.config, self.gpus)

    @property
    def uses_closed_form_only_features(self) -> bool:
        """Return whether the scenario adds experts to a dense model.

        Only the closed level prices them, without their memory.
        """
        return max(self.experts, self.top_k, self.expert_parallel) > 1

    def make_case(self, counts_gathers: bool = True) -> Case:
        """Return the case with which both levels compute. Raises FitError if sizes do not divide.

        Args:
            counts_gathers: whether to count the gathers of ZeRO-3, which takes milliseconds if units are chunks.
        """
        layout = self.layout
        parallel = self.config.parallel
        layers_by_stage = self.count_chunk_layers().sum(axis=1)
        last_stage = layout.chunk_map.last_stage
        middle_layers = float(layers_by_stage[0])
        if parallel.pipeline > 1:
            # The slowest stage besides the last one determines the pace.
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
            gather_share=self._compute_gather_share(layout) if counts_gathers else 1.0,
            experts=self.experts,
            top_k=self.top_k,
            expert_parallel=self.expert_parallel,
        )

    def _compute_gather_share(self, layout: Layout) -> float:
        """Return the gathers of the first stage's blocks, relative to two per micro-batch; 1 without unit slots."""
        if not self.software.unit_slots or layout.grid.shards == 1:
            return 1.0
        schedule = layout.unchecked_schedule()
        return compute_gather_share(self.config.model, self.config.parallel, schedule, stage=0)

    def count_chunk_layers(self) -> np.ndarray:
        """Return the number of layers of each chunk, weighted by FLOPs: [stages, chunks]. A mean layer has weight 1."""
        layout = self.layout
        flops_sums = _sum_flops(self.config.model)
        mean_flops = flops_sums.running[-1] / self.config.model.layers
        counts = np.array([flops_sums.of_chunk(chunk) / mean_flops for chunk in layout.layers])
        return counts[layout.chunk_map.positions]

    @property
    def memory_config(self) -> Config:
        """The configuration whose memory counts: with the block of the software stack."""
        block = "parallel" if self.software.parallel_block else "serial"
        if self.config.model.block == block:
            return self.config
        model = self.config.model.model_copy(update={"block": block})
        return self.config.model_copy(update={"model": model})

    def memory_gib(self) -> float:
        """Return the memory of the fullest rank with the reserve, in GiB (core/memory.py), as `megascale plan` does.

        It is this engine's memory, whichever stack `software` is.
        """
        layout = self.layout
        # A check of the schedule takes time, and a search estimates many layouts. `estimate_step` checks the schedule.
        schedule = layout.unchecked_schedule()
        pipeline = self.config.parallel.pipeline
        # The first, a middle and the last stage, and the stages with the ends of the model.
        stages = sorted({0, pipeline // 2, pipeline - 1, *layout.chunk_map.end_stages})
        config = self.memory_config
        available_bytes = (self.cluster.gpu.memory_gib - RESERVE_GIB) * GIB
        totals = []
        for stage in stages:
            memory, _ = estimate_rank_memory(
                config, layout.grid, schedule=schedule, stage=stage, available_bytes=available_bytes
            )
            totals.append(memory.total)
        return max(totals) / GIB + RESERVE_GIB


def dump_settings(config: Config) -> dict[str, Any]:
    """Return a configuration as a tree to change, from which `from_tree` makes a configuration.

    The preset is left out, since its values are in the tree. So is the precision if it is not set.
    """
    tree = config.model_dump(exclude_none=True)
    tree["model"].pop("preset", None)
    if "precision" not in config.train.model_fields_set:
        tree["train"].pop("precision")
    return tree


def match_hosts(config: Config, cluster: ClusterSpec) -> tuple[Config, ClusterSpec]:
    """Return both with the same number of GPUs per host: that of the configuration if it is set, else the cluster's."""
    parallel = config.parallel
    if "gpus_per_host" in parallel.model_fields_set:
        return config, cluster.model_copy(update={"gpus_per_host": parallel.gpus_per_host})
    parallel = parallel.model_copy(update={"gpus_per_host": cluster.gpus_per_host})
    return config.model_copy(update={"parallel": parallel}), cluster


# Cached because a search calls it for every layout.
@lru_cache(maxsize=64)
def _sum_flops(model: ModelConfig) -> LayerSums:
    """Return the sums over layers of the forward FLOPs per token, from which the FLOPs of a chunk follow."""
    flops_by_layer = []
    for layer in resolve_layers(model):
        count = flops.layer_flops(layer, model.sequence_length)
        flops_by_layer.append((count.forward, count.projections + count.attention, count.mlp))
    return LayerSums.collect(flops_by_layer)


def make_engine_software(config: Config, base: Software) -> Software:
    """Return this package's own stack `base` with the switches that the configuration sets.

    Block, window, ZeRO, recomputation, float8 and a named attention kernel are those of the configuration. Overlaps and
    fused operators are off if the stack or the configuration switches them off.
    """
    model = config.model
    parallel = config.parallel
    overlap = config.overlap
    kernels = config.kernels
    float8 = LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms
    # This engine runs CUDA graphs where the configuration allows them. A stack with other launch times keeps its own.
    has_engine_launches = _launch_times(base) == _launch_times(MEGASCALE_H200)
    if has_engine_launches and not explain_no_graphs(config):
        graphs = MEGASCALE_H200_GRAPHS
        base = replace(base, launch_us=graphs.launch_us, region_host_us=graphs.region_host_us)
    # Ask for two data-parallel ranks: one rank gathers nothing, so that the bytes do not matter.
    has_float8_gathers = gathers_float8(model, parallel, config.train.linear_precision, data=2)
    return replace(
        base,
        parallel_block=model.block == "parallel",
        window=model.window,
        distributed_optimizer=parallel.zero > 0,
        reduces_each_microbatch=parallel.zero == 2,
        full_sharding=base.full_sharding or parallel.zero == 3,
        unit_slots=parallel.zero == 3 and base.is_memory_modelled,
        copied_gathers=overlap.gathers != "collectives",
        copied_reductions=find_copied_reduction_tokens(config),
        mapped_shards=not has_float8_gathers and read_shard_switch() == "1",
        rounded_gradients=parallel.reduce_dtype == "bfloat16" and float8 == "none",
        float8=base.float8 or float8 != "none",
        bf16_weight_gradients=float8 == "all but weight gradients",
        gather_bytes=1 if has_float8_gathers else base.gather_bytes,
        reduce_bytes=2 if parallel.reduce_dtype == "bfloat16" else base.reduce_bytes,
        recompute=parallel.recompute,
        trains_adapters=config.train.lora is not None,
        tp_overlap=base.tp_overlap and overlap.tensor in ("auto", "fused"),
        pp_overlap=base.pp_overlap and overlap.pipeline,
        dp_overlap=base.dp_overlap and overlap.data,
        fused_operators=base.fused_operators and kernels.mode != "reference",
        attention=ATTENTION.get(kernels.attention, base.attention),
    )


def _launch_times(software: Software) -> tuple[float, float]:
    return software.launch_us, software.region_host_us


def make_baseline_software(config: Config, base: Software = MEGATRON_2023) -> Software:
    """Return another trainer's stack `base` with the configuration's sharding, recomputation and float8.

    Block and window stay those of `base`.

    A stack that supports float8 uses it for all three GEMMs of a linear layer.
    """
    parallel = config.parallel
    return replace(
        base,
        distributed_optimizer=parallel.zero > 0,
        reduces_each_microbatch=parallel.zero == 2,
        full_sharding=base.full_sharding or parallel.zero == 3,
        float8=base.has_float8 and requests_float8(config),
        recompute=parallel.recompute,
        trains_adapters=config.train.lora is not None,
    )


def requests_float8(config: Config) -> bool:
    """Return whether the configuration has GEMMs in float8."""
    return LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms != "none"
