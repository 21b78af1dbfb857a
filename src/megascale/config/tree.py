"""The whole tree of settings, what must hold between its sections, and how it is written as TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import model_validator

from megascale.config.base import Section
from megascale.config.data_section import DataConfig
from megascale.config.kubernetes_section import KubernetesConfig
from megascale.config.model_section import ModelConfig
from megascale.config.optimizers import OPTIMIZERS
from megascale.config.parallel_sections import FEW_TOKENS, WIDE, OverlapConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.config.resilience_section import ResilienceConfig
from megascale.config.run_sections import CheckpointConfig, ObserveConfig, RendezvousConfig
from megascale.config.training_sections import KernelsConfig, LrConfig, OptimizerConfig, TrainConfig
from megascale.errors import FitError


class Config(Section):
    """The whole tree."""

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
    kubernetes: KubernetesConfig = KubernetesConfig()

    @property
    def gemms_on_side_stream(self) -> bool:
        """Whether independent GEMMs run on two streams: overlap.gemms with auto resolved."""
        tokens = self.model.sequence_length * self.train.micro_batch
        pays = self.model.hidden >= WIDE and tokens <= FEW_TOKENS
        return self.overlap.gemms == "on" or (self.overlap.gemms == "auto" and pays)

    @property
    def run_folder(self) -> Path:
        """`runs/NAME`: all that a run leaves behind."""
        return Path(self.train.runs) / self.train.name

    @model_validator(mode="before")
    @classmethod
    def _rates(cls, tree: Any) -> Any:
        """An optimizer's own default of lr.peak: with AdamW's LAMB would train a fifteenth as fast."""
        if not isinstance(tree, Mapping):
            return tree
        optimizer, lr = tree.get("optimizer", {}), tree.get("lr", {})
        if not (isinstance(optimizer, Mapping) and isinstance(lr, Mapping)):
            return tree
        name = optimizer.get("name")
        if isinstance(name, str) and name in OPTIMIZERS and "peak" not in lr:
            peak = OPTIMIZERS[name].default_peak
            return tree if peak is None else {**tree, "lr": {**lr, "peak": peak}}
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.data.weights is not None and len(self.data.weights) != len(self.data.train):
            raise ValueError(
                f"data.weights has {len(self.data.weights)} entries for {len(self.data.train)} files in data.train; "
                "give one weight a file"
            )
        if self.parallel.reduce_dtype == "bfloat16":
            if self.parallel.zero == 0:
                raise ValueError(
                    "parallel.reduce_dtype=bfloat16 needs parallel.zero=1 or 2: with 0 sums would travel rounded too"
                )
            if self.train.precision == "float64":
                raise ValueError(
                    "parallel.reduce_dtype=bfloat16 would round the gradients of train.precision=float64; set "
                    "--parallel.reduce_dtype=float32 (they then travel in full) or another precision"
                )
        if self.parallel.gather_precision == "float8":
            linear = self.train.linear_precision
            if LINEAR_PRECISIONS[linear].gathered is None:
                raise ValueError(
                    f"parallel.gather_precision=float8 needs weights with one float8 scale a matrix, and "
                    f"train.linear_precision is {linear}; set --train.linear_precision=float8 or "
                    "--parallel.gather_precision=auto"
                )
            if self.parallel.zero == 0:
                raise ValueError(
                    "parallel.gather_precision=float8 needs parallel.zero=1 or 2: with 0 every rank updates all "
                    "parameters and none are gathered; set --parallel.zero=1 or --parallel.gather_precision=auto"
                )
        if self.lr.min > self.lr.peak:
            raise ValueError(f"lr.min={self.lr.min} is above lr.peak={self.lr.peak}; lower lr.min")
        return self

    def count_microbatches(self, data_parallel: int) -> int:
        """Micro-batches a data-parallel rank runs in a step; FitError if sizes do not divide."""
        per_micro = self.train.micro_batch * data_parallel
        if self.train.global_batch % per_micro:
            near = max(1, round(self.train.global_batch / per_micro)) * per_micro
            raise FitError(
                f"train.global_batch={self.train.global_batch} is not a multiple of train.micro_batch x data-parallel "
                f"ranks = {self.train.micro_batch} x {data_parallel}; try --train.global_batch={near}"
            )
        return self.train.global_batch // per_micro

    def to_toml(self) -> str:
        """The resolved tree as TOML, which `load` reads again whatever its strings hold; unset keys are left out, and
        train.precision unless somebody set it: it is decided where the devices are, not by who passes the file on."""
        tree = self.model_dump(exclude_none=True)
        if "precision" not in self.train.model_fields_set:
            del tree["train"]["precision"]
        return tomli_w.dumps(tree)

    def write(self, file: Path) -> None:
        """Write `to_toml` to a file, in the encoding that `load` reads wherever it runs."""
        file.write_text(self.to_toml(), encoding="utf-8")


def with_precision(config: Config, bfloat16: bool) -> Config:
    """train.precision as it is where somebody set it, else bfloat16 where the devices have that; set in either case."""
    if "precision" in config.train.model_fields_set:
        return config
    precision = "bfloat16" if bfloat16 else config.train.precision
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
