"""Layouts of every imported family give the losses, gradients and weights of the one-process run, in float64."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from megascale.config import ModelConfig, from_tree
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.import_model import read_config
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, train
from tests.model.huggingface import CONFIGS

pytestmark = pytest.mark.xdist_group("processes")

# Sizes that tensor-parallel ranks divide; what the family is made of stays.
SIZES: dict[str, Any] = {
    "ffn_hidden": 36,
    "sequence_length": 24,
    "vocab_size": 21,
    "vocab_multiple": 8,
    "init_std": 0.2,
}
GROUPS = {"mistral": {"kv_heads": 2}}
HEADS = {"gpt2": {"n_embd": 24, "n_head": 4}, "gptj": {"n_embd": 40, "n_head": 4}, "mixtral": {"num_local_experts": 4}}
HEADS["gpt_oss"] = {"num_local_experts": 4}


def model_tree(family: str) -> dict[str, Any]:
    """Return the table [model] of a family."""
    values = {"model_type": family, "vocab_size": 101, **CONFIGS[family], **HEADS.get(family, {})}
    _, model = read_config(ConfigKeys(values, "config.json"))
    return model.model_dump(exclude_unset=True) | SIZES | GROUPS.get(family, {})


@pytest.mark.parametrize("family", CONFIGS)
def test_tensor_and_pipeline_ranks_train_a_family_like_one_process(family, pool, one_process):
    layout: Case = case(2, 2, 1, microbatches=2, model=model_tree(family))
    config = from_tree(layout.tree)
    result = pool.run(train, layout.world, layout.tree, FEW_STEPS)
    assert_equal(one_process(layout.twin, FEW_STEPS), result, config.model)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_of_the_configuration_gives_the_same_model(family):
    """Lists of factors, kinds of layers and bounds are written and read again."""
    model: ModelConfig = from_tree({"model": model_tree(family)}).model
    text = from_tree({"model": model_tree(family)}).to_toml()
    assert from_tree(tomllib.loads(text)).model == model
