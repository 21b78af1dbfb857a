"""Base class of the model's modules."""

from __future__ import annotations

from typing import Any

from torch import nn


class DirectModule(nn.Module):
    """Module whose parameters and submodules are attributes of the instance, too.

    nn.Module looks them up in `__getattr__`, which Python calls at each access: some hundred times per step, on the
    thread that launches kernels. Replace them by assignment only; `to_empty` and the like would leave the old ones.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is None or isinstance(value, (nn.Module, nn.Parameter)):
            self.__dict__[name] = value
