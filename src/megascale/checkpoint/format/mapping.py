"""Shared memory mapped with every page in place, without the interpreter's lock, which Python's own mmap would keep.

New memory is cleared by several threads: one clears 3 GB/s at best, and snapshots are tens of GB. Memory that is clear
already maps at 20 GB/s, which more threads would not speed up.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from megascale.core.capacity import usable_cores

_READ, _WRITE = 22, 23  # MADV_POPULATE_READ, MADV_POPULATE_WRITE, since Linux 5.14
_PIECE = 64 << 20  # bytes a call: the process can change its mappings between two; less is not worth a thread
_THREADS = 16  # beyond, the memory's bandwidth bounds it


def map_shared(handle: int, size: int, new: bool = False, writable: bool = True) -> mmap.mmap:
    """`size` bytes of an open file in memory, mapped; no later access has to clear or map a page.

    new: its pages have not been cleared. Raises OSError where memory lacks.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    madvise = _madvise()
    if size >= _PIECE and madvise is not None:
        mapped = mmap.mmap(handle, size, mmap.MAP_SHARED, protection)
        threads = min(_THREADS, usable_cores(), size // _PIECE) if new else 1
        if _populate(madvise, mapped, threads, _WRITE if writable else _READ):
            return mapped
        mapped.close()
    return mmap.mmap(handle, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)


def _populate(madvise: Callable[[int, int, int], int], mapped: mmap.mmap, threads: int, advice: int) -> bool:
    """False where the kernel knows no such advice. Raises OSError where memory lacks."""
    begin, size = np.frombuffer(mapped, np.uint8).ctypes.data, len(mapped)

    def work(start: int) -> int:
        return ctypes.get_errno() if madvise(begin + start, min(_PIECE, size - start), advice) else 0

    with ThreadPoolExecutor(threads) as pool:
        failed = [code for code in pool.map(work, range(0, size, _PIECE)) if code]
    if not failed:
        return True
    if failed[0] == errno.EINVAL:
        return False
    raise OSError(failed[0], os.strerror(failed[0]))


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
