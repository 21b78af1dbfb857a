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


def run_for_hopper(program: str) -> str:
    """Return the output of a program that uses the package for Hopper without a GPU."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed (extra: flash4)")
    report = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    env = {**os.environ, **report, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_passes_compile_for_hopper() -> None:
    assert "compiled" in run_for_hopper(PROGRAM)


@pytest.mark.parametrize("name", ["flash4", "cudnn_frontend"])
def test_a_kernel_of_a_package_says_what_it_needs(name: str) -> None:
    q_SBND = torch.zeros(4, 1, 1, 8)
    with pytest.raises(ConfigError, match=f"{name}.*CUDA.*kernels.attention=auto"):
        attention(q_SBND, q_SBND, q_SBND, window=None, backend=name)
