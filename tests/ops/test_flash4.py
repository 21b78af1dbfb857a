"""FlashAttention-4 as it is called: its compiler makes the kernels for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megascale.errors import ConfigError
from megascale.ops.attention import attention

PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megascale.ops.attention_backends import _FlashAttention4 as ours
from megascale.ops.attention_documents import _Flash4Varlen as varlen

class Context:
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

S, B, N, G, D = 512, 2, 4, 2, 128
with FakeTensorMode(), torch.no_grad():
    q, k, v = torch.empty(S, B, N + 2 * G, D, dtype=torch.bfloat16, device="cuda").split((N, G, G), dim=2)
    for window in (None, 100):
        context = Context()
        out = ours.forward(context, q, k, v, window)
        assert out.shape == (S, B, N * D) and out.is_contiguous()
        *grads, _ = ours.backward(context, torch.empty_like(out))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        assert all(g.stride() == q.stride() for g in grads)
    for window in (None, 100):
        for batch in (1, B):
            context = Context()
            q, k, v = torch.empty(S, batch, N + 2 * G, D, dtype=torch.bfloat16, device="cuda").split((N, G, G), dim=2)
            cumulative = torch.empty(batch * 17 + 1, dtype=torch.int32, device="cuda")
            out = varlen.forward(context, q, k, v, window, cumulative)
            assert out.shape == (S, batch, N * D)
            *grads, _, _ = varlen.backward(context, torch.empty_like(out))
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
            assert batch > 1 or all(g.stride() == q.stride() for g in grads)
print("compiled")
"""

# The package's Python with kernels that note their arguments. Without assertions (-O) it takes tensors of a CPU.
DIRECT_PROGRAM = """
import torch
from flash_attn.cute import interface
from megascale.ops.flash4_calls import Flash4Calls

launches = []

def describe(argument):
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.shape, argument.stride(), argument.dtype, argument.requires_grad

class Cache:
    def __init__(self, name):
        self.name = name

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return lambda *arguments: launches.append((self.name, [describe(argument) for argument in arguments]))

for function in vars(interface).values():
    if hasattr(function, "compile_cache"):
        function.compile_cache = Cache(function.__name__)

def check(condition):
    if not condition:
        raise AssertionError

S, B, N, D = 512, 2, 4, 128
for groups, window, deterministic in [(4, None, False), (2, None, True), (4, 100, True), (2, 100, False)]:
    calls = Flash4Calls(interface)
    heads = (N, groups, groups)
    runs = []
    for _ in range(3):
        launches.clear()
        qkv = torch.randn(S, B, sum(heads), D, requires_grad=True).bfloat16()
        q, k, v = (tensor.transpose(0, 1) for tensor in qkv.split(heads, dim=2))
        out, d_out = (torch.empty(S, B, N, D, dtype=torch.bfloat16).transpose(0, 1) for _ in range(2))
        lse = torch.empty(B, N, S)
        options = {"causal": True, "window_size_left": window}
        calls.run_forward(q, k, v, out, lse, **options)
        grads = torch.empty(S, B, sum(heads), D, dtype=torch.bfloat16).split(heads, dim=2)
        grads = tuple(grad.transpose(0, 1) for grad in grads)
        calls.run_backward(q, k, v, out, d_out, lse, grads, **options, deterministic=deterministic)
        runs.append(list(launches))
    check(len(runs[0]) == (4 if groups == N else 6))
    check(runs[0] == runs[1] == runs[2])
    check(len(calls._plans) == 2 and all(calls._plans.values()))
print("direct")
"""


def run_for_hopper(program: str, *options: str) -> str:
    """Return the output of a program that uses the package for Hopper without a GPU."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed (extra: flash4)")
    report = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    env = {**os.environ, **report, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_passes_compile_for_hopper() -> None:
    assert "compiled" in run_for_hopper(PROGRAM)


def test_direct_calls_pass_the_arguments_of_the_package() -> None:
    assert "direct" in run_for_hopper(DIRECT_PROGRAM, "-O")


@pytest.mark.parametrize("name", ["flash4", "cudnn_frontend"])
def test_a_kernel_of_a_package_says_what_it_needs(name: str) -> None:
    q_SBND = torch.zeros(4, 1, 1, 8)
    with pytest.raises(ConfigError, match=f"{name}.*CUDA.*kernels.attention=auto"):
        attention(q_SBND, q_SBND, q_SBND, window=None, backend=name)
