"""Choice between an operator's fused kernel and its plain PyTorch reference, and a record of the choices.

Each engine has one `Kernels` (in parallel/runtime.py's Runtime), made from `kernels.mode`, and makes it current while
it works. Every public operator calls `use_fused(name, *tensors)`, which the current `Kernels` answers and records for
`Kernels.active()`. A kernel that was requested and is not active is an error (mode "fused") or a line of the printed
record (mode "auto"), never silence.

The current `Kernels` is a context variable and not an argument of each operator. Backward functions need it as well,
from inside autograd, and operators that other packages register have signatures of their own. It is separate for each
thread: a thread that sets none (autograd's own, a service's) uses DEFAULT, as do operators outside any engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from megascale.errors import ConfigError
from megascale.ops import launch

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # a CPU-only installation: the references run, and `active()` reports it
    HAVE_TRITON = False
    triton = None
    tl = None

# Triton reads this variable when a kernel is decorated, so one read here suffices.
INTERPRET = HAVE_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# cuBLAS and torch read the variable. Results are deterministic with either value.
_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate with `triton.jit`, launched by key (ops/launch.py). Without Triton the function is never called."""
    if function is None:
        return lambda f: jit(f, **options)
    return launch.wrap(triton.jit(function, **options)) if HAVE_TRITON else function


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. Triton's own takes 5 us on the host, hundreds of times per micro-batch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()


class _TorchDeterministic:
    """Context in which torch's operators are deterministic, in all threads, until all users have left."""

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
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_TORCH = _TorchDeterministic()


class Kernels:
    """One engine's choice of operators, and the record of those that have run.

    Args:
        mode: kernels.mode: "auto", "fused" (an error if unavailable) or "reference".
        deterministic: kernels.deterministic.
        reads_expert_blocks: kernels.expert_rows_gemm is "descriptors" (ops/grouped_gemm.py).

    Attributes:
        wide_gemm: whether torch's CUDA GEMM adds into float32 (ops/linear.py); None until the first.
        amaxes: slots for the amaxes that operators collect of their outputs (ops/amax.py); None to collect none.

    Raises ConfigError for "fused" on a machine without CUDA (or Triton's interpreter) or Triton, and for
    `deterministic` with a CUBLAS_WORKSPACE_CONFIG that is not deterministic.
    """

    def __init__(self, mode: str = "auto", deterministic: bool = False, reads_expert_blocks: bool = False) -> None:
        if mode == "fused" and not (HAVE_TRITON and (INTERPRET or torch.cuda.is_available())):
            missing = "no CUDA device is visible" if HAVE_TRITON else "Triton is not installed"
            raise ConfigError(
                f"kernels.mode='fused' is unavailable: {missing}; set --kernels.mode=auto to run the plain PyTorch "
                "operators where the fused ones are not available"
            )
        if deterministic and os.environ.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
            raise ConfigError(
                f"kernels.deterministic=true needs {_WORKSPACE}={' or '.join(_WORKSPACES)}, and it is set to "
                f"{os.environ[_WORKSPACE]!r}; unset it"
            )
        self.mode = mode
        self.deterministic = deterministic
        self.reads_expert_blocks = reads_expert_blocks
        self.choices: dict[str, str] = {}
        self.wide_gemm: bool | None = None
        self.amaxes: Any = None

    def note(self, op: str, choice: str) -> None:
        """Record the implementation of `op`, for operators that are not a choice between Triton and reference."""
        self.choices[op] = choice

    def active(self) -> dict[str, str]:
        """Return the implementation of each operator called so far: "triton", "reference (why)" or a description."""
        return dict(sorted(self.choices.items()))

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Choose the operators that this thread calls within.

        torch's operators are made deterministic in all threads, because backward may run in another.
        """
        token = CURRENT.set(self)
        try:
            with _TORCH if self.deterministic else nullcontext():
                yield
        finally:
            CURRENT.reset(token)


DEFAULT = Kernels()  # for operators outside any engine
CURRENT: ContextVar[Kernels] = ContextVar("kernels", default=DEFAULT)


def use_fused(op: str, *tensors: torch.Tensor | None) -> bool:
    """Return whether operator `op` runs its fused kernel on these tensors, and record it for `active()`."""
    # Loops instead of generators, because this runs about a hundred times per micro-batch.
    for tensor in tensors:
        if tensor is not None:
            break
    else:
        raise ValueError(f"{op}: no tensor to choose by")
    kernels = CURRENT.get()
    if kernels.mode == "reference":
        choice = "reference (kernels.mode)"
    elif not HAVE_TRITON:
        choice = "reference (Triton is not installed)"
    elif not (tensor.is_cuda or (INTERPRET and kernels.mode == "fused")):
        choice = f"reference ({tensor.device.type} tensors)"
    else:
        choice = "triton"
        for tensor in tensors:
            if tensor is not None and tensor.dtype not in FUSED_DTYPES:
                choice = "reference (float64)"
    kernels.choices[op] = choice
    return choice == "triton"


def deterministic() -> bool:
    """Return whether results must be the same bits each time: kernels.deterministic of the current `Kernels`."""
    return CURRENT.get().deterministic


def mode() -> str:
    """Return the current mode: "auto", "fused" or "reference"."""
    return CURRENT.get().mode


def note(op: str, choice: str) -> None:
    """Call `Kernels.note` of the current `Kernels`."""
    CURRENT.get().choices[op] = choice


def active() -> dict[str, str]:
    """Call `Kernels.active` of the current `Kernels`."""
    return CURRENT.get().active()
