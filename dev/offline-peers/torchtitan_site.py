"""Substitutes for packages that torchtitan imports and the comparison does not use. Copy it as sitecustomize.py.

`datasets` needs pyarrow and pandas (67 MB), and tensorboard needs grpcio. Batches are random tokens. No metrics are
written.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def _add(name: str, *attributes: str) -> None:
    """Add a module with empty classes as attributes."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {}))
    sys.modules[name] = module


_add("datasets", "Dataset", "load_dataset")
_add("datasets.distributed", "split_dataset_by_node")
_add("torch.utils.tensorboard", "SummaryWriter")
