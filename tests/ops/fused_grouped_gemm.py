"""Grouped GEMMs against a loop in float64: groups of any size, empty ones among them, read through an index."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch, grouped_gemm, grouped_gradients, grouped_tiles
from megascale.ops.grouped_gemm import multiply_groups, multiply_groups_reference
from megascale.ops.grouped_gradients import accumulate_group_gradients, accumulate_group_gradients_reference
from megascale.ops.grouped_tiles import Tiling, plan_tiles
from megascale.ops.row_copies import gather_rows
from tests.ops.tools import TOLERANCE, distance

TILING = Tiling(rows=16, columns=16, inner=16, grouped_rows=3)
COUNTS = st.lists(st.sampled_from([0, 0, 1, 5, 16, 17]), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def make_offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


@settings(max_examples=20, deadline=None)
@given(counts=COUNTS, spare=st.sampled_from([0, 3, 50]))
def test_tiles_cover_each_row_of_each_group_once(counts, spare):
    offsets = make_offsets(counts)
    experts, rows = plan_tiles(offsets, sum(counts) + spare, 16)
    covered = []
    for expert, row in zip(experts.tolist(), rows.tolist(), strict=True):
        if expert >= 0:
            last = int(offsets[expert + 1])
            covered += [(r, expert) for r in range(row, min(row + 16, last))]
    assert covered == [(r, e) for e, n in enumerate(counts) for r in range(int(offsets[e]), int(offsets[e]) + n)]


@settings(max_examples=12, deadline=None)
@given(
    counts=COUNTS,
    spare=st.sampled_from([0, 7]),
    columns=st.sampled_from([16, 24, 48]),
    inner=st.sampled_from([16, 32, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gathered=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_meet_the_matrix_of_their_group(counts, spare, columns, inner, dtype, gathered, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets, rows = make_offsets(counts), sum(counts) + spare
    tokens = 11 if gathered else rows
    index = torch.randint(0, tokens, (rows,), generator=generator) if gathered else None
    x = torch.randn(tokens, inner, generator=generator).to(dtype)
    shape = (len(counts), inner, columns) if transposed else (len(counts), columns, inner)
    weights = torch.randn(shape, generator=generator).to(dtype)
    result = multiply_groups(x, weights, offsets, index, transposed, tiling=TILING)
    expected = multiply_groups_reference(x.double(), weights.double(), offsets, index, transposed)
    used = sum(counts)
    assert result.dtype == dtype
    assert distance(result[:used], expected[:used]) <= TOLERANCE[dtype]
    assert dispatch.list_choices()["grouped GEMM"] == "triton"


@settings(max_examples=12, deadline=None)
@given(
    counts=COUNTS,
    spare=st.sampled_from([0, 7]),
    sizes=st.sampled_from([(16, 32), (24, 40), (48, 16)]),
    gathered=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_of_rows_meet_the_matrix_of_their_group(counts, spare, sizes, gathered, transposed, seed):
    columns, inner = sizes
    generator = torch.Generator().manual_seed(seed)
    offsets, rows = make_offsets(counts), sum(counts) + spare
    index = torch.randint(0, 11, (rows,), generator=generator) if gathered else None
    x = torch.randn(11 if gathered else rows, inner, generator=generator).bfloat16()
    shape = (len(counts), inner, columns) if transposed else (len(counts), columns, inner)
    weights = torch.randn(shape, generator=generator).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm, "COLUMNS_WORTH_COPY", 16)
        result = multiply_groups(x, weights, offsets, index, transposed, tiling=TILING, by_blocks=True)
    expected = multiply_groups_reference(x.double(), weights.double(), offsets, index, transposed)
    used = sum(counts)
    assert distance(result[:used], expected[:used]) <= TOLERANCE[torch.bfloat16]
    is_by_pointers = transposed and inner % TILING.inner
    assert dispatch.list_choices()[f"experts' rows, {inner} to {columns}"].startswith(
        "by pointers" if is_by_pointers else "by tensor descriptors"
    )


def test_blocks_of_rows_are_refused_where_a_copy_of_rows_does_not_pay():
    offsets = make_offsets([5, 4])
    x, weights = torch.randn(9, 16).bfloat16(), torch.randn(2, 32, 16).bfloat16()
    multiply_groups(x, weights, offsets, torch.arange(9), tiling=TILING, by_blocks=True)
    assert "fewer than 8192 columns" in dispatch.list_choices()["experts' rows, 16 to 32"]


def draw_at(offset: int, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random numbers that begin `offset` elements behind an aligned address, as in a flat buffer."""
    count = torch.Size(shape).numel()
    flat = torch.randn(offset + count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert flat.data_ptr() % 16 == 0
    return flat[offset:].view(shape)


@pytest.mark.parametrize(
    ("rows_offset", "matrix_offset", "expected"),
    [
        (0, 8, "by tensor descriptors"),
        (0, 4, "by pointers (descriptors need matrices at multiples of 16 bytes)"),
        (4, 0, "by pointers (descriptors need rows at multiples of 16 bytes)"),
    ],
)
def test_unaligned_factors_are_read_by_pointers(rows_offset, matrix_offset, expected):
    offsets = make_offsets([5, 4])
    x = draw_at(rows_offset, 9, 16, dtype=torch.bfloat16, seed=1)
    weights = draw_at(matrix_offset, 2, 32, 16, dtype=torch.bfloat16, seed=2)
    result = multiply_groups(x, weights, offsets, tiling=TILING, by_blocks=True)
    reference = multiply_groups_reference(x.double(), weights.double(), offsets)
    assert distance(result, reference) <= TOLERANCE[torch.bfloat16]
    assert dispatch.list_choices()["experts' rows, 16 to 32"] == expected


@pytest.mark.parametrize("unaligned", ["none", "dy", "x", "gradient"])
def test_gradients_of_unaligned_factors_and_buffers_use_pointers(unaligned, monkeypatch):
    offsets = make_offsets([5, 4])
    by_blocks = []
    real = grouped_gradients._accumulate_blocks
    monkeypatch.setattr(grouped_gradients, "_accumulate_blocks", lambda *inputs: by_blocks.append(1) or real(*inputs))
    dy = draw_at(4 * (unaligned == "dy"), 9, 24, dtype=torch.bfloat16, seed=1)
    x = draw_at(4 * (unaligned == "x"), 9, 40, dtype=torch.bfloat16, seed=2)
    main_grad = draw_at(2 * (unaligned == "gradient"), 2, 24, 40, dtype=torch.float32, seed=3)
    expected = main_grad.double()
    accumulate_group_gradients(main_grad, dy, x, offsets, tiling=TILING)
    accumulate_group_gradients_reference(expected, dy.double(), x.double(), offsets)
    assert distance(main_grad, expected) <= TOLERANCE[torch.float32]
    assert len(by_blocks) == (unaligned == "none")


# Shared memory per program: Hopper and B200, A100, and GPUs such as RTX 4090 and RTX 5090 (CUDA's programming guide).
SHARED_BYTES = {"9.0": 232_448, "8.0": 166_912, "8.9 and 12.0": 101_376}
DEFAULT_TILINGS = (
    grouped_tiles.ROWS_TILING,
    grouped_tiles.GATHERED_TILING,
    grouped_tiles.BLOCK_ROWS_TILING,
    grouped_tiles.GRADIENT_TILING,
    grouped_tiles.POINTER_GRADIENT_TILING,
)


@pytest.mark.parametrize("limit", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("tiling", DEFAULT_TILINGS)
@pytest.mark.parametrize(("element_bytes", "result_bytes"), [(2, 0), (2, 2), (2, 4), (4, 0)])
def test_tiles_fit_the_shared_memory_of_a_device(limit, tiling, element_bytes, result_bytes):
    smaller = grouped_tiles.shrink_tiling(tiling, limit, element_bytes, result_bytes)
    factors = smaller.stages * (smaller.rows + smaller.columns) * smaller.inner * element_bytes
    assert max(factors, smaller.rows * smaller.columns * result_bytes) < limit
    assert smaller.rows == tiling.rows  # as planned by plan_tiles
    assert smaller.stages >= 3
    assert smaller.columns >= 64
    if limit == SHARED_BYTES["9.0"] and element_bytes == 2:
        assert smaller == tiling  # the tilings that were measured


@settings(max_examples=12, deadline=None)
@given(
    counts=COUNTS,
    rows=st.sampled_from([16, 24]),
    columns=st.sampled_from([32, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gathered=st.booleans(),
    dy_gathered=st.booleans(),
    overwrite=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_of_matrices_sum_the_rows_of_their_group(
    counts, rows, columns, dtype, gathered, dy_gathered, overwrite, seed
):
    generator = torch.Generator().manual_seed(seed)
    offsets, total = make_offsets(counts), sum(counts)
    tokens = 11 if gathered else total
    index = torch.randint(0, tokens, (total,), generator=generator) if gathered else None
    x = torch.randn(tokens, columns, generator=generator).to(dtype)
    dy_index = torch.randint(0, max(1, tokens), (total,), generator=generator) if dy_gathered else None
    dy = torch.randn(max(1, tokens, total), rows, generator=generator).to(dtype)
    main_grad = torch.randn(len(counts), rows, columns, generator=generator)
    expected = main_grad.double()
    accumulate_group_gradients(main_grad, dy, x, offsets, index, dy_index, overwrite, tiling=TILING)
    accumulate_group_gradients_reference(expected, dy.double(), x.double(), offsets, index, dy_index, overwrite)
    assert distance(main_grad, expected) <= TOLERANCE[torch.float32]


@settings(max_examples=10, deadline=None)
@given(counts=COUNTS, spare=st.sampled_from([0, 9]), columns=st.sampled_from([8, 520]), seed=st.integers(0, 99))
def test_rows_are_copied_up_to_the_last_offset(counts, spare, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets, used = make_offsets(counts), sum(counts)
    x = torch.randn(11, columns, generator=generator).bfloat16()
    index = torch.randint(0, 11, (used + spare,), generator=generator, dtype=torch.int32)
    index[used:] = -1_000_000  # undefined
    assert torch.equal(gather_rows(x, index, offsets)[:used], x[index[:used]])
