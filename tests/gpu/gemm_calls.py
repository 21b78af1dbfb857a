"""Direct calls of cuBLASLt (ops/float8/cublaslt.py) next to `torch._scaled_mm`: bits, and host time per call.

    PYTHONPATH=src:. python tests/gpu/gemm_calls.py --out gemm_calls.json

The GEMMs are those of gpt-13b and llama-8b with tensor parallelism of 1 and 2 and micro-batches of 1, 2 and 4. y and dx
must have the bits of `_scaled_mm`, with and without bias, with one scale per matrix and one per row, on a side stream,
and in a CUDA graph that is replayed. dw must be near `_scaled_mm`, and twice as large after a second call.

Host times are medians of CALLS calls, each timed by itself while the device's queue is short. Calls through torch are
timed twice: while torch parses CUBLAS_WORKSPACE_CONFIG in each call, and after `hide_workspace_setting`. Device times
are those of DEVICE_CALLS calls in a row, for the workspaces of torch and of weight gradients.

The exit code is 1 if any bits differ, if cuBLASLt refuses a GEMM, or if the setting is still parsed on Hopper.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.float8 import cublaslt, gemm
from megascale.ops.float8.formats import E4M3, E5M2, Format, allocate_scales
from tests.gpu.command_line import make_parser, require_gpu

CALLS = 200
CALLS_IN_QUEUE = 20  # CUDA takes about a thousand launches before the host must wait
DEVICE_CALLS = 20
DW_LIMIT = 1e-3  # norm-wise distance between two products in float32, whose sums have different orders
ADD_LIMIT = 1e-6  # norm-wise distance of a product that is added to itself from twice the product
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


class Linear(NamedTuple):
    """A linear layer of a model.

    Attributes:
        cut: the size that tensor-parallel ranks cut: "outputs" or "inputs".
        has_bias: whether the GEMM adds a bias.
    """

    inputs: int
    outputs: int
    cut: str
    has_bias: bool = False


# Tokens of a sequence, and linear layers.
MODELS: dict[str, tuple[int, dict[str, Linear]]] = {
    "gpt-13b": (
        2048,
        {
            "qkv": Linear(5120, 15360, "outputs", has_bias=True),
            "attention out": Linear(5120, 5120, "inputs"),
            "mlp in": Linear(5120, 20480, "outputs", has_bias=True),
            "mlp out": Linear(20480, 5120, "inputs"),
        },
    ),
    "llama-8b": (
        8192,
        {
            "qkv": Linear(4096, 6144, "outputs"),
            "attention out": Linear(4096, 4096, "inputs"),
            "gate + up": Linear(4096, 28672, "outputs"),
            "down": Linear(14336, 4096, "inputs"),
        },
    ),
}
TIMED_SHAPES = ((2048, 5120, 7680), (4096, 5120, 5120), (8192, 4096, 14336))  # tokens, inputs, outputs


def list_shapes() -> dict[tuple[int, int, int, bool], str]:
    """Return the name of each different shape (tokens, inputs, outputs, bias) of the models and layouts.

    Tensor-parallel ranks also multiply the rows of one rank at a time, as they arrive.
    """
    shapes: dict[tuple[int, int, int, bool], str] = {}
    for model, (length, linears) in MODELS.items():
        for name, linear in linears.items():
            for tensor in (1, 2):
                inputs, outputs = linear.inputs, linear.outputs
                if linear.cut == "outputs":
                    outputs //= tensor
                else:
                    inputs //= tensor
                for microbatch in (1, 2, 4):
                    for parts in {1, tensor}:
                        shape = length * microbatch // parts, inputs, outputs, linear.has_bias
                        shapes.setdefault(shape, f"{model} {name} TP{tensor} micro-batch {microbatch}")
    return shapes


def draw(kind: Format, rows: int, columns: int) -> Tensor:
    """Return random float8 numbers [rows, columns]."""
    return torch.randn(rows, columns, device=DEVICE, dtype=BF16).mul_(8).to(kind.dtype)


def allocate_result(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, dtype: torch.dtype = BF16) -> Tensor:
    """Allocate the result of a GEMM."""
    return torch.empty(a.shape[0], b.shape[0], device=DEVICE, dtype=dtype)


def have_equal_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bits, so that NaN is equal to NaN and 0 differs from -0."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Comparison:
    """Results of all GEMMs.

    Attributes:
        compared: number of GEMMs.
        faults: descriptions of different results.
        equal_dw: number of weight gradients with the bits of `_scaled_mm`, of `compared_dw`.
    """

    def __init__(self) -> None:
        self.compared = self.compared_dw = self.equal_dw = 0
        self.faults: list[str] = []
        self.scales = allocate_scales(2, DEVICE, 0.0078)

    def check(self, name: str, operands: tuple[Tensor, ...], fast: bool, bias: Tensor | None = None) -> None:
        """Compare a product with `_scaled_mm`."""
        expected = allocate_result(*operands)
        out = torch.full_like(expected, torch.nan)
        gemm.multiply_by_torch(expected, *operands, fast=fast, bias=bias)
        reason = cublaslt.multiply(out, *operands, bias=bias, fast=fast)
        self.compared += 1
        if reason:
            self.faults.append(f"{name}: refused, {reason}")
        elif not have_equal_bits(out, expected):
            distance = (out.float() - expected.float()).norm() / expected.float().norm()
            self.faults.append(f"{name}: other bits, distance {distance.item():.1e}")

    def check_linear(self, name: str, T: int, I: int, O: int, has_bias: bool, row_wise: bool) -> None:  # noqa: E741
        """Compare the three GEMMs of a linear layer."""
        sx, sw = self.scales
        x, w, w_columns = draw(E4M3, T, I), draw(E4M3, O, I), draw(E4M3, I, O)
        bias = torch.randn(O, device=DEVICE, dtype=BF16) if has_bias else None
        self.check(f"{name} y", (x, sx, w, sw), fast=True, bias=bias)
        dy = draw(E5M2, T, O)
        self.check(f"{name} dx", (dy, sx, w_columns, sw), fast=False)
        if row_wise:
            row_scales = [torch.rand(rows, 1, device=DEVICE) + 0.5 for rows in (T, O, I)]
            self.check(f"{name} y, row-wise", (x, row_scales[0], w, row_scales[1]), fast=True, bias=bias)
            dy_e4m3 = draw(E4M3, T, O)
            self.check(f"{name} dx, row-wise", (dy_e4m3, row_scales[0], w_columns, row_scales[2]), fast=False)
        self.check_wgrad(f"{name} dw", (draw(E5M2, O, T), sx, draw(E4M3, I, T), sw))

    def check_wgrad(self, name: str, operands: tuple[Tensor, ...]) -> None:
        """Compare a weight's gradient with `_scaled_mm`, which may sum in another order, and add it a second time."""
        expected = allocate_result(*operands, dtype=torch.float32)
        out = torch.full_like(expected, torch.nan)
        gemm.multiply_by_torch(expected, *operands)
        gemm.matmul_into(out, *operands, overwrite=True)
        self.compared_dw += 1
        self.equal_dw += have_equal_bits(out, expected)
        distance = ((out - expected).norm() / expected.norm()).item()
        if not distance <= DW_LIMIT:
            self.faults.append(f"{name}: distance {distance:.1e}")
        twice = out * 2
        gemm.matmul_into(out, *operands)
        distance = ((out - twice).norm() / twice.norm()).item()
        if not distance <= ADD_LIMIT:
            self.faults.append(f"{name}: the second call adds another product, distance {distance:.1e}")

    def check_streams_and_graphs(self) -> None:
        """Compare products of two streams at the same time, and of a graph that is replayed after other products."""
        T, I, O = 2048, 5120, 5120  # noqa: E741
        sx, sw = self.scales
        pairs = [((draw(E4M3, T, I), sx, draw(E4M3, O, I), sw), torch.empty(T, O, device=DEVICE, dtype=BF16))]
        pairs.append(((draw(E4M3, T, I), sw, draw(E4M3, O, I), sx), torch.empty_like(pairs[0][1])))
        expected = [gemm.multiply_by_torch(allocate_result(*operands), *operands) for operands, _ in pairs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def multiply(index: int) -> None:
            operands, out = pairs[index]
            reason = cublaslt.multiply(out, *operands)
            if reason:
                self.faults.append(f"streams: refused, {reason}")

        def compare(name: str) -> None:
            torch.cuda.synchronize()
            self.compared += len(pairs)
            for (_, out), product in zip(pairs, expected, strict=True):
                if not have_equal_bits(out, product):
                    self.faults.append(f"{name}: other bits")
                out.fill_(torch.nan)

        for _ in range(10):
            multiply(0)
            with torch.cuda.stream(side):
                multiply(1)
        compare("two streams")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            multiply(0)
            multiply(1)
        multiply(1)  # the plan's addresses differ from those of the graph
        for _, out in pairs:
            out.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        compare("graph")


def measure_host(call: Callable[[], Any]) -> float:
    """Return the median of the host's microseconds per call."""
    times = []
    for _ in range(10):
        call()
    for index in range(CALLS):
        if index % CALLS_IN_QUEUE == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return sorted(times)[CALLS // 2] * 1e6


def measure_device(call: Callable[[], Any]) -> float:
    """Return the device's microseconds per call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    call()
    torch_private.cuda_sleep(10_000_000)  # the host runs ahead during these cycles
    events[0].record()
    for _ in range(DEVICE_CALLS):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / DEVICE_CALLS * 1e3


def make_heuristic_call(plan: cublaslt.Plan) -> Callable[[], Any]:
    """Return a call that asks cuBLASLt for the algorithm of a plan again."""
    lt = cublaslt.get_library()
    preference, count, results = c_void_p(), c_int(), (cublaslt._Heuristic * 1)()
    lt("cublasLtMatmulPreferenceCreate", byref(preference))
    size = c_uint64(plan.workspace_bytes)
    attribute = cublaslt._PREFERENCE_WORKSPACE
    lt("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(size), sizeof(size))
    layouts = plan.b, plan.a, plan.d, plan.d
    arguments = plan.handle, plan.descriptor, *layouts, preference, 1, results, byref(count)
    return lambda: lt.calls.cublasLtMatmulAlgoGetHeuristic(*arguments)


class Timed:
    """The calls of one shape, and their times by name."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        T, I, O = shape  # noqa: E741
        scales = allocate_scales(2, DEVICE, 0.0078)
        self.operands = (draw(E4M3, T, I), scales[0], draw(E4M3, O, I), scales[1])
        self.wgrad_operands = (draw(E5M2, O, T), scales[0], draw(E4M3, I, T), scales[1])
        self.out = torch.empty(T, O, device=DEVICE, dtype=BF16)
        self.main_grad = torch.zeros(O, I, device=DEVICE)
        self.x, self.w = (torch.randn(*sizes, device=DEVICE, dtype=BF16) for sizes in ((T, I), (O, I)))
        self.bias = torch.randn(O, device=DEVICE, dtype=BF16)
        self.host: dict[str, float] = {}
        self.device: dict[str, float] = {}

    def multiply_by_torch(self) -> Tensor:
        """Return a new product by `_scaled_mm`."""
        return gemm.multiply_by_torch(torch.empty_like(self.out), *self.operands, fast=True)

    def list_torch_calls(self) -> dict[str, Callable[[], Any]]:
        return {
            "_scaled_mm": functools.partial(gemm.multiply_by_torch, self.out, *self.operands, fast=True),
            "_scaled_mm, bias": functools.partial(
                gemm.multiply_by_torch, self.out, *self.operands, fast=True, bias=self.bias
            ),
            "bfloat16 mm": functools.partial(torch.mm, self.x, self.w.t(), out=self.out),
            "bfloat16 linear, bias": functools.partial(F.linear, self.x, self.w, self.bias),
        }

    def measure_torch(self, suffix: str) -> None:
        for name, call in self.list_torch_calls().items():
            self.host[f"{name}{suffix}"] = measure_host(call)

    def measure_direct(self) -> None:
        """Measure direct calls, and their parts that only C needs."""
        calls: dict[str, Callable[[], Any]] = {
            "y, direct": functools.partial(gemm.matmul_out, self.out, *self.operands, fast=True),
            "y, direct, bias": functools.partial(gemm.matmul_out, self.out, *self.operands, fast=True, bias=self.bias),
            "dw, direct": functools.partial(gemm.matmul_into, self.main_grad, *self.wgrad_operands),
        }
        for name, call in calls.items():
            self.host[name] = measure_host(call)
        a, a_scale, b, b_scale = self.operands
        (plan,) = (
            plan
            for problem, plan in cublaslt._plans.items()
            if problem.a_shape == a.shape and problem.b_shape == b.shape and problem.as_torch and not problem.has_bias
        )
        addresses = cublaslt.Addresses(
            self.out.data_ptr(), a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), bias=0
        )
        self.host["cublasLtMatmul alone"] = measure_host(lambda: plan.run(addresses, cublaslt._OVERWRITE_AT))
        self.host["heuristic alone"] = measure_host(make_heuristic_call(plan))
        self.host["torch.empty"] = measure_host(lambda: torch.empty_like(self.out))

    def measure_device(self) -> None:
        torch_calls = self.list_torch_calls()
        with_large_workspace = functools.partial(
            cublaslt.matmul_into, self.out, *self.operands, overwrite=True, fast=True
        )
        self.device = {
            "_scaled_mm": measure_device(torch_calls["_scaled_mm"]),
            "y, direct": measure_device(functools.partial(cublaslt.multiply, self.out, *self.operands, fast=True)),
            "y, direct, 32 MiB": measure_device(with_large_workspace),
        }


def print_times(title: str, times: list[dict[str, float]]) -> None:
    print(f"{title:<44}" + "".join(f"{' x '.join(map(str, shape)):>22}" for shape in TIMED_SHAPES))
    for name in times[0]:
        print(f"  {name:<42}" + "".join(f"{row[name]:>22.1f}" for row in times))


def main() -> int:
    """Compare and print; 1 if anything differs."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    out_path: Path | None = parser.parse_args().out
    require_gpu()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as kernels.deterministic=auto sets it, before the first GEMM
    torch.manual_seed(0)
    begin = time.perf_counter()
    timed = [Timed(shape) for shape in TIMED_SHAPES]
    for item in timed:
        item.measure_torch(", setting parsed")
    before = [item.multiply_by_torch() for item in timed]
    faults: list[str] = []
    line = dispatch.hide_workspace_setting(DEVICE)
    if not line and torch.cuda.get_device_capability() == (9, 0):
        faults.append("CUBLAS_WORKSPACE_CONFIG is still parsed")
    for item, product in zip(timed, before, strict=True):
        if not have_equal_bits(item.multiply_by_torch(), product):
            faults.append("_scaled_mm has other bits without the setting")
        item.measure_torch(", setting hidden")
        item.measure_direct()
        item.measure_device()
    del before
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {cublaslt.get_library().version}")
    print(f"workspace of torch {torch_private.get_cublaslt_workspace_bytes() >> 10} KiB; setting: {line or 'parsed'}")
    print_times("host us per call (tokens x inputs x outputs)", [item.host for item in timed])
    print_times(
        "device us per call",
        [item.device for item in timed],
    )
    host, device = ([getattr(item, part) for item in timed] for part in ("host", "device"))
    del timed, item
    comparison = Comparison()
    comparison.check_streams_and_graphs()
    for (T, I, O, has_bias), name in list_shapes().items():  # noqa: E741
        comparison.check_linear(f"{name} {T} x {I} x {O}", T, I, O, has_bias, row_wise=T <= 4096)
    faults += comparison.faults
    for fault in faults:
        print(f"FAULT {fault}")
    summary = {
        "compared": comparison.compared,
        "faults": len(faults),
        "dw": comparison.compared_dw,
        "dw with the bits of _scaled_mm": comparison.equal_dw,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(summary)
    if out_path:
        out_path.write_text(json.dumps({"host_us": host, "device_us": device, "faults": faults, **summary}, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
