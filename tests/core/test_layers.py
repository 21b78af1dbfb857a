"""Layer splits: balanced, complete, every chunk with a layer; the user's own split obeyed or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core.chunk_map import make_chunk_map, v_shape
from megascale.core.layers import assign_layers, split_layers
from megascale.errors import FitError


@st.composite
def splits(draw):
    stages, virtual = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    layers = draw(st.integers(stages * virtual, 5 * stages * virtual))
    costs = draw(st.tuples(st.floats(0, 4), st.floats(0, 4)))
    return layers, stages, virtual, *costs


@given(splits())
def test_split_is_complete_and_best(case):
    layers, stages, virtual, embedding, logits = case
    split = split_layers(layers, stages * virtual, embedding, logits, make_chunk_map(stages, virtual))
    assert sum(split) == layers
    assert min(split) >= 1
    load = [sum(split[s::stages]) + embedding * (s == 0) + logits * (s == stages - 1) for s in range(stages)]
    # No single layer can move from the heaviest stage to another and lower the largest load.
    heaviest = max(range(stages), key=load.__getitem__)
    if sum(split[heaviest::stages]) > virtual:
        assert min(load) + 1 >= load[heaviest] - 1e-9
    for s in range(stages):
        local = [
            n + embedding * (g == 0) + logits * (g == stages * virtual - 1)
            for g, n in enumerate(split)
            if g % stages == s
        ]
        spread = [n for n, count in zip(local, split[s::stages], strict=True) if count > 1]
        assert not spread or max(spread) <= min(local) + 1 + 1e-9


def test_logits_take_layers_off_the_last_stage():
    assert split_layers(32, 4, 0.0, 2.1) == [8, 9, 9, 6] or split_layers(32, 4, 0.0, 2.1)[-1] in (6, 7)
    assert split_layers(8, 4, 1.5, 0.0)[0] < 2 + 1e-9
    assert split_layers(8, 4) == [2, 2, 2, 2]
    assert split_layers(9, 4) == [2, 2, 2, 3]


def test_explicit_split():
    assert split_layers(6, 4, explicit=[0, 3, 3, 0]) == [0, 3, 3, 0]
    with pytest.raises(FitError, match="3 entries for 4"):
        split_layers(6, 4, explicit=[2, 2, 2])
    with pytest.raises(FitError, match="adds up to 7"):
        split_layers(6, 4, explicit=[2, 2, 2, 1])
    with pytest.raises(FitError, match="at least 0"):
        split_layers(6, 4, explicit=[7, -1, 0, 0])
    with pytest.raises(FitError, match="chunk 2 with nothing to compute"):
        split_layers(6, 4, explicit=[0, 3, 0, 3])


def test_too_few_layers():
    with pytest.raises(FitError, match="at most 6 chunks"):
        split_layers(6, 8, chunk_map=make_chunk_map(4, 2))


def test_both_ends_of_a_v_take_layers_off_the_first_stage():
    chunk_map = make_chunk_map(4, 2, v_shape)
    split = split_layers(32, 8, 0.0, 2.0, chunk_map)
    by_stage = [sum(split[position] for position in chunk_map.stage_chunks(stage)) for stage in range(4)]
    assert by_stage[0] < min(by_stage[1:])
    assert split[7] < split[0]


def test_chunk_layers_follow_the_configuration():
    config = from_tree(
        {
            "model": {"preset": "gpt-13b"},
            "parallel": {"pipeline": 4, "virtual_stages": 2, "layer_split": [5, 5, 5, 5, 5, 5, 6, 4]},
        }
    )
    chunks = assign_layers(config.model, config.parallel)
    assert [i for chunk in chunks for i in chunk] == [(layer, "both") for layer in range(40)]
    assert [chunk.layer_count for chunk in chunks] == [5, 5, 5, 5, 5, 5, 6, 4]


def test_one_layer_a_chunk():
    config = from_tree({"model": {"preset": "gpt-530b"}, "parallel": {"pipeline": 35, "virtual_stages": 3}})
    assert [c.layer_count for c in assign_layers(config.model, config.parallel)] == [1] * 105


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.booleans(), st.booleans())
def test_halves_of_layers_are_each_in_one_chunk(halves, first, last):
    """With any boundaries: every layer's attention and MLP once, in order, and all counts agree."""
    halves = [0 if first else halves[0], *halves[1:-1], 0 if last else halves[-1]]
    halves[len(halves) // 2] += sum(halves) % 2 or 2 * (not sum(halves))
    split, layers = [n / 2 for n in halves], sum(halves) // 2
    parallel = {"pipeline": len(split), "layer_split": split}
    config = from_tree({"model": {"layers": layers, "vocab_size": 64}, "parallel": parallel})
    chunks = assign_layers(config.model, config.parallel)
    assert [chunk.layer_count for chunk in chunks] == split
    pieces = [(layer, half) for chunk in chunks for layer, half in chunk]
    result = [(layer, item) for layer, half in pieces for item in (("attention", "mlp") if half == "both" else (half,))]
    assert result == [(layer, half) for layer in range(layers) for half in ("attention", "mlp")]


@pytest.mark.parametrize(
    ("model", "split", "arguments"),
    [
        ({}, [1.5, 1.3, 1.2], ["layer_split=[1.5, 1.3, 1.2]", "whole numbers, or halves"]),
        ({"block": "parallel"}, [1.5, 1.5, 1], ["attention and its MLP", "--model.block=serial"]),
        ({}, [1.5, 1.5, 0.5], ["adds up to 3.5 layers", "model.layers=4"]),
    ],
)
def test_a_division_that_cannot_be_is_refused(model, split, arguments):
    config = from_tree(
        {"model": {"layers": 4, "vocab_size": 64, **model}, "parallel": {"pipeline": 3, "layer_split": split}}
    )
    with pytest.raises(FitError) as report:
        assign_layers(config.model, config.parallel)
    assert all(word in str(report.value) for word in arguments)
