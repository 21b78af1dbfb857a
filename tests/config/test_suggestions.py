"""An unknown setting: the message names the one that was meant."""

from __future__ import annotations

import pytest

from megascale.config import Config, load, load_command_line, reference
from megascale.config.suggestions import _ALIASES, suggest_keys
from megascale.errors import ConfigError

KEYS = {f"{name}.{key}" for name, field in Config.model_fields.items() for key in field.annotation.model_fields}


def test_aliases_stand_for_settings_and_are_none_themselves():
    assert set(_ALIASES) <= KEYS
    for key, aliases in _ALIASES.items():
        assert not {f"{key.partition('.')[0]}.{alias}" for alias in aliases.split()} & KEYS, key


@pytest.mark.parametrize(
    ("inputs", "intended"),
    [
        ("learning_rate", "lr.peak"),
        ("lr", "lr.peak"),
        ("bs", "train.global_batch or train.micro_batch"),
        ("batch_size", "train.global_batch or train.micro_batch"),
        ("tp", "parallel.tensor"),
        ("pp", "parallel.pipeline"),
        ("dp", "parallel.data"),
        ("seq_len", "model.sequence_length"),
        ("max-steps", "train.steps"),
        ("weight_decay", "optimizer.weight_decay"),
        ("wd", "optimizer.weight_decay"),
        ("warmup", "lr.warmup_steps"),
        ("cp", "parallel.context"),
        ("ep", "parallel.expert"),
        ("fsdp", "parallel.zero"),
        ("compile", "kernels.mode"),
        ("peft", "train.lora"),
        ("Tensor_Parallel_Sizes", "parallel.tensor"),
    ],
)
def test_names_of_other_trainers_lead_to_the_key_wherever_they_are_written(inputs, intended):
    for section in ("train", "data", "kernels"):
        with pytest.raises(ConfigError, match=rf"did you mean {intended}\?$"):
            load(None, [f"{section}.{inputs}=1"])
    option = " or ".join(f"--{key}=" for key in intended.split(" or "))
    with pytest.raises(ConfigError, match=rf"settings are given as --section.key=value; did you mean {option}\?$"):
        load_command_line(None, [f"--{inputs}=1"])


@pytest.mark.parametrize(
    ("key", "intended"),
    [
        ("overlap.tp", "overlap.tensor"),  # the same key of its own section comes first
        ("model.layrs", "model.layers"),
        ("train.interval", "checkpoint.interval or resilience.interval"),
        ("model.clip", "optimizer.clip"),
        ("optim.weight_decay", "optimizer.weight_decay"),
        ("training.steps", "train.steps"),
        ("trainer.lr", "lr.peak"),
        ("parallelism.tp", "parallel.tensor"),
    ],
)
def test_slips_and_other_sections(key, intended):
    with pytest.raises(ConfigError, match=rf"did you mean {intended}\?$"):
        load(None, [f"{key}=1"])


def test_what_is_like_nothing_gets_the_list():
    with pytest.raises(ConfigError, match=r"keys of \[parallel\]: tensor, pipeline, .*gpus_per_host$"):
        load(None, ["parallel.quux=1"])
    with pytest.raises(ConfigError, match=r"no section \[quux\]; known: model, data, .*kubernetes$"):
        load(None, ["quux.q=1"])
    with pytest.raises(ConfigError, match=r"no section \[trian\]; did you mean \[train\]\?$"):
        load(None, ["trian.q=1"])
    with pytest.raises(ConfigError, match=r"settings are given as --section\.key=value$"):
        load_command_line(None, ["--quux=1"])


@pytest.mark.parametrize(
    ("arguments", "intended"), [("learning_rate", "lr.peak"), ("bs", "train.global_batch"), ("tp", "parallel.tensor")]
)
def test_the_reference_knows_names_of_other_trainers(arguments, intended):
    with pytest.raises(ConfigError, match=rf"there is no setting '{arguments}'; did you mean {intended}"):
        reference.find_settings(arguments)
    assert [setting.key for setting in reference.find_settings(intended)] == [intended]


def test_each_alias_is_found():
    for key, aliases in _ALIASES.items():
        assert all(key in suggest_keys(alias) for alias in aliases.split())
