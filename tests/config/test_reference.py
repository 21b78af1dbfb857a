"""Descriptions of settings by `megascale config`: they come from the models, and no setting lacks one."""

from __future__ import annotations

import tomllib

import pytest

from megascale.config import Config, from_tree, load
from megascale.config.reference import (
    describe_sections,
    find_settings,
    list_differences,
    list_settings,
    make_json_schema,
)
from megascale.errors import ConfigError


def test_every_setting_and_section_is_explained():
    assert all(describe_sections().values())
    assert [s.key for s in list_settings() if len(s.description) < 4 or not s.describe_values()] == []
    assert {s.key.partition(".")[0] for s in list_settings()} == set(Config.model_fields)


def test_defaults_are_those_that_a_configuration_has():
    for setting in list_settings():
        section, _, key = setting.key.partition(".")
        value = getattr(getattr(Config(), section), key)
        assert (tomllib.loads(f"v = {setting.default}")["v"] if setting.default else None) == value, setting.key


def test_choices_and_ranges():
    (name,) = find_settings("optimizer.name")
    assert {"adamw", "lamb", "muon"} <= set(name.choices)
    assert "a registered one" in name.describe_values()
    (window,) = find_settings("model.window")
    assert window.optional
    assert window.describe_values() == "integer, at least 1"  # a bound for slips only is not said
    assert find_settings("lr.decay_shape")[0].choices == ("linear", "cosine", "sqrt", "exponential")
    assert find_settings("lr.schedule")[0].choices[:5] == ("cosine", "linear", "wsd", "constant", "inverse_sqrt")
    assert find_settings("observe.span_sinks")[0].describe_values().startswith("list of: parquet")


def test_what_is_found():
    assert [s.key for s in find_settings("train.micro_batch")] == ["train.micro_batch"]
    three = ["parallel.gather_precision", "train.precision", "train.linear_precision"]
    assert [s.key for s in find_settings("precision")] == three
    assert len(find_settings("lr")) == 7
    with pytest.raises(ConfigError, match=r"no setting 'model\.headz'; did you mean model\.heads"):
        find_settings("model.headz")


def test_differences_from_the_defaults():
    assert list_differences(Config()) == []
    config = load(overrides=["--train.steps=7", "--data.train=a,b"])
    assert list_differences(config) == [("data.train", '["a", "b"]', "[]"), ("train.steps", "7", "1000")]


def test_the_schema_judges_as_the_models_do():
    jsonschema = pytest.importorskip("jsonschema_rs")
    validator = jsonschema.Draft202012Validator(make_json_schema())
    assert validator.is_valid(Config().model_dump(exclude_none=True))
    for wrong in ({"train": {"steps": -1}}, {"train": {"stepz": 1}}, {"lr": {"decay": "square"}}, {"trein": {}}):
        assert not validator.is_valid(wrong)


@pytest.mark.parametrize(
    "tree",
    [
        {"data": {"train": "x"}},
        {"data": {"train": ["x", "y"], "weights": [0.5, 1]}},
        {"train": {"precision": "bf16", "callbacks": "unset"}},
        {"train": {"precision": "fp16"}},
        {"train": {"lora": {"rank": 8, "targets": "attention.query"}}},
        {"train": {"steps": "unset"}},
        {"train": {"steps": [3]}},
        {"model": {"preset": "gpt-oss-20b", "window": "unset", "layer_pattern": "unset"}},
        {"model": {"preset": "gpt-oss-20b", "window": "wide"}},
        {"parallel": {"layer_split": 4}},
        {"resilience": {"log_patterns": "Xid"}},
    ],
)
def test_the_schema_accepts_what_the_command_line_accepts(tree):
    jsonschema = pytest.importorskip("jsonschema_rs")
    validator = jsonschema.Draft202012Validator(make_json_schema())
    try:
        from_tree(tree)
        is_accepted = True
    except ConfigError:
        is_accepted = False
    assert validator.is_valid(tree) == is_accepted


def test_one_value_stands_for_a_list_of_one():
    assert from_tree({"data": {"train": "x"}}) == from_tree({"data": {"train": ["x"]}})
    assert load(overrides=["--data.train=x"]).data.train == ["x"]
    assert load(overrides=["--data.train=x", "--data.weights=2"]).data.weights == [2.0]
    assert load(overrides=["--train.lora.rank=4", "--train.lora.targets=mlp.in,mlp.out"]).train.lora.targets == [
        "mlp.in",
        "mlp.out",
    ]


def test_a_setting_of_a_preset_or_a_file_is_unset(tmp_path):
    preset = "--model.preset=gpt-oss-20b"
    assert load(overrides=[preset]).model.window == 128
    model = load(overrides=[preset, "--model.window=unset", "--model.layer_pattern=unset"]).model
    assert (model.window, model.layer_pattern) == (None, "S")  # the defaults
    file = tmp_path / "job.toml"
    file.write_text(
        '[train]\nsteps = 7\n[data]\ntrain = "x"\n[model]\npreset = "gpt-oss-20b"\nrotary_scaling = "unset"\n'
    )
    config = load(file, ["--train.steps=unset", "--data.train=unset"])
    assert (config.train.steps, config.data.train) == (1000, [])
    assert config.model.rotary_scaling is None
    with pytest.raises(ConfigError, match=r"write train\.steps=unset for the default"):
        load(overrides=["--train.steps="])


@pytest.mark.parametrize(
    "setting",
    ["train.stpes", "model.experts.numbre", "train.lora.rnak", "model.rotary_scaling.factr", "modle.window"],
)
def test_an_unknown_setting_is_refused_although_it_is_unset(setting):
    with pytest.raises(ConfigError, match="there is no"):
        load(overrides=["--model.preset=gpt-oss-20b", f"--{setting}=unset"])


def test_unset_names_of_models_do_not_conflict_with_a_folder():
    settings = ["--model.preset=unset", "--checkpoint.start_from=unset", "--checkpoint.imported=unset"]
    assert load(overrides=["--model.from=folder", *settings]).checkpoint.imported == "folder"


def test_empty_text_is_no_list_of_one_and_no_path():
    paths = ["data.valid", "data.tokenizer", "train.runs", "checkpoint.location", "checkpoint.start_from"]
    for setting in ("data.train", "train.callbacks", "observe.sinks", "train.sample_prompt", *paths):
        section, _, key = setting.partition(".")
        with pytest.raises(ConfigError, match=rf"{setting}='' is wrong.*write {setting}=unset"):
            load(overrides=[f"--{setting}="])
        with pytest.raises(ConfigError, match=rf"{setting}='' is wrong.*write {setting}=unset"):
            from_tree({section: {key: ""}})
    with pytest.raises(ConfigError, match=r"data\.train\.1='' is wrong.*write data\.train=unset"):
        load(overrides=["--data.train=a,"])


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp32", "float32"), ("fp64", "float64")])
def test_short_names_of_precisions(short, name):
    assert load(overrides=[f"--train.precision={short}"]).train.precision == name


def test_unknown_precisions_are_refused():
    with pytest.raises(ConfigError, match=r"train\.precision='fp8'"):
        load(overrides=["--train.precision=fp8"])


def test_a_setting_that_accepts_auto_has_one_error_with_all_alternatives():
    assert find_settings("kernels.deterministic")[0].describe_values() == "auto, true, false"
    assert find_settings("resilience.replay_interval")[0].describe_values() == "auto or integer, at least 0"
    for text, requirement in (("-1", "greater than or equal to 0"), ("often", "a valid integer")):
        with pytest.raises(ConfigError) as caught:
            load(None, [f"--resilience.replay_interval={text}"])
        message = str(caught.value)
        assert message.startswith("resilience.replay_interval=")
        assert f"is wrong: input should be 'auto' or {requirement}" in message
        assert len(message.splitlines()) == 1
    assert load(None, ["--resilience.replay_interval=7"]).resilience.replay_interval == 7
    assert load(None, ["--kernels.deterministic=false"]).kernels.deterministic is False
