"""The embedding's gradient straight into its float32 rows, against the dense one, bit for bit from run to run."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.embedding import (
    PROGRAM_POSITIONS,
    add_sorted_rows,
    embedding,
    embedding_reference,
    sort_tokens,
)
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach, detach, get_sink
from tests.ops.tools import distance


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    built = SinkParameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype))
    attach(built, GradientSink(torch.ones(rows, columns)))
    return built


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 1, 1, 2, 7, 11]), min_size=1, max_size=5 * PROGRAM_POSITIONS),
    columns=st.sampled_from([1, 8, 600]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cut=st.booleans(),
)
def test_rows_get_the_sums_of_their_tokens(tokens, columns, dtype, cut):
    w, report = weight(12, columns, dtype), []
    get_sink(w).ready = lambda: report.append(1)
    ids = torch.tensor(tokens)[:, None]
    local = (ids != 1) & (ids != 11) if cut else None
    upstream = torch.randn(len(tokens), 1, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = embedding(ids, w, local)
    y.backward(upstream)
    assert torch.equal(y, embedding_reference(ids, w, local))
    assert w.grad is None
    assert report == [1]
    exact = w.detach().double().requires_grad_()
    embedding_reference(ids, exact, local).backward(upstream.double())
    assert distance(get_sink(w).main_grad, 1.0 + exact.grad) < 1e-6  # with what was there: sums may cancel
    assert dispatch.list_choices()["embedding"] == "triton"


@pytest.mark.parametrize("part", [3, 5, 12])
def test_parts_of_the_rows_are_those_of_the_whole_gradient(part):
    """A divided table's rows are written part by part, from tokens that are sorted once."""
    ids = torch.tensor([7, 1, 11, 1, 0, 3, 1, 2, 5] * PROGRAM_POSITIONS)
    dy = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros(12, 8)
    add_sorted_rows(whole, sort_tokens(ids), dy)
    sorted_tokens = sort_tokens(ids)
    for first in range(0, 12, part):
        rows = torch.zeros(min(part, 12 - first), 8)
        add_sorted_rows(rows, sorted_tokens, dy, first_row=first)
        assert torch.equal(rows, whole[first : first + part])


def test_many_long_runs_of_every_length_meet_in_one_block():
    """Runs that end and begin within one piece, which share the places of their partial sums."""
    size = PROGRAM_POSITIONS
    lengths = [size + 1, 3, 2 * size, 1, 5 * size - 1, size, size + 2, 2 * size + 1]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    dy = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(2))
    main = torch.zeros(len(lengths), 4)
    add_sorted_rows(main, sort_tokens(ids[order]), dy)
    repeated = torch.zeros_like(main)
    add_sorted_rows(repeated, sort_tokens(ids[order]), dy)
    assert torch.equal(main, repeated)
    expected = torch.zeros(len(lengths), 4, dtype=torch.float64).index_add_(0, ids[order], dy.double())
    assert distance(main, expected) < 1e-6


def test_without_a_float32_gradient_of_its_own_it_is_the_plain_one():
    w = weight(5, 3, torch.float32)
    detach(w)
    embedding(torch.tensor([1, 1, 4]), w).sum().backward()
    assert w.grad.sum(1).tolist() == [0, 6, 0, 0, 3]
