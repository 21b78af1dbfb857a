"""Attention kernels with sinks, on a real GPU: agreement with the reference, and milliseconds.

    PYTHONPATH=src:. python tests/gpu/sinks.py

For each shape it prints the kernel that `auto` chooses, the milliseconds of all kernels (forward + backward) and why
others were refused, next to those without sinks. The clamped SwiGLU is compared with its reference. It ends with 1 if a
kernel is refused where its package is installed, or if the activation differs.
"""

from __future__ import annotations

import sys

import torch

from megascale.ops.activation import activate, swiglu_clamped_reference
from megascale.ops.attention import AttentionShape, measure_backends
from tests.gpu.command_line import make_parser, require_gpu

# gpt-oss-20b: layers with and without a window; documents.
SHAPES = [
    AttentionShape(8192, 1, 64, 8, 64, None, torch.bfloat16, has_sinks=True),
    AttentionShape(8192, 1, 64, 8, 64, 128, torch.bfloat16, has_sinks=True),
    AttentionShape(4096, 2, 64, 8, 64, 128, torch.bfloat16, max_documents=33, has_sinks=True),
]
EXPECTED_REFUSALS = ("is unavailable",)
ACTIVATION_AGREEMENT = 1e-2  # norm-wise, in bfloat16


def compare_activation() -> str:
    """Return why the fused clamped SwiGLU is wrong, or an empty string."""
    x = 4 * torch.randn(4096, 2 * 2880, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(4096, 2880, device="cuda", dtype=torch.bfloat16)
    results = []
    for function, dtype in (
        (lambda x: activate("swiglu_clamped", x), x.dtype),
        (swiglu_clamped_reference, torch.float),
    ):
        leaf = x.to(dtype).requires_grad_()
        y = function(leaf)
        results.append((y.detach().float(), torch.autograd.grad(y, leaf, upstream.to(dtype))[0].float()))
    for part, actual, expected in zip(("output", "gradient"), *results, strict=True):
        distance = ((actual - expected).norm() / expected.norm()).item()
        if not distance <= ACTIVATION_AGREEMENT:
            return f"its {part} is {distance:.1e} away from the reference's"
    return ""


def main() -> int:
    """Print a block per shape; 1 if anything differs."""
    make_parser(__doc__).parse_args()
    require_gpu()
    device = torch.device("cuda")
    faults = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in SHAPES:
        choice = measure_backends(shape, device)
        without = measure_backends(shape._replace(has_sinks=False), device)
        print(f"{shape}\n  sinks:   {choice}\n  without: {without}", flush=True)
        for reason in choice.refused.values():
            faults += not any(expected in reason for expected in EXPECTED_REFUSALS)
    reason = compare_activation()
    faults += bool(reason)
    print(f"clamped SwiGLU: {reason or 'as the reference'}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
