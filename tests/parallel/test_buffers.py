"""Shards of the flat buffers: together the data-parallel ranks own every element of every logical tensor once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.model.transformer import Chunk
from megascale.ops.gradient_sink import get_main_grad
from megascale.parallel import data_parallel
from megascale.parallel.buffer_layout import ALIGN, BufferMember, lay_out
from megascale.parallel.buffers import Axes, ParamAndGradBuffer, split_extent
from megascale.parallel.collectives import Axis
from megascale.parallel.data_parallel import DataParallel


def chunk(tensor: Axis, **options) -> Chunk:
    model = {"hidden": 12, "heads": 4, "layers": 2, "sequence_length": 8, "vocab_size": 21, "vocab_multiple": 8}
    config = from_tree({"model": {**model, **options}}).model
    return Chunk(config, range(2), is_first=True, is_last=True, axis=tensor, dtype=torch.float64)


@given(
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2]),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.sampled_from(["serial", "parallel"]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_element_is_owned_once(data, tensor, zero, bucket, block, tied):
    owned: dict[str, np.ndarray] = {}
    for t in range(tensor):
        for d in range(data):
            module = chunk(Axis(None, tensor, t), block=block, tied_embeddings=tied)
            axes = Axes(data=Axis(None, data, d), model={"tensor": Axis(None, tensor, t)})
            flat = ParamAndGradBuffer(module, torch.device("cpu"), axes, zero, bucket)
            for shard in flat.shards:
                assert shard.params.shape == shard.grads.shape
                assert shard.params.is_contiguous()
                edges = [edge for e in shard.extents for edge in (e.start, e.stop)]
                assert edges == sorted(edges)
                for extent in shard.extents:
                    # Replicas all own what they hold; it counts on the first of them only.
                    if (not extent.spec.is_counted({"tensor": t})) or (zero == 0 and d > 0):
                        continue
                    for piece, offsets, view in split_extent(extent, shard.params):
                        full = owned.setdefault(piece.name, np.zeros(piece.shape, int))
                        full[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] += 1
    for name, count in owned.items():
        assert (count == 1).all(), name


@given(
    st.lists(
        st.builds(
            BufferMember,
            st.integers(1, 300),
            st.booleans(),
            st.sampled_from([(), ("tensor",)]),
            st.just(False),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 700)),
)
@settings(max_examples=60, deadline=None)
def test_a_layout_keeps_kinds_of_parameters_apart(members, tied, ranks, limit):
    if tied:
        members = [BufferMember(50, True, (), is_tied=True)] + list(members)
    layout = lay_out(members, ranks, limit)
    assert sorted(i for span in layout.buckets for i in span.members) == list(range(len(members)))
    edges = [0]
    for number, span in enumerate(layout.buckets):
        assert span.start == edges[-1]
        edges.append(span.stop)
        assert (span.stop - span.start) % ranks == 0
        kinds = {members[i].region for i in span.members}
        assert len(kinds) == 1
        # Backward finishes the last matrix of the forward first; the few parameters without decay follow.
        assert list(span.members) == sorted(span.members, key=lambda i: (not members[i].has_decay, -i))
        used = [(layout.starts[i], layout.starts[i] + members[i].count) for i in span.members]
        assert all(start % ALIGN == 0 for start, _ in used)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(used))
        assert span.start == used[0][0]
        # No more is filled up than shards of equal, aligned size need.
        assert used[-1][1] <= span.stop < used[-1][1] + ALIGN * (ranks + 1)
        if limit is not None and len(span.members) > 1:
            assert used[-1][1] - span.start <= limit
        shards = [layout.find_shard(number, rank, ranks) for rank in range(ranks)]
        assert [start for start, _ in shards] == ([span.start] + [stop for _, stop in shards[:-1]])
        assert shards[-1][1] == span.stop
        if limit is None:  # of one kind all are in one bucket
            assert kinds not in [{members[i].region for i in peer.members} for peer in layout.buckets[:number]]
    assert layout.size == edges[-1]
    summed = {span.start for span in layout.buckets if members[span.members[0]].summed_axes}
    inside = {s.start for s in layout.buckets for part in layout.summed_ranges if part.start <= s.start < part.stop}
    assert summed == inside
    assert layout.tied_bucket == (len(layout.buckets) - 1 if tied else None)


def test_only_replicated_gradients_wait_for_the_tensor_axis():
    """The embedding of a first stage lies right behind them, and leaves within its backward."""
    for tensor in (1, 2):
        axes = Axes(model={"tensor": Axis(None, tensor, 0)}, tied=Axis(None, 2, 0))
        flat = ParamAndGradBuffer(chunk(axes.tensor), torch.device("cpu"), axes, 1, 500)
        assert flat.layout.tied_bucket == len(flat.layout.buckets) - 1
        for number, span in enumerate(flat.layout.buckets):
            waits = data_parallel._needs_axis_sums(flat, number)
            assert waits == (tensor > 1 and "tensor" in flat.parameters[span.members[0]].spec.summed_axes)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_and_gradients_are_views_of_the_buffers(zero):
    """The next forward reads the updated shard, and the shard receives the gradients of backward."""
    module = chunk(Axis())
    flat = ParamAndGradBuffer(module, torch.device("cpu"), zero=zero, bucket_elements=500)
    for shard in flat.shards:
        for extent in shard.extents:
            shard.params[extent.start : extent.stop] = 7.0
    for p in module.parameters():
        real = sum(piece.box.count for piece in p.spec.pieces)
        assert (p.view(-1)[:real] == 7.0).all()
        assert (p.view(-1)[real:] == 0.0).all()
        get_main_grad(p).fill_(3.0)
    for shard in flat.shards:
        for extent in shard.extents:
            assert (shard.grads[extent.start : extent.stop] == 3.0).all()


def backward(data: DataParallel, last: bool) -> None:
    """One micro-batch's, of tokens that are always the same."""
    tokens = torch.arange(8)[:, None]
    if last:
        data.arm_reductions(0)
    data.begin_backward(0)
    data.buffers[0].module(tokens, Batch(tokens, tokens)).sum().backward()
    data.end_backward(0)


@pytest.mark.parametrize("options", [{"block": "serial"}, {"block": "parallel", "tied_embeddings": False}])
def test_a_steps_first_gemms_write_their_gradients(options):
    """They are never made zero, whatever the step before left there; all else is."""
    flat = ParamAndGradBuffer(chunk(Axis(), **options), torch.device("cpu"))
    data = DataParallel([flat])
    for p in flat.parameters:
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    once, twice = [], []
    for sums in (once, twice, once, twice):  # the first step of all finds zeros, and who writes what
        data.begin_step()
        for micro_batch in range(1 if sums is once else 2):
            backward(data, last=sums is once or micro_batch == 1)
        sums.append(flat.grads.clone())
        flat.grads.fill_(float("nan"))
    assert torch.equal(*once)
    assert torch.equal(*twice)
    torch.testing.assert_close(twice[0], 2 * once[0])
    data.begin_step()
    gemms = sum(p.numel() for block in flat.module.blocks for p in block.parameters() if p.dim() == 2)
    assert flat.grads.isnan().sum() == gemms
    # A step in which nothing comes to them.
    data.arm_reductions(0)
    data.begin_backward(0)
    data.end_backward(0)
    assert (flat.grads == 0).all()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_several_contributions_to_one_gradient_are_summed(micro_batches):
    """Autograd adds to a matrix's gradient before its GEMM does: what the GEMM would write must be added too."""
    flat = ParamAndGradBuffer(chunk(Axis()), torch.device("cpu"))
    data = DataParallel([flat])
    for p in flat.parameters:
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    matrix = flat.module.blocks[0].mlp.out.weight
    tokens = torch.arange(8)[:, None]

    def run_step(penalty: float) -> torch.Tensor:
        data.begin_step()
        for micro_batch in range(micro_batches):
            if micro_batch == micro_batches - 1:
                data.arm_reductions(0)
            data.begin_backward(0)
            loss = flat.module(tokens, Batch(tokens, tokens)).sum()
            # Later operators go backward first, so that this gradient comes before that of the GEMM.
            (loss + penalty * matrix.square().sum()).backward()
            data.end_backward(0)
        return get_main_grad(matrix).clone()

    plain = [run_step(0.0) for _ in range(3)][-1]
    for _ in range(3):
        torch.testing.assert_close(run_step(1.0), plain + 2 * micro_batches * matrix.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_waits_for_each_block_when_it_is_next(monkeypatch, tied):
    """Parameters arrive under the forward: none is used before its gather is waited for, none waited for early."""
    log: list[tuple[str, int]] = []

    class Gather:
        def __init__(self, first: int) -> None:
            self.first = first

        def wait(self) -> None:
            log.append(("arrived", self.first))

    def gather(full, part, axis):
        log.append(("sent", full.storage_offset()))
        return Gather(full.storage_offset())

    monkeypatch.setattr(data_parallel, "all_gather_into", gather)
    module = chunk(Axis(), tied_embeddings=tied)
    flat = ParamAndGradBuffer(module, torch.device("cpu"), Axes(data=Axis(None, 2, 0)), 1, 300)
    for i, block in enumerate(module.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: log.append(("block", i)))
    data = DataParallel([flat])
    data.start_gather(0)
    data.await_parameters(0)
    tokens = torch.zeros(8, 1, dtype=torch.long)
    module(tokens, Batch(tokens, tokens))
    assert not data.is_gathering(0)
    sent = [where for subject, where in log if subject == "sent"]
    assert len(sent) == len(flat.layout.buckets) == len({where for event, where in log if event == "arrived"})
    spans = {span.start: span for span in flat.layout.buckets}
    of = {id(p): i for i, p in enumerate(flat.parameters)}
    for number, block in enumerate(module.blocks):
        local = {of[id(p)] for p in block.parameters()}
        needed = {start for start, span in spans.items() if local & set(span.members)}
        later = {start for start, span in spans.items() if min(span.members) > max(local)}
        arrived = {where for event, where in log[: log.index(("block", number))] if event == "arrived"}
        assert needed <= arrived
        assert (later and not later & arrived) or number == 1  # the last block may be all that is left
    assert [min(spans[where].members) for where in sent] == sorted(min(span.members) for span in spans.values())


@pytest.mark.parametrize(("zero", "expected"), [(1, "all"), (2, "all"), (3, "resident")])
def test_the_buffer_of_parameters_has_no_room_for_gathered_units(zero, expected):
    axes = Axes(data=Axis(size=2))
    buffer = ParamAndGradBuffer(chunk(Axis(), layers=2), torch.device("cpu"), axes=axes, zero=zero)
    sizes = {"all": buffer.layout.size, "resident": buffer.layout.size - buffer.layout.unit_size}
    assert buffer.params.numel() == sizes[expected] > 0
    assert buffer.shard_params.numel() == (buffer.layout.size - sizes[expected]) // 2
