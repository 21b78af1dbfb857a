"""Shipped models: their published numbers of parameters, and that each of them can be planned."""

import pytest

from megascale.config import list_presets, load
from megascale.core.flops import count_parameters
from megascale.simulate.defaults import assume_vocabulary, choose_batch
from megascale.simulate.planner.layout_cost import make_plan

# Preset -> billions of parameters, all and without embeddings, with the digits of the model card or paper.
# Cards give no second figure for some models. gpt-175b and gpt-530b have the MegaScale paper's vocabulary.
PUBLISHED = {
    "gpt2-124m": ("0.124", None),
    "gpt2-350m": ("0.355", None),
    "gpt-1.3b": ("1.3", None),
    "gpt-13b": ("13", None),
    "gpt-175b": ("175", None),
    "gpt-530b": ("530", None),
    "llama-8b": ("8.03", None),
    "llama3.1-8b": ("8.03", None),
    "llama3.1-70b": ("70.6", None),
    "llama3.1-405b": ("405", None),
    "qwen3-0.6b": ("0.6", "0.44"),
    "qwen3-1.7b": ("1.7", "1.4"),
    "qwen3-4b": ("4.0", "3.6"),
    "qwen3-8b": ("8.2", "6.95"),
    "qwen3-14b": ("14.8", "13.2"),
    "qwen3-32b": ("32.8", "31.2"),
    "olmo2-7b": ("7.3", None),
    "olmo2-13b": ("13.7", None),
    "olmo2-32b": ("32.2", None),
    "seed-oss-36b": ("36", None),
    "mixtral-8x7b": ("46.7", None),
    "qwen3-30b-a3b": ("30.5", None),
    "gpt-oss-20b": ("20.9", None),
}


def assert_close(count: int, published: str) -> None:
    """Assert that a count is within 1% of a published figure, or rounds to it."""
    billions = count / 1e9
    digits = len(published.partition(".")[2])
    assert abs(billions / float(published) - 1) < 0.01 or f"{billions:.{digits}f}" == published, billions


def test_every_preset_has_a_published_figure():
    assert sorted([*PUBLISHED, "tiny"]) == list_presets()


@pytest.mark.parametrize(("preset", "total", "without_embeddings"), [(name, *row) for name, row in PUBLISHED.items()])
def test_parameters_are_those_published(preset, total, without_embeddings):
    model = load(None, [f"model.preset={preset}"]).model
    assert_close(count_parameters(model), total)
    if without_embeddings:
        outer = model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)
        assert_close(count_parameters(model) - outer, without_embeddings)


@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_is_planned(preset):
    config = choose_batch(assume_vocabulary(load(None, [f"model.preset={preset}", "parallel.zero=3"])), 64)
    plan = make_plan(config, 64, 80.0)
    assert plan.needed_gib > 0
    assert plan.layout.microbatches >= 1
