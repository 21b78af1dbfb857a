"""Keys of config.json: all those of published models are known, and a key that is not known is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.core.flops import count_parameters
from megascale.errors import DataError
from megascale.model.huggingface.export import make_config
from megascale.model.huggingface.families import FAMILIES
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.import_model import read_config
from tests.model.huggingface import transformers
from tests.model.published_configs import PUBLISHED

FIRST_OF_FAMILY = {values["model_type"]: name for name, values in reversed(PUBLISHED.items())}


def read(values: dict[str, Any]):
    """Read a config.json."""
    return read_config(ConfigKeys(values, "config.json"))


def make_theirs(values: dict[str, Any]) -> Any:
    """Make a model of transformers without memory."""
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_every_family_has_a_published_config():
    assert set(FIRST_OF_FAMILY) == set(FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_with_the_published_number_of_parameters(name):
    family, model = read(PUBLISHED[name])
    assert family.name == PUBLISHED[name]["model_type"]
    assert count_parameters(model) == sum(p.numel() for p in make_theirs(PUBLISHED[name]).parameters())
    assert not family.find_faults(model)
    written = make_config(family, model, torch.bfloat16, {})
    assert read(written)[1] == model


@pytest.mark.parametrize("family", FIRST_OF_FAMILY)
def test_a_key_that_is_not_known_is_named(family):
    values = PUBLISHED[FIRST_OF_FAMILY[family]]
    for value in (True, 0, "x", [1]):
        with pytest.raises(DataError, match=r"config\.json has attention_twist=.* not known"):
            read(values | {"attention_twist": value})
    read(values | {"attention_twist": None})


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama", {"qk_norm": True}, "qk_norm=True"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True.*only is_encoder_decoder=False"),
        ("mistral", {"attention_bias": True}, "attention_bias=True.*only attention_bias=False"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("gpt2", {"n_ctx": 512}, "n_ctx=512.*n_positions=1024"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("gptj", {"rotary": False}, "rotary=False"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block=False"),
        ("cohere2", {"layer_switch": 3}, "layer_switch=3.*sliding_window_pattern is 4"),
        ("cohere2", {"layer_types": ["full_attention"] * 32, "sliding_window_pattern": None}, "layer_types=.*no layer"),
        ("cohere2", {"layer_types": ["sliding_attention"] * 32}, "sliding_window_pattern=4.*layer_types"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'.*hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.*table for each"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_theta=5.0.*is 1000000"),
        ("olmo3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("phi3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_type='longrope'"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_a_key_of_another_family_or_a_contradiction_is_named(family, changes, named):
    with pytest.raises(DataError, match=named):
        read(PUBLISHED[FIRST_OF_FAMILY[family]] | changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: it must be a positive number"),
        (
            "llama",
            {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "factor": "2"}},
            r"rope_parameters.factor='2': it must be a number",
        ),
        (
            "llama",
            {"rope_scaling": None, "rope_theta": 1.0, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "set model.rotary_base above 1",
        ),
        (
            "llama",
            {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            r"model\.rotary_base=0\.0 is wrong",
        ),
        (
            "phi3",
            {
                "rope_scaling": None,
                "partial_rotary_factor": None,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0},
            },
            r"model\.rotary_fraction=0\.0 is wrong",
        ),
        (
            "gemma3_text",
            {
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_scaling": None,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 0},
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                },
            },
            r"rotary_base=0\.0 is wrong",
        ),
    ],
)
def test_a_number_that_cannot_be_used_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    values = PUBLISHED[FIRST_OF_FAMILY[family]] | changes
    with pytest.raises(DataError, match=message):
        read(values)
