"""Base class of the model's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class DirectModule(nn.Module):
    """Module whose parameters and submodules are also plain attributes of the instance.

    nn.Module finds them only in `__getattr__`, a Python call for each access. That would be some hundred calls per step
    on the thread that launches kernels.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is None or isinstance(value, (nn.Module, nn.Parameter)):
            self.__dict__[name] = value

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Apply `fn` to all tensors, as `to` and `to_empty` do, and update the attributes of replaced parameters."""
        super()._apply(fn, recurse)
        self.__dict__.update(self.named_parameters(recurse=False))
        return self
