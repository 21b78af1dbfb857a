"""Kinds of layers: what a pattern resolves to, what is written and read again, and what is refused."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale import config
from megascale.checkpoint.setting_changes import find_changes
from megascale.core.inventory import count_distinct_layers, resolve_layers
from megascale.errors import ConfigError

KINDS = st.fixed_dictionaries(
    {},
    optional={
        "window": st.sampled_from([0, 3, 70]),
        "rotary_base": st.sampled_from([50.0, 1e6]),
        "rotary_fraction": st.sampled_from([0.25, 0.5]),
        "kv_heads": st.sampled_from([1, 2]),
        "ffn_hidden": st.integers(1, 9),
    },
)


def load(pattern: str, *settings: str) -> config.Config:
    return config.load(None, ["--model.positions=rotary", f"--model.layer_pattern={pattern}"] + list(settings))


@given(st.text("SLXY", min_size=1, max_size=6), st.fixed_dictionaries({"X": KINDS, "Y": KINDS}), st.integers(1, 8))
def test_a_layer_has_its_kinds_settings_and_the_models_others(pattern, kinds, layers):
    kinds = {letter: kind for letter, kind in kinds.items() if letter in pattern}
    model = {"layers": layers, "positions": "rotary", "window": 8, "layer_pattern": pattern, "layer_kinds": kinds}
    loaded = config.from_tree({"model": model})
    specs = resolve_layers(loaded.model)
    assert len(specs) == layers
    for index, spec in enumerate(specs):
        letter = pattern[index % len(pattern)]
        kind = {"L": {"window": 0}}.get(letter, {}) | kinds.get(letter, {})
        assert spec.window == (kind.get("window", 8) or None)
        assert spec.rope is not None
        assert spec.rope.base == kind.get("rotary_base", 10000.0)
        assert spec.rope.width == int(64 * kind.get("rotary_fraction", 1.0))
        assert spec.mixer.kv_heads == kind.get("kv_heads", 4)
        assert spec.feed_forward.width == kind.get("ffn_hidden", 1024)
    assert sum(count for _, count in count_distinct_layers(loaded.model)) == layers
    repeated = config.from_tree(tomllib.loads(loaded.to_toml()))
    assert repeated.model == loaded.model
    assert hash(repeated.model) == hash(loaded.model)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["layer_pattern=SX"], ["model.layer_pattern='SX'", "kind X", "[model.layer_kinds.X]"]),
        (["layer_kinds.X.window=3"], ["model.layer_kinds.X", "model.layer_pattern='S'", "remove"]),
        (["layer_pattern=s"], ["model.layer_pattern='s'"]),
        (["layer_pattern=SX", "layer_kinds.X.windows=3"], ["model.layer_kinds.X.windows", "3", "keys of", "window"]),
        (["layer_pattern=SX", "layer_kinds.X.window=-1"], ["model.layer_kinds.X.window=-1"]),
        (["layer_pattern=SX", "layer_kinds.X=3"], ["model.layer_kinds.X=3"]),
        (["layer_pattern=SX", "layer_kinds.X.mlp=mixtures"], ["mixtures", "dense"]),
        (["layer_pattern=SX", "layer_kinds.X.kv_heads=3"], ["model.layer_kinds.X", "kv_heads=3"]),
        (
            ["positions=learned", "layer_pattern=SX", "layer_kinds.X.positions=none"],
            ["model.layer_kinds.X.positions=none", "model.positions=learned"],
        ),
        (
            ["layer_pattern=SX", "layer_kinds.X.positions=none", "layer_kinds.X.rotary_base=7"],
            ["model.layer_kinds.X.rotary_base=7", "no effect", "model.layer_kinds.X.positions=rotary"],
        ),
        (["layer_pattern=SX", "layer_kinds.X.rotary_fraction=0.01"], ["model.layer_kinds.X", "rotary_fraction=0.01"]),
        (["window_pattern=SL"], ["model.window_pattern", "model.layer_pattern"]),
    ],
)
def test_a_wrong_kind_is_named_with_its_key_and_a_remedy(settings, named):
    with pytest.raises(ConfigError) as error:
        config.load(None, ["--model.positions=rotary"] + [f"--model.{setting}" for setting in settings])
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("saved", "present", "kind"),
    [
        (["SL"], ["S"], "free"),  # without a window, the kinds are alike
        (["SX", "--model.layer_kinds.X.window=5"], ["SY", "--model.layer_kinds.Y.window=5"], "free"),
        (["SX", "--model.layer_kinds.X.kv_heads=4"], ["S"], "free"),  # the default
        (["SX", "--model.layer_kinds.X.window=5"], ["SX", "--model.layer_kinds.X.window=6"], "refused"),
        (["SX", "--model.layer_kinds.X.positions=none"], ["S"], "refused"),
    ],
)
def test_a_checkpoint_goes_on_with_kinds_that_mean_the_same(saved, present, kind):
    changes = find_changes(load(*saved), load(*present), has_trained=True)
    assert changes
    assert {change.kind for change in changes} == {kind}
