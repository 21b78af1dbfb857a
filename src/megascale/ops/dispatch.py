"""Which implementation an operator runs: the fused kernel or the plain PyTorch reference, and a record of it.

`configure(mode)` is called once at start-up with `kernels.mode`. Every public operator asks `use_fused(name,
*tensors)`; the answer is remembered so that `active()` can be printed: what was asked for and is not active
is an error (mode "fused") or a line of that print (mode "auto"), never silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_mode = "auto"
_active: dict[str, str] = {}


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


def configure(mode: str) -> None:
    """Set how operators are chosen: "auto", "fused" (an error where it cannot be) or "reference".

    Raises ConfigError if "fused" is asked for on a machine without CUDA (or Triton's interpreter) or Triton.
    """
    global _mode
    if mode == "fused" and not (HAVE_TRITON and (INTERPRET or torch.cuda.is_available())):
        missing = "Triton is not installed" if not HAVE_TRITON else "no CUDA device is visible"
        raise ConfigError(
            f"kernels.mode='fused' cannot be had here: {missing}; set --kernels.mode=auto to run the plain "
            "PyTorch operators where the fused ones are not available"
        )
    _mode = mode
    _active.clear()


def mode() -> str:
    """The mode in force: "auto", "fused" or "reference"."""
    return _mode


def use_fused(op: str, *tensors: torch.Tensor | None) -> bool:
    """Whether operator `op` runs its fused kernel on these tensors; the answer is recorded for `active()`."""
    # Loops, not generators: this is asked about a hundred times a micro-batch.
    for tensor in tensors:
        if tensor is not None:
            break
    else:
        raise ValueError(f"{op}: no tensor to choose by")
    if _mode == "reference":
        choice = "reference (kernels.mode)"
    elif not HAVE_TRITON:
        choice = "reference (Triton is not installed)"
    elif not (tensor.is_cuda or (INTERPRET and _mode == "fused")):
        choice = f"reference ({tensor.device.type} tensors)"
    else:
        choice = "triton"
        for tensor in tensors:
            if tensor is not None and tensor.dtype not in FUSED_DTYPES:
                choice = "reference (float64)"
    _active[op] = choice
    return choice == "triton"


def note(op: str, choice: str) -> None:
    """Record what `op` runs, for operators that are not a choice between Triton and reference."""
    _active[op] = choice


def active() -> dict[str, str]:
    """What each operator called so far runs: name to "triton", "reference (why)" or a description."""
    return dict(sorted(_active.items()))
