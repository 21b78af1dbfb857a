"""The one typed tree of settings: sections as typed models, loading with overrides.

Every package may import this one; it imports nothing of ours but the errors. A key exists here only if some code
obeys it.
"""

from megascale.config.base import DEEP, MOST, Section
from megascale.config.data_section import DataConfig
from megascale.config.kubernetes_section import KubernetesConfig
from megascale.config.loading import from_tree, load, load_command_line, preset, presets
from megascale.config.model_section import ModelConfig
from megascale.config.parallel_sections import FEW_TOKENS, WIDE, OverlapConfig, ParallelConfig
from megascale.config.resilience_section import ResilienceConfig
from megascale.config.run_sections import (
    CHANGEABLE_KEYS,
    CheckpointConfig,
    ObserveConfig,
    RendezvousConfig,
    split_password,
)
from megascale.config.training_sections import KernelsConfig, LrConfig, OptimizerConfig, TrainConfig
from megascale.config.tree import Config, with_precision

__all__ = [
    "CHANGEABLE_KEYS",
    "DEEP",
    "FEW_TOKENS",
    "MOST",
    "WIDE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "KernelsConfig",
    "KubernetesConfig",
    "LrConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "ParallelConfig",
    "RendezvousConfig",
    "ResilienceConfig",
    "Section",
    "TrainConfig",
    "from_tree",
    "load",
    "load_command_line",
    "preset",
    "presets",
    "split_password",
    "with_precision",
]
