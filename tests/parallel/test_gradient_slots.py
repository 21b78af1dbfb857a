"""Gradients and parameters of units in slots (ZeRO-2 and 3) on one process, with communication replaced."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.unit_slots import TABLE_PARTS, find_gaps
from megascale.model.context import ForwardContext
from megascale.model.transformer import Chunk
from megascale.ops import cross_entropy
from megascale.parallel import parameter_slots
from megascale.parallel.buffer_layout import BufferMember, lay_out
from megascale.parallel.buffers import Axes, ParamAndGradBuffer
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.gradient_slots import find_slot_starts, reduce_into_shard, size_slots
from megascale.parallel.parameter_slots import ParameterUnit

RANKS = 2
LAYERS = 4


class LateReduction:
    """A reduction that returns this rank's shard late and poisons the slot: nothing may read it afterwards."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, grads: torch.Tensor, axis: Axis) -> Pending:
        self.count += 1
        result = grads.view(RANKS, -1)[axis.rank].clone()
        grads.fill_(float("nan"))
        return Pending(result)


def make_data_parallel(
    monkeypatch: pytest.MonkeyPatch,
    zero: int,
    rank: int,
    shares_block: bool = False,
    bucket_elements: int | None = None,
    table_part: int | None = None,
    overlap: bool = True,
    **options: Any,
) -> DataParallel:
    model = {"hidden": 12, "heads": 4, "layers": LAYERS, "sequence_length": 8, "vocab_size": 21, "init_std": 0.2}
    config = from_tree({"model": {**model, **options}}).model
    module = Chunk(config, range(LAYERS), is_first=True, is_last=True, dtype=torch.float64)
    if shares_block:
        module.blocks[2] = module.blocks[0]
    data = Axis(None, RANKS, rank)
    buffer = ParamAndGradBuffer(
        module, torch.device("cpu"), Axes(data=data, reduce=data), zero, bucket_elements, table_part=table_part
    )
    data_parallel = DataParallel([buffer], overlap, microbatches=3)
    data_parallel._start_reduction = CountedReduction()  # resident buffers hold the sums
    if data_parallel.gradient_slots is not None:
        data_parallel.gradient_slots.start_reduction = partial(reduce_into_shard, LateReduction())
    slots = data_parallel.parameter_slots
    if slots is None:
        for param in buffer.parameters:
            draw_values(param)
        return data_parallel
    for i in buffer.resident_params:
        draw_values(buffer.parameters[i])
    slots.initialise(draw_values)
    # Every unit's matrices as all ranks hold them together, by the address of this rank's shard.
    wholes: dict[int, torch.Tensor] = {}
    for unit in slots.units[0]:
        if unit is not None:
            unit.memory.zero_()
            for param in unit.params:
                draw_values(param)
            for out, shard in unit._gather_pairs:
                wholes[shard.data_ptr()] = out.clone()
    slots.memory.fill_(float("nan"))
    monkeypatch.setattr(
        parameter_slots,
        "all_gather_into",
        lambda out, shard, axis: Pending(out, finish=lambda: out.copy_(wholes[shard.data_ptr()])),
    )
    slots.poison_unused = True
    return data_parallel


@torch.no_grad()
def draw_values(param: torch.Tensor) -> None:
    torch.nn.init.normal_(param, std=0.2, generator=torch.Generator().manual_seed(param.numel()))


class CountedReduction:
    """A reduction that changes nothing, and the number of its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, grads: torch.Tensor, axis: Axis) -> Pending:
        self.count += 1
        return Pending(grads)


def run_step(data: DataParallel, microbatches: int, token_grad: torch.Tensor | None = None) -> None:
    """Run forward and backward of a step's micro-batches, each with tokens of its own.

    With `token_grad` the loss computes its gradients in forward.
    """
    data.begin_step()
    for i in range(microbatches):
        tokens = (torch.arange(8)[:, None] * (i + 1)) % 21
        context = ForwardContext(token_grad=token_grad)
        loss = data.buffers[0].module(tokens, Batch(tokens, tokens), context).sum()
        if data.gradient_slots is not None or i == microbatches - 1:
            data.arm_reductions(0)
        data.begin_backward(0)
        loss.backward()
        data.end_backward(0)
    data.finish_reductions()


def collect_shard(data: DataParallel) -> dict[tuple[str, int], torch.Tensor]:
    """Return this rank's gradients by tensor and place in it."""
    grads = {}
    for shard in data.buffers[0].shards:
        for extent in shard.extents:
            grads[extent.piece.name, extent.piece_start] = shard.grads[extent.start : extent.stop].clone()
    return grads


def collect_expected(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], shares_block: bool, microbatches: int
) -> dict[str, torch.Tensor]:
    """Return the whole gradients, by tensor, of a step without sharding."""
    data = make_data_parallel(monkeypatch, 0, 0, shares_block, **options)
    run_step(data, microbatches)
    return {name: grad for (name, _), grad in collect_shard(data).items()}


@pytest.mark.parametrize(("zero", "bucket_elements"), [(2, None), (2, 1), (3, 1)])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("shares_block", [False, True], ids=["each block once", "a block used twice"])
@pytest.mark.parametrize(
    "options", [{"tied_embeddings": False}, {"block": "parallel", "activation": "swiglu"}], ids=["untied", "tied"]
)
def test_shards_have_the_sums_of_all_micro_batches(options, shares_block, rank, zero, bucket_elements, monkeypatch):
    """The first micro-batch overwrites the last step's sums, the others add, and a released slot is never read.

    Units are reduced in every micro-batch, resident parameters once per step. ZeRO-2 may divide units.
    """
    data = make_data_parallel(monkeypatch, zero, rank, shares_block, bucket_elements, **options)
    assert data.gradient_slots is not None
    expected = collect_expected(monkeypatch, options, shares_block, microbatches=3)
    for _ in range(3):
        run_step(data, 3)
        assert not data.gradient_slots.active
        for (name, start), grad in collect_shard(data).items():
            shard = expected[name].flatten()[start : start + grad.numel()]
            torch.testing.assert_close(grad, shard, rtol=1e-12, atol=1e-14)
    blocks = LAYERS - 2 * shares_block
    matrices = 4 if zero == 2 and bucket_elements else 1
    if "block" in options:
        matrices = min(matrices, 3)  # queries, keys, values and the MLP's input are one
    buckets = len(data.gradient_slots.buckets[0])
    assert buckets == matrices * blocks + 2 * ("block" not in options)
    assert data.gradient_slots.start_reduction.args[0].count == 3 * 3 * buckets
    assert data._start_reduction.count == 3 * len(data.buffers[0].resident_buckets)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("early", [True, False], ids=["gradient in forward", "gradient in backward"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_tables_are_reduced_by_rows(rank, early, overlap, monkeypatch):
    """Parts of a table use the slots in turn, and the head is reduced once per group of tokens of the loss."""
    options = {"tied_embeddings": False, "vocab_size": 250}
    monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda tokens, columns, itemsize: 3)
    expected = collect_expected(monkeypatch, options, shares_block=False, microbatches=3)
    part_rows = 32  # the fewest rows that two ranks divide without padding
    data = make_data_parallel(
        monkeypatch, 2, rank, bucket_elements=500, table_part=12 * part_rows, overlap=overlap, **options
    )
    slots = data.gradient_slots
    assert slots is not None
    if early:
        assert data.allow_early_gradients(data.buffers[0].module.output_weight)
    parts = [bucket for bucket in slots.buckets[0] if bucket.is_part]
    assert len(parts) == 2 * 256 // part_rows
    assert {bucket.start for bucket in parts} == {12 * part_rows * i for i in range(TABLE_PARTS)}
    for _ in range(3):
        run_step(data, 3, token_grad=torch.ones((), dtype=torch.float64) if early else None)
        assert not slots.active
        compared = set()
        for (name, start), grad in collect_shard(data).items():
            shard = expected[name].flatten()[start : start + grad.numel()]
            torch.testing.assert_close(grad, shard, rtol=1e-12, atol=1e-14)
            compared.add(name)
        assert compared >= {"embedding.token.weight", "head.weight"}
    blocks = len(slots.buckets[0]) - len(parts)
    groups = 3  # eight tokens in groups of three
    assert slots.start_reduction.args[0].count == 3 * 3 * (blocks + len(parts) // 2 * (1 + groups))


def test_the_embedding_is_not_gathered_for_backward(monkeypatch):
    """Backward gathers the head and the blocks, last first, and never reads the embedding's slot."""
    data = make_data_parallel(monkeypatch, 3, 0, tied_embeddings=False)
    slots = data.parameter_slots
    assert slots is not None
    gathered: list[int] = []
    start_gather = ParameterUnit.start_gather

    def log_gather(unit: ParameterUnit, full_precision: bool) -> None:
        gathered.append(slots.units[0].index(unit))
        start_gather(unit, full_precision)

    monkeypatch.setattr(ParameterUnit, "start_gather", log_gather)
    slots.prefetch = False
    run_step(data, 1)
    forward = list(range(LAYERS + 2))
    assert gathered == forward + forward[-2:0:-1]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_micro_batch_does_not_wait_for_its_last_reduction(zero, monkeypatch):
    """Accumulation synchronises where memory is needed, not after each micro-batch."""
    data = make_data_parallel(monkeypatch, zero, 0, tied_embeddings=False)
    assert data.gradient_slots is not None
    in_flight: list[int] = []
    end_backward = data.end_backward

    def note_active(chunk: int) -> None:
        end_backward(chunk)
        assert data.gradient_slots is not None
        in_flight.append(sum(not bucket.is_open for bucket in data.gradient_slots.active))

    monkeypatch.setattr(data, "end_backward", note_active)
    for _ in range(2):
        run_step(data, 3)
    assert all(in_flight)
    assert len(in_flight) == 6


def test_parameters_keep_their_addresses(monkeypatch):
    """CUDA graphs may replay what reads and writes them: no gather and no backward moves a parameter or gradient."""
    data = make_data_parallel(monkeypatch, 3, 0)
    buffer = data.buffers[0]
    parameters = [param.data_ptr() for param in buffer.parameters]
    gradients = [sink.main_grad.data_ptr() for sink in buffer.sinks]
    run_step(data, 2)
    assert [param.data_ptr() for param in buffer.parameters] == parameters
    assert [sink.main_grad.data_ptr() for sink in buffer.sinks] == gradients


def test_a_unit_without_gradients_has_a_sum_of_zero(monkeypatch):
    data = make_data_parallel(monkeypatch, 2, 0)
    run_step(data, 1)
    assert any(shard.grads.any() for shard in data.buffers[0].shards)
    data.begin_step()
    data.finish_reductions()
    assert not any(shard.grads.any() for shard in data.buffers[0].shards)


def test_slots_hold_two_blocks_or_the_largest_matrix():
    """Layouts of blocks that are smaller, and larger, than half of the embedding."""
    for block, table in ((100, 1000), (900, 1000)):
        members = [BufferMember(table, True, (), unit=0)]
        members += [BufferMember(block, True, (), unit=unit) for unit in (1, 2, 3)]
        members.append(BufferMember(5, False, ("tensor",)))
        layout = lay_out(members, 1, None)
        assert [layout.units[bucket] for bucket in range(5)] == [3, 2, 1, 0, None]
        size, block_size = size_slots([layout], [5])
        assert block_size == -(-block // 64) * 64
        assert size == max(1024, 2 * block_size)


@pytest.mark.parametrize(("rows", "columns", "ranks"), [(1001, 64, 2), (1001, 96, 4), (997, 4096, 8)])
def test_parts_of_a_table_suit_fast_gemms(rows, columns, ranks):
    """A part's columns of the gradient of 16-bit logits begin at a multiple of 16 bytes, if the logits do."""
    part = 100 * columns + 1
    table = BufferMember(rows * columns, True, (), unit=0, row_elements=columns)
    layout = lay_out([table], ranks, 1, divides_units=True, table_part=part)
    ranges = [span.rows for span in layout.buckets]
    assert len(ranges) > TABLE_PARTS
    assert [first for first, _ in ranges] == [0] + [stop for _, stop in ranges[:-1]]
    assert ranges[-1][1] == rows
    for span, (first, stop) in zip(layout.buckets, ranges, strict=True):
        assert 2 * first % 16 == 0
        assert (stop - first) * columns <= part
        assert span.start == first * columns  # without padding before the last part


def test_a_matrix_next_to_a_divided_table_has_memory_of_its_own():
    """A part of the model may add a matrix, or a second table, to the unit of the embedding."""
    rows, columns, part = 640, 64, 40 * 64
    members = [
        BufferMember(3000, True, (), unit=0),
        BufferMember(rows * columns, True, (), unit=0, row_elements=columns),
        BufferMember(2 * rows * columns, True, (), unit=0, row_elements=columns),
        BufferMember(100, True, (), unit=1),
    ]
    layout = lay_out(members, RANKS, part, divides_units=True, table_part=part)
    size, block_size = size_slots([layout], [3])
    ranges: dict[int, set[tuple[int, int]]] = {}  # by member
    for span, start in zip(layout.buckets, find_slot_starts(layout, 3, block_size), strict=True):
        ranges.setdefault(span.members[0], set()).add((start, start + span.stop - span.start))
    assert [len(ranges[member]) for member in range(3)] == [1, TABLE_PARTS, TABLE_PARTS]
    in_unit = sorted(ranges[0] | ranges[1] | ranges[2])
    assert find_gaps(0, size, in_unit) == []
    assert all(stop <= start for (_, stop), (start, _) in pairwise(in_unit))


@pytest.mark.parametrize("table_part", [None, 12 * 32])
def test_a_unit_with_another_matrix_has_no_early_gradient(table_part, monkeypatch):
    """The forward writes the gradient of the logits' matrix, and the backward opens no slot for that unit."""

    def list_units(chunk: Chunk) -> list[list[torch.nn.Parameter]]:
        """Return the units of a chunk whose last block belongs to the unit of the head."""
        blocks = [list(block.parameters()) for block in chunk.blocks]
        return [[chunk.token_embedding], *blocks[:-1], list(chunk.parameters())]

    options = {"tied_embeddings": False, "vocab_size": 250, "table_part": table_part}
    data = make_data_parallel(monkeypatch, 2, 0, bucket_elements=500, **options)
    assert data.allow_early_gradients(data.buffers[0].module.output_weight)
    monkeypatch.setattr(Chunk, "list_forward_units", list_units)
    data = make_data_parallel(monkeypatch, 2, 0, bucket_elements=500, **options)
    assert not data.allow_early_gradients(data.buffers[0].module.output_weight)


def test_gaps_between_spans():
    assert find_gaps(0, 10, [(4, 6), (0, 2)]) == [(2, 4), (6, 10)]
    assert find_gaps(3, 3, []) == []
