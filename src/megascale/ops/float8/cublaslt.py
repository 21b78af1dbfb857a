"""Float8 GEMMs by direct calls of the cuBLASLt that torch has loaded.

`multiply` gives the bits of `torch._scaled_mm`, with less work per call: descriptors, layouts and the algorithm are
made once per shape, as a `Plan`. A call then passes addresses. `matmul_into` adds to its target, which `_scaled_mm`
cannot do (torch 2.11): a weight gradient would need another float32 tensor and another pass.

Calls go through ctypes. Attribute numbers are those of cublasLt.h, which are stable between versions (12.9 and later
have row-wise scales). cuBLASLt is column-major, so it computes the transpose D^T = B A^T of the row-major
D [M, N] = A [M, K] B [N, K]^T. Its first operand is therefore b with OP_T, and its second operand is a with OP_N.

Work is launched on the device's current stream. Each stream has its own workspace, so that streams may run GEMMs at the
same time. A CUDA graph may capture the calls: they do not synchronise, and workspaces are never freed.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import addressof, byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale import torch_private
from megascale.errors import TrainingError
from megascale.ops.float8.formats import ALIGNED, check_operands, check_scales

WORKSPACE_BYTES = 32 << 20  # workspace of GEMMs that add to their target: NVIDIA's recommendation for Hopper
MAX_PROPOSALS = 8  # algorithms requested for them; the first is used

# The next numbers are values of enumerations in cublasLt.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F = 68
_SCALE_32F = 0
_OP_N = 0
_OP_T = 1
# Attributes of a descriptor.
_TRANSA = 3
_TRANSB = 4
_EPILOGUE = 7
_BIAS = 8
_A_SCALE = 17
_B_SCALE = 18
_FAST = 25
_BIAS_TYPE = 26
_A_SCALE_MODE = 31
_B_SCALE_MODE = 32
_OUTER_VECTOR = 3  # value of the scale modes: a scale for each row
_ADD_BIAS = 4  # value of the epilogue
_PREFERENCE_WORKSPACE = 1
_STATUS = {1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch"}
_STATUS |= {11: "mapping error", 13: "execution failed", 14: "internal error", 15: "not supported"}

CALLS: dict[str, list[Any]] = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
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
    """cuBLASLt with typed calls that raise, a handle per device and workspaces per device and stream.

    Attributes:
        calls: functions of the library, by name.
        set_attribute: cublasLtMatmulDescSetAttribute without release of the interpreter's lock, since it only copies a
            few bytes. Another thread might keep the lock for milliseconds.
    """

    def __init__(self) -> None:
        self.path = find_library_path()
        self.calls = ctypes.CDLL(self.path)
        self.handles: dict[int, c_void_p] = {}
        self.workspaces: dict[tuple[int, int, int], Tensor] = {}
        self.declare(self.calls)
        self.set_attribute = ctypes.PyDLL(self.path).cublasLtMatmulDescSetAttribute
        self.set_attribute.argtypes = CALLS["cublasLtMatmulDescSetAttribute"]
        self.set_attribute.restype = c_int
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
            raise TrainingError(self.explain(name, status) + context)

    def explain(self, name: str, status: int) -> str:
        """Return a description of a failed call."""
        return f"{name} of {self.path} failed with status {status} ({_STATUS.get(status, 'unknown')})"

    def get_handle(self, device: int) -> c_void_p:
        """Return the library's handle for a device, created by the first call."""
        if device not in self.handles:
            handle = c_void_p()
            with torch.cuda.device(device):
                self("cublasLtCreate", byref(handle))
            self.handles[device] = handle
        return self.handles[device]

    def get_workspace(self, device: int, stream: int, nbytes: int) -> int:
        """Return the address of a workspace for a device and stream, allocated by the first call."""
        workspace = self.workspaces.get((device, stream, nbytes))
        if workspace is None:
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
            self.workspaces[device, stream, nbytes] = workspace
        return workspace.data_ptr()


_library: _Library | None = None
# Backward runs in another thread, and each GEMM writes its addresses into the shared plan.
_lock = threading.RLock()


def get_library() -> _Library:
    """Return cuBLASLt with declared calls, prepared by the first call."""
    global _library
    with _lock:
        if _library is None:
            _library = _Library()
        return _library


class Problem(NamedTuple):
    """All that a plan depends on.

    Attributes:
        device: index of the device.
        a_shape, b_shape: sizes [M, K] and [N, K].
        a_type, b_type, type: types of a, b and the result.
        fast: accumulate in about 14 bits.
        row_wise: whether each row of a and b has a scale.
        has_bias: whether a bias of the result's type is added.
        as_torch: whether the algorithm is that of `torch._scaled_mm`.
    """

    device: int
    a_shape: torch.Size
    b_shape: torch.Size
    a_type: torch.dtype
    b_type: torch.dtype
    type: torch.dtype
    fast: bool
    row_wise: bool
    has_bias: bool
    as_torch: bool

    def describe(self) -> str:
        """Return the GEMM in words, for messages."""
        M, K = self.a_shape
        return f"[{M}, {K}] x [{self.b_shape[0]}, {K}]^T, {self.a_type} x {self.b_type} -> {self.type}"


class Addresses(NamedTuple):
    """Addresses of a GEMM's tensors; 0: no bias."""

    target: int
    a: int
    a_scale: int
    b: int
    b_scale: int
    bias: int


class Plan:
    """Descriptor, layouts and algorithm of a problem.

    The library proposes an algorithm for the addresses of scales and bias, so the first call's addresses are given.
    Raises TrainingError if the library proposes none.
    """

    def __init__(self, problem: Problem, addresses: Addresses) -> None:
        lt = get_library()
        self.device = problem.device
        self.context = f", for {problem.describe()}"
        self.workspace_bytes, self.proposals = WORKSPACE_BYTES, MAX_PROPOSALS
        if problem.as_torch:
            self.workspace_bytes, self.proposals = torch_private.get_cublaslt_workspace_bytes(), 1
        self.handle = lt.get_handle(problem.device).value
        self.descriptor = c_void_p()
        lt("cublasLtMatmulDescCreate", byref(self.descriptor), _COMPUTE_32F, _SCALE_32F)
        self.set_attribute(_TRANSA, c_int32(_OP_T))
        self.set_attribute(_TRANSB, c_int32(_OP_N))
        self.set_attribute(_FAST, c_int8(problem.fast))
        if problem.row_wise:
            self.set_attribute(_A_SCALE_MODE, c_int32(_OUTER_VECTOR))
            self.set_attribute(_B_SCALE_MODE, c_int32(_OUTER_VECTOR))
        if problem.has_bias:
            self.set_attribute(_EPILOGUE, c_int32(_ADD_BIAS))
            self.set_attribute(_BIAS_TYPE, c_int32(_TYPES[problem.type]))
        (M, K), N = problem.a_shape, problem.b_shape[0]
        self.a = self._create_layout(problem.a_type, K, M)
        self.b = self._create_layout(problem.b_type, K, N)
        self.d = self._create_layout(problem.type, N, M)
        # Memory from which the library copies an address.
        self._address = c_uint64()
        self._address_at = addressof(self._address)
        self._scales_and_bias = (0, 0, 0)
        self._set_addresses(addresses.a_scale, addresses.b_scale, addresses.bias)
        self.results = (_Heuristic * self.proposals)()
        self.algorithm = addressof(self.results)
        self._propose()

    def set_attribute(self, attribute: int, value: Any) -> None:
        """Set an attribute of the descriptor."""
        get_library()("cublasLtMatmulDescSetAttribute", self.descriptor, attribute, byref(value), ctypes.sizeof(value))

    def _create_layout(self, dtype: torch.dtype, rows: int, columns: int) -> int:
        """Return the address of the layout of a column-major matrix without gaps."""
        layout = c_void_p()
        get_library()("cublasLtMatrixLayoutCreate", byref(layout), _TYPES[dtype], rows, columns, rows)
        assert layout.value is not None
        return layout.value

    def _set_addresses(self, a_scale: int, b_scale: int, bias: int) -> None:
        """Write the addresses of scales and bias into the descriptor."""
        set_attribute, descriptor = get_library().set_attribute, self.descriptor
        # The library's operand A is b, see the module's docstring.
        self._address.value = b_scale
        status = set_attribute(descriptor, _A_SCALE, self._address_at, 8)
        self._address.value = a_scale
        status = status or set_attribute(descriptor, _B_SCALE, self._address_at, 8)
        if bias:
            self._address.value = bias
            status = status or set_attribute(descriptor, _BIAS, self._address_at, 8)
        if status:
            raise TrainingError(get_library().explain("cublasLtMatmulDescSetAttribute", status) + self.context)
        self._scales_and_bias = a_scale, b_scale, bias

    def _propose(self) -> None:
        """Request algorithms, best first."""
        lt = get_library()
        preference, count = c_void_p(), c_int()
        lt("cublasLtMatmulPreferenceCreate", byref(preference))
        size = c_uint64(self.workspace_bytes)
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
                self.proposals,
                self.results,
                byref(count),
                context=self.context,
            )
        finally:
            lt("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise TrainingError(f"cuBLASLt {lt.version} proposes no algorithm{self.context}")

    def run(self, addresses: Addresses, beta: int) -> int:
        """Launch target = a @ b^T times both scales + bias + beta * target. Return cuBLASLt's status.

        Args:
            beta: address of a float32.
        """
        lt = get_library()
        target, a, a_scale, b, b_scale, bias = addresses
        stream = torch_private.current_raw_stream(self.device)
        if (a_scale, b_scale, bias) != self._scales_and_bias:
            self._set_addresses(a_scale, b_scale, bias)
        status: int = lt.calls.cublasLtMatmul(
            self.handle,
            self.descriptor,
            _ALPHA_AT,
            b,
            self.b,
            a,
            self.a,
            beta,
            target,
            self.d,
            target,
            self.d,
            self.algorithm,
            lt.get_workspace(self.device, stream, self.workspace_bytes),
            self.workspace_bytes,
            stream,
        )
        return status

    def close(self) -> None:
        """Free the library's memory of the plan. GEMMs that are launched or captured do not read it."""
        lt = get_library()
        lt("cublasLtMatmulDescDestroy", self.descriptor)
        for layout in (self.a, self.b, self.d):
            lt("cublasLtMatrixLayoutDestroy", layout)


MAX_PLANS = 4096  # prompts of any length would otherwise add plans without end
_plans: dict[Problem, Plan] = {}
_refusals: dict[Problem, str] = {}  # why cuBLASLt does not run a problem of `multiply`
_ALPHA = c_float(1.0)
_BETA_OVERWRITE, _BETA_ADD = c_float(0.0), c_float(1.0)
_ALPHA_AT, _OVERWRITE_AT, _ADD_AT = addressof(_ALPHA), addressof(_BETA_OVERWRITE), addressof(_BETA_ADD)


def _find_plan(problem: Problem, addresses: Addresses) -> Plan:
    """Return the plan of a problem, created by the first call."""
    plan = _plans.get(problem)
    if plan is None:
        M, K = problem.a_shape
        check_operands(M, problem.b_shape[0], K, problem.a_type, problem.b_type)
        if len(_plans) >= MAX_PLANS:
            for old_plan in _plans.values():
                old_plan.close()
            _plans.clear()
        plan = Plan(problem, addresses)
        _plans[problem] = plan
    return plan


def _refuse(problem: Problem, reason: str) -> None:
    """Record why cuBLASLt does not run a problem. At MAX_PLANS reasons, forget the earlier ones."""
    if len(_refusals) >= MAX_PLANS:
        _refusals.clear()
    _refusals[problem] = reason


def multiply(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> str:
    """Compute out [M, N] = a [M, K] @ b [N, K]^T times both scales, plus bias [N], with the bits of `_scaled_mm`.

    Raises FitError for unsupported sizes, formats and addresses of scales.

    Args:
        a_scale, b_scale: float32, [] each, or [M, 1] and [N, 1].
        fast: accumulate in about 14 bits.

    Returns:
        Why cuBLASLt has not run the GEMM, or an empty string. `out` is unchanged with a reason.
    """
    addresses = Addresses(
        out.data_ptr(),
        a.data_ptr(),
        a_scale.data_ptr(),
        b.data_ptr(),
        b_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    target, a_at, a_scale_at, b_at, b_scale_at, bias_at = addresses
    if (target | a_at | b_at | a_scale_at | b_scale_at | bias_at) % ALIGNED:
        check_scales(a_scale, b_scale)
        return f"an address is not a multiple of {ALIGNED}"
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        return "a matrix is not contiguous"
    if bias is not None and bias.dtype != out.dtype:
        return f"the bias is {bias.dtype} and the result {out.dtype}"
    problem = Problem(
        a.get_device(),
        a.shape,
        b.shape,
        a.dtype,
        b.dtype,
        out.dtype,
        fast,
        row_wise=a_scale.dim() > 0,
        has_bias=bias is not None,
        as_torch=True,
    )
    with _lock:
        if problem in _refusals:
            return _refusals[problem]
        try:
            plan = _find_plan(problem, addresses)
            status = plan.run(addresses, _OVERWRITE_AT)
        except TrainingError as error:
            _refuse(problem, str(error))
            return str(error)
        if status:
            _refuse(problem, get_library().explain("cublasLtMatmul", status) + plan.context)
            return _refusals[problem]
    return ""


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
    addresses = Addresses(target.data_ptr(), a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), bias=0)
    problem = Problem(
        a.get_device(),
        a.shape,
        b.shape,
        a.dtype,
        b.dtype,
        target.dtype,
        fast,
        row_wise=a_scale.dim() > 0,
        has_bias=False,
        as_torch=False,
    )
    with _lock:
        plan = _find_plan(problem, addresses)
        status = plan.run(addresses, _OVERWRITE_AT if overwrite else _ADD_AT)
        if status:
            raise TrainingError(get_library().explain("cublasLtMatmul", status) + plan.context)
