"""The number of kernels that this process has compiled, or found compiled in Triton's cache of its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    from triton import knobs
except ImportError:  # Triton is absent, or too old
    knobs = None


@dataclass
class CompileCount:
    """Kernels by origin.

    Attributes:
        compiled: compiled by this process.
        loaded: read from the cache.
        compile_seconds: seconds that the compilations took.
    """

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0

    def describe(self) -> str:
        """Return the counts as text."""
        text = f"{self.loaded} kernels from the node's cache, {self.compiled} compiled"
        return text + (f" in {self.compile_seconds:.1f} s" if self.compiled else "")


count = CompileCount()
_is_counting = False


def count_compilations() -> CompileCount:
    """Begin to count if Triton reports its compilations, and return the process's counts."""
    global _is_counting
    if knobs is None or _is_counting or not hasattr(knobs, "compilation"):
        return count
    _is_counting = True
    previous = knobs.compilation.listener

    def note(**report: Any) -> None:
        if report["cache_hit"]:
            count.loaded += 1
        else:
            count.compiled += 1
            count.compile_seconds += report["times"].total / 1e6
        if previous is not None:
            previous(**report)

    knobs.compilation.listener = note
    return count
