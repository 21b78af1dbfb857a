"""Every kernel, at the presets' widths, compiles for Hopper: no register spills, whole 128-bit loads and stores.

Triton brings its own assembler, so this needs no GPU; speed and results there are `megascale bench kernels`.
"""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from megascale.ops.float8 import cast
from megascale.ops.float8.formats import E4M3
from megascale.ops.grouped_gradients import accumulate_group_gradients
from tests.ops.every_kernel import BF16, CASES, zeros
from tests.ops.offline import compile_for_hopper, stack_bytes

# Bytes that three kernels of amax and float8 spill with one Triton, of 255 registers a thread: ten registers.
SPILLED = 40 if version("triton").startswith("3.7.") else 0
ALLOWED = {"_group_gradient_kernel": 8}  # two registers of each thread, for the pointers of gathered rows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.xdist_group("triton")
def test_compiles_without_spills_and_moves_whole_vectors(name: str) -> None:
    with compile_for_hopper() as compiled:
        CASES[name]()
    assert compiled.kernels
    for kernel, binary in compiled.kernels:
        ptx = binary.asm["ptx"]
        assert stack_bytes(binary.asm["cubin"]) <= max(SPILLED, ALLOWED.get(kernel, 0)), f"{kernel} spills registers"
        if kernel in ("_sum_by_tensor_kernel", "_shard_scales_kernel", "_peer_max_kernel", "_plan_tiles_kernel"):
            continue  # reads through an index, a few thousand numbers; one number a matrix; one number; offsets
        if kernel in ("_group_rows_kernel", "_block_rows_kernel", "_group_gradient_kernel", "_float8_rows_kernel"):
            assert "wgmma.mma_async" in ptx, f"{kernel} does not use the tensor cores of Hopper"
            continue  # asynchronous copies
        if kernel in ("_count_kernel", "_place_kernel"):
            assert "ld.global.v2.b64" in ptx, f"{kernel} reads choices in pieces"
            continue
        if kernel == "_sum_parts_kernel":
            copies = re.findall(r"cp\.async\.\S+ \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
            assert set(copies) == {"0x10"}, f"{kernel} loads parts in pieces of {set(copies)} bytes, not 16"
            continue
        # GeLU's backward reads 8 bytes per thread, with more threads.
        width = "[24]" if kernel == "_activation_kernel" and "glu" not in name else "4"
        assert re.search(rf"ld\.global\S*\.v{width}\.b32", ptx), f"{kernel} reads in pieces"
        if kernel == "_cast_kernel":  # both copies, also the transposed one
            assert not re.search(r"st\.global\S*\.b(8|16)\b", ptx), "a float8 copy is written in pieces"


@pytest.mark.xdist_group("triton")
def test_no_kernel_writes_both_float8_copies_of_a_float32_source() -> None:
    """Triton 3.6 exchanges float8 between threads there and gets it wrong on a GPU; of bfloat16 it is right."""
    for dtype, launches in ((torch.float32, 2), (BF16, 1)):
        with compile_for_hopper() as compiled:
            cast.cast_by_amax(zeros(4096, 5120, dtype=dtype), E4M3, torch.ones(()))
        assert [name for name, _ in compiled.kernels] == ["_cast_kernel"] * launches


@pytest.mark.xdist_group("triton")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gradients_of_groups_read_rows_through_an_index_of_any_integer_type(dtype: torch.dtype) -> None:
    rows = 252  # not aligned, so that the kernel reads by pointers
    with compile_for_hopper() as compiled:
        accumulate_group_gradients(
            torch.zeros(4, rows, 256),
            zeros(512, rows),
            zeros(300, 256),
            torch.tensor([0, 100, 200, 300, 512], dtype=torch.int32),
            index=torch.zeros(512, dtype=dtype),
            dy_index=torch.zeros(512, dtype=dtype),
        )
    assert [name for name, _ in compiled.kernels][-1] == "_group_gradient_kernel"
