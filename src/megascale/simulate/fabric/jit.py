"""Compiled kernels: numba, optional, its machine code kept in the user's cache so that it is made once a machine.

The cache folder's name has a hash of all kernel sources, since numba looks at the file of a function only, not at
those of what it calls.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from megascale.errors import ConfigError, describe_install

KERNELS = (
    "dcqcn.py", "swift.py", "hybrid.py", "event_wheel.py", "packet_kernel.py", "packet_hops.py", "packet_nics.py",
    "packet_tables.py", "packet_views.py", "control_settings.py", "jit.py",
)  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def has_numba() -> bool:
    """Whether the extra `network` is installed."""
    return importlib.util.find_spec("numba") is not None


def cache_folder() -> Path:
    """Where compiled kernels lie: NUMBA_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = Path(__file__).parent
    code = hashlib.sha256(b"".join((here / n).read_bytes() for n in KERNELS if (here / n).is_file())).hexdigest()[:12]
    return root / "megascale" / f"kernels-{code}"


@cache
def _numba() -> Any:
    if not has_numba():
        raise ConfigError(f"the packet level needs the package numba; {describe_install('network')}")
    import numba

    settings: Any = numba.config
    settings.CACHE_DIR = str(cache_folder())
    return numba


def compiled(function: Function) -> Function:
    """numba.njit with a cache on disk; ConfigError with the remedy if numba is not installed."""
    return _numba().njit(cache=True, nogil=True, error_model="numpy")(function)


def inlined(function: Function) -> Function:
    """A part of a compiled function: put into it before it is compiled, so that its arguments cost nothing.

    A call with some twenty tables of six words each would cost more than most events do.
    """
    return _numba().njit(inline="always", nogil=True, error_model="numpy")(function)


def memory_view() -> Any:
    """(address, shape, dtype) -> an array over memory that it does not own, for compiled functions."""
    numba = _numba()
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], cgutils.voidptr_t)

        return numba.types.voidptr(address), build

    carray = numba.carray

    def view(address: Any, shape: Any, dtype: Any) -> Any:
        return carray(pointer(address), shape, dtype)  # type: ignore[call-arg]

    return inlined(view)
