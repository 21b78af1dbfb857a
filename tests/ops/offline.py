"""Compile Triton kernels for Hopper on a machine without a GPU: launches stop after code generation."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from megascale.ops import dispatch
from megascale.ops.launch import Kernel


class _Hopper(DriverBase):
    """Driver with the members that Triton needs before it compiles."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> str:
        return "cpu"

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        return None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread needs, which is where spilled registers go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", usage))


@dataclass
class Compiled:
    """Kernels in the order of their launches."""

    kernels: list[tuple[str, Any]] = field(default_factory=list)


@contextmanager
def compile_for_hopper(by_key: bool = False) -> Iterator[Compiled]:
    """Within, fused operators on CPU tensors compile their kernels for sm_90 and run none of them.

    by_key: launches go by key as on a GPU, whose stream a build with CUDA asks for.
    """
    compiled = Compiled()
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = True
        kernel = run(self, *args, **kwargs)
        compiled.kernels.append((self.__name__, kernel))
        return kernel

    def as_triton(self: Kernel, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        self.run(*arguments, grid=grid, warmup=False, **meta)

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Hopper()),
        mock.patch.object(JITFunction, "run", only_compile),
        mock.patch.object(Kernel, "launch", Kernel.launch if by_key else as_triton),
        mock.patch.object(dispatch, "IS_INTERPRETED", True),
        dispatch.Kernels("fused").as_current(),
    ):
        yield compiled
