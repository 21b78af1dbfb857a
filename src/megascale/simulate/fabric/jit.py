"""Compilation of kernels with numba (an extra). The machine code is cached, so that each machine compiles once.

The name of the cache folder contains a hash of all kernel sources. numba itself checks only the file of a function, not
the files of the functions that it calls.
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
    "packet_tables.py", "control_settings.py", "jit.py",
)  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def has_numba() -> bool:
    """Return whether the extra `network` is installed."""
    return importlib.util.find_spec("numba") is not None


def cache_folder() -> Path:
    """Return the folder of compiled kernels: NUMBA_CACHE_DIR, or a folder in the user's cache."""
    configured_folder = os.environ.get("NUMBA_CACHE_DIR")
    if configured_folder:
        return Path(configured_folder)
    cache_root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    package = Path(__file__).parent
    source_files = [package / name for name in KERNELS if (package / name).is_file()]
    source_hash = hashlib.sha256(b"".join(file.read_bytes() for file in source_files)).hexdigest()
    return cache_root / "megascale" / f"kernels-{source_hash[:12]}"


@cache
def _numba() -> Any:
    if not has_numba():
        raise ConfigError(f"the packet level needs the package numba; {describe_install('network')}")
    import numba

    settings: Any = numba.config
    settings.CACHE_DIR = str(cache_folder())
    return numba


def compiled(function: Function) -> Function:
    """Compile a function with numba.njit, with a cache on disk. Raises ConfigError if numba is not installed."""
    return _numba().njit(cache=True, nogil=True, error_model="numpy")(function)


def inlined(function: Function) -> Function:
    """Compile a function that numba inlines into its callers.

    A call passes about twenty tables of six words each, which would take longer than most events.
    """
    return _numba().njit(inline="always", nogil=True, error_model="numpy")(function)


def memory_view() -> Any:
    """Return a compiled function (address, shape, dtype) that returns an array over memory that it does not own."""
    numba = _numba()
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return numba.types.voidptr(address), build

    carray = numba.carray

    def view(address: Any, shape: Any, dtype: Any) -> Any:
        return carray(pointer(address), shape, dtype)  # type: ignore[call-arg]

    return inlined(view)
