"""The configuration of a run: all sections, checks that concern several sections, and output as TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import model_validator

from megascale.config.base import Section
from megascale.config.cluster_sections import KubernetesConfig, SlurmConfig
from megascale.config.model_section import ModelConfig
from megascale.config.parallel_sections import (
    CONTEXT_DATA_CHANNELS,
    DATA_CHANNELS,
    SIDE_STREAM_MAX_TOKENS,
    SIDE_STREAM_MIN_HIDDEN,
    OverlapConfig,
    ParallelConfig,
)
from megascale.config.parts import LINEAR_PRECISIONS, OPTIMIZERS
from megascale.config.resilience_section import ForeignConfig, ResilienceConfig
from megascale.config.run_sections import CheckpointConfig, ObserveConfig, RendezvousConfig
from megascale.config.training_sections import DataConfig, KernelsConfig, LrConfig, OptimizerConfig, TrainConfig
from megascale.errors import FitError


class Config(Section):
    """Configuration of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr: LrConfig = LrConfig()
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    foreign: ForeignConfig = ForeignConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @property
    def gemms_on_side_stream(self) -> bool:
        """True if independent GEMMs run on two streams: overlap.gemms with auto resolved."""
        if self.overlap.gemms != "auto":
            return self.overlap.gemms == "on"
        tokens = self.model.sequence_length * self.train.micro_batch
        return self.model.hidden >= SIDE_STREAM_MIN_HIDDEN and tokens <= SIDE_STREAM_MAX_TOKENS

    @property
    def exchanges_heads_in_parts(self) -> bool:
        """True if context ranks exchange heads in parts (overlap.context_parts)."""
        return self.overlap.context_parts and self.parallel.context > 1

    def max_channels(self, axis: str) -> int | None:
        """Return the maximum NCCL channels of the axis "pipeline" or "data"; None (NCCL's choice) without overlap."""
        overlap = self.overlap
        if axis == "pipeline":
            return overlap.pipeline_channels if overlap.pipeline else None
        if not overlap.data:
            return None
        if overlap.data_channels != "auto":
            return overlap.data_channels
        if self.parallel.context > 1:
            return CONTEXT_DATA_CHANNELS
        return DATA_CHANNELS

    @property
    def requested_determinism(self) -> bool | None:
        """Whether steps must repeat bit for bit: kernels.deterministic, or true with a given replay interval.

        None with kernels.deterministic=auto: the trainer decides by the cost.
        """
        if self.kernels.deterministic != "auto":
            return self.kernels.deterministic
        if self.resilience.replay_interval not in ("auto", 0):
            return True
        return None

    @property
    def run_folder(self) -> Path:
        """Folder of all the run's files, `runs/NAME`."""
        return Path(self.train.runs) / self.train.name

    @model_validator(mode="before")
    @classmethod
    def _set_default_peak(cls, tree: Any) -> Any:
        """Set an unset lr.peak to the optimizer's default, if the optimizer has one."""
        if not isinstance(tree, Mapping):
            return tree
        optimizer = tree.get("optimizer", {})
        lr = tree.get("lr", {})
        if not isinstance(optimizer, Mapping) or not isinstance(lr, Mapping) or "peak" in lr:
            return tree
        name = optimizer.get("name")
        if not isinstance(name, str) or name not in OPTIMIZERS or OPTIMIZERS[name].default_peak is None:
            return tree
        return {**tree, "lr": {**lr, "peak": OPTIMIZERS[name].default_peak}}

    @model_validator(mode="after")
    def _check_sections(self) -> Config:
        if self.data.weights is not None and len(self.data.weights) != len(self.data.train):
            raise ValueError(
                f"data.weights has {len(self.data.weights)} entries for {len(self.data.train)} files in data.train; "
                "give one weight per file"
            )
        if self.parallel.reduce_dtype == "bfloat16":
            self._check_bfloat16_reduction()
        if self.parallel.gather_precision == "float8":
            self._check_float8_gather()
        if self.overlap.gathers == "copies" and self.parallel.zero != 3:
            raise ValueError(
                f"overlap.gathers=copies gathers the matrices of parallel.zero=3, and parallel.zero is "
                f"{self.parallel.zero}; set --parallel.zero=3 or --overlap.gathers=collectives"
            )
        if self.parallel.zero3_keep_layers and self.parallel.zero != 3:
            raise ValueError(
                f"parallel.zero3_keep_layers={self.parallel.zero3_keep_layers} keeps gathered matrices of "
                f"parallel.zero=3, and parallel.zero is {self.parallel.zero}; set --parallel.zero=3 or leave it out"
            )
        if self.overlap.reductions == "copies":
            self._check_copied_reductions()
        # The key whose ranks exchange the tokens of experts.
        expert_key = "context" if self.parallel.experts_over == "context" else "expert"
        for axis, key, ranks in (
            ("context", "context", self.parallel.context),
            ("expert", expert_key, self.parallel.expert_ranks),
        ):
            if getattr(self.overlap, axis) == "copies" and ranks == 1:
                raise ValueError(
                    f"overlap.{axis}=copies exchanges data between the ranks of parallel.{key}, and there is only one; "
                    f"set --parallel.{key}=2 or more, or --overlap.{axis}=auto"
                )
        if self.overlap.context_parts and self.parallel.context == 1:
            raise ValueError(
                "overlap.context_parts=true divides the exchange of the ranks of parallel.context, and there is only "
                "one; set --parallel.context=2 or more, or --overlap.context_parts=false"
            )
        if self.overlap.context_parts and self.overlap.context != "collectives":
            raise ValueError(
                f"overlap.context_parts=true with overlap.context={self.overlap.context}: copies exchange all heads at "
                "once; set --overlap.context=collectives or --overlap.context_parts=false"
            )
        if self.parallel.replicate > 1 and self.parallel.zero == 0:
            raise ValueError(
                f"parallel.replicate={self.parallel.replicate} makes copies of sharded state, and parallel.zero=0 "
                "shards none; set --parallel.zero=1 or --parallel.replicate=1"
            )
        if self.optimizer.offload and self.optimizer.name != "adamw":
            raise ValueError(
                f"optimizer.offload=true with optimizer.name={self.optimizer.name}, whose update reads whole matrices; "
                "set --optimizer.name=adamw or --optimizer.offload=false"
            )
        if self.train.lora is not None and self.checkpoint.start_state == "continued":
            raise ValueError(
                "checkpoint.start_state=continued needs the optimizer state of the trained parameters, and "
                "checkpoint.start_from has no state of adapters (train.lora); set --checkpoint.start_state=fresh"
            )
        if self.resilience.continue_replicas:
            self._check_continued_replicas()
        if self.rendezvous.prepared_groups:
            self._check_prepared_groups()
        if self.requested_determinism and self.kernels.attention == "cudnn":
            raise ValueError(
                f"resilience.replay_interval={self.resilience.replay_interval} compares bits, and "
                "kernels.attention='cudnn' sums its gradients in a varying order; set kernels.attention=auto, or "
                "cudnn_frontend"
            )
        if self.lr.min > self.lr.peak:
            raise ValueError(f"lr.min={self.lr.min} is above lr.peak={self.lr.peak}; lower lr.min")
        return self

    def _check_continued_replicas(self) -> None:
        key = "resilience.continue_replicas=true"
        if self.foreign.command:
            raise ValueError(
                f"{key} redistributes the samples of this package's trainer, and foreign.command names another "
                "trainer; leave resilience.continue_replicas out"
            )
        if not self.checkpoint.replicas or not self.checkpoint.memory_interval:
            raise ValueError(
                f"{key} takes the state of lost ranks from copies in other hosts' memory, which the settings do not "
                "make; set --checkpoint.background=true --checkpoint.replicas=true --checkpoint.memory_interval=1"
            )
        if self.resilience.replay_interval not in ("auto", 0):
            raise ValueError(
                f"{key} changes the samples of replicas, and resilience.replay_interval="
                f"{self.resilience.replay_interval} compares replicas with equal numbers of samples; set "
                "--resilience.replay_interval=0, or leave resilience.continue_replicas out"
            )
        if self.model.mlp == "experts" and self.kernels.graphs == "on":
            raise ValueError(
                f"{key} runs blank micro-batches, whose tokens experts do not count, and kernels.graphs=on cannot "
                "capture these; set --kernels.graphs=auto, which captures only steps with all replicas"
            )

    def _check_prepared_groups(self) -> None:
        key = "rendezvous.prepared_groups=true"
        if not self.resilience.continue_replicas:
            raise ValueError(
                f"{key} makes the groups with which missing replicas join, and resilience.continue_replicas=false "
                "trains only with all replicas; set --resilience.continue_replicas=true, or leave "
                "rendezvous.prepared_groups out"
            )
        if self.resilience.keep_seconds == 0:
            raise ValueError(
                f"{key} needs processes that stay for the next attempt, and resilience.keep_seconds=0 starts new ones; "
                "set --resilience.keep_seconds=3, or leave rendezvous.prepared_groups out"
            )
        if not self.rendezvous.url.startswith("env://"):
            raise ValueError(
                f"{key} uses the store that rank 0 serves, and rendezvous.url={self.rendezvous.url} names another one; "
                "set --rendezvous.url=env://, or leave rendezvous.prepared_groups out"
            )

    def _check_copied_reductions(self) -> None:
        if self.parallel.zero < 2:
            raise ValueError(
                f"overlap.reductions=copies reduces the gradients of parallel.zero=2 and 3, and parallel.zero is "
                f"{self.parallel.zero}; set --parallel.zero=2 or --overlap.reductions=collectives"
            )

    def _check_bfloat16_reduction(self) -> None:
        if self.parallel.zero == 0:
            raise ValueError(
                "parallel.reduce_dtype=bfloat16 needs parallel.zero=1 or more, because with 0 the sums would be "
                "rounded too; set --parallel.zero=1 or --parallel.reduce_dtype=float32"
            )
        if self.train.precision == "float64":
            raise ValueError(
                "parallel.reduce_dtype=bfloat16 would round the gradients of train.precision=float64; set "
                "--parallel.reduce_dtype=float32 (gradients are then sent unrounded) or another precision"
            )

    def _check_float8_gather(self) -> None:
        linear_precision = self.train.linear_precision
        if LINEAR_PRECISIONS[linear_precision].gathered_weight_bytes is None:
            raise ValueError(
                "parallel.gather_precision=float8 needs weights with one float8 scale per matrix, and "
                f"train.linear_precision is {linear_precision}; set --train.linear_precision=float8 or "
                "--parallel.gather_precision=auto"
            )
        if self.parallel.zero == 0:
            raise ValueError(
                "parallel.gather_precision=float8 needs parallel.zero=1 or more, because with 0 every rank updates all "
                "parameters and none are gathered; set --parallel.zero=1 or --parallel.gather_precision=auto"
            )

    def count_microbatches(self, data_parallel: int) -> int:
        """Return the micro-batches per data-parallel rank and step.

        With resilience.continue_replicas some ranks may have one fewer. Raises FitError if train.global_batch is not a
        multiple of train.micro_batch x `data_parallel`.
        """
        sequences = self.train.micro_batch * data_parallel
        if self.resilience.continue_replicas and self.train.global_batch % self.train.micro_batch == 0:
            total = self.train.global_batch // self.train.micro_batch
            if total >= data_parallel:
                return -(-total // data_parallel)
        if self.train.global_batch % sequences:
            nearest = max(1, round(self.train.global_batch / sequences)) * sequences
            raise FitError(
                f"train.global_batch={self.train.global_batch} is not a multiple of train.micro_batch x data-parallel "
                f"ranks = {self.train.micro_batch} x {data_parallel}; try --train.global_batch={nearest}"
            )
        return self.train.global_batch // sequences

    def to_toml(self) -> str:
        """Return the configuration as TOML that `load` can read.

        Unset keys are left out. train.precision is left out unless the user has set it, because its default depends on
        the devices of the machine that trains.
        """
        tree = self.model_dump(exclude_none=True)
        if "precision" not in self.train.model_fields_set:
            del tree["train"]["precision"]
        if not self.model.layer_kinds:
            del tree["model"]["layer_kinds"]
        return tomli_w.dumps(tree)

    def write(self, file: Path) -> None:
        """Write `to_toml` to a file in UTF-8, which `load` expects on all machines."""
        file.write_text(self.to_toml(), encoding="utf-8")


def resolve_precision(config: Config, has_bfloat16: bool) -> Config:
    """Return the configuration with train.precision set: the user's choice, else bfloat16 if devices support it.

    Args:
        has_bfloat16: whether the devices of the run support bfloat16.
    """
    if "precision" in config.train.model_fields_set:
        return config
    if has_bfloat16:
        precision = "bfloat16"
    else:
        precision = config.train.precision
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
