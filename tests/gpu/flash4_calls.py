"""Direct calls of FlashAttention-4's kernels (ops/flash4_calls.py) next to the package: bits, and host time per call.

    PYTHONPATH=src:. python tests/gpu/flash4_calls.py --out flash4_calls.json

The shapes are those of gpt-13b, llama-8b and a small model, with full attention and a window, ordered gradients and
others. Each shape runs on views of a projection, on a side stream, and in a CUDA graph that is replayed with other
inputs. Results must have the bits of the package. Gradients whose order varies are compared in ordered runs only.

Host times are medians of CALLS calls, each timed by itself while the device's queue is short.

The exit code is 1 if any bits differ, or if a call went through the package.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.ops import dispatch, flash4_calls
from megascale.ops.attention_backends import load_flash4
from megascale.ops.flash4_calls import CHOICE_NAME, Flash4Calls
from tests.gpu.command_line import make_parser, require_gpu

CALLS = 200
CALLS_IN_QUEUE = 20  # CUDA takes about a thousand launches before the host must wait
DEVICE = torch.device("cuda")


class Problem(NamedTuple):
    """A call of attention.

    Attributes:
        window: keys that a query reads before its own; None: all.
    """

    name: str
    sequence: int
    batch: int
    heads: int
    groups: int
    head_size: int
    window: int | None = None


PROBLEMS = (
    Problem("gpt-13b, micro-batch 2", 2048, 2, 40, 40, 128),
    Problem("gpt-13b, micro-batch 4, TP2", 2048, 4, 20, 20, 128),
    Problem("llama-8b", 8192, 1, 32, 8, 128),
    Problem("llama-8b, window", 8192, 1, 32, 8, 128, window=511),
    Problem("small", 256, 2, 4, 4, 64),
)


class Tensors(NamedTuple):
    """Inputs and results of a forward and a backward, [B, S, heads, D] but `lse` [B, N, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    d_out: Tensor
    lse: Tensor
    grads: tuple[Tensor, Tensor, Tensor]

    def list_results(self) -> list[Tensor]:
        return [self.out, self.lse, *self.grads]


def make_tensors(problem: Problem, seed: int) -> Tensors:
    """Return random inputs as views of a projection, and empty results."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads = (problem.heads, problem.groups, problem.groups)
    shape = (problem.sequence, problem.batch, sum(heads), problem.head_size)
    qkv = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (tensor.transpose(0, 1) for tensor in qkv.split(heads, dim=2))
    out_shape = (problem.sequence, problem.batch, problem.heads, problem.head_size)
    d_out = torch.randn(out_shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    dq, dk, dv = (tensor.transpose(0, 1) for tensor in torch.full_like(qkv, torch.nan).split(heads, dim=2))
    return Tensors(
        q=q,
        k=k,
        v=v,
        out=torch.full_like(d_out, torch.nan).transpose(0, 1),
        d_out=d_out.transpose(0, 1),
        lse=torch.full((problem.batch, problem.heads, problem.sequence), torch.nan, device=DEVICE),
        grads=(dq, dk, dv),
    )


def run_forward(calls: Flash4Calls, problem: Problem, tensors: Tensors) -> None:
    calls.run_forward(
        tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse, causal=True, window_size_left=problem.window
    )


def run_backward(calls: Flash4Calls, problem: Problem, tensors: Tensors, deterministic: bool) -> None:
    calls.run_backward(
        tensors.q,
        tensors.k,
        tensors.v,
        tensors.out,
        tensors.d_out,
        tensors.lse,
        tensors.grads,
        causal=True,
        window_size_left=problem.window,
        deterministic=deterministic,
    )


def count_differences(direct: Flash4Calls, package: Flash4Calls, problem: Problem) -> int:
    """Return the number of results whose bits differ: in later calls, on a side stream, and in a replayed graph."""
    wrong = 0
    for seed in range(3):
        expected = make_tensors(problem, seed)
        run_forward(package, problem, expected)
        run_backward(package, problem, expected, deterministic=True)
        main, side, graphed = (make_tensors(problem, seed) for _ in range(3))
        run_both(direct, problem, main)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run_both(direct, problem, side)
        torch.cuda.current_stream().wait_stream(stream)
        replay(direct, problem, graphed, other=make_tensors(problem, seed + 100))
        torch.cuda.synchronize()
        for tensors in (main, side, graphed):
            pairs = zip(tensors.list_results(), expected.list_results(), strict=True)
            wrong += sum(not torch.equal(result, reference) for result, reference in pairs)
    return wrong


def run_both(calls: Flash4Calls, problem: Problem, tensors: Tensors) -> None:
    """Run a forward and an ordered backward."""
    run_forward(calls, problem, tensors)
    run_backward(calls, problem, tensors, deterministic=True)


def replay(calls: Flash4Calls, problem: Problem, tensors: Tensors, other: Tensors) -> None:
    """Capture a forward and a backward with the inputs of `other`, and replay them with those of `tensors`."""
    inputs = [tensor.clone() for tensor in (tensors.q, tensors.k, tensors.v, tensors.d_out)]
    targets = (tensors.q, tensors.k, tensors.v, tensors.d_out)
    for target, value in zip(targets, (other.q, other.k, other.v, other.d_out), strict=True):
        target.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_both(calls, problem, tensors)
    for target, value in zip(targets, inputs, strict=True):
        target.copy_(value)
    graph.replay()
    graph.replay()  # sums and semaphores must be zeroed in each replay
    torch.cuda.synchronize()


def time_host(call: Callable[[], None]) -> float:
    """Return the median of the microseconds that the host needs for a call."""
    call()
    seconds = []
    for i in range(CALLS):
        if i % CALLS_IN_QUEUE == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * sorted(seconds)[CALLS // 2]


def measure(direct: Flash4Calls, package: Flash4Calls, problem: Problem) -> dict[str, Any]:
    """Return a problem's differences and host times."""
    row: dict[str, Any] = {"problem": problem.name, "differences": count_differences(direct, package, problem)}
    tensors = make_tensors(problem, 0)
    for name, calls in (("package", package), ("direct", direct)):
        row[f"{name}_forward_us"] = time_host(partial(run_forward, calls, problem, tensors))
        for order in (False, True):
            label = "ordered_backward" if order else "backward"
            row[f"{name}_{label}_us"] = time_host(partial(run_backward, calls, problem, tensors, order))
    return row


def main() -> int:
    """Print a row per problem; return 1 if anything differs."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    require_gpu()
    interface = load_flash4()
    flash4_calls.CALLS_DIRECTLY = True
    direct = flash4_calls.make_calls(interface)
    package = Flash4Calls(interface, obstacle="for comparison")
    rows = []
    with torch.no_grad():
        for problem in PROBLEMS:
            row = measure(direct, package, problem)
            run_forward(direct, problem, make_tensors(problem, 0))
            row["choice"] = dispatch.list_choices()[CHOICE_NAME]
            rows.append(row)
            print(
                " ".join(
                    f"{key}={value:.1f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
                )
            )
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1))
    is_wrong = any(row["differences"] or row["choice"] != "compiled kernels directly" for row in rows)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
