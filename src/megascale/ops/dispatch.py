"""Which implementation an operator runs: the fused kernel or the plain PyTorch reference, and a record of it.

Each engine has one `Kernels` (in parallel/runtime.py's Runtime), made from `kernels.mode`, and puts it in force for
the length of what it does. Every public operator asks `use_fused(name, *tensors)`, which is answered by the one in
force; the answer is remembered so that `Kernels.active()` can be printed: what was asked for and is not active is an
error (mode "fused") or a line of that print (mode "auto"), never silence.

The one in force is a context variable and not an argument of each operator: backward functions ask as well, from inside
autograd, and operators that other packages register have signatures of their own. It is each thread's own: a thread
that puts nothing in force (autograd's own, a service's) runs DEFAULT, and so does whatever no engine called.
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
except ImportError:  # a CPU-only installation: the references serve, and `active()` says so
    HAVE_TRITON = False
    triton = None
    tl = None

# Triton reads this when a kernel is decorated, so it is read once here too.
INTERPRET = HAVE_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# cuBLAS and torch read the variable; of these values both say that results are the same each time.
_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, launched by key (ops/launch.py); the undecorated function where Triton is not installed, where it
    is never called."""
    if function is None:
        return lambda f: jit(f, **options)
    return launch.quick(triton.jit(function, **options)) if HAVE_TRITON else function


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own serves kernels too and takes 5 us here, hundreds of times a micro-batch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()


class _TorchDeterministic:
    """Within, torch's operators are deterministic, in all threads; as before once all who entered have left."""

    def __init__(self) -> None:
        self._inside, self._lock = 0, threading.Lock()
        self._before = (False, False, True)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                told = (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                )
                self._before = (*told, torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
                # Memory that is not cleared is not read either, and clearing takes longer than many an operator.
                self._tell(True, False, False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._tell(*self._before)

    @staticmethod
    def _tell(deterministic: bool, warn_only: bool, fill: bool) -> None:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_TORCH = _TorchDeterministic()


class Kernels:
    """How operators are chosen, and what they have run: an engine's own.

    Args:
        mode: "auto", "fused" (an error where it cannot be) or "reference", as kernels.mode.
        deterministic: as kernels.deterministic.

    Attributes:
        wide_gemm: whether torch's CUDA GEMM adds into float32 (ops/linear.py); None until the first.
        amaxes: where operators collect the largest magnitude of what they make (ops/known_amax.py); None: nowhere.

    Raises ConfigError if "fused" is asked for on a machine without CUDA (or Triton's interpreter) or Triton, and if
    CUBLAS_WORKSPACE_CONFIG is set to what is not deterministic and that is asked for.
    """

    def __init__(self, mode: str = "auto", deterministic: bool = False) -> None:
        if mode == "fused" and not (HAVE_TRITON and (INTERPRET or torch.cuda.is_available())):
            missing = "Triton is not installed" if not HAVE_TRITON else "no CUDA device is visible"
            raise ConfigError(
                f"kernels.mode='fused' cannot be had here: {missing}; set --kernels.mode=auto to run the plain "
                "PyTorch operators where the fused ones are not available"
            )
        if deterministic and os.environ.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
            raise ConfigError(
                f"kernels.deterministic=true needs {_WORKSPACE}={' or '.join(_WORKSPACES)}, and it is set to "
                f"{os.environ[_WORKSPACE]!r}; unset it"
            )
        self.mode, self.deterministic = mode, deterministic
        self.choices: dict[str, str] = {}
        self.wide_gemm: bool | None = None
        self.amaxes: Any = None

    def note(self, op: str, choice: str) -> None:
        """Record what `op` runs, for operators that are not a choice between Triton and reference."""
        self.choices[op] = choice

    def active(self) -> dict[str, str]:
        """What each operator called so far runs: name to "triton", "reference (why)" or a description."""
        return dict(sorted(self.choices.items()))

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Within, operators that this thread calls ask these. Those of torch are told whether to be deterministic, in
        all threads: backward may run in another."""
        before = CURRENT.set(self)
        try:
            with _TORCH if self.deterministic else nullcontext():
                yield
        finally:
            CURRENT.reset(before)


DEFAULT = Kernels()  # of operators that no engine calls
CURRENT: ContextVar[Kernels] = ContextVar("kernels", default=DEFAULT)


def use_fused(op: str, *tensors: torch.Tensor | None) -> bool:
    """Whether operator `op` runs its fused kernel on these tensors; the answer is recorded for `active()`."""
    # Loops, not generators: this is asked about a hundred times a micro-batch.
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
    """Whether a result must be the same bits each time: kernels.deterministic, of those in force."""
    return CURRENT.get().deterministic


def mode() -> str:
    """The mode in force: "auto", "fused" or "reference"."""
    return CURRENT.get().mode


def note(op: str, choice: str) -> None:
    """As `Kernels.note`, of those in force."""
    CURRENT.get().choices[op] = choice


def active() -> dict[str, str]:
    """As `Kernels.active`, of those in force."""
    return CURRENT.get().active()
