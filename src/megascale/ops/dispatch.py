"""Choice between an operator's fused kernel and its plain PyTorch reference, and a record of the choices.

Each engine has one `Kernels` (in `Runtime` of parallel/runtime.py), which holds the value of kernels.mode. The engine
makes its `Kernels` current while it runs. Every public operator calls `use_fused(name, *tensors)`, which chooses by the
current `Kernels` and records the choice there. A requested kernel that is not active is an error (mode "fused") or a
line of the printed record (mode "auto").

The current `Kernels` is a context variable instead of an argument of each operator. Backward functions, which autograd
calls, need it too, and operators of other packages have signatures of their own. Each thread has its own current
`Kernels`. Threads that set none (of autograd, of services) use DEFAULT, as do operators outside any engine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from megascale import torch_private
from megascale.errors import ConfigError
from megascale.ops import launch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # In a CPU-only installation the references run, and `list_choices` shows it.
    HAS_TRITON = False
    triton = None
    tl = None

# Triton reads this variable when a kernel is decorated, so later changes have no effect.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# cuBLAS and torch read this variable. Results are deterministic with either of these values.
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
# torch's compiler reads this variable at its import. `_TorchDeterministic` sets a compiler that is imported already.
_COMPILER_VARIABLE = "TORCHINDUCTOR_DETERMINISTIC"
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel with `triton.jit` and fast launches (ops/launch.py). Without Triton return the function."""
    if function is None:
        return lambda f: jit(f, **options)
    if not HAS_TRITON:
        return function
    return launch.enable_fast_launches(triton.jit(function, **options))


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes 5 us, and operators call this hundreds of times per micro-batch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()


def prepare_workspace() -> str:
    """Let cuBLAS be deterministic, unless the user has set its workspace. Return what is missing, or ""."""
    workspace = os.environ.setdefault(_WORKSPACE_VARIABLE, _DETERMINISTIC_WORKSPACES[0])
    if workspace in _DETERMINISTIC_WORKSPACES:
        return ""
    return f"{_WORKSPACE_VARIABLE}={' or '.join(_DETERMINISTIC_WORKSPACES)}, and it is set to {workspace!r}"


def hide_workspace_setting(device: torch.device) -> str:
    """Remove cuBLAS's workspace setting from C's environment, after torch has read it. Return a line for the log.

    The line is empty if the setting stays. torch 2.11 parses the setting by a regular expression in each call of
    cuBLAS, and three times in `_scaled_mm` and in a GEMM with a bias (`tests/gpu/gemm_calls.py` measures it). Whether
    the setting is deterministic is read once, at the first GEMM. Without a setting a Hopper device has a workspace of
    the same size, so that the algorithms stay the same. `os.environ` keeps the setting.
    """
    if os.environ.get(_WORKSPACE_VARIABLE) != _DETERMINISTIC_WORKSPACES[0] or not _has_large_workspace(device):
        return ""
    matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.mm(matrix, matrix)
    os.unsetenv(_WORKSPACE_VARIABLE)
    try:
        with _TORCH_DETERMINISTIC:
            torch.mm(matrix, matrix)
    except RuntimeError:  # This torch reads the setting again.
        os.putenv(_WORKSPACE_VARIABLE, _DETERMINISTIC_WORKSPACES[0])
        return ""
    return f"{_WORKSPACE_VARIABLE}={_DETERMINISTIC_WORKSPACES[0]}, which torch does not parse in each call"


def _has_large_workspace(device: torch.device) -> bool:
    """Return whether torch's default workspace of cuBLAS is that of the first of _DETERMINISTIC_WORKSPACES, 32 MiB."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def prepare_determinism() -> None:
    """Set the environment that determinism needs. Raises ConfigError if the user's cuBLAS workspace excludes it."""
    problem = prepare_workspace()
    if problem:
        raise ConfigError(f"kernels.deterministic=true needs {problem}; unset it")
    os.environ[_COMPILER_VARIABLE] = "1"


class _TorchDeterministic:
    """Context in which torch's operators are deterministic in all threads, until the last thread has left it."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._previous = (False, False, True)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._previous = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            )
            # Uninitialised memory is never read, and filling it takes longer than many operators.
            self._set(deterministic=True, warn_only=False, fill=False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._set(*self._previous)

    @staticmethod
    def _set(deterministic: bool, warn_only: bool, fill: bool) -> None:
        if "torch._inductor" in sys.modules:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        else:
            # The public function imports torch._inductor to set an option there, which takes seconds per process.
            torch_private.set_deterministic(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_TORCH_DETERMINISTIC = _TorchDeterministic()


class Kernels:
    """One engine's choice between fused and reference operators, and the record of choices.

    Args:
        mode: kernels.mode: "auto", "fused" (an error if unavailable) or "reference".
        deterministic: whether repeated steps must give the same bits.
        reads_expert_blocks: kernels.expert_rows_gemm is "auto" (ops/grouped_gemm.py).

    Attributes:
        choices: implementation of each operator called so far, by the operator's name.
        wide_gemm: whether torch has a CUDA GEMM of bfloat16 matrices that adds to a float32 matrix (ops/linear.py);
            None before the first attempt.
        amaxes: memory for amaxes of operators' outputs (ops/amax.py); None: operators collect no amaxes.

    Raises ConfigError for "fused" on a machine without CUDA (or Triton's interpreter) or Triton, and for
    `deterministic` with a CUBLAS_WORKSPACE_CONFIG that is not deterministic.
    """

    def __init__(self, mode: str = "auto", deterministic: bool = False, reads_expert_blocks: bool = False) -> None:
        if mode == "fused" and not (HAS_TRITON and (IS_INTERPRETED or torch.cuda.is_available())):
            missing = "no CUDA device is visible" if HAS_TRITON else "Triton is not installed"
            raise ConfigError(
                f"kernels.mode='fused' is unavailable: {missing}; set --kernels.mode=auto to run the plain PyTorch "
                "operators where the fused ones are not available"
            )
        if deterministic:
            prepare_determinism()
        self.mode = mode
        self.deterministic = deterministic
        self.reads_expert_blocks = reads_expert_blocks
        self.choices: dict[str, str] = {}
        self.wide_gemm: bool | None = None
        self.amaxes: Any = None

    def record_choice(self, op: str, choice: str) -> None:
        """Record the implementation of `op`, for operators that are not a choice between Triton and reference."""
        self.choices[op] = choice

    def list_choices(self) -> dict[str, str]:
        """Return the implementation of each operator called so far: "triton", "reference (why)" or a description."""
        return dict(sorted(self.choices.items()))

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this object the current `Kernels` of the thread within the context.

        If `deterministic`, torch's operators are deterministic in all threads, because backward may run in another.
        """
        token = CURRENT.set(self)
        try:
            with _TORCH_DETERMINISTIC if self.deterministic else nullcontext():
                yield
        finally:
            CURRENT.reset(token)


DEFAULT = Kernels()  # for operators outside any engine
CURRENT: ContextVar[Kernels] = ContextVar("kernels", default=DEFAULT)


def use_fused(op: str, *tensors: torch.Tensor | None) -> bool:
    """Return whether operator `op` runs its fused kernel on these tensors, and record the choice."""
    # The first tensor decides the device. These are loops instead of generators, because the function runs about a
    # hundred times per micro-batch.
    for tensor in tensors:
        if tensor is not None:
            break
    else:
        raise ValueError(f"{op}: no tensor to choose by")
    kernels = CURRENT.get()
    if kernels.mode == "reference":
        choice = "reference (kernels.mode)"
    elif not HAS_TRITON:
        choice = "reference (Triton is not installed)"
    elif not (tensor.is_cuda or (IS_INTERPRETED and kernels.mode == "fused")):
        choice = f"reference ({tensor.device.type} tensors)"
    else:
        choice = "triton"
        for tensor in tensors:
            if tensor is not None and tensor.dtype not in FUSED_DTYPES:
                choice = "reference (float64)"
    kernels.choices[op] = choice
    return choice == "triton"


def is_deterministic() -> bool:
    """Return whether repeated steps must give the same bits with the current `Kernels`."""
    return CURRENT.get().deterministic


def get_mode() -> str:
    """Return the current mode: "auto", "fused" or "reference"."""
    return CURRENT.get().mode


def record_choice(op: str, choice: str) -> None:
    """Record the implementation of `op` in the current `Kernels`, see `Kernels.record_choice`."""
    CURRENT.get().choices[op] = choice


def list_choices() -> dict[str, str]:
    """Return the implementation of each operator called so far, see `Kernels.list_choices`."""
    return CURRENT.get().list_choices()
