"""A kernel is compiled once per node: the next process finds it in Triton's cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.backends.compiler")

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megascale.ops.compile_count import count_compilations


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1.0, mask=i < n)


count = count_compilations()
assert count_compilations() is count
signature = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(fn=add_one, signature=signature, constexprs={(2,): 256})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(count.compiled, count.loaded, count.compile_seconds > 0)
"""


def test_a_second_process_of_the_node_compiles_nothing(tmp_path):
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    outputs = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(result.stdout.strip())
    assert outputs == ["1 0 True", "0 1 False"]
