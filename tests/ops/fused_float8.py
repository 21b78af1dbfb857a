"""Float8 casts through Triton's interpreter: the references' bytes, scales, largest magnitudes and counts."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.float8 import cast
from megascale.ops.float8.cast import (
    cast_by_amax,
    cast_rows,
    cast_shard,
    compute_amax,
    compute_column_amaxes,
    compute_row_amaxes,
    compute_shard_amaxes,
    compute_shard_scales,
    transpose_rows,
    transpose_scaled_rows,
)
from megascale.ops.float8.formats import E4M3, E5M2, SMALLEST_SCALE, allocate_scales
from megascale.ops.segments import Segments

SETTINGS = settings(max_examples=8, deadline=None)
kinds = st.sampled_from([E4M3, E5M2])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
shapes = st.sampled_from([(1, 1), (7, 16), (3, 5, 33), (130, 70), (40, 600)])


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def rows_of(shape, dtype, seed, hole=None) -> torch.Tensor:
    """Gaussians over many magnitudes, in parts of longer rows, perhaps with a value that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator)
    x *= torch.randn(x.shape, generator=generator).mul(4).exp2()
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    if hole is not None:
        x.view(-1)[0] = hole
    return x.to(dtype)[..., : shape[-1]]


def assert_same_bits(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if want is None or got is None:
        assert got is want
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.float()[~nan].view(torch.int32), want.float()[~nan].view(torch.int32))


def run_pair(function, *collected: torch.Tensor):
    """Return the results of kernels and references, each with its own copies of the accumulation tensors."""
    built = []
    for mode in ("fused", "reference"):
        kernels, copies = dispatch.Kernels(mode), [c.clone() for c in collected]
        with kernels.as_current():
            result = function(*copies)
        built.append((result, copies, kernels.list_choices()))
    (fused, local, active), (plain, theirs, _) = built
    assert "triton" in active.values()
    for a, b in zip(local, theirs, strict=True):
        assert_same_bits(a, b)
    if isinstance(fused, torch.Tensor):
        assert_same_bits(fused, plain)
        return
    for name in ("rows", "rows_scale", "columns", "columns_scale"):
        assert_same_bits(getattr(fused, name), getattr(plain, name))


holes = st.sampled_from([None, float("inf"), float("-inf"), float("nan")])
seeds = st.integers(0, 1000)


@SETTINGS
@given(shapes, dtypes, seeds, holes, st.sampled_from([0.0, 1e6]))
def test_amax(shape, dtype, seed, hole, before):
    x = rows_of(shape, dtype, seed, hole)
    with mock.patch.object(cast, "TILE_AMAX_ONLY", (4, 32, 1, 3)):
        run_pair(lambda: compute_amax(x))
        if hole != hole:  # a NaN stays whatever was there, and a maximum with it is NaN in torch too
            before = 0.0
        run_pair(lambda out: compute_amax(x, out), torch.tensor(before))


@SETTINGS
@given(shapes, dtypes, kinds, seeds, holes, st.booleans())
def test_cast_by_amax(shape, dtype, kind, seed, hole, columns):
    x = rows_of(shape, dtype, seed, hole)
    amax = x.float().nan_to_num(0.0, 0.0, 0.0).abs().max() / 3 + 1e-4  # some are clipped, some flushed
    with (
        mock.patch.object(cast, "TILE_WITH_COUNTS", (16, 32, 1)),
        mock.patch.object(cast, "TILE_WITHOUT_COLUMNS", (8, 64, 1)),
    ):
        run_pair(lambda counts: cast_by_amax(x, kind, amax, columns=columns, counts=counts), torch.tensor([3, 4]))
        run_pair(lambda: cast_by_amax(x, kind, columns=columns))


@SETTINGS
@given(shapes, dtypes, kinds, seeds, holes, st.booleans())
def test_cast_rows(shape, dtype, kind, seed, hole, columns):
    x = rows_of(shape, dtype, seed, hole)
    with mock.patch.object(cast, "ROW_BLOCK", 64):
        run_pair(lambda counts: cast_rows(x, kind, columns=columns, counts=counts), torch.zeros(2, dtype=torch.int64))
        x[..., 0, :] = 0
        run_pair(lambda: cast_rows(x, kind, empty_scale=SMALLEST_SCALE))


@SETTINGS
@given(shapes, dtypes, kinds, seeds, holes, st.floats(1, 100))
def test_cast_rows_by_amaxes_that_ranks_agreed_on(shape, dtype, kind, seed, hole, factor):
    x = rows_of(shape, dtype, seed, hole)
    with mock.patch.object(cast, "ROW_BLOCK", 64):
        run_pair(lambda: compute_row_amaxes(x))
        run_pair(lambda: compute_column_amaxes(x))
        row_amax, column_amax = compute_row_amaxes(x) * factor, compute_column_amaxes(x) * factor
        run_pair(
            lambda counts: cast_rows(x, kind, columns=True, row_amax=row_amax, column_amax=column_amax, counts=counts),
            torch.zeros(2, dtype=torch.int64),
        )


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_a_tensor_of_zeros_or_nearly(kind, value):
    x = torch.full((20, 40), value)
    run_pair(lambda: cast_by_amax(x, kind))
    run_pair(lambda: cast_rows(x, kind, columns=True))


def test_every_bfloat16_casts_as_the_reference_does():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).view(256, 256)
    # The interpreter loses some numbers below the smallest normal one on the way to float32.
    every = every.where((every.abs() >= torch.finfo(every.dtype).tiny) | every.isnan(), torch.zeros_like(every))
    for kind in (E4M3, E5M2):
        for scale in (1.0, 0.0078125, 3e-5):
            run_pair(
                lambda counts, k=kind, s=scale: cast_by_amax(every, k, torch.tensor(s * k.largest), counts=counts),
                torch.zeros(2, dtype=torch.int64),
            )


@settings(max_examples=4, deadline=None)
@given(dtypes, seeds, holes)
def test_shards_are_cast_as_the_matrices_they_are_parts_of(dtype, seed, hole):
    """Three ranks' shards of three matrices, with padding between and behind them; rank 2 has a part of one only."""
    shapes = [(70, 64), (3, 5), (64, 128)]
    starts = [0, 4480, 4544]
    ranks = 3
    part = -(-(4544 + 64 * 128) // (64 * ranks)) * 64
    flat = torch.full((part * ranks,), 7e4, dtype=dtype)  # what lies between matters to no matrix
    for i, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
        present = rows_of(shape, dtype, seed + i, hole if i == 1 else None)
        flat[start : start + present.numel()] = present.reshape(-1)

    def table(rank: int) -> Segments:
        a, z = rank * part, (rank + 1) * part
        sizes = [r * c for r, c in shapes]
        values = [
            (max(s, a) - a, min(s + n, z) - a, True, i) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))
        ]
        return Segments([row for row in values if row[0] < row[1]], len(shapes), "cpu")

    built = []
    for mode in ("fused", "reference"):
        with dispatch.Kernels(mode).as_current():
            result, scales = torch.full((ranks, len(shapes)), 9.0), allocate_scales(len(shapes))
            for rank in range(ranks):
                compute_shard_amaxes(flat[rank * part : (rank + 1) * part], table(rank), result[rank])
            agreed = result.view(torch.int32).amax(0).view(torch.float32)
            compute_shard_scales(agreed, E4M3, scales)
            out = torch.full_like(flat, 3, dtype=torch.uint8)
            for rank in range(ranks):
                local = slice(rank * part, (rank + 1) * part)
                cast_shard(flat[local], table(rank), scales, E4M3, out[local])
        built.append(out)
        assert (out[4480 + 15 : 4544] == 3).all()
        for i, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
            stop = start + shape[0] * shape[1]
            with dispatch.Kernels("reference").as_current():
                full = cast_by_amax(flat[start:stop].view(shape), E4M3, compute_amax(flat[start:stop]))
            assert_same_bits(out[start:stop].view(E4M3.dtype).view(shape), full.rows)
            assert torch.equal(scales[i], full.rows_scale)
    assert torch.equal(*built)


@pytest.mark.parametrize("shape", [(4, 8), (128, 132), (260, 64), (16, 300), (7, 12)])
def test_a_transpose_has_every_byte_in_its_place(shape):
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(shape[::-1], dtype=torch.uint8)
    assert transpose_rows(rows.view(E4M3.dtype), out.view(E4M3.dtype)).data_ptr() == out.data_ptr()
    assert torch.equal(out, rows.t())
    assert torch.equal(transpose_rows(rows.view(E4M3.dtype)).view(torch.uint8), rows.t())


@pytest.mark.parametrize("shape", [(4, 8), (128, 132), (260, 64), (16, 300), (7, 12)])
def test_a_transpose_of_scaled_rows_has_the_reference_s_bytes(shape):
    """All bytes occur, NaN among them, with scales that leave numbers normal, make them subnormal and flush them."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(E4M3.dtype)
    scales = torch.randint(-20, 3, (shape[0], 1), generator=generator).float().exp2()
    with dispatch.Kernels("reference").as_current():
        expected, largest = transpose_scaled_rows(rows, scales)
    columns, scale = transpose_scaled_rows(rows, scales)
    assert_same_bits(columns, expected)
    assert scale == largest == scales.max()
