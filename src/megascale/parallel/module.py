"""Base class of the model's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class DirectModule(nn.Module):
    """Module whose parameters and submodules are attributes of the instance, too.

    nn.Module looks them up in `__getattr__`, which Python calls at each access: some hundred times per step, on the
    thread that launches kernels.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is None or isinstance(value, (nn.Module, nn.Parameter)):
            self.__dict__[name] = value

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Apply `fn` to all tensors, as `to` and `to_empty` do, which may replace parameters."""
        super()._apply(fn, recurse)
        self.__dict__.update(self.named_parameters(recurse=False))
        return self
