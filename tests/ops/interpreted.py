"""For tests that run Triton kernels on the CPU: import this first, in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/ops/test_fused.py with TRITON_INTERPRET=1", allow_module_level=True)
interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """Triton 3.6 turns a loop bound into int() of a 1-element array, which NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
