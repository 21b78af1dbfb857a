"""Shared memory whose pages are put in place by several threads, without the interpreter's lock.

The kernel clears new pages where they are first touched: 2 GB/s by one thread, 5 by four, and snapshots are tens of GB.
Python's own mmap would do it in one, and let no other thread run meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import ClassVar

import numpy as np

from megascale.core.capacity import usable_cores

_READ, _WRITE = 22, 23  # MADV_POPULATE_READ, MADV_POPULATE_WRITE, since Linux 5.14
_PIECE = 64 << 20  # bytes a call: the process can change its mappings between two; less is not worth a thread
_CLEARING, _MAPPING = 16, 8  # threads at most: beyond, the memory's bandwidth bounds it


def map_shared(handle: int, size: int, writable: bool = True) -> mmap.mmap:
    """`size` bytes of an open file in memory, mapped; no later access has to map a page.

    Raises OSError where memory lacks.
    """
    mapped = mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    fill_pages(mapped, writable=writable)
    return mapped


def fill_pages(
    mapped: mmap.mmap,
    *,
    new: bool = False,
    writable: bool = True,
    stop: threading.Event | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Put every page of a shared mapping in place; nothing of what it holds changes.

    Args:
        new: most pages have never been touched, and are cleared.
        stop: ends it early once it is set.
        told: hears of every piece how many bytes it had, from several threads.

    Raises OSError where memory lacks.
    """
    memory = np.frombuffer(mapped, np.uint8)  # while it lives the mapping cannot be closed
    begin, size, madvise = memory.ctypes.data, len(mapped), _madvise()
    failed: list[int] = []
    stop, turn = stop or threading.Event(), threading.Lock()
    pieces = iter(range(0, size, _PIECE))

    def work() -> None:
        while not stop.is_set() and not failed:
            with turn:
                start = next(pieces, None)
            if start is None:
                return
            length = min(_PIECE, size - start)
            code = madvise(begin + start, length, _WRITE if writable else _READ) if madvise is not None else 0
            if code and ctypes.get_errno() != errno.EINVAL:
                failed.append(ctypes.get_errno())
            elif code or madvise is None:  # a kernel before 5.14: a page is in place once it has been read
                memory[start : start + length : mmap.PAGESIZE].max()
            if on_progress is not None:
                on_progress(length)

    # Not a pool's: those are waited for when the process ends.
    count = min(_CLEARING if new else _MAPPING, usable_cores() // 2)
    others = [threading.Thread(target=work, daemon=True) for _ in range(min(count, -(-size // _PIECE)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))


class Filling:
    """The pages of a new shared mapping, put in place in the background: of a process's one after the other, those with
    the lowest `turn` first, since training needs the cores too.

    Attributes:
        left: bytes still to come.
        problem: why it ended early, None as long as all is well.
    """

    _waiting: ClassVar[list[tuple[int, int]]] = []  # whose turn comes next: the least
    _next: ClassVar[threading.Condition] = threading.Condition()
    _number: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, mapped: mmap.mmap, turn: int = 0) -> None:
        self.remaining_bytes = len(mapped)
        self.problem: OSError | None = None
        self._lock, self._stop, self._done = threading.Lock(), threading.Event(), threading.Event()
        self._turn = (turn, next(self._number))
        with self._next:
            self._waiting.append(self._turn)
        self._thread = threading.Thread(target=self._run, args=(mapped,), name="megascale-pages", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether every page is in place, after so many seconds at most. Raises OSError where memory lacks."""
        done = self._done.wait(seconds)
        if self.problem is not None:
            raise self.problem
        return done

    def stop(self) -> None:
        """End it now; the mapping may be closed then."""
        self._stop.set()
        with self._next:
            self._next.notify_all()
        self._thread.join()

    def _run(self, mapped: mmap.mmap) -> None:
        with self._next:
            self._next.wait_for(lambda: self._stop.is_set() or min(self._waiting) == self._turn)
        try:
            fill_pages(mapped, new=True, stop=self._stop, on_progress=self._tell)
        except OSError as error:
            self.problem = error
        except Exception as error:
            self.problem = OSError(f"memory cannot be put in place: {error!r}")
        finally:  # those whose turn is next, and whoever needs the memory, wait for this
            with self._next:
                self._waiting.remove(self._turn)
                self._next.notify_all()
            with self._lock:
                self.remaining_bytes = 0
            self._done.set()

    def _tell(self, length: int) -> None:
        with self._lock:
            self.remaining_bytes = max(0, self.remaining_bytes - length)


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
