"""Numbers of Triton kernels that this process has compiled, and that it has loaded from the node's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    from triton import knobs
except ImportError:  # Triton is absent, or too old
    knobs = None


@dataclass
class CompileCount:
    """Numbers of Triton kernels.

    Attributes:
        compiled: number of kernels that this process has compiled.
        loaded: number of kernels that were loaded from the node's cache.
    """

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0

    def describe(self) -> str:
        """Return the counts as text."""
        text = f"{self.loaded} kernels from the node's cache, {self.compiled} compiled"
        if self.compiled:
            text += f" in {self.compile_seconds:.1f} s"
        return text


count = CompileCount()
_is_counting = False


def count_compilations() -> CompileCount:
    """Start counting if this Triton reports compilations. Return the counts, which later compilations change."""
    global _is_counting
    if knobs is None or _is_counting or not hasattr(knobs, "compilation"):
        return count
    _is_counting = True
    previous = knobs.compilation.listener

    def count_kernel(**report: Any) -> None:
        if report["cache_hit"]:
            count.loaded += 1
        else:
            count.compiled += 1
            count.compile_seconds += report["times"].total / 1e6  # Triton reports microseconds.
        if previous is not None:
            previous(**report)

    knobs.compilation.listener = count_kernel
    return count
