"""Attention kernels of a slice's queries over more keys, on a real GPU: agreement with the reference, milliseconds.

    PYTHONPATH=src:. python tests/gpu/slices.py

The shapes are those of context ranks that gather keys. For each it prints the kernel that `auto` chooses, the
milliseconds of all kernels (forward + backward), and why others were refused, next to those of full causal attention
of all keys. It ends with 1 if a kernel is refused where its package is installed.
"""

from __future__ import annotations

import sys

import torch

from megascale.ops.attention import AttentionShape, measure_backends
from tests.gpu.command_line import make_parser, require_gpu

# 20 heads over 8 ranks of 32,768 tokens: the second and the last slice, and one with a window.
SHAPES = [
    AttentionShape(4096, 1, 20, 4, 128, None, torch.bfloat16, key_count=8192),
    AttentionShape(4096, 1, 20, 4, 128, None, torch.bfloat16, key_count=32768),
    AttentionShape(4096, 1, 20, 4, 128, 1024, torch.bfloat16, key_count=5119),
]
EXPECTED_REFUSALS = ("is unavailable",)


def main() -> int:
    """Print a block per shape; 1 if a kernel is refused."""
    make_parser(__doc__).parse_args()
    require_gpu()
    device = torch.device("cuda")
    faults = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for shape in SHAPES:
        choice = measure_backends(shape, device)
        print(f"{shape}\n  slice: {choice}", flush=True)
        full = measure_backends(shape._replace(S=shape.key_count, key_count=0), device)
        print(f"  full:  {full}", flush=True)
        for reason in choice.refused.values():
            faults += not any(expected in reason for expected in EXPECTED_REFUSALS)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
