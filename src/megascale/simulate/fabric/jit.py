"""Compilation of kernels with numba (an extra). The machine code is cached, so that each machine compiles once.

The name of the cache folder contains a hash of all kernel sources. numba itself checks only the file of a function, not
the files of the functions that it calls. numba also keeps the code of each installation apart, by the path of its
sources. `KernelLocator` has all installations of equal kernels share their code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class KernelLocator:
    """Location of a kernel's compiled code, which does not depend on the path of its source.

    numba finds this class by its name in CACHE_LOCATOR_CLASSES and calls these methods.
    """

    def __init__(self, file: str, line: int) -> None:
        self._file = file
        self._line = line

    @classmethod
    def from_function(cls, function: Any, file: str) -> KernelLocator:
        """Return the location of a function."""
        return cls(file, function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """Return the folder of the function's files, whose names contain those of the module and the function."""
        return str(cache_folder())

    def ensure_cache_path(self) -> None:
        """Make the folder. Raises OSError if it is not writable."""
        _ensure_writable(self.get_cache_path())

    def get_source_stamp(self) -> str:
        """Return a hash of the function's file. numba compiles anew if it differs from that of the cached code."""
        return hashlib.sha256(Path(self._file).read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name in one module."""
        return str(self._line)


def _ensure_writable(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _shared_cache(settings: Any) -> Iterator[None]:
    """Have numba use `KernelLocator` for the functions that are decorated within.

    A folder of the user's choice has no hash in its name, so there numba distinguishes the sources. Older releases of
    numba cannot be given a locator.
    """
    before = getattr(settings, "CACHE_LOCATOR_CLASSES", None)
    if before is None or os.environ.get("NUMBA_CACHE_DIR"):
        yield
        return
    try:
        _ensure_writable(str(cache_folder()))
    except OSError:
        yield  # numba tries other folders
        return
    settings.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelLocator.__name__}"
    try:
        yield
    finally:
        settings.CACHE_LOCATOR_CLASSES = before


def compiled(function: Function) -> Function:
    """Compile a function with numba.njit, with a cache on disk. Raises ConfigError if numba is not installed."""
    numba = _numba()
    with _shared_cache(numba.config):
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


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
