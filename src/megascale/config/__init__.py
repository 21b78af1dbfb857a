"""Configuration: sections as typed models, and loading with overrides.

Every package may import this package, which imports `megascale.errors` only.

The names below are imported on first use. Services of a host need only the registries, and start in half the time if
the sections are not imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale.config.base import Section
    from megascale.config.cluster_sections import KubernetesConfig, SlurmConfig
    from megascale.config.loading import (
        from_tree,
        list_presets,
        load,
        load_command_line,
        load_written,
        read_preset,
        replace_sections,
    )
    from megascale.config.model_section import ModelConfig
    from megascale.config.parallel_sections import OverlapConfig, ParallelConfig
    from megascale.config.resilience_section import ForeignConfig, ResilienceConfig
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
    "load_written",
    "read_preset",
    "replace_sections",
    "resolve_precision",
    "split_password",
]

_MODULES = {
    "CHANGEABLE_KEYS": "run_sections",
    "CheckpointConfig": "run_sections",
    "Config": "tree",
    "DataConfig": "training_sections",
    "ForeignConfig": "resilience_section",
    "KernelsConfig": "training_sections",
    "KubernetesConfig": "cluster_sections",
    "LrConfig": "training_sections",
    "ModelConfig": "model_section",
    "ObserveConfig": "run_sections",
    "OptimizerConfig": "training_sections",
    "OverlapConfig": "parallel_sections",
    "ParallelConfig": "parallel_sections",
    "RendezvousConfig": "run_sections",
    "ResilienceConfig": "resilience_section",
    "Section": "base",
    "SlurmConfig": "cluster_sections",
    "TrainConfig": "training_sections",
    "from_tree": "loading",
    "list_presets": "loading",
    "load": "loading",
    "load_command_line": "loading",
    "load_written": "loading",
    "read_preset": "loading",
    "replace_sections": "loading",
    "resolve_precision": "tree",
    "split_password": "run_sections",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
