"""Float8 GEMMs that add to a float32 result, by direct calls of the cuBLASLt that torch has loaded.

`torch._scaled_mm` cannot add to its output (torch 2.11). A weight gradient would need another float32 tensor and
another pass. This module calls `cublasLtMatmul` through ctypes. Attribute numbers are those of cublasLt.h, which are
stable between versions (12.9 and later have row-wise scales).

A plan (descriptors, layouts, algorithm) is made once per shape. cuBLASLt is column-major, so it computes the transpose
D^T = B A^T of the row-major D [M, N] = A [M, K] B [N, K]^T. Its first operand is therefore b with OP_T, and its second
operand is a with OP_N.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.errors import TrainingError
from megascale.ops.float8.formats import check_operands, check_scales

WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper
MAX_PROPOSALS = 8  # algorithms requested; the first is used

# The next numbers are values of enumerations in cublasLt.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F = 68
_SCALE_32F = 0
_OP_N = 0
_OP_T = 1
# Attributes of a descriptor.
_TRANSA = 3
_TRANSB = 4
_A_SCALE = 17
_B_SCALE = 18
_FAST = 25
_A_SCALE_MODE = 31
_B_SCALE_MODE = 32
_OUTER_VECTOR = 3  # value of the scale modes: a scale for each row
_PREFERENCE_WORKSPACE = 1
_STATUS = {1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch"}
_STATUS |= {11: "mapping error", 13: "execution failed", 14: "internal error", 15: "not supported"}

CALLS: dict[str, list[Any]] = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    # handle, descriptor, layouts of A, B, C, D, preference, requested, results, returned
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, c_void_p],
    # handle, descriptor, alpha, A, A's layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
    # workspace, its size, stream
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


def find_library_path(maps: str = "/proc/self/maps") -> str:
    """Return the path of the libcublasLt that this process has loaded. Raises TrainingError if it has loaded none.

    Args:
        maps: file with the memory mappings of the process.
    """
    for line in Path(maps).read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.rpartition("/")[2].startswith("libcublasLt.so"):
            return path
    raise TrainingError(
        "train.linear_precision='float8' needs the cuBLASLt that torch with CUDA loads, and this process has none; "
        "install a torch with CUDA or set --train.linear_precision=default"
    )


class _Library:
    """cuBLASLt with typed calls that raise, a handle per device and a workspace per device and stream."""

    def __init__(self) -> None:
        self.path = find_library_path()
        self.calls = ctypes.CDLL(self.path)
        self.handles: dict[int, c_void_p] = {}
        self.workspaces: dict[tuple[int, int], Tensor] = {}
        self.declare(self.calls)
        self.version = int(self.calls.cublasLtGetVersion())

    @staticmethod
    def declare(calls: Any) -> None:
        """Declare argument and result types, without which ctypes would pass pointers as 32 bits."""
        for name, arguments in CALLS.items():
            call = getattr(calls, name)
            call.argtypes, call.restype = arguments, c_int
        calls.cublasLtGetVersion.argtypes, calls.cublasLtGetVersion.restype = [], c_size_t

    def __call__(self, name: str, *arguments: Any, context: str = "") -> None:
        """Call a function of cuBLASLt. Raises TrainingError, with `context` in its message, if the call fails."""
        status = getattr(self.calls, name)(*arguments)
        if status:
            meaning = _STATUS.get(status, "unknown")
            raise TrainingError(f"{name} of {self.path} failed with status {status} ({meaning}){context}")

    def get_handle(self, device: int) -> c_void_p:
        """Return the library's handle for a device, created by the first call."""
        if device not in self.handles:
            handle = c_void_p()
            with torch.cuda.device(device):
                self("cublasLtCreate", byref(handle))
            self.handles[device] = handle
        return self.handles[device]

    def get_workspace(self, device: int, stream: int) -> int:
        """Return the address of the workspace for a device and stream, allocated by the first call."""
        workspace = self.workspaces.get((device, stream))
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
            self.workspaces[device, stream] = workspace
        return workspace.data_ptr()


_library: _Library | None = None
# Backward runs in another thread, and each GEMM writes its scale pointers into the shared plan.
_lock = threading.RLock()


def get_library() -> _Library:
    """Return cuBLASLt with declared calls, prepared by the first call."""
    global _library
    with _lock:
        if _library is None:
            _library = _Library()
        return _library


class Plan:
    """Descriptor, layouts and proposed algorithms (best first) of one shape."""

    def __init__(
        self,
        device: int,
        M: int,
        N: int,
        K: int,
        types: tuple[torch.dtype, ...],
        *,
        fast: bool,
        row_wise: bool,
    ) -> None:
        """Create the plan of a GEMM a [M, K] x b [N, K]^T.

        Args:
            types: types of a, b and the result.
            fast: accumulate in about 14 bits.
            row_wise: whether each row of a and b has a scale.
        """
        lt = get_library()
        self.context = f", for [{M}, {K}] x [{N}, {K}]^T, {types[0]} x {types[1]} -> {types[2]}"
        self.device = device
        self.handle = lt.get_handle(device)
        self.descriptor = c_void_p()
        lt("cublasLtMatmulDescCreate", byref(self.descriptor), _COMPUTE_32F, _SCALE_32F)
        self.set_attribute(_TRANSA, c_int32(_OP_T))
        self.set_attribute(_TRANSB, c_int32(_OP_N))
        self.set_attribute(_FAST, c_int8(fast))
        if row_wise:
            self.set_attribute(_A_SCALE_MODE, c_int32(_OUTER_VECTOR))
            self.set_attribute(_B_SCALE_MODE, c_int32(_OUTER_VECTOR))
        self.a, self.b = c_void_p(), c_void_p()
        self.d = c_void_p()
        lt("cublasLtMatrixLayoutCreate", byref(self.a), _TYPES[types[0]], K, M, K)
        lt("cublasLtMatrixLayoutCreate", byref(self.b), _TYPES[types[1]], K, N, K)
        lt("cublasLtMatrixLayoutCreate", byref(self.d), _TYPES[types[2]], N, M, N)
        self.results = (_Heuristic * MAX_PROPOSALS)()
        self.has_proposals = False

    def set_attribute(self, attribute: int, value: Any) -> None:
        """Set an attribute of the descriptor."""
        get_library()("cublasLtMatmulDescSetAttribute", self.descriptor, attribute, byref(value), ctypes.sizeof(value))

    def propose(self) -> None:
        """Request algorithms. The scale pointers must be set, because the library's proposals depend on them."""
        lt = get_library()
        preference, count = c_void_p(), c_int()
        lt("cublasLtMatmulPreferenceCreate", byref(preference))
        size = c_uint64(WORKSPACE_BYTES)
        lt("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_WORKSPACE, byref(size), ctypes.sizeof(size))
        try:
            lt(
                "cublasLtMatmulAlgoGetHeuristic",
                self.handle,
                self.descriptor,
                self.b,
                self.a,
                self.d,
                self.d,
                preference,
                MAX_PROPOSALS,
                self.results,
                byref(count),
                context=self.context,
            )
        finally:
            lt("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise TrainingError(f"cuBLASLt {lt.version} proposes no algorithm{self.context}")
        self.has_proposals = True

    def run(self, target: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, beta: c_float) -> None:
        """Compute target = a @ b^T times both scales + beta * target."""
        lt = get_library()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        # The library's operand A is b, see the module's docstring.
        self.set_attribute(_A_SCALE, c_void_p(b_scale.data_ptr()))
        self.set_attribute(_B_SCALE, c_void_p(a_scale.data_ptr()))
        if not self.has_proposals:
            self.propose()
        lt(
            "cublasLtMatmul",
            self.handle,
            self.descriptor,
            byref(_ALPHA),
            b.data_ptr(),
            self.b,
            a.data_ptr(),
            self.a,
            byref(beta),
            target.data_ptr(),
            self.d,
            target.data_ptr(),
            self.d,
            byref(self.results[0]),
            lt.get_workspace(self.device, stream),
            WORKSPACE_BYTES,
            stream,
            context=self.context,
        )


# Plans by device, sizes, types and options.
_plans: dict[tuple[Any, ...], Plan] = {}
_ALPHA = c_float(1.0)
_BETA_OVERWRITE, _BETA_ADD = c_float(0.0), c_float(1.0)


def _find_plan(target: Tensor, a: Tensor, b: Tensor, fast: bool, row_wise: bool) -> Plan:
    """Return the plan for these tensors, created by the first call."""
    M, K = a.shape
    N = b.shape[0]
    key = (a.device.index, M, N, K, a.dtype, b.dtype, target.dtype, fast, row_wise)
    plan = _plans.get(key)
    if plan is None:
        check_operands(M, N, K, a.dtype, b.dtype)
        types = (a.dtype, b.dtype, target.dtype)
        plan = Plan(a.device.index, M, N, K, types, fast=fast, row_wise=row_wise)
        _plans[key] = plan
    return plan


def matmul_into(
    target: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    overwrite: bool = False,
    fast: bool = False,
) -> None:
    """Compute target [M, N] += a [M, K] @ b [N, K]^T times both scales.

    All tensors are contiguous and on one CUDA device. Raises FitError for unsupported sizes, formats and addresses of
    scales, TrainingError with cuBLASLt's status.

    Args:
        target: float32, bfloat16 or float16.
        a_scale, b_scale: float32, [] each, or [M, 1] and [N, 1].
        overwrite: whether the product replaces target's values.
        fast: accumulate in about 14 bits.
    """
    check_scales(a_scale, b_scale)
    row_wise = a_scale.numel() > 1 or b_scale.numel() > 1
    with _lock:
        plan = _find_plan(target, a, b, fast, row_wise)
        plan.run(target, a, a_scale, b, b_scale, _BETA_OVERWRITE if overwrite else _BETA_ADD)
