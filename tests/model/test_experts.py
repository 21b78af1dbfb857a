"""Experts on one process: against a loop over tokens, and each known trap of such layers by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megascale.config import from_tree
from megascale.config.experts_section import ExpertsConfig
from megascale.config.parts import OPTIMIZERS
from megascale.core.batch import Batch
from megascale.core.flops import flops_per_token
from megascale.core.inventory import list_tensors, resolve_layers
from megascale.core.layout import lay_out
from megascale.core.parameter_counts import count_stage_parameters, count_stage_units
from megascale.core.tensors import Box, Piece, list_matrix_names
from megascale.core.traffic import estimate_stage_traffic, layer_collectives
from megascale.errors import ConfigError, FitError
from megascale.model.experts import ExpertsMlp, Routing, list_expert_layers
from megascale.model.transformer import Chunk
from megascale.ops.activation import activation_reference
from megascale.ops.routing import combine_rows, plan_rows, score_experts, select_experts, weigh_experts
from megascale.optim.base import make_state_parts
from megascale.parallel.buffers import Extent, FlatShard
from megascale.parallel.parameters import ParameterSpec, initialise, materialise
from megascale.simulate.fabric.step_traffic import estimate_step_traffic
from megascale.simulate.planner.layout_cost import make_plan
from megascale.train.engine import Engine

MODEL = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "sequence_length": 8,
    "vocab_size": 24,
    "vocab_multiple": 8,
    "init_std": 0.3,
    "mlp": "experts",
    "mlp_bias": False,
    "activation": "swiglu",
}
BIASED = {"number": 6, "top_k": 3, "width": 10, "biases": True}
SHARED = {"number": 6, "top_k": 2, "width": 10, "shared_width": 12, "shared_gate": True, "scaling": 1.5}


def make_config(experts: dict[str, Any], **sections: Any) -> Any:
    """Return a configuration of a small model of experts."""
    model = {**MODEL, "experts": experts, **sections.pop("model", {})}
    train = {"precision": "float64", "global_batch": 2, **sections.pop("train", {})}
    return from_tree({"model": model, "train": train, **sections})


def make_chunk(experts: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> Chunk:
    """Return the whole model in one chunk."""
    model = make_config(experts).model
    chunk = Chunk(model, range(model.layers), is_first=True, is_last=True, dtype=dtype, **options)
    materialise(chunk, {param: torch.empty(param.shape, dtype=param.dtype) for param in chunk.parameters()})
    initialise(chunk, 1)
    for layer in list_expert_layers([chunk]):
        layer.begin_training(16, torch.device("cpu"), torch.zeros((), dtype=torch.bool))
    return chunk


def run_chunk(chunk: Chunk) -> Tensor:
    """Return the mean loss of a fixed micro-batch, after its backward."""
    tokens = torch.randint(0, 24, (9, 2), generator=torch.Generator().manual_seed(3))
    loss = chunk(tokens[:-1], Batch(tokens[:-1], tokens[1:])).mean()
    loss.backward()
    return loss.detach()


def loop_over_tokens(layer: ExpertsMlp, x: Tensor) -> Tensor:
    """Compute a layer of experts token by token, for tests."""
    experts = layer.settings
    act = activation_reference
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = layer.router @ token
        if layer.logit_bias is not None:
            logits = logits + layer.logit_bias
        scores = torch.softmax(logits, 0)
        best = sorted(range(experts.number), key=lambda e: (-float(scores[e].detach()), e))[: experts.top_k]
        total = sum(scores[e] for e in best)
        y = torch.zeros_like(token)
        for e in best:
            inner = layer.experts_in[e] @ token
            if layer.in_bias is not None:
                inner = inner + layer.in_bias[e]
            out = layer.experts_out[e] @ act(layer.activation, inner.flatten())
            if layer.out_bias is not None:
                out = out + layer.out_bias[e]
            y = y + scores[e] / total * experts.scaling * out
        if layer.shared_in is not None:
            assert layer.shared_out is not None
            shared = layer.shared_out.weight @ act(layer.activation, layer.shared_in.weight @ token)
            y = y + torch.sigmoid(layer.shared_scale @ token) * shared
        rows.append(y)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("experts", [SHARED, BIASED], ids=["shared", "biased"])
def test_a_layer_and_its_gradients_equal_a_loop_over_tokens(experts):
    layer = next(list_expert_layers([make_chunk(experts)]))
    for parameter in (layer.logit_bias, layer.in_bias, layer.out_bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    inputs = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (lambda x: layer(x, None), lambda x: loop_over_tokens(layer, x)):
        x = inputs.clone().requires_grad_()
        layer.zero_grad()
        y = function(x)
        y.backward(upstream)
        results.append([y.detach(), x.grad] + [param.grad.clone() for param in layer.parameters()])
    for observed, expected in zip(*results, strict=True):
        torch.testing.assert_close(observed, expected, rtol=1e-10, atol=1e-12)


# selection -----------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.1, 0.4]])
    assert select_experts(scores, ExpertsConfig(number=4, top_k=3)).tolist() == [[0, 1, 2], [1, 3, 0]]
    grouped = ExpertsConfig(number=4, top_k=2, groups=2, group_limit=1)
    assert select_experts(scores, grouped).tolist() == [[0, 1], [1, 0]]


def test_the_sigmoid_of_a_bf16_model_is_float32():
    layer = next(list_expert_layers([make_chunk({**SHARED, "scores": "sigmoid"}, torch.bfloat16)]))
    x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, indices = layer.route(x)
    assert weights.dtype == torch.float32
    scores = torch.sigmoid(x.float() @ layer.router.float().t())
    assert torch.equal(indices, select_experts(scores, layer.settings))
    torch.testing.assert_close(weights, weigh_experts(scores, indices, layer.settings))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_selection_obeys_its_settings(data):
    size = data.draw(st.integers(1, 4))
    groups = data.draw(st.integers(1, 4))
    limit = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, limit * size))
    options = {"groups": groups, "group_limit": limit, "scores": data.draw(st.sampled_from(["softmax", "sigmoid"]))}
    experts = ExpertsConfig(number=groups * size, top_k=top_k, **options)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randint(-2, 3, (5, experts.number), generator=generator).double()  # with many ties
    scores = score_experts(logits, experts)
    bias = torch.randn(experts.number, dtype=torch.float64, generator=generator)
    indices = select_experts(scores, experts, bias)
    for row, choice in zip(indices.tolist(), (scores + bias).tolist(), strict=True):
        assert len(set(row)) == top_k
        chosen_groups = {index // size for index in row}
        assert len(chosen_groups) <= limit
        assert row == sorted(row, key=lambda index: (-choice[index], index))
        for index in set(range(experts.number)) - set(row):
            if index // size in chosen_groups:
                assert choice[index] <= choice[row[-1]]
    weights = weigh_experts(scores, indices, experts)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(0, 6), st.integers(1, 4), st.integers(1, 4))
def test_a_plan_has_each_local_choice_once_in_order(seed, tokens, ranks, local):
    number = ranks * local
    top_k = min(3, number)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.rand(tokens, number, generator=generator).argsort(1)[:, :top_k].contiguous()
    total = torch.zeros(tokens, 1, dtype=torch.float64)
    for rank in range(ranks):
        plan = plan_rows(indices, rank * local, local, torch.ones(tokens, top_k), number)
        rows = []
        for expert in range(local):
            start, stop = plan.offsets[expert : expert + 2].tolist()
            pairs = list(zip(plan.row_tokens[start:stop].tolist(), plan.row_slots[start:stop].tolist(), strict=True))
            assert pairs == [tuple(pair) for pair in (indices == rank * local + expert).nonzero().tolist()]
            rows += [indices[pair] for pair in pairs]
        values = torch.tensor(rows, dtype=torch.float64).view(-1, 1)
        total += combine_rows(values, plan)
    assert torch.equal(total[:, 0], indices.sum(1).double())


# traps ---------------------------------------------------------------------------------------------------------------


def test_recomputation_does_not_double_counts_and_keeps_the_selection(monkeypatch):
    selections = []

    def select_and_note(*args: Any) -> Tensor:
        selections.append(select_experts(*args))
        return selections[-1]

    monkeypatch.setattr("megascale.model.experts.select_experts", select_and_note)
    results = []
    for recompute in ("none", "full"):
        selections.clear()
        chunk = make_chunk({**SHARED, "bias_rate": 0.1, "sequence_loss": 0.1}, recompute=recompute)
        run_chunk(chunk)
        layers = list(list_expert_layers([chunk]))
        assert len(selections) == len(layers)
        for layer in layers:
            assert layer.counts.sum() == 2 * 8 * 2
        gradients = [param.grad for param in chunk.parameters()]
        results.append(list(gradients) + [layer.counts for layer in layers] + [layer.losses for layer in layers])
    for observed, expected in zip(*results, strict=True):
        assert torch.equal(observed, expected)


def test_a_recomputed_layer_takes_the_kept_selection_after_its_bias_moved():
    layer = next(list_expert_layers([make_chunk({**SHARED, "bias_rate": 0.1})]))
    x = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer.routing = Routing()
    _, indices = layer.route(x)
    layer.router_bias += torch.tensor([9.0, 0, 0, 0, 0, 0])
    _, kept = layer.route(x)
    layer.routing = None
    assert torch.equal(indices, kept)
    assert (layer.route(x)[1][..., 0] == 0).all()


def test_all_tokens_on_one_expert_and_experts_without_tokens():
    chunk = make_chunk({"number": 4, "top_k": 1, "width": 10, "bias_rate": 0.1})
    for layer in list_expert_layers([chunk]):
        layer.router_bias += torch.tensor([0.0, 0, 9, 0])
    run_chunk(chunk)
    for layer in list_expert_layers([chunk]):
        assert layer.counts.tolist() == [0, 0, 16, 0]
        norms = layer.experts_in.grad.flatten(1).norm(dim=1)
        assert norms[2] > 0
        assert norms.sum() == norms[2]


def test_the_same_step_twice_gives_the_same_bits():
    results = []
    for _ in range(2):
        chunk = make_chunk({**SHARED, "sequence_loss": 0.1, "z_loss": 0.1}, torch.float32)
        results.append([run_chunk(chunk)] + [param.grad for param in chunk.parameters()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_bfloat16_is_near_float32_where_it_selects_the_same_experts():
    """With all experts selected, no rounding can change the selection."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        chunk = make_chunk({**SHARED, "top_k": 6}, dtype)
        results.append([run_chunk(chunk)] + [param.grad.float() for param in chunk.parameters()])
    for wide, narrow in zip(*results, strict=True):
        assert (narrow - wide).norm() <= 0.1 * wide.norm()


def test_balance_losses_are_means_over_the_global_batch():
    """A micro-batch's gradients of these losses add up: two halves give what the whole gives."""
    experts = {**SHARED, "sequence_loss": 0.3, "z_loss": 0.2}
    tokens = torch.randint(0, 24, (9, 4), generator=torch.Generator().manual_seed(3))
    results = []
    for parts in (1, 2):
        chunk = make_chunk(experts)
        layers = list(list_expert_layers([chunk]))
        for layer in layers:
            layer.tokens_per_step = 32
        for part in tokens.chunk(parts, dim=1):
            (chunk(part[:-1], Batch(part[:-1], part[1:])).sum() / 32).backward()
        results.append([param.grad for param in chunk.parameters()] + [layer.losses for layer in layers])
    for whole, halves in zip(*results, strict=True):
        torch.testing.assert_close(halves, whole, rtol=1e-10, atol=1e-13)


def test_the_sequence_loss_equals_its_definition():
    coefficient = 0.7
    layer = next(list_expert_layers([make_chunk({**SHARED, "sequence_loss": coefficient, "scores": "sigmoid"})]))
    x = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, indices = layer.route(x)
    scores = torch.sigmoid(x @ layer.router.detach().t())
    expected = 0.0
    for sequence in range(2):
        for expert in range(6):
            share = float((indices[:, sequence] == expert).sum()) * 6 / (2 * 8)
            normalised = scores[:, sequence] / scores[:, sequence].sum(-1, keepdim=True)
            expected += coefficient / 2 * share * float(normalised[:, expert].mean())
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-12)


def test_memory_counts_the_experts_of_a_rank():
    """A rank of four has a quarter of the experts, and all of the router and the attention."""
    config = make_config({"number": 8, "top_k": 2, "width": 10, "biases": True})
    tensors = list(list_tensors(config.model))
    stacks = sum(tensor.elements for tensor in tensors if ".experts." in tensor.name)
    parallel = config.parallel
    whole = count_stage_parameters(config.model, parallel, 0)
    matrices = sum(tensor.elements for tensor in tensors if ".experts." in tensor.name and tensor.decay)
    for changes in ({"expert": 4, "experts_over": "data"}, {"context": 4, "experts_over": "context"}):
        divided = parallel.model_copy(update=changes)
        assert count_stage_parameters(config.model, divided, 0) == whole - 3 * stacks // 4
        assert count_stage_units(config.model, divided, 0).sharded == matrices // 4


def test_traffic_of_experts_over_data_is_that_of_distinct_ranks():
    """With one expert per token and two ranks, half of the tokens leave; five exchanges; other gradients are summed.

    If all experts are chosen, every token goes to the other rank.
    """
    parallel = {"experts_over": "data", "expert": 2, "zero": 0}
    config = make_config({"number": 8, "top_k": 1, "width": 10}, parallel=parallel, train={"micro_batch": 1})
    layout = lay_out(config, 2)
    traffic = estimate_stage_traffic(config.model, config.parallel, layout.grid, layout.schedule(), 0, 1, "float32")
    tokens, layers, hidden = 8, 2, 16
    parameters = count_stage_parameters(config.model, config.parallel, 0)
    others = parameters - count_stage_units(config.model, config.parallel, 0).sharded
    assert traffic.expert == pytest.approx(5 * 0.5 * tokens * layers * hidden * 4 + others * 4)
    every = make_config({"number": 8, "top_k": 8, "width": 10}, parallel=parallel, train={"micro_batch": 1})
    sent = [make_plan(chosen, 2, 80.0).traffic(0).expert for chosen in (config, every)]
    assert sent[1] - sent[0] == pytest.approx(5 * 0.5 * tokens * layers * hidden * 8)  # float64
    copied = config.model_copy(update={"overlap": config.overlap.model_copy(update={"expert": "copies"})})
    gathered = make_plan(copied, 2, 80.0).traffic(0).expert  # copies gather, and every token goes to the other rank
    assert gathered == sent[1]
    in_float8 = config.model_copy(update={"train": config.train.model_copy(update={"linear_precision": "float8"})})
    saved = sent[0] - make_plan(in_float8, 2, 80.0).traffic(0).expert
    assert saved == pytest.approx(0.5 * tokens * layers * hidden * 7)  # tokens travel in bytes in forward
    with pytest.raises(FitError, match=r"parallel\.expert=2 has no price"):
        estimate_step_traffic(config, 2)


def test_lamb_has_a_norm_per_expert_and_adamw_one_segment():
    piece = Piece("layers.0.mlp.experts.in.weight", (4, 2, 3, 5), Box((2, 0, 0, 0), (2, 2, 3, 5)))
    spec = ParameterSpec((piece,), 0.02)
    master = torch.zeros(40)
    shard = FlatShard(master, master, [Extent(0, 40, spec, piece, piece_start=10)])
    names = list_matrix_names(piece.name, piece.shape)
    ids = {name: number for number, name in enumerate(list(names) + [piece.name])}
    [lamb] = make_state_parts(shard, master, OPTIMIZERS["lamb"], ids)
    rows = [(row.start, row.stop, names[row.tensor_index]) for row in lamb.segments.ranges]
    stem = "layers.0.mlp.experts.in.weight"
    assert rows == [(0, 5, f"{stem}[4]"), (5, 20, f"{stem}[5]"), (20, 35, f"{stem}[6]"), (35, 40, f"{stem}[7]")]
    [adamw] = make_state_parts(shard, master, OPTIMIZERS["adamw"], ids)
    assert [(row.start, row.stop) for row in adamw.segments.ranges] == [(0, 40)]


def test_flops_count_active_experts_only():
    few, many = (make_config({"number": number, "top_k": 2, "width": 10}).model for number in (4, 64))
    router = 2 * (64 - 4) * 16 * 2
    assert flops_per_token(many).forward - flops_per_token(few).forward == router
    assert sum(t.elements for t in list_tensors(many)) > 10 * sum(t.elements for t in list_tensors(few)) / 2


@pytest.mark.parametrize(
    ("model", "experts", "expected"),
    [
        ({}, {}, (2, 2)),
        ({}, {"shared_width": 8}, (3, 3)),
        ({"block": "parallel"}, {}, (2, 2)),
        ({"block": "parallel"}, {"shared_width": 8}, (3, 3)),
    ],
)
def test_traffic_counts_the_gathers_and_scatters_of_experts(model, experts, expected):
    layer = resolve_layers(make_config(experts, model=model).model)[0]
    assert layer_collectives(layer) == expected


# bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "named"),
    [
        ({"number": 4, "top_k": 5}, ["model.experts.top_k=5", "number=4", "at most 4"]),
        ({"number": 6, "groups": 4}, ["model.experts.groups=4", "number=6", "divisor"]),
        ({"groups": 4, "group_limit": 5}, ["group_limit=5", "groups=4", "at most 4"]),
        ({"groups": 4, "group_limit": 1, "top_k": 3}, ["group_limit=1", "2 experts", "top_k=3"]),
        ({"shared_gate": True}, ["shared_gate", "shared_width"]),
        ({"numbers": 2}, ["no key model.experts.numbers", "keys of [model.experts]: number, top_k"]),
        ({"dense_layers": 2}, ["dense_layers=2", "model.layers=2", "model.mlp=dense"]),
        ({"number": 8, "groups": 4}, ["model.experts.groups=4", "no effect", "set group_limit"]),
    ],
)
def test_impossible_settings_are_refused_by_name(experts, named):
    with pytest.raises(ConfigError) as error:
        make_config(experts)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"mlp": "dense"}, ["[model.experts]", "model.mlp=experts"]),
        ({"mlp_bias": True}, ["model.mlp_bias=true", "model.mlp_bias=false"]),
    ],
)
def test_settings_without_effect_are_refused_by_name(model, named):
    with pytest.raises(ConfigError) as error:
        make_config({"number": 4}, model=model)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("ES", ["dense_layers=1", "leaves no layer of model.layers=2 with experts"]),
        ("SE", ["dense_layers=1", "no effect", "model.layer_pattern=SE", "remove dense_layers"]),
    ],
)
def test_first_dense_layers_are_compared_with_the_pattern(pattern, named):
    kinds = {"mlp": "dense", "layer_pattern": pattern, "layer_kinds": {"E": {"mlp": "experts"}}}
    with pytest.raises(ConfigError) as error:
        make_config({"dense_layers": 1}, model=kinds)
    for text in named:
        assert text in str(error.value)


def test_router_without_gradient_of_the_loss_is_said():
    for experts, is_said in (({"top_k": 1}, True), ({"top_k": 1, "normalize": "none"}, False), ({"top_k": 2}, False)):
        config = make_config({"number": 4, **experts}, train={"global_batch": 8})
        engine = Engine(lay_out(config, 1), None, torch.device("cpu"))
        assert ("model.experts.top_k=1" in engine.active.get("router", "")) == is_said


def test_scores_that_underflow_give_finite_weights():
    """A bias may select experts whose softmax scores are 0."""
    experts = ExpertsConfig(number=4, top_k=2, bias_rate=0.001)
    logits = torch.tensor([[200.0, 0, 0, 0]], requires_grad=True)
    scores = score_experts(logits, experts)
    indices = select_experts(scores, experts, torch.tensor([-0.6, 0.5, 0.5, -0.4]))
    weights = weigh_experts(scores, indices, experts)
    weights.sum().backward()
    assert indices.tolist() == [[1, 2]]
    assert torch.isfinite(weights).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("experts", "sections", "named"),
    [
        ({"number": 6}, {"parallel": {"tensor": 4}}, ["model.experts.number=6", "parallel.tensor=4", "=3 or 6"]),
        (
            {"number": 8, "shared_width": 6},
            {"parallel": {"tensor": 4}},
            ["model.experts.shared_width=6", "shared_width=4 or 8"],
        ),
        (
            {},
            {"train": {"linear_precision": "float8_rowwise_wgrad", "global_batch": 4}},
            ["linear_precision=float8_rowwise_wgrad", "one of default, float8, float8_rowwise"],
        ),
        (
            {},
            {
                "parallel": {"data": 2, "gather_precision": "float8"},
                "train": {"linear_precision": "float8", "global_batch": 4},
            },
            ["parallel.gather_precision=float8", "--parallel.gather_precision=auto or default"],
        ),
        (
            {"bias_rate": 0.1},
            {"train": {"lora": {"rank": 2}, "global_batch": 4}},
            ["model.experts.bias_rate=0.1", "train.lora"],
        ),
        (
            {},
            {"parallel": {"experts_over": "data"}},
            ["parallel.experts_over=data with parallel.expert=1", "--parallel.expert"],
        ),
        (
            {},
            {"parallel": {"expert": 2}},
            ["parallel.expert=2 with parallel.experts_over=tensor", "--parallel.experts_over=data"],
        ),
        (
            {"number": 6},
            {"parallel": {"experts_over": "data", "expert": 4}},
            ["model.experts.number=6", "parallel.tensor=1 x parallel.expert=4"],
        ),
        (
            {},
            {"parallel": {"experts_over": "data", "expert": 2}, "train": {"lora": {"rank": 2}, "global_batch": 4}},
            ["parallel.expert=2 with train.lora", "--parallel.expert=1"],
        ),
        (
            {},
            {"parallel": {"experts_over": "data", "expert": 2}, "model": {"mlp": "dense", "experts": None}},
            ["parallel.expert=2 with parallel.experts_over=data", "the model has none"],
        ),
        (
            {},
            {"parallel": {"experts_over": "context", "context": 2}, "model": {"mlp": "dense", "experts": None}},
            ["parallel.experts_over=context", "the model has none", "--parallel.experts_over=tensor"],
        ),
        (
            {},
            {"parallel": {"experts_over": "context"}},
            ["parallel.experts_over=context with parallel.context=1", "--parallel.context=2"],
        ),
        (
            {},
            {"parallel": {"experts_over": "context", "context": 2, "expert": 2}},
            ["parallel.expert=2 with parallel.experts_over=context", "--parallel.expert=1"],
        ),
        (
            {"number": 6},
            {"parallel": {"experts_over": "context", "context": 4}},
            ["model.experts.number=6", "parallel.tensor=1 x parallel.context=4"],
        ),
    ],
)
def test_layouts_that_experts_exclude_are_refused_by_name(experts, sections, named):
    config = make_config(experts, **sections)
    with pytest.raises(FitError) as error:
        lay_out(config, config.parallel.model_ranks)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(("experts_over", "key"), [("context", "context"), ("data", "expert")])
def test_copies_between_the_ranks_of_experts_need_two(experts_over, key):
    with pytest.raises(ConfigError, match=rf"the ranks of parallel\.{key}, .* --parallel\.{key}=2"):
        make_config({}, parallel={"experts_over": experts_over}, overlap={"expert": "copies"})
