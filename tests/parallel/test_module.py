"""Parameters and submodules as plain attributes, over every way in which they are replaced."""

from __future__ import annotations

import copy

import torch
from torch import nn

from megascale.parallel.module import DirectModule


class Scaled(DirectModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))
        self.bias: nn.Parameter | None = None
        self.inner = nn.Linear(3, 3)


def assert_attributes_are_registered(module: DirectModule) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        assert getattr(module, name) is parameter
    for name, child in module.named_children():
        assert getattr(module, name) is child


def test_attributes_follow_what_is_registered():
    module = Scaled()
    assert "weight" in module.__dict__  # an access calls no __getattr__
    assert module.bias is None
    module.weight = nn.Parameter(torch.zeros(3))
    module.bias = nn.Parameter(torch.ones(3))
    module.inner = nn.Identity()
    assert_attributes_are_registered(module)
    module.bias = None
    assert module.bias is None
    assert "bias" not in dict(module.named_parameters())


def test_parameters_that_torch_replaces_are_followed():
    module = Scaled().to_empty(device="cpu")
    assert module.weight.device.type == "cpu"
    assert_attributes_are_registered(module)
    module = copy.deepcopy(module.to(torch.float64))
    assert module.weight.dtype == torch.float64
    assert_attributes_are_registered(module)
    module.load_state_dict({name: torch.full_like(t, 2.0) for name, t in module.state_dict().items()})
    assert module.weight.tolist() == [2.0, 2.0, 2.0]
