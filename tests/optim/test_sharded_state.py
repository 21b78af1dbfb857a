"""State of the sharded optimizers: what counts in norms, what is written where, and what a checkpoint gets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import ModelConfig, OptimizerConfig, from_tree
from megascale.core.tensors import Piece
from megascale.model.transformer import Chunk
from megascale.ops.gradient_sink import get_main_grad
from megascale.optim import sharded_muon
from megascale.optim.optimizer import ShardedOptimizer, _merge_ranges
from megascale.optim.sharded_muon import assign_owners, batch_matrices
from megascale.parallel.buffers import TIED, Axes, Extent, ParamAndGradBuffer
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import ParameterSpec, get_spec, initialise, list_piece_views

# Not OPTIMIZERS.names(): tests of plugins register others in the same process.
OPTIMIZER_NAMES = ("adamw", "lamb", "muon")

Tensors = dict[str, torch.Tensor]


def make_model(**keys: object) -> ModelConfig:
    shape = {"hidden": 16, "heads": 4, "layers": 2, "sequence_length": 8, "vocab_size": 21, "vocab_multiple": 8}
    return from_tree({"model": shape | keys}).model


def make_buffer(
    model: ModelConfig,
    layers: range,
    axes: Axes | None = None,
    dtype: torch.dtype = torch.float64,
    bucket_elements: int | None = 500,
) -> ParamAndGradBuffer:
    """Return the buffers of a chunk with initial weights, by default in several buckets."""
    is_first, is_last = layers.start == 0, layers.stop == model.layers
    chunk = Chunk(model, layers, is_first=is_first, is_last=is_last, dtype=dtype)
    buffer = ParamAndGradBuffer(chunk, torch.device("cpu"), axes, bucket_elements=bucket_elements)
    initialise(chunk, 1)
    return buffer


def fill_grads(buffer: ParamAndGradBuffer, seed: int) -> Tensors:
    """Draw gradients; padding rows get none."""
    generator = torch.Generator().manual_seed(seed)
    grads = {}
    for param in buffer.parameters:
        get_main_grad(param).zero_()
        for piece, view in list_piece_views(get_spec(param), get_main_grad(param)):
            grads[piece.name] = view.normal_(0, 0.1, generator=generator).clone()
    return grads


def copy_weights(buffer: ParamAndGradBuffer) -> Tensors:
    views = [view for param in buffer.parameters for view in list_piece_views(get_spec(param), param.data)]
    return {piece.name: view.clone() for piece, view in views}


def norm_of(*gradients: Tensors) -> torch.Tensor:
    return torch.cat([grad.flatten().double() for tensors in gradients for grad in tensors.values()]).norm()


# norms ---------------------------------------------------------------------------------------------------------------


def test_replicated_tensors_count_on_the_first_tensor_rank_only():
    buffer = make_buffer(make_model(), range(2))
    specs = [get_spec(param) for param in buffer.parameters]
    replicated = {piece.name for spec in specs if "tensor" in spec.replicated_axes for piece in spec.pieces}
    assert {"norm.weight", "layers.1.mlp.out.bias"} <= replicated
    for rank, is_counted in ((0, True), (1, False)):
        optimizer = ShardedOptimizer(OptimizerConfig(), [buffer], position={"tensor": rank})
        grads = fill_grads(buffer, 1)
        norm, _ = optimizer.step(1e-2, 1)
        counted = {name: grad for name, grad in grads.items() if is_counted or name not in replicated}
        torch.testing.assert_close(norm, norm_of(counted), rtol=1e-12, atol=0)


def test_duplicates_count_nowhere_on_this_stage():
    """Wherever they lie in a bucket: between counted tensors here."""
    buffer = make_buffer(make_model(), range(2), bucket_elements=None)
    duplicates = frozenset({"layers.0.mlp.out.weight", "layers.1.attention.key.weight"})
    optimizer = ShardedOptimizer(OptimizerConfig(), [buffer], duplicates=duplicates)
    grads = fill_grads(buffer, 1)
    norm, _ = optimizer.step(1e-2, 1)
    counted = {name: grad for name, grad in grads.items() if name not in duplicates}
    assert len(counted) == len(grads) - 2
    torch.testing.assert_close(norm, norm_of(counted), rtol=1e-12, atol=0)


def test_the_norm_is_weighted_and_carries_scalars():
    buffer = make_buffer(make_model(), range(2))
    optimizer = ShardedOptimizer(OptimizerConfig(), [buffer], norm_weight=0.25)
    grads = fill_grads(buffer, 1)
    norm, scalars = optimizer.step(1e-2, 1, torch.tensor([3.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(norm, norm_of(grads) / 2, rtol=1e-12, atol=0)
    assert scalars is not None
    assert scalars.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("is_duplicate", [False, True])
def test_a_tied_gradient_counts_when_it_has_arrived(is_duplicate):
    """The last stage of two, with two chunks: its copy of the embedding is reduced while other norms are computed."""
    model = make_model(layers=4, tied_embeddings=True)
    axes = Axes(tied=Axis(size=2, rank=1))
    buffers = [make_buffer(model, range(1, 2)), make_buffer(model, range(3, 4), axes)]
    tied_bucket = buffers[1].layout.tied_bucket
    assert tied_bucket is not None
    duplicates = frozenset({TIED}) if is_duplicate else frozenset()
    optimizer = ShardedOptimizer(OptimizerConfig(clip=0.0), buffers, duplicates=duplicates)
    grads = [fill_grads(buffer, seed) for seed, buffer in enumerate(buffers)]
    before = copy_weights(buffers[1])[TIED]
    shard = buffers[1].shards[tied_bucket]
    local = shard.grads.clone()
    shard.grads.zero_()  # in flight
    norm, _ = optimizer.step(1e-2, 1, finish_tied=lambda: shard.grads.copy_(2 * local))
    tied = {TIED: 2 * grads[1].pop(TIED)}
    expected = norm_of(*grads) if is_duplicate else norm_of(*grads, tied)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    # The copy is updated in any case: Adam's first update is the learning rate, and the weight decays.
    change = (before - copy_weights(buffers[1])[TIED]) / 1e-2 - OptimizerConfig().weight_decay * before
    torch.testing.assert_close(change, tied[TIED].sign(), rtol=0, atol=1e-3)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.booleans()), max_size=9))
def test_ranges_cover_the_counted_extents_alone(rows):
    """Padding between neighbours may lie within a range: its gradients are 0."""
    extents, selected, offset = [], [], 0
    piece = Piece.full("w", (99,))
    for size, padding, is_selected in rows:
        extent = Extent(offset, offset + size, ParameterSpec((piece,)), piece, 0)
        extents.append(extent)
        if is_selected:
            selected.append(extent)
        offset += size + padding
    ranges = _merge_ranges(extents, selected)
    covered = {i for start, stop in ranges for i in range(start, stop)}
    owned = {id(extent): set(range(extent.start, extent.stop)) for extent in extents}
    for extent in extents:
        assert owned[id(extent)] <= covered if extent in selected else owned[id(extent)].isdisjoint(covered)
    # One range per run of counted neighbours.
    runs = sum(is_selected and (i == 0 or not rows[i - 1][2]) for i, (_, _, is_selected) in enumerate(rows))
    assert len(ranges) == runs


# LAMB ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"trust_min": 50.0}, {"trust_max": 0.01}, {"lamb_bias_correction": False}],
    ids=["defaults", "trust_min", "trust_max", "no bias correction"],
)
def test_lamb_follows_its_settings(settings):
    """Algorithm 2 of You et al. on each decayed tensor; a tensor of zeros moves by the direction itself."""
    config = OptimizerConfig(name="lamb", weight_decay=0.05, clip=0.0, beta2=0.99, eps=1e-6, **settings)
    buffer = make_buffer(make_model(positions="learned"), range(2))
    optimizer = ShardedOptimizer(config, [buffer])
    zero = "layers.0.mlp.out.weight"
    for param in buffer.parameters:
        for piece, view in list_piece_views(get_spec(param), param.data):
            if piece.name == zero:
                view.zero_()
    before, grads = copy_weights(buffer), fill_grads(buffer, 1)
    optimizer.step(1e-2, 1)
    after = copy_weights(buffer)
    for name, grad in grads.items():
        corrections = (0.1, 0.01) if config.lamb_bias_correction else (1.0, 1.0)
        direction = (0.1 * grad / corrections[0]) / ((0.01 * grad**2 / corrections[1]).sqrt() + 1e-6)
        ratio = 1.0
        if grad.dim() > 1:
            direction = direction + 0.05 * before[name]
            norm = float(before[name].norm())
            if norm > 0:
                upper = math.inf if config.trust_max is None else config.trust_max
                ratio = min(max(norm, config.trust_min), upper) / float(direction.norm())
        torch.testing.assert_close(after[name], before[name] - 1e-2 * ratio * direction, rtol=1e-10, atol=1e-12)
    assert torch.count_nonzero(after[zero]) == after[zero].numel()


def test_lamb_counts_replicated_tensors_on_the_first_tensor_rank_only():
    """The second rank adds nothing for them: without the first rank's sums their trust ratio is 1."""
    config = OptimizerConfig(name="lamb", weight_decay=0.0, clip=0.0)
    buffer = make_buffer(make_model(positions="learned"), range(2))
    optimizer = ShardedOptimizer(config, [buffer], position={"tensor": 1})
    before, grads = copy_weights(buffer), fill_grads(buffer, 1)
    optimizer.step(1e-2, 1)
    after = copy_weights(buffer)
    name = "embedding.position.weight"
    torch.testing.assert_close(before[name] - after[name], 1e-2 * grads[name].sign(), rtol=1e-3, atol=1e-6)
    cut = "layers.0.mlp.out.weight"
    ratio = before[cut].norm() / grads[cut].sign().norm()
    torch.testing.assert_close(before[cut] - after[cut], 1e-2 * ratio * grads[cut].sign(), rtol=1e-3, atol=1e-6)


# state and weights in use --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_weights_in_use_are_the_rounded_master_weights(name):
    """After each step, and after a checkpoint has been loaded into the master weights."""
    buffer = make_buffer(make_model(), range(2), dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(OptimizerConfig(name=name), [buffer])
    for step in (1, 2):
        before = buffer.params.clone()
        fill_grads(buffer, step)
        optimizer.step(1e-2, step)
        assert not torch.equal(buffer.params, before)
        for state in optimizer.states:
            assert state.master.dtype == torch.float32
            assert torch.equal(state.shard.params, state.master.bfloat16())
    for state in optimizer.states:
        state.master.add_(1.0)
    optimizer.copy_to_params()
    for state in optimizer.states:
        assert torch.equal(state.shard.params, state.master.bfloat16())


@pytest.mark.parametrize("bucket_elements", [500, None])
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_a_checkpoint_gets_each_tensor_with_its_state(name, bucket_elements):
    """After one step without clipping: weights, and moments or momentum, under the name of their tensor."""
    config = OptimizerConfig(name=name, clip=0.0, beta1=0.9, beta2=0.99)
    buffer = make_buffer(make_model(), range(2), bucket_elements=bucket_elements)
    optimizer = ShardedOptimizer(config, [buffer])
    grads = fill_grads(buffer, 1)
    optimizer.step(1e-2, 1)
    expected = {}
    for tensor, grad in grads.items():
        expected[f"model.{tensor}"] = copy_weights(buffer)[tensor]
        if name == "muon" and tensor.startswith("layers.") and grad.dim() == 2:
            expected[f"optimizer.momentum.{tensor}"] = grad
        else:
            expected[f"optimizer.exp_avg.{tensor}"] = 0.1 * grad
            expected[f"optimizer.exp_avg_sq.{tensor}"] = 0.01 * grad**2
    saved = {tensor: torch.full_like(values, math.nan) for tensor, values in expected.items()}
    for tensor, shape, offsets, view in optimizer.logical_tensors():
        assert saved[tensor].shape == shape
        ranges = zip(offsets, view.shape, strict=True)
        saved[tensor][tuple(slice(start, start + size) for start, size in ranges)] = view
    for tensor, values in expected.items():
        torch.testing.assert_close(saved[tensor], values, rtol=1e-12, atol=0, msg=tensor)


def test_tensors_are_numbered_alike_on_all_ranks():
    """In the order of names, whatever the order of chunks; packed sums are reduced by number."""
    model = make_model(layers=4)
    buffers = [make_buffer(model, range(2)), make_buffer(model, range(2, 4))]
    names = sorted(buffers[0].names | buffers[1].names)
    for order in (buffers, buffers[::-1]):
        assert list(ShardedOptimizer(OptimizerConfig(), order).rule.shards.tensor_names) == names


def test_a_shard_has_as_few_parts_as_its_states_allow():
    """A part is one launch: AdamW's shards have one each, Muon's one per run of tensors with the same state."""
    buffer = make_buffer(make_model(), range(2), bucket_elements=None)
    assert all(len(state.parts) == 1 for state in ShardedOptimizer(OptimizerConfig(), [buffer]).states)
    muon_states = ShardedOptimizer(OptimizerConfig(name="muon"), [buffer]).states
    assert max(len(state.parts) for state in muon_states) > 1
    for state in muon_states:
        names = [tuple(part.state) for part in state.parts]
        assert all(first != second for first, second in pairwise(names))
        edges = [edge for part in state.parts for edge in (part.start, part.stop)]
        assert (edges[0], edges[-1]) == (0, state.master.numel())
        assert edges[1:-1:2] == edges[2::2]


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_updated_shards_are_reported_in_the_order_of_the_next_forward(name):
    model = make_model(layers=4)
    buffers = [make_buffer(model, range(2)), make_buffer(model, range(2, 4))]
    optimizer = ShardedOptimizer(OptimizerConfig(name=name), buffers)
    for seed, buffer in enumerate(buffers):
        fill_grads(buffer, seed)
    updated: list[int] = []
    optimizer.step(1e-2, 1, on_shard_updated=lambda shard: updated.append(id(shard)))
    first = [id(buffers[0].shards[bucket]) for bucket in buffers[0].forward_order]
    assert first != [id(shard) for shard in buffers[0].shards]
    assert updated == first + [id(shard) for shard in buffers[1].shards]


# Muon ----------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(*[st.integers(1, 30)] * 2), max_size=9), st.integers(1, 4))
def test_owners_have_even_work_whatever_the_order(shapes, ranks):
    """Largest first: without its smallest matrix, the busiest rank has no more work than any other."""
    owner = assign_owners(shapes, ranks)
    assert owner == assign_owners(dict(reversed(shapes.items())), ranks)
    assert owner.keys() == shapes.keys()
    work: list[list[int]] = [[] for _ in range(ranks)]
    for name, (rows, columns) in shapes.items():
        work[owner[name]].append(rows * columns * min(rows, columns))
    busiest = max(work, key=sum)
    least = min(map(sum, work))
    assert sum(busiest) - min(busiest, default=0) <= least


def test_large_matrices_get_owners_first():
    shapes = {"a": (2, 2), "b": (3, 3), "c": (4, 4), "d": (4, 6)}  # work of 8, 27, 64 and 96
    owner = assign_owners(shapes, 2)
    assert owner["c"] == owner["b"] == 1 - owner["d"]
    assert owner["a"] == owner["c"]


def test_batches_have_one_shape_and_bounded_size(monkeypatch):
    monkeypatch.setattr(sharded_muon, "MAX_BATCH_ELEMENTS", 24)
    shapes = {f"small {i}": (2, 3) for i in range(5)} | {"large a": (5, 6), "large b": (5, 6)}
    assert batch_matrices(shapes) == [
        ((2, 3), [f"small {i}" for i in range(4)]),
        ((2, 3), ["small 4"]),
        ((5, 6), ["large a"]),
        ((5, 6), ["large b"]),
    ]
