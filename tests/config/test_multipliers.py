"""Multipliers, softcaps and longrope of [model]: what is refused, and that the defaults change nothing."""

from __future__ import annotations

import pytest

from megascale import config
from megascale.core.inventory import resolve_layers
from megascale.errors import ConfigError

LONGROPE = ["positions=rotary", "rotary_scaling.method=longrope", "rotary_scaling.original_length=8", "head_dim=8"]


def load(*settings: str) -> config.ModelConfig:
    return config.load(None, [f"--model.{setting}" for setting in settings]).model


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["head_bias=true", "logit_multiplier=0.5"], "model.logit_multiplier=0.5 needs logits without a bias"),
        (["embedding_multiplier=2"], "model.embedding_multiplier=2.0 needs positions"),
        (["attention_softcap=0"], "model.attention_softcap"),
        (["residual_multiplier=-1"], "model.residual_multiplier"),
        (
            LONGROPE + ["rotary_scaling.short_factors=[1,1]", "rotary_scaling.long_factors=[1,1,1,1]"],
            "model.rotary_scaling.short_factors has 2 factors for the 4 rotated pairs",
        ),
        (
            (LONGROPE + ["rotary_fraction=0.5", "rotary_scaling.short_factors=[1,1]"])
            + ["rotary_scaling.long_factors=[1,1,1,1]"],
            "model.rotary_scaling.long_factors has 4 factors for the 2 rotated pairs",
        ),
    ],
)
def test_what_cannot_be_computed_names_the_key(settings, named):
    with pytest.raises(ConfigError) as error:
        load(*settings)
    assert named in " ".join(str(error.value).split())


def test_layers_have_the_multipliers():
    plain, scaled = load(), load("attention_multiplier=0.3", "residual_multiplier=0.5", "attention_softcap=9")
    first, other = resolve_layers(plain)[0], resolve_layers(scaled)[0]
    assert (first.mixer.multiplier, first.mixer.softcap, first.residual_multiplier) == (None, None, 1.0)
    assert (other.mixer.multiplier, other.mixer.softcap, other.residual_multiplier) == (0.3, 9.0, 0.5)
