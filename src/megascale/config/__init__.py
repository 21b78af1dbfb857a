"""Configuration: sections as typed models, and loading with overrides.

Every package may import this one; it imports `errors` only. A key exists only if some code obeys it.
"""

from megascale.config.base import Section
from megascale.config.loading import from_tree, list_presets, load, load_command_line, read_preset
from megascale.config.model_section import ModelConfig
from megascale.config.parallel_sections import OverlapConfig, ParallelConfig
from megascale.config.resilience_section import ForeignConfig, KubernetesConfig, ResilienceConfig, SlurmConfig
from megascale.config.run_sections import (
    CHANGEABLE_KEYS,
    CheckpointConfig,
    ObserveConfig,
    RendezvousConfig,
    split_password,
)
from megascale.config.training_sections import DataConfig, KernelsConfig, LrConfig, OptimizerConfig, TrainConfig
from megascale.config.tree import Config, resolve_precision

__all__ = [
    "CHANGEABLE_KEYS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ForeignConfig",
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
    "SlurmConfig",
    "TrainConfig",
    "from_tree",
    "list_presets",
    "load",
    "load_command_line",
    "read_preset",
    "resolve_precision",
    "split_password",
]
