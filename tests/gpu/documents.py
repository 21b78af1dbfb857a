"""Attention kernels within documents, on a real GPU: agreement with the reference, and milliseconds.

    PYTHONPATH=src:. python tests/gpu/documents.py

For each shape it prints the kernel that `auto` chooses, the milliseconds of all kernels (forward + backward) and why
others were refused, next to those of full causal attention. It ends with 1 if a kernel other than `sdpa` is refused
where its package is installed, or if the results of a captured kernel are not those of an eager one, also with
other documents.
"""

from __future__ import annotations

import sys

import torch

from megascale.ops.attention import AttentionShape, measure_backends, run_backend
from megascale.ops.attention_documents import DOCUMENT_CANDIDATES, DocumentMask, make_synthetic_boundaries
from megascale.ops.rope import split_qkv
from tests.gpu.command_line import make_parser, require_gpu

# llama-8b at 8,192 tokens with the default limit of documents and with a lower one; windows; several samples.
SHAPES = [
    AttentionShape(8192, 1, 32, 8, 128, None, torch.bfloat16, 129),
    AttentionShape(8192, 1, 32, 8, 128, None, torch.bfloat16, 33),
    AttentionShape(8192, 1, 32, 8, 128, 1024, torch.bfloat16, 129),
    AttentionShape(2048, 4, 16, 16, 64, None, torch.bfloat16, 33),
]
EXPECTED_REFUSALS = ("is unavailable",)
AGREEMENT = 1e-2  # norm-wise, in bfloat16


def check_capture(name: str, shape: AttentionShape) -> str:
    """Return why a captured kernel is wrong, or "": it must read the boundaries of each replay."""
    device = torch.device("cuda")
    width = (shape.N + 2 * shape.G) * shape.D
    qkv = torch.randn(shape.S, shape.B, width, device=device, dtype=shape.dtype, requires_grad=True)
    upstream = torch.randn(shape.S, shape.B, shape.N * shape.D, device=device, dtype=shape.dtype)
    boundaries = make_synthetic_boundaries(shape.S, shape.B, shape.max_documents).to(device)
    others = torch.full_like(boundaries, shape.S)
    others[0] = 0

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        documents = DocumentMask.from_boundaries(boundaries, shape.S)
        q, k, v = split_qkv(qkv * 1, shape.N, shape.G)
        out = run_backend(name, q, k, v, shape.window, documents)
        return out.detach(), torch.autograd.grad(out, qkv, upstream)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for values in (boundaries.clone(), others):
        boundaries.copy_(values)
        graph.replay()
        expected = run()
        for part, actual, eager in zip(("output", "gradient"), captured, expected, strict=True):
            distance = ((actual.float() - eager.float()).norm() / eager.float().norm()).item()
            if not distance <= AGREEMENT:  # NaN is far away too
                return f"its captured {part} is {distance:.1e} away from the eager one's"
    return ""


def main() -> int:
    """Print a block per shape; 1 if anything differs."""
    make_parser(__doc__).parse_args()
    require_gpu()
    device = torch.device("cuda")
    faults = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in SHAPES:
        full = measure_backends(shape._replace(max_documents=0), device)
        choice = measure_backends(shape, device)
        print(f"{shape}\n  documents: {choice}\n  full:      {full}", flush=True)
        for reason in choice.refused.values():
            faults += not any(expected in reason for expected in EXPECTED_REFUSALS)
        for name in DOCUMENT_CANDIDATES:
            if name in choice.milliseconds:
                reason = check_capture(name, shape)
                faults += bool(reason)
                print(f"  {name} captured: {reason or 'as eager'}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
