"""Context parallelism: layouts whose ranks divide the tokens of each sequence train as one process does, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.config import from_tree
from megascale.config.parts import ATTENTIONS
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.core.head_exchange import share_heads
from megascale.core.inventory import resolve_layers
from megascale.core.layout import Layout, lay_out
from megascale.core.saved_tensors import layer_saved_tensors
from megascale.errors import FitError
from megascale.model import attention, transformer
from megascale.model.block import make_block
from megascale.model.context import ForwardContext, KVCache, LayerSetup
from megascale.model.rotary import RotaryTables
from megascale.model.transformer import Chunk
from megascale.parallel import context as parallel_context
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.linear import make_linears
from megascale.train import chunk_forward, loss_weights
from megascale.train.engine_axes import choose_context_exchange
from megascale.train.generation import Sampling, _run_chunk, generate_tokens
from tests.exact.cases import KINDS, LLAMA3, POST_NORMS, SMALL, TWO_LAYERS, Case, case
from tests.exact.compare import TOLERANCE, assert_equal, differences
from tests.exact.test_experts import BALANCED, BIASED, DEEPSEEK, experts_case
from tests.exact.training import FEW_STEPS, train

pytestmark = pytest.mark.xdist_group("processes")

DOCUMENTS = SampleFields(loss_weights=True, positions=True, max_documents=4)
WEIGHTS = SampleFields(loss_weights=True)
ROTARY = {**TWO_LAYERS, "positions": "rotary"}
LONGROPE = {
    "method": "longrope",
    "original_length": 6,
    "short_factors": [1.0, 1.5],
    "long_factors": [2.0, 3.0],
}


def context_case(context: int, *sizes: int, **options: Any) -> Case:
    """Return a case whose `context` ranks divide the tokens."""
    parallel = {"context": context, "bucket_elements": 700, **options.pop("parallel", {})}
    return case(*sizes, microbatches=options.pop("microbatches", 2), parallel=parallel, **options)


def experts_over_context(context: int, *sizes: int, **options: Any) -> Case:
    """Return a case whose `context` ranks divide the experts too."""
    parallel = {"context": context, "experts_over": "context", "bucket_elements": 700, **options.pop("parallel", {})}
    return experts_case(*sizes, parallel=parallel, **options)


def on_four_ranks(chosen: Case) -> Case:
    """Return a case whose replicas lie along the axis `expert` or `replicate` instead of data."""
    return Case({**chosen.tree, "parallel": {**chosen.tree["parallel"], "data": 1}}, 4)


IN_PARTS = {"context_parts": True}

CASES = {
    "heads in parts, window, ZeRO-2": context_case(2, model={**ROTARY, "window": 3}, zero=2, overlap=IN_PARTS),
    "heads in parts, groups, tensor, stages, recompute": context_case(
        2,
        2,
        2,
        microbatches=3,
        model={**ROTARY, "hidden": 32, "heads": 16, "kv_heads": 8, "dropout": 0.2},
        parallel={"recompute": "selective"},
        overlap=IN_PARTS,
    ),
    "heads in parts, recomputed, head norms": context_case(
        2, model={**ROTARY, "qk_norm": "head", "norm": "rmsnorm"}, parallel={"recompute": "full"}, overlap=IN_PARTS
    ),
    "keys gathered, windows": context_case(
        4,
        model={**ROTARY, "heads": 3, "hidden": 12, "window": 3, "layer_pattern": "SL", "dropout": 0.1},
        parallel={"recompute": "selective"},
    ),
    "keys gathered, softcap, stages": context_case(
        2, 1, 2, model={**ROTARY, "heads": 3, "hidden": 12, "window": 5, "attention_softcap": 1.5}
    ),
    "two ranks, learned positions, dropout": context_case(2, model={**TWO_LAYERS, "dropout": 0.2}, zero=0),
    "four ranks, ZeRO-2": context_case(4, model=ROTARY, zero=2),
    "each key to two ranks, ZeRO-3": context_case(4, model={**ROTARY, "kv_heads": 2, "window": 3}, zero=3),
    "one key for all ranks, parallel block": context_case(4, model={**ROTARY, "kv_heads": 1, "block": "parallel"}),
    "keys gathered": context_case(2, 4, model={**TWO_LAYERS, "dropout": 0.2}),
    "keys gathered, window, softcap": context_case(
        4, 2, model={**ROTARY, "window": 3, "attention_softcap": 1.5, "kv_heads": 2}
    ),
    "tensor, data, ZeRO-1, Muon": context_case(
        2, 2, 1, 2, model={**ROTARY, "dropout": 0.2, "block": "parallel"}, optimizer={"name": "muon"}
    ),
    "data, ZeRO-0, LAMB, recompute": context_case(
        2, 1, 1, 2, zero=0, model=ROTARY, optimizer={"name": "lamb"}, parallel={"recompute": "full"}
    ),
    "data, ZeRO-3, Muon, recompute": context_case(
        2,
        1,
        1,
        2,
        zero=3,
        model={**ROTARY, "window": 3},
        optimizer={"name": "muon"},
        parallel={"recompute": "selective"},
    ),
    "tensor, pipeline": context_case(2, 2, 2, microbatches=3, model={**TWO_LAYERS, "dropout": 0.2}),
    "interleaved stages, data, ZeRO-2": context_case(
        2, 1, 2, 2, virtual=2, zero=2, model={"positions": "rotary", "window": 3, "kv_heads": 2}
    ),
    "interleaved stages, ZeRO-1, tied, full recompute": context_case(
        2, 1, 2, virtual=2, microbatches=3, model={"dropout": 0.1}, parallel={"recompute": "full"}
    ),
    "kinds of layers, ZeRO-1, LAMB": context_case(
        2, 1, 1, 2, model={**KINDS, "norm": "rmsnorm", "activation": "swiglu"}, optimizer={"name": "lamb"}
    ),
    "norms over projections, scaled positions": context_case(
        2, 2, 1, 2, model={**POST_NORMS, "positions": "rotary", "rotary_scaling": LLAMA3, "layers": 2}
    ),
    # The whole sequence exceeds the original length, and the first rank's slice does not.
    "longrope": context_case(2, model={**ROTARY, "rotary_scaling": LONGROPE}),
    "experts, balance of whole sequences": experts_case(
        2, 1, 2, experts=BALANCED, parallel={"context": 2, "recompute": "full"}
    ),
    "MLP recomputed, halves of layers": context_case(
        2,
        1,
        2,
        microbatches=3,
        model={"layers": 3, "dropout": 0.1, "norm_placement": "both"},
        parallel={"recompute": "mlp", "layer_split": [1.5, 1.5]},
    ),
    "attention recomputed": context_case(
        2, 2, model={**ROTARY, "window": 3, "norm": "rmsnorm"}, parallel={"recompute": "attention"}
    ),
    "experts recomputed": experts_case(2, 1, 1, experts=BALANCED, parallel={"context": 2, "recompute": "mlp"}),
    "experts over data, balance of whole sequences": on_four_ranks(
        experts_case(1, 1, 2, experts=BALANCED, parallel={"context": 2, "experts_over": "data", "expert": 2})
    ),
    "experts over context, gathered": experts_over_context(2, experts=BALANCED, zero=1),
    "experts over context, all-to-all, ZeRO-2, Muon": experts_over_context(
        2, 1, 1, 2, experts={**BALANCED, "top_k": 1}, zero=2, optimizer={"name": "muon"}
    ),
    "experts over four context ranks, biases, LAMB, without ZeRO": experts_over_context(
        4, experts=BIASED, zero=0, optimizer={"name": "lamb"}
    ),
    "experts over context and tensor, ZeRO-3, recomputed": experts_over_context(
        2, 2, experts=DEEPSEEK, zero=3, parallel={"recompute": "full"}
    ),
    "experts over context, stages, offloaded": experts_over_context(
        2, 1, 2, experts=BALANCED, parallel={"recompute": "full", "offload_activations": True}
    ),
    "experts over context, data, keys gathered": experts_over_context(
        2, 1, 1, 2, experts=BALANCED, model={"heads": 3, "hidden": 12, "dropout": 0.1}, zero=3
    ),
    "copies of the sharded state": on_four_ranks(
        context_case(2, 1, 1, 2, model={**ROTARY, "dropout": 0.1}, parallel={"replicate": 2})
    ),
    "offloaded, ZeRO-3": context_case(
        4,
        zero=3,
        model={**ROTARY, "layers": 5, "tied_embeddings": False},
        parallel={"recompute": "full", "offload_activations": True},
    ),
    "offloaded, interleaved stages": context_case(
        2,
        1,
        2,
        virtual=2,
        microbatches=3,
        model={"layers": 7, "positions": "rotary", "dropout": 0.1},
        parallel={"recompute": "full", "offload_activations": True},
    ),
    "nothing overlapped": context_case(
        2, 2, 2, model=TWO_LAYERS, overlap={"tensor": "off", "pipeline": False, "data": False}
    ),
}
FIELD_CASES = {
    "documents, window, each key to two ranks": (
        context_case(4, model={**ROTARY, "kv_heads": 2, "window": 3}, train={"micro_batch": 2}),
        DOCUMENTS,
    ),
    "documents, keys gathered": (context_case(2, 4, model=ROTARY, train={"micro_batch": 2}), DOCUMENTS),
    "documents, all axes, learned positions": (
        context_case(2, 1, 2, 2, virtual=2, zero=2, model={"dropout": 0.1}, train={"micro_batch": 2}),
        DOCUMENTS,
    ),
    # Weights are unequal, many are 0, so that slices count unequally many targets.
    "weights, tensor, data, ZeRO-3": (context_case(2, 2, 1, 2, zero=3, model=TWO_LAYERS), WEIGHTS),
}


def check(chosen: Case, pool: Any, fields: SampleFields = NO_FIELDS) -> None:
    """Compare a layout with one process."""
    [expected] = pool.run(train, 1, chosen.twin, FEW_STEPS, nullcontext, fields)
    report = pool.run(train, chosen.world, chosen.tree, FEW_STEPS, nullcontext, fields)
    assert_equal(expected, report, from_tree(chosen.tree).model)


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str, pool: Any) -> None:
    check(CASES[name], pool)


@pytest.mark.parametrize("name", FIELD_CASES)
def test_layouts_with_fields(name: str, pool: Any) -> None:
    chosen, fields = FIELD_CASES[name]
    check(chosen, pool, fields)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (8, 8, 4, (2, 2, 1, False)),
        (8, 2, 4, (2, 1, 2, False)),
        (32, 8, 4, (8, 2, 1, False)),
        (12, 4, 6, (2, 2, 3, False)),
        (12, 4, 3, (4, 4, 3, False)),
        (6, 2, 4, (6, 2, 1, True)),
    ],
)
def test_heads_of_a_rank(heads: int, kv_heads: int, ranks: int, expected: tuple[int, int, int, bool]) -> None:
    assert tuple(share_heads(heads, kv_heads, ranks)) == expected


# Faults that the comparison must find ------------------------------------------------------------------------------


@contextmanager
def loss_is_divided_by_the_axis() -> Iterator[None]:
    """The sum over ranks is taken for a sum of means."""
    tokens = Layout.tokens_per_step.fget
    assert tokens is not None
    with mock.patch.object(Layout, "tokens_per_step", property(lambda layout: tokens(layout) * layout.grid.context)):
        yield


@contextmanager
def gradients_of_keys_stay_local() -> Iterator[None]:
    """Ranks do not return the gradients of keys and values that belong to other ranks' tokens."""

    def gather(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        gathered = [x.detach().clone() for x in parallel_context.gather_keys(k, v, axis)]
        rows = k.shape[0]
        for sequence, part in zip(gathered, (k, v), strict=True):
            sequence[axis.rank * rows : (axis.rank + 1) * rows] = part
        return gathered[0], gathered[1]

    with mock.patch.object(attention, "gather_keys", gather):
        yield


@contextmanager
def attention_stays_in_the_slice() -> Iterator[None]:
    with mock.patch.object(
        attention.CausalAttention,
        "_attend_over_ranks",
        lambda self, q, k, v, context: self._attend_locally(q, k, v, None),
    ):
        yield


@contextmanager
def masks_become_causal() -> Iterator[None]:
    """Windows and documents are forgotten."""
    kernel = attention.attention

    def attend(*args: Tensor, **options: Any) -> Tensor:
        return kernel(*args, **{**options, "window": None, "documents": None})

    with mock.patch.object(attention, "attention", attend):
        yield


@contextmanager
def labels_are_shifted_in_the_slice() -> Iterator[None]:
    """The last token of a slice predicts nothing, because its label is the first token of the next slice."""
    cut = chunk_forward.slice_batch

    def cut_targets(batch: Batch[Tensor], axis: Axis) -> Batch[Tensor]:
        part = cut(batch, axis)
        assert part.targets is not None
        targets = part.targets.clone()
        targets[-1] = -100
        return replace(part, targets=targets)

    with mock.patch.object(chunk_forward, "slice_batch", cut_targets):
        yield


@contextmanager
def slices_share_positions() -> Iterator[None]:
    """Every slice begins at position 0."""
    with mock.patch.object(transformer, "replace", lambda context, **changes: context):
        yield


@contextmanager
def weights_are_summed_per_slice() -> Iterator[None]:
    """The loss is the mean of the slices' weighted means, as if all slices counted equally many targets."""

    def shares_of_slice(self: loss_weights.LossWeights, weights_SB: Tensor) -> Tensor:
        return weights_SB.double() / weights_SB.sum().clamp(min=1e-9) / 2

    with mock.patch.object(loss_weights.LossWeights, "normalise", shares_of_slice):
        yield


MATRIX = "step 1 gradient layers.0.mlp.in.weight"
KEY = "step 1 gradient layers.0.attention.key.weight"
LOSS = "step 1 loss on rank 0"
FAULTS: dict[str, tuple[Callable[[], Any], Case, SampleFields, str, str | None]] = {
    "loss": (loss_is_divided_by_the_axis, context_case(2, model=TWO_LAYERS), NO_FIELDS, LOSS, None),
    "keys": (gradients_of_keys_stay_local, context_case(2, 4, model=TWO_LAYERS), NO_FIELDS, KEY, LOSS),
    "slice": (attention_stays_in_the_slice, context_case(2, model=TWO_LAYERS), NO_FIELDS, LOSS, None),
    "window": (masks_become_causal, context_case(2, model={**TWO_LAYERS, "window": 3}), NO_FIELDS, LOSS, None),
    "documents": (masks_become_causal, context_case(2, model=TWO_LAYERS), DOCUMENTS, LOSS, None),
    "labels": (labels_are_shifted_in_the_slice, context_case(2, model=TWO_LAYERS), NO_FIELDS, LOSS, None),
    "positions": (slices_share_positions, context_case(2, model=ROTARY), NO_FIELDS, LOSS, None),
    "dropout": (
        slices_share_positions,
        context_case(2, model={**TWO_LAYERS, "positions": "none", "dropout": 0.2}),
        NO_FIELDS,
        MATRIX,
        None,
    ),
    "counts": (weights_are_summed_per_slice, context_case(2, model=TWO_LAYERS), WEIGHTS, LOSS, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, pool: Any) -> None:
    fault, chosen, fields, wrong, right = FAULTS[name]
    [expected] = pool.run(train, 1, chosen.twin, 1, nullcontext, fields)
    model = from_tree(chosen.tree).model
    assert_equal(expected, pool.run(train, chosen.world, chosen.tree, 1, nullcontext, fields), model)
    result = differences(expected, pool.run(train, chosen.world, chosen.tree, 1, fault, fields), model)
    assert result[wrong] > 1e-6
    assert right is None or result[right] <= TOLERANCE


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            context_case(3, model=TWO_LAYERS),
            r"model.sequence_length=8 is not divisible by parallel.context=3; use --model.sequence_length=6 or 9",
        ),
        (
            context_case(4, 4, model=TWO_LAYERS),
            r"parallel.context=4 x parallel.tensor=4; use --model.sequence_length=16",
        ),
    ],
)
def test_a_sequence_that_does_not_divide_is_refused(chosen: Case, message: str) -> None:
    with pytest.raises(FitError, match=message):
        lay_out(from_tree(chosen.tree), chosen.world)


def test_a_kernel_that_cannot_mask_a_slice_is_refused() -> None:
    chosen = context_case(2, 4, model=TWO_LAYERS)
    tree = {**chosen.tree, "kernels": {"attention": "flash"}}
    with pytest.raises(FitError, match=r"kernels.attention=flash cannot mask the queries of a slice"):
        lay_out(from_tree(tree), chosen.world)
    lay_out(from_tree({**tree, "kernels": {"attention": "sdpa"}}), chosen.world)
    tree = {**tree, "kernels": {"attention": "flash4"}}
    lay_out(from_tree(tree), chosen.world)
    with pytest.raises(FitError, match=r"kernels.attention=flash4 .*set --kernels.attention=auto or sdpa, or"):
        lay_out(from_tree({**tree, "data": {"document_mask": True}}), chosen.world)


def test_an_attention_that_cannot_divide_tokens_is_refused() -> None:
    chosen = context_case(2, model=TWO_LAYERS)
    facts = replace(ATTENTIONS["causal"], divides_tokens=False)
    with mock.patch.dict(ATTENTIONS, {"causal": facts}), pytest.raises(FitError, match=r"with model.attention=causal"):
        lay_out(from_tree(chosen.tree), chosen.world)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"layer_pattern": "SG", "layer_kinds": {"G": {"kv_heads": 1}}},
            "exchanges slices for heads; exchanges slices for heads, each key/value head on 2 ranks",
        ),
        (
            {"heads": 3, "hidden": 12},
            "gathers keys and values where 2 context ranks do not divide 3 heads "
            "(kernel: the fastest with such a mask)",
        ),
    ],
)
def test_the_start_names_every_kind_of_attention(model: dict[str, Any], line: str) -> None:
    config = from_tree(context_case(2, model={**ROTARY, **model}).tree)
    _, lines = choose_context_exchange(Axis(None, 2, 0), config, torch.float64, torch.device("cpu"))
    assert lines["context attention"] == line


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"heads": 4}, "collectives, in parts of the heads"),
        ({"heads": 4, "attention_sinks": True}, "collectives, of all heads at once"),
        ({"heads": 2}, "collectives, of all heads at once"),
        (
            {"heads": 4, "layer_pattern": "SG", "layer_kinds": {"G": {"kv_heads": 2}}},
            "collectives, in parts of the heads of some layers",
        ),
    ],
)
def test_the_start_names_the_layers_that_exchange_heads_in_parts(model: dict[str, Any], line: str) -> None:
    config = from_tree(context_case(2, model={**ROTARY, **model}, overlap=IN_PARTS).tree)
    axis, lines = choose_context_exchange(Axis(None, 2, 0), config, torch.float64, torch.device("cpu"))
    text, _, reason = lines["context exchange"].partition(" (")
    assert text == line
    assert (axis.overlap == "parts") == ("in parts" in line) == (not reason)


# Memory ------------------------------------------------------------------------------------------------------------


def measure_saved_bytes(rank: int, world: int, options: dict[str, Any], recompute: str) -> int:
    """Return the bytes of all distinct storages that the forward of one layer saves, parameters aside."""
    config = from_tree({"model": {**MEASURED, **options}, "parallel": {"context": world}})
    axes = {"context": Axis(dist.group.WORLD, world, rank)}
    spec = resolve_layers(config.model)[0]
    linears = make_linears("default", SINGLE_RANK)
    setup = LayerSetup(spec, 0, linears, torch.float32, recompute=recompute, axes=axes)
    block = make_block(setup).to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    excluded = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    stored: dict[int, tuple[int, Tensor]] = {}
    rows = config.model.sequence_length // world
    [rotary] = RotaryTables([spec.rope], config.model.sequence_length, torch.float32).select(
        rank * rows, (rank + 1) * rows, torch.device("cpu")
    )
    excluded |= {table.untyped_storage().data_ptr() for table in rotary or ()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded and tensor.dtype == torch.float32:
            stored[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = torch.randn(rows, 1, config.model.hidden, requires_grad=True)
        block(x, rotary, ForwardContext(sequence_start=rank * rows))
    return sum(size for size, _ in stored.values())


MEASURED = {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 128, "sequence_length": 128}


@pytest.mark.parametrize("recompute", ["none", "selective", "mlp", "attention"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "rotary"},
        {"positions": "rotary", "kv_heads": 1},
        {"positions": "none", "qk_norm": "head"},
        {"attention_multiplier": 0.1},
        {"block": "parallel", "kv_heads": 2},
    ],
    ids=str,
)
def test_saved_tensors_are_those_that_the_block_keeps(options: dict[str, Any], recompute: str, pool: Any) -> None:
    if options.get("block") == "parallel" and recompute in ("mlp", "attention"):
        pytest.skip("a parallel block has no halves")
    config = from_tree({"model": {**MEASURED, **options}})
    for retained in pool.run(measure_saved_bytes, 2, options, recompute):
        saved = layer_saved_tensors(resolve_layers(config.model)[0], 128, 1, 1, "float32", recompute, context=2)
        assert sum(tensor.bytes for tensor in saved) == pytest.approx(retained, rel=0.002)


# Generation --------------------------------------------------------------------------------------------------------


def make_chunk(rank: int, world: int, model: dict[str, Any]) -> Chunk:
    """Return a whole model on ranks that divide prompts."""
    config = from_tree({"model": {**SMALL["model"], **model, "sequence_length": 40}, "parallel": {"context": world}})
    axes = {"context": Axis(dist.group.WORLD, world, rank)} if world > 1 else {}
    chunk = Chunk(config.model, range(2), is_first=True, is_last=True, axes=axes, dtype=torch.float64).to_empty(
        device="cpu"
    )
    draw = torch.Generator().manual_seed(0)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    return chunk


def generate(rank: int, world: int, model: dict[str, Any], prompt: list[int]) -> list[int]:
    """Return tokens that continue a prompt that the ranks divide."""
    chunk = make_chunk(rank, world, model)
    return list(generate_tokens(chunk, prompt, 12, Sampling(temperature=1.0, seed=3)))


@pytest.mark.parametrize(
    ("world", "model"),
    [
        (2, {"layers": 2}),
        (4, {"layers": 2, "positions": "rotary", "kv_heads": 2, "window": 3}),
        (3, {"layers": 2, "positions": "rotary"}),  # three ranks do not divide four heads
    ],
)
@pytest.mark.parametrize("length", [1, 4, 11])
def test_generation_divides_the_prompt(world: int, model: dict[str, Any], length: int, pool: Any) -> None:
    prompt = [(7 * i + 3) % 21 for i in range(length)]
    [expected] = pool.run(generate, 1, model, prompt)
    assert pool.run(generate, world, model, prompt) == [expected] * world


@torch.no_grad()
def compute_logits(rank: int, world: int, length: int) -> Tensor:
    """Return the logits after a prompt, whose rotary frequencies depend on its length."""
    chunk = make_chunk(rank, world, {"layers": 2, "positions": "rotary", "rotary_scaling": LONGROPE})
    prompt = torch.tensor([(7 * i + 3) % 21 for i in range(length)])
    return chunk.compute_logits(_run_chunk(chunk, prompt, KVCache())[-1:])


@pytest.mark.parametrize("length", [6, 7, 8, 9])  # two ranks divide 4, 6, 6 and 8; frequencies change above 6
def test_a_divided_prompt_has_the_frequencies_of_its_whole_length(length: int, pool: Any) -> None:
    [expected] = pool.run(compute_logits, 1, length)
    for logits in pool.run(compute_logits, 2, length):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
