"""Memory and traffic against closed forms, and the list of saved tensors against what the model really keeps."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import Config, from_tree
from megascale.config.parts import OPTIMIZERS
from megascale.core import flops, memory
from megascale.core.inventory import count_elements, layer_inventory, logical_shapes, resolve_layers
from megascale.core.layers import assign_layers
from megascale.core.layout import lay_out
from megascale.core.memory import estimate_stage_memory
from megascale.core.parameter_counts import (
    count_checkpoint_elements,
    count_chunk_parameters,
    count_stage_parameters,
    count_stage_units,
)
from megascale.core.rank_memory import estimate_rank_memory, rounds_block_gradients
from megascale.core.saved_tensors import layer_saved_tensors
from megascale.core.traffic import estimate_stage_traffic
from megascale.core.unit_slots import TABLE_PARTS, size_staging
from tests.exact.cases import HARD


def configure(
    model: dict, parallel: dict | None = None, train: dict | None = None, optimizer: dict | None = None
) -> Config:
    return from_tree({"model": model, "parallel": parallel or {}, "train": train or {}, "optimizer": optimizer or {}})


def memory_of(config: Config, world: int, stage: int) -> memory.MemoryEstimate:
    layout, train = lay_out(config, world), config.train
    return estimate_stage_memory(
        config.model,
        config.parallel,
        layout.grid,
        layout.schedule(),
        stage,
        train.micro_batch,
        train.precision,
        optimizer=config.optimizer.name,
    )


@st.composite
def models(draw):
    heads = 4 * draw(st.integers(1, 3))
    return {
        "layers": draw(st.integers(4, 9)),
        "hidden": heads * 8,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([4, heads])),
        "ffn_hidden": 4 * draw(st.integers(1, 40)),
        "vocab_size": 128 * draw(st.integers(1, 5)),
        "sequence_length": 4 * draw(st.integers(1, 20)),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "block": draw(st.sampled_from(["serial", "parallel"])),
        "parallel_norms": draw(st.sampled_from([1, 2])),
        "positions": draw(st.sampled_from(["learned", "rotary", "none"])),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "head_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }


@settings(deadline=None)
@given(models(), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_parameters_over_stages_and_ranks_add_up(model, pipeline, tensor):
    config = configure(model, {"pipeline": pipeline, "tensor": tensor})
    full = flops.count_parameters(config.model)
    alone = sum(
        count_stage_parameters(config.model, config.parallel.model_copy(update={"tensor": 1}), s)
        for s in range(pipeline)
    )
    copies = config.model.padded_vocab * config.model.hidden if model["tied_embeddings"] and pipeline > 1 else 0
    assert alone == full + copies
    # Norms, row-parallel biases and positions are whole on every tensor-parallel rank; all else is cut.
    m = config.model
    layer = layer_inventory(resolve_layers(m)[0])
    replicated = m.layers * (count_elements(layer, tensor) * tensor - count_elements(layer)) // max(tensor - 1, 1)
    replicated += m.hidden * (2 if m.norm == "layernorm" else 1)
    replicated += m.sequence_length * m.hidden if m.positions == "learned" else 0
    ranks = sum(count_stage_parameters(m, config.parallel, s) for s in range(pipeline))
    assert ranks * tensor == alone + (tensor - 1) * replicated


def test_parameters_match_the_model():
    torch = pytest.importorskip("torch")
    from megascale.model.transformer import Chunk

    full = {"pipeline": 3}
    for options, parallel in (
        ({}, full),
        ({}, {"pipeline": 3, "layer_split": [0.5, 1, 1.5]}),
        ({"block": "parallel"}, full),
        ({"kv_heads": 2, "activation": "swiglu", "tied_embeddings": False}, full),
    ):
        config = configure({"layers": 3, "hidden": 64, "heads": 4, "vocab_size": 128, **options}, parallel)
        layers = assign_layers(config.model, config.parallel)
        for g, local in enumerate(layers):
            chunk = Chunk(config.model, local, is_first=g == 0, is_last=g == 2, dtype=torch.float32)
            assert sum(p.numel() for p in chunk.parameters()) == count_chunk_parameters(config.model, local, g, 3)


BLOCKS: list[dict[str, Any]] = [
    {},
    {"block": "parallel"},
    {"block": "parallel", "parallel_norms": 2},
    {"kv_heads": 2},
    {"ffn_hidden": 192, "attention_bias": False, "mlp_bias": False},
    {"block": "parallel", "dropout": 0.1},
    {"qk_norm": "head"},
    {"norm_placement": "post"},
    {"norm": "layernorm_no_bias"},
    {"attention_multiplier": 0.3},
    {"residual_multiplier": 0.3},
    {"norm_placement": "both", "half": "mlp"},
    {"half": "attention"},
    {"half": "mlp"},
    {"mlp": "experts", "mlp_bias": False, "activation": "swiglu", "experts": {"width": 96, "top_k": 3}},
    {"mlp": "experts", "mlp_bias": False, "experts": {"shared_width": 128, "shared_gate": True}},
    {"mlp": "experts", "mlp_bias": False, "experts": {"width": 96, "scores": "sigmoid", "normalize": "none"}},
]
RECOMPUTES = ("none", "norms", "activation", "selective", "mlp", "attention")
PRECISIONS = ("default", "float8", "float8_rowwise", "float8_rowwise_wgrad")
# Each block with each recomputation, and each of the two with each precision.
SAVED = [
    (options, recompute, PRECISIONS[(i + j) % 4])
    for i, options in enumerate(BLOCKS)
    for j, recompute in enumerate(RECOMPUTES)
]


@pytest.mark.parametrize(("options", "recompute", "precision"), SAVED)
def test_saved_tensors_are_those_that_the_block_keeps(options, recompute, precision):
    """One layer on the CPU: bytes of all distinct storages that autograd holds, parameters aside."""
    torch = pytest.importorskip("torch")
    from megascale.model.block import make_block
    from megascale.model.context import ForwardContext, LayerSetup
    from megascale.parallel.collectives import SINGLE_RANK
    from megascale.parallel.linear import make_linears

    if "dropout" in options:
        pytest.importorskip("megascale.ops.dropout")
    if "experts" in options and precision == "float8_rowwise_wgrad":
        pytest.skip("experts have no GEMMs in this precision")
    if recompute in ("mlp", "attention") and options.get("block") == "parallel":
        pytest.skip("a parallel block has no halves")
    half = options.get("half", "both")
    shape = {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 128, "sequence_length": 128}
    model = configure(shape | {key: value for key, value in options.items() if key != "half"}).model
    spec = resolve_layers(model)[0]
    linears = make_linears(precision, SINGLE_RANK)
    setup = LayerSetup(spec, 0, linears, torch.float32, dropout=model.dropout, recompute=recompute, half=half)
    block = make_block(setup).to_empty(device="cpu")
    for p in block.parameters():
        torch.nn.init.normal_(p)
    local = {p.untyped_storage().data_ptr() for p in block.parameters()}
    stored: dict[int, tuple[int, object]] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in local:
            stored[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x = torch.randn(128, 1, 64, requires_grad=True)
        block(x, None, ForwardContext(dropout_key=1 if "dropout" in options else None))
    retained = sum(size for size, _ in stored.values())
    counted = sum(t.bytes for t in layer_saved_tensors(spec, 128, 1, 1, "float32", recompute, precision, half))
    # Scalars and shape bookkeeping may come on top.
    assert counted == pytest.approx(retained, rel=0.002)


def test_float8_copies_of_weights_are_counted():
    """Two bytes for each number of the matrices of this stage's layers; half of what GEMMs alone read."""
    settings = {"preset": "gpt-1.3b"}, {}, {"micro_batch": 1, "global_batch": 2}

    def memory(precision):
        config = configure(*settings[:2], {**settings[2], "precision": "bfloat16", "linear_precision": precision})
        layout = lay_out(config, 1)
        schedule = layout.schedule()
        train = ("bfloat16", False, "adamw", precision)
        return estimate_stage_memory(config.model, config.parallel, layout.grid, schedule, 0, 1, *train)

    plain, tensor, row = (memory(precision) for precision in ("default", "float8", "float8_rowwise"))
    assert plain.weight_copies == 0
    assert tensor.weight_copies == row.weight_copies == 2 * 24 * 12 * 2048**2
    assert row.activations == plain.activations
    # Of 24 layers: two norm outputs and the activation halved, a copy of attention's output more.
    assert plain.activations - tensor.activations == 24 * 2048 * 2048 * (2 + 4 - 1)


def test_closed_forms_of_activations():
    """In 16 bit with f = 4h and full heads: 32 s b h / t serial, 28 parallel, 20 and 18 selective, 2 full."""
    for block, recompute, units in (
        ("serial", "none", 32),
        ("parallel", "none", 28),
        ("serial", "selective", 20),
        ("parallel", "selective", 18),
        ("serial", "full", 2),
        ("parallel", "full", 2),
    ):
        model = configure({"preset": "gpt-175b", "block": block}).model
        saved = layer_saved_tensors(resolve_layers(model)[0], 2048, 8, 1, "bfloat16", recompute)
        size = sum(t.bytes for t in saved if "statistics" not in t.name and "logsumexp" not in t.name)
        assert size == units * 2048 * 12288 / 8
        statistics = sum(t.bytes for t in saved) - size
        assert statistics < 0.01 * max(size, 32 * 2048 * 12288 / 8)


def test_activations_in_flight_of_interleaving():
    """Korthikanti et al. 2022: p (1 + (p-1)/(p v)) micro-batches of L/p layers on the first stage."""
    config = configure(
        {"preset": "gpt-175b"},
        {"tensor": 8, "pipeline": 8, "virtual_stages": 6},
        {"micro_batch": 1, "global_batch": 6144, "precision": "bfloat16"},
    )
    layer = sum(t.bytes for t in layer_saved_tensors(resolve_layers(config.model)[0], 2048, 8, 1, "bfloat16"))
    stored = memory_of(config, 12288, 0).activations
    # And the output of each chunk in flight.
    outputs = 55 * 2048 * 12288 * 2 / 8
    assert stored == pytest.approx(8 * (1 + 7 / (8 * 6)) * 12 * layer + outputs, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_bytes_a_parameter(zero, precision):
    model = {"preset": "gpt-1.3b"}
    config = configure(model, {"zero": zero}, {"micro_batch": 1, "global_batch": 8, "precision": precision})
    count = count_stage_parameters(config.model, config.parallel, 0)
    m = memory_of(config, 8, 0)
    weight, state = {"bfloat16": (2, 12), "float32": (4, 8), "float64": (8, 16)}[precision]
    master = max(4, weight)
    assert m.weights == weight * count
    assert m.optimizer == pytest.approx(state * count / (8 if zero else 1), rel=1e-6)
    gradients = count
    if zero == 2:
        # Two slots of a block, the shards of all blocks, and what is resident: norms, biases, the tied embedding.
        block = 12 * config.model.hidden**2
        blocks = config.model.layers * block
        gradients = 2 * block + blocks / 8 + count - blocks
    assert m.gradients == pytest.approx(master * gradients, rel=1e-6)


@pytest.mark.parametrize("zero", [1, 2])
def test_rounded_gradients_are_held_with_the_full_ones(zero):
    """A copy of two bytes of what is in flight: all of a stage's, or of ZeRO-2's slots and resident parameters."""
    model, train = {"preset": "gpt-1.3b"}, {"micro_batch": 1, "global_batch": 8, "precision": "bfloat16"}
    config = configure(model, {"zero": zero}, train)
    plain, rounded = (
        memory_of(configure(model, {"zero": zero, "reduce_dtype": dtype}, train), 8, 0)
        for dtype in ("float32", "bfloat16")
    )
    count = plain.weights // 2
    if zero == 2:
        block = 12 * config.model.hidden**2
        count -= (config.model.layers - 2) * block
    assert rounded.gradients - plain.gradients == 2 * count
    assert rounded.weights == plain.weights


@settings(deadline=None, max_examples=50)
@given(models(), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 2))
def test_kinds_move_the_right_way(model, pipeline, tensor, virtual):
    virtual = virtual if pipeline > 1 and model["layers"] >= pipeline * virtual else 1
    parallel = {"pipeline": pipeline, "tensor": tensor, "virtual_stages": virtual}
    train = {"micro_batch": 1, "global_batch": 8, "precision": "bfloat16"}
    world = 4 * pipeline * tensor

    def of(**changes) -> memory.MemoryEstimate:
        return memory_of(configure(model, {**parallel, **changes}, train), world, 0)

    base = of()
    assert base.total == sum(base.bytes_by_kind().values())
    assert of(recompute="selective").activations <= base.activations
    assert of(recompute="full").activations < of(recompute="selective").activations
    assert of(zero=0).optimizer > base.optimizer
    assert (base.pipeline_buffers > 0) == (pipeline > 1)
    assert (base.tensor_buffers > 0) == (tensor > 1)
    assert (base.logits > 0) == (pipeline == 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
def test_buffers_and_optimizer_are_as_large_as_counted(zero, precision, optimizer):
    """The engine's own buffers for a stage of three chunks on four data-parallel ranks; no communication is needed."""
    torch = pytest.importorskip("torch")
    from megascale.model.transformer import Chunk
    from megascale.optim.optimizer import ShardedOptimizer
    from megascale.parallel.buffers import Axes, ParamAndGradBuffer
    from megascale.parallel.collectives import Axis
    from megascale.parallel.data_parallel import DataParallel

    config = configure(
        {"layers": 12, "hidden": 256, "heads": 4, "vocab_size": 1024},
        {"pipeline": 2, "virtual_stages": 3, "zero": zero, "layer_split": [2, 1.5, 2.5, 2, 1.5, 2.5]},
        {"micro_batch": 1, "global_batch": 8, "precision": precision},
        {"name": optimizer},
    )
    layout, dtype = lay_out(config, 8), getattr(torch, precision)

    def flats_of(rank: int) -> list[ParamAndGradBuffer]:
        axes = Axes(data=Axis(None, 4, rank), reduce=Axis(None, 4, rank), tied=Axis(None, 2, 0))
        return [
            ParamAndGradBuffer(
                Chunk(config.model, layers, is_first=c == 0, is_last=False, dtype=dtype),
                torch.device("cpu"),
                axes,
                zero,
            )
            for c, layers in enumerate(layout.stage_layers(0))
        ]

    flats = flats_of(1)
    data_parallel = DataParallel(flats)
    slots, parameter_slots = data_parallel.gradient_slots, data_parallel.parameter_slots
    counted = memory_of(config, 8, 0)

    def size(tensors) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    weights = [f.params for f in flats] + [f.shard_params for f in flats]
    if parameter_slots is not None:
        weights.append(parameter_slots.memory)
    gradients = [f.grads for f in flats] + [f.shard_grads for f in flats]
    if slots is not None:
        gradients.append(slots.memory)
    # Where tensors keep different state, ranks do: the mean is what is counted.
    sizes = []
    for rank in range(4 if optimizer == "muon" else 1):
        sharded = ShardedOptimizer(config.optimizer, flats_of(rank))
        states = [t for s in sharded.states for t in s.state_tensors()]
        states += [s.master for s in sharded.states] if precision == "bfloat16" else []
        sizes.append(size(states))
    # Buckets are padded to whole units of every rank.
    assert size(weights) == pytest.approx(counted.weights, rel=0.01)
    assert size(gradients) == pytest.approx(counted.gradients, rel=0.01)
    assert sum(sizes) / len(sizes) == pytest.approx(counted.optimizer, rel=0.01)


def test_states_of_llama_8b_in_zero_2():
    """The states of a rank stay below 50 GB in DP4, in the plan and in the buffers that a rank allocates.

    The buffers are on the meta device, which gives tensors their sizes without memory.
    """
    torch = pytest.importorskip("torch")
    from megascale.model.transformer import Chunk
    from megascale.parallel.buffers import Axes, ParamAndGradBuffer
    from megascale.parallel.collectives import Axis
    from megascale.parallel.data_parallel import DataParallel

    train = {"micro_batch": 1, "global_batch": 16, "precision": "bfloat16"}
    config = configure({"preset": "llama-8b", "vocab_size": 128256}, {"data": 4, "zero": 2}, train)
    planned = memory_of(config, 4, 0)
    assert planned.weights + planned.gradients + planned.optimizer < 50e9
    layout = lay_out(config, 4)
    axis = Axis(None, 4, 1)
    (layers,) = layout.stage_layers(0)
    chunk = Chunk(config.model, layers, is_first=True, is_last=True, dtype=torch.bfloat16)
    buffer = ParamAndGradBuffer(
        chunk,
        torch.device("meta"),
        Axes(data=axis, reduce=axis),
        zero=2,
        bucket_elements=layout.bucket_elements,
        table_part=layout.find_table_part(0),
    )
    slots = DataParallel([buffer]).gradient_slots
    assert slots is not None
    gradient_bytes = buffer.grads.nbytes + buffer.shard_grads.nbytes + slots.memory.nbytes
    assert gradient_bytes == pytest.approx(planned.gradients, rel=1e-3)
    assert buffer.params.nbytes == pytest.approx(planned.weights, rel=1e-3)
    # AdamW keeps a master weight and two moments in float32 per element of the rank's shards.
    owned = sum(shard.params.numel() for shard in buffer.shards)
    assert 12 * owned == pytest.approx(planned.optimizer, rel=1e-3)
    assert buffer.params.nbytes + gradient_bytes + 12 * owned < 50e9


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("zero", "ranks"), [(2, 2), (2, 8), (3, 8)])
def test_staging_of_copies_is_as_large_as_counted(zero, ranks, reduce_dtype):
    """Reductions by copies allocate staging memory, which the estimate counts, and fill both halves of it."""
    torch = pytest.importorskip("torch")
    from megascale.parallel.copy_reduction import CopyReduction

    train = {"micro_batch": 1, "global_batch": 8, "precision": "bfloat16"}
    model = {"hidden": 512, "heads": 8, "layers": 4, "vocab_size": 1024}
    config = configure(model, {"data": ranks, "zero": zero, "reduce_dtype": reduce_dtype}, train)
    layout = lay_out(config, ranks)

    def estimate(reduces_by_copies: bool) -> memory.MemoryEstimate:
        return estimate_stage_memory(
            config.model,
            config.parallel,
            layout.grid,
            layout.schedule(),
            0,
            1,
            "bfloat16",
            reduces_by_copies=reduces_by_copies,
        )

    counted = estimate(reduces_by_copies=True).gradients - estimate(reduces_by_copies=False).gradients
    units = count_stage_units(config.model, config.parallel, 0)
    elements = units.count_gradient_slots(layout.find_table_part(0))
    sent_dtype = getattr(torch, reduce_dtype)

    peer_memory = [torch.zeros(elements * 4 + 512, dtype=torch.uint8) for _ in range(ranks)]
    exchange = SimpleNamespace(rank=1, size=ranks, peer_memory=peer_memory)
    copies = CopyReduction(exchange, elements, torch.float32, sent_dtype)
    assert copies.staging.nbytes == counted
    # Pieces are smaller among more ranks.
    assert math.prod(size_staging(1 << 30, 4)) == pytest.approx(math.prod(size_staging(1 << 30, 2)), rel=1e-4)
    assert math.prod(size_staging(1 << 30, 8)) == 2 * 7 * (1 << 21)


@pytest.mark.parametrize(
    ("zero", "virtual", "tied"), [(2, 1, True), (2, 1, False), (3, 1, True), (3, 1, False), (3, 4, False)]
)
def test_blocks_whose_gradients_gemms_round_have_no_slots_in_float32(zero, virtual, tied):
    """The plan counts the slots that are allocated: in bfloat16 for all units, in float32 for tables only."""
    torch = pytest.importorskip("torch")
    from megascale.model.transformer import Chunk
    from megascale.parallel.buffers import Axes, ParamAndGradBuffer
    from megascale.parallel.collectives import Axis
    from megascale.parallel.copy_reduction import CopyReduction, count_slot_elements, count_wide_elements
    from megascale.parallel.data_parallel import DataParallel

    model = {"hidden": 256, "heads": 4, "layers": 4, "vocab_size": 4096, "tied_embeddings": tied}
    parallel = {"data": 4, "zero": zero, "virtual_stages": virtual, "reduce_dtype": "bfloat16"}
    if virtual > 1:
        parallel["micro_batch_group_size"] = 4
    tree = {
        "model": model,
        "parallel": parallel,
        "train": {"micro_batch": 1, "global_batch": 16, "precision": "bfloat16"},
        "overlap": {"reductions": "copies"},
        "kernels": {"graphs": "off"},
    }
    layout = lay_out(from_tree(tree), 4)
    config = layout.config
    assert rounds_block_gradients(config, layout.grid)
    planned, _ = estimate_rank_memory(config, layout.grid, layout.schedule(), 0)
    axis = Axis(None, 4, 1)
    buffers = []
    chunks = layout.stage_layers(0)
    for index, layers in enumerate(chunks):
        is_first, is_last = index == 0, index == len(chunks) - 1
        chunk = Chunk(config.model, layers, is_first=is_first, is_last=is_last, dtype=torch.bfloat16)
        buffers.append(
            ParamAndGradBuffer(
                chunk,
                torch.device("cpu"),
                Axes(data=axis, reduce=axis),
                zero=zero,
                bucket_elements=layout.bucket_elements,
                table_part=layout.find_table_part(0),
            )
        )
    count = count_slot_elements(buffers)
    peer_memory = [torch.zeros(2 * count + 512, dtype=torch.uint8) for _ in range(4)]
    exchange = SimpleNamespace(rank=1, size=4, peer_memory=peer_memory)
    wide_count = count_wide_elements(buffers)
    copies = CopyReduction(exchange, count, torch.float32, torch.bfloat16, wide_count=wide_count)
    slots = DataParallel(buffers, copy_reduction=copies).gradient_slots
    assert slots is not None
    assert slots.memory.nbytes == 4 * wide_count
    tensors = [slots.memory, slots.rounded, copies.staging]
    resident_bytes = 0
    for buffer in buffers:
        tensors += [buffer.grads, buffer.shard_grads]
        resident_bytes += buffer.grads.nbytes // 2  # rounded copies, which exist while they are reduced
    allocated = sum(tensor.nbytes for tensor in tensors) + resident_bytes
    assert allocated == pytest.approx(planned.gradients, rel=0.01)
    with_float32_slots = planned.gradients + 4 * (count - wide_count)
    assert with_float32_slots > 1.02 * planned.gradients


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"linear_precision": "float8"}},
        {"train": {"lora": {"rank": 4}}},
        {"parallel": {"tensor": 2}},
        {"parallel": {"reduce_dtype": "float32"}},
        {"overlap": {"reductions": "collectives"}},
        {"model": {"mlp": "experts", "mlp_bias": False, "experts": {"number": 8, "top_k": 2, "width": 96}}},
    ],
)
def test_blocks_with_other_gradients_have_slots_in_float32(change):
    tree = {
        "model": {"hidden": 256, "heads": 4, "layers": 4, "vocab_size": 4096},
        "parallel": {"data": 2, "zero": 2, "reduce_dtype": "bfloat16"},
        "train": {"micro_batch": 1, "global_batch": 16, "precision": "bfloat16"},
        "overlap": {"reductions": "copies"},
    }
    layout = lay_out(from_tree(tree), 2)
    assert rounds_block_gradients(layout.config, layout.grid)
    changed = {section: {**tree[section], **change.get(section, {})} for section in tree}
    layout = lay_out(from_tree(changed), 2 * changed["parallel"].get("tensor", 1))
    assert not rounds_block_gradients(layout.config, layout.grid)


@pytest.mark.parametrize("ranks", range(2, 17))
def test_staged_pieces_begin_at_multiples_of_16_bytes(ranks):
    """Each further piece of a shard, and each peer's row of the staging memory, suits loads of vectors."""
    _, _, piece = size_staging(1 << 30, ranks)
    assert 2 * piece % 16 == 0  # the sent type has at least two bytes


@pytest.mark.parametrize("name", [name for name in HARD if "divided by rows" in name])
def test_cases_with_divided_tables_divide_them(name):
    """The exact cases of divided tables have tables that are large enough, on each stage that has one."""
    layout = lay_out(from_tree(HARD[name].tree), HARD[name].world)
    for stage in range(layout.grid.pipeline):
        part = layout.find_table_part(stage)
        units = count_stage_units(layout.config.model, layout.config.parallel, stage)
        assert part is not None
        assert units.outer > TABLE_PARTS * part


@pytest.mark.parametrize("columns", [50304, 128256])
@pytest.mark.parametrize("tokens", [1, 300, 8192, 32768])
def test_groups_of_logits_are_those_of_the_loss(columns, tokens):
    cross_entropy = pytest.importorskip("megascale.ops.cross_entropy")
    group = cross_entropy.chunk_tokens(tokens, columns, 2)
    assert memory.count_logits_groups(tokens, columns, 2) == len(range(0, tokens, group))


def test_a_divided_head_is_reduced_once_per_group_of_logits():
    """Llama 8B in ZeRO-2: two groups of 8,192 tokens reduce the head's 525 million elements twice per micro-batch."""
    train = {"micro_batch": 1, "global_batch": 16, "precision": "bfloat16"}
    reduced = []
    for sequence_length in (4096, 8192):
        model = {"preset": "llama-8b", "vocab_size": 128256, "sequence_length": sequence_length}
        config = configure(model, {"data": 4, "zero": 2}, train)
        layout = lay_out(config, 4)
        traffic = estimate_stage_traffic(
            config.model, config.parallel, layout.grid, layout.schedule(), 0, 1, "bfloat16"
        )
        reduced.append(traffic.data_reduce)
    assert reduced[1] - reduced[0] == 0.75 * 4 * 4 * 128256 * 4096


@pytest.mark.parametrize("options", [{"tied_embeddings": False, "head_bias": True}, {"activation": "swiglu"}])
@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_checkpoint_holds_what_the_optimizer_declares(options, name):
    """Tensor by tensor, from the table of logical tensors."""
    model = configure({"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab_size": 50, **options}).model
    retained = OPTIMIZERS[name].state_names
    full = sum(math.prod(shape) * (1 + len(retained(n, shape))) for n, shape in logical_shapes(model).items())
    assert count_checkpoint_elements(name, model) == full


def test_logits_chunk_is_the_one_the_loss_uses():
    pytest.importorskip("torch")
    from megascale.ops import cross_entropy

    assert memory.MAX_LOGITS_BYTES == cross_entropy.LOGITS_BYTES


@pytest.mark.parametrize(("block", "norms", "a_layer"), [("serial", 1, 10), ("parallel", 1, 5), ("parallel", 2, 8)])
def test_tensor_traffic_counts_collectives(block, norms, a_layer):
    """Serial: 2 + 2 forward, the same backward, 2 gathers again. Parallel with one norm: half of all."""
    model = {"preset": "gpt-175b", "block": block, "parallel_norms": norms}
    parallel = {"tensor": 8, "pipeline": 8, "virtual_stages": 6}
    config = configure(model, parallel, {"micro_batch": 1, "global_batch": 6144, "precision": "bfloat16"})
    layout = lay_out(config, 12288)

    def of(stage: int, **changes):
        changed = config.parallel.model_copy(update=changes)
        return estimate_stage_traffic(config.model, changed, layout.grid, layout.schedule(), stage, 1, "bfloat16")

    wire = 2048 * 12288 * 2 * 7 / 8
    assert of(3).tensor == pytest.approx(32 * 12 * a_layer * wire)
    # 6.3 MB a message, all parameters and fp32 gradients once a step.
    assert of(3).pipeline == pytest.approx(32 * 2 * 6 * 2048 * 12288 * 2 / 8)
    assert of(0).pipeline == pytest.approx(32 * 11 * 2048 * 12288 * 2 / 8)
    count = count_stage_parameters(config.model, config.parallel, 3)
    assert of(3).data_gather == pytest.approx(191 / 192 * 2 * count)
    assert of(3).data_reduce == pytest.approx(191 / 192 * 4 * count)
    assert of(3, zero=0).data_reduce == pytest.approx(2 * 191 / 192 * 4 * count)
    assert of(3, zero=0).data_gather == 0
    assert of(3, zero=2).data_reduce == pytest.approx(32 * 191 / 192 * 4 * count, rel=1e-3)  # but norms and biases
    assert of(3, reduce_dtype="bfloat16").data_reduce == pytest.approx(191 / 192 * 2 * count)
    assert of(3).embedding == 0
    assert of(7).embedding == of(0).embedding == pytest.approx(4 * 64000 / 8 * 12288)


def test_float8_copies_of_experts_are_counted():
    """Two bytes for each number of the matrices of attention, and of the experts of one rank."""
    experts = {"number": 8, "top_k": 2, "width": 96}
    model = {"layers": 3, "hidden": 64, "heads": 4, "vocab_size": 128, "mlp": "experts", "mlp_bias": False}
    train = {"precision": "bfloat16", "linear_precision": "float8_rowwise"}
    copies = []
    for expert in (1, 4):
        parallel = {"expert": expert, "experts_over": "data" if expert > 1 else "tensor"}
        config = configure({**model, "experts": experts}, parallel, {**train, "micro_batch": 1, "global_batch": 4})
        layout = lay_out(config, expert)
        settings = ("bfloat16", False, "adamw", "float8_rowwise")
        estimate = estimate_stage_memory(config.model, config.parallel, layout.grid, layout.schedule(), 0, 1, *settings)
        copies.append(estimate.weight_copies)
    assert copies == [2 * 3 * (4 * 64**2 + 8 // expert * 2 * 64 * 96) for expert in (1, 4)]


def test_a_model_with_experts_gathers_no_float8():
    """parallel.gather_precision=auto is then train.precision for all parameters."""
    experts = {"number": 8, "top_k": 2, "width": 96}
    layout = lay_out(
        configure(
            {**SMALL, "mlp": "experts", "mlp_bias": False, "experts": experts},
            {"data": 2, "gather_precision": "auto"},
            {"micro_batch": 1, "global_batch": 4, "precision": "bfloat16", "linear_precision": "float8"},
        ),
        2,
    )
    config = layout.config
    assert not memory.gathers_float8(config.model, config.parallel, "float8", 2)
    dense = configure(SMALL).model
    assert memory.gathers_float8(dense, config.parallel, "float8", 2)
    count = count_stage_parameters(config.model, config.parallel, 0)
    details = layout.grid, layout.schedule(), 0, 1, "bfloat16", "float8"
    assert estimate_stage_traffic(config.model, config.parallel, *details).data_gather == 2 * count / 2


def test_matrices_gathered_as_float8_are_a_byte_each():
    config = configure({"preset": "gpt-175b"}, {"tensor": 8, "pipeline": 8}, {"micro_batch": 1, "global_batch": 6144})
    layout = lay_out(config, 12288)

    def gathered(stage: int, linear: str, gather_precision: str = "auto", **changes) -> float:
        parallel = config.parallel.model_copy(update={"gather_precision": gather_precision, **changes})
        details = layout.grid, layout.schedule(), stage, 1, "bfloat16", linear
        return estimate_stage_traffic(config.model, parallel, *details).data_gather / (191 / 192)

    for stage in (0, 3):  # the first has the embedding too, which stays in bfloat16
        count, matrices = count_stage_parameters(config.model, config.parallel, stage), 12 * 12 * 12288**2 // 8
        assert gathered(stage, "float8") == pytest.approx(2 * count - matrices)
        for plain in ("default", "float8_rowwise"):
            assert gathered(stage, plain) == pytest.approx(2 * count)
        assert gathered(stage, "float8", gather_precision="default") == pytest.approx(2 * count)
        assert gathered(stage, "float8", zero=0) == 0


SMALL = {"layers": 8, "hidden": 64, "heads": 4, "vocab_size": 128, "sequence_length": 128}


def test_several_chunks_on_one_stage_hold_what_one_does():
    """A tied embedding is there once, and what one chunk gives is what the next keeps as its input."""
    train = {"micro_batch": 1, "global_batch": 6}
    single, four = (
        memory_of(configure(SMALL, {"virtual_stages": v, "micro_batch_group_size": size}, train), 2, 0)
        for v, size in ((1, None), (4, 3))
    )
    assert (single.weights, single.gradients, single.optimizer) == (four.weights, four.gradients, four.optimizer)
    assert four.pipeline_buffers == 0
    # Three micro-batches in the first three chunks and one in the last; the head's share is in both.
    model = configure(SMALL).model
    saved = layer_saved_tensors(resolve_layers(model)[0], model.sequence_length, 1, 1, "float32")
    layer = sum(t.bytes for t in saved)
    assert four.activations - single.activations == (3 * 6 + 2 - 8) * layer


def test_messages_that_wait_for_their_turn_take_memory():
    """In a round of eight on two stages six results wait where they crossed the ring's end."""
    train = {"micro_batch": 1, "global_batch": 8}
    layouts = [{"pipeline": 2, "virtual_stages": 2, "micro_batch_group_size": size} for size in (2, 8)]
    for stage in (0, 1):
        short, long = (memory_of(configure(SMALL, parallel, train), 2, stage) for parallel in layouts)
        assert long.pipeline_buffers - short.pipeline_buffers == 6 * 128 * 64 * 4


@pytest.mark.parametrize(
    ("preset", "layout", "micro_batch", "gib"),
    [
        # Peaks measured on H200s with and without (dev/log.md, 2026-11-22): what 8 layers took more.
        ("gpt-13b", {"tensor": 2}, 2, 0.1), ("gpt-13b", {"tensor": 2}, 4, 0.3), ("gpt-13b", {}, 1, 0.2),
        ("gpt-13b", {"pipeline": 2}, 2, 0.2), ("llama-8b", {}, 1, 0.3), ("gpt-1.3b", {}, 8, 0.4),
    ],
)  # fmt: skip
def test_what_gemms_on_a_side_stream_keep_is_counted(preset, layout, micro_batch, gib):
    report = {"preset": preset, "layers": 8, "vocab_size": 50304}
    config = configure(
        report, layout, {"micro_batch": micro_batch, "global_batch": micro_batch, "precision": "bfloat16"}
    )
    grid = lay_out(config, layout.get("tensor", 1) * layout.get("pipeline", 1))
    pair = [
        estimate_stage_memory(
            config.model, config.parallel, grid.grid, grid.schedule(), 0, micro_batch, "bfloat16", side_stream
        )
        for side_stream in (False, True)
    ]
    more = (pair[1].total - pair[0].total) / 2**30
    assert gib - 0.05 <= more <= gib + 0.5


KINDS = {"L": {"positions": "rotary"}, "W": {"kv_heads": 2, "ffn_hidden": 48, "head_dim": 8}}


@pytest.mark.parametrize("split", [None, [1.5, 2.5]])
def test_layers_of_different_kinds_are_summed_one_by_one(split):
    """A stage has the parameters and activations of its own layers, and workspace for the largest of them."""
    model = {"layers": 4, "hidden": 64, "heads": 4, "vocab_size": 128, "positions": "none"}
    model |= {"layer_pattern": "SLLW", "layer_kinds": KINDS}
    train = {"micro_batch": 1, "global_batch": 1}
    config = configure(model, {"pipeline": 2, "layer_split": split}, train, {"name": "muon"})
    specs = resolve_layers(config.model)
    assert len(set(specs)) == 3
    full = sum(math.prod(shape) for shape in logical_shapes(config.model).values())
    vocabulary = 128 * 64  # the tied matrix, which both stages have
    assert sum(count_stage_parameters(config.model, config.parallel, s) for s in (0, 1)) == full + vocabulary
    by_stage = [memory_of(config, 2, stage).activations for stage in (0, 1)]
    halves = ["attention", "mlp"]
    sizes = [
        [sum(t.bytes for t in layer_saved_tensors(spec, 256, 1, 1, "float32", half=half)) for half in halves]
        for spec in specs
    ]
    flat = [size for layer in sizes for size in layer]
    boundary = 4 if split is None else 3
    outputs = 256 * 64 * 4
    assert by_stage[0] == sum(flat[:boundary]) + outputs
    head = sum(t.bytes for t in memory.head_saved_tensors(config.model, 1, 1, "float32"))
    assert by_stage[1] == sum(flat[boundary:]) + head
    names = OPTIMIZERS["muon"].state_names
    stored = sum(
        math.prod(shape) * (1 + len(names(name, shape))) for name, shape in logical_shapes(config.model).items()
    )
    assert count_checkpoint_elements("muon", config.model) == stored


def test_float8_gathers_of_zero_3_keep_no_copies_of_all_matrices():
    """A slot holds rows and transposes, and a rank the bytes of its shards."""
    model = {"layers": 8, "hidden": 256, "heads": 4, "sequence_length": 128, "vocab_size": 1024}

    def estimate(gather: str) -> memory.MemoryEstimate:
        config = configure(
            model,
            {"zero": 3, "gather_precision": gather},
            {"micro_batch": 1, "global_batch": 4, "precision": "bfloat16"},
        )
        layout = lay_out(config, 4)
        return estimate_stage_memory(
            config.model, config.parallel, layout.grid, layout.schedule(), 0, 1, "bfloat16", linear_precision="float8"
        )

    cast, gathered = estimate("default"), estimate("auto")
    assert cast.weight_copies == 2 * 8 * 12 * 256**2
    assert gathered.weight_copies == cast.weight_copies / 2 / 4
    assert gathered.weights == cast.weights


# Of three chunks, two have both micro-batches in flight when the last one has its first.
@pytest.mark.parametrize(("virtual_stages", "in_flight", "kept"), [(1, 12, 1), (3, 20, 2 * (1 + 2) + 2)])
def test_offloaded_inputs_leave_those_of_backward_and_of_copies(virtual_stages: int, in_flight: int, kept: int) -> None:
    """The last input of each chunk stays on the device, the first one of later chunks, and two for the copies."""
    model = {"layers": 12, "hidden": 64, "heads": 4, "sequence_length": 128, "vocab_size": 1024}
    train = {"micro_batch": 1, "global_batch": 2, "precision": "bfloat16"}
    activations = []
    for offloads in (False, True):
        parallel = {"recompute": "full", "offload_activations": offloads, "virtual_stages": virtual_stages}
        if virtual_stages > 1:
            parallel["micro_batch_group_size"] = 2
        activations.append(memory_of(configure(model, parallel, train), 1, 0).activations)
    freed = in_flight - kept - memory.OFFLOADED_DEVICE_INPUTS
    assert activations[0] - activations[1] == freed * 128 * 64 * 2


def test_offloaded_state_takes_slots_of_the_device_only():
    model = {"layers": 32, "hidden": 4096, "heads": 32, "sequence_length": 128, "vocab_size": 1024}
    config = configure(model, train={"micro_batch": 1, "global_batch": 1, "precision": "bfloat16"})
    layout = lay_out(config, 1)

    def estimate(offload: bool) -> memory.MemoryEstimate:
        return estimate_stage_memory(
            config.model, config.parallel, layout.grid, layout.schedule(), 0, 1, "bfloat16", offload=offload
        )

    on_device, on_host = estimate(False), estimate(True)
    assert on_host.optimizer == 3 * memory.OFFLOAD_SLOTS * 4 * memory.OFFLOAD_ELEMENTS
    assert on_host.total - on_host.optimizer == on_device.total - on_device.optimizer
    parameters = on_device.weights // 2
    assert memory.count_offloaded_state_bytes(parameters, 1, "bfloat16") == on_device.optimizer
