"""Changes of an optimizer's own settings: a question if that optimizer runs, free if no optimizer reads them."""

from __future__ import annotations

import pytest

from megascale.checkpoint.setting_changes import (
    Change,
    explain_changes,
    find_changes,
    format_changes,
    read_saved_config,
)
from megascale.config import from_tree

EXPERTS = {"mlp": "experts", "mlp_bias": False, "experts": {"top_k": 2}}


@pytest.mark.parametrize(
    ("name", "key", "values", "kind"),
    [
        ("lamb", "trust_max", (1.0, 2.0), "asked"),
        ("adamw", "trust_max", (1.0, 2.0), "free"),
        ("muon", "trust_max", (1.0, 2.0), "free"),
        ("muon", "muon_momentum", (0.9, 0.95), "asked"),
        ("lamb", "muon_momentum", (0.9, 0.95), "free"),
        ("adamw", "beta2", (0.95, 0.99), "asked"),
    ],
)
def test_a_setting_is_asked_about_where_its_optimizer_runs(name, key, values, kind):
    saved, present = (from_tree({"optimizer": {"name": name, key: value}}) for value in values)
    (change,) = find_changes(saved, present, has_trained=True)
    assert (change.key, change.kind) == (f"optimizer.{key}", kind)


def kinds(saved: dict, present: dict, **changes) -> dict[str, str]:
    """Return the kind of each change by its key."""
    result = find_changes(from_tree(saved), from_tree(present), **({"has_trained": True} | changes))
    return {change.key: change.kind for change in result}


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        ({"heads": 4}, {"heads": 4, "kv_heads": 4}, {"model.kv_heads": "free"}),  # the default, spelt out
        ({"kv_heads": 4}, {"kv_heads": 2}, {"model.kv_heads": "refused"}),
        (
            EXPERTS,
            {**EXPERTS, "experts": {"width": 1024, "sequence_loss": 0.1, "z_loss": 0.1}},
            {"model.experts": "free"},
        ),
        (EXPERTS, {**EXPERTS, "experts": {"top_k": 1}}, {"model.experts": "refused"}),
        (EXPERTS, {**EXPERTS, "experts": {"bias_rate": 0.1}}, {"model.experts": "refused"}),
        ({"positions": "learned"}, {"positions": "learned", "rotary_base": 5.0}, {"model.rotary_base": "free"}),
        ({"positions": "rotary"}, {"positions": "rotary", "rotary_base": 5.0}, {"model.rotary_base": "refused"}),
        (
            {"positions": "rotary"},
            {"positions": "rotary", "rotary_fraction": 0.5},
            {"model.rotary_fraction": "refused"},
        ),
        ({}, {"init_std": 0.5, "vocab_multiple": 7}, {"model.init_std": "free", "model.vocab_multiple": "free"}),
        (
            {"positions": "learned"},
            {"positions": "learned", "sequence_length": 64},
            {"model.sequence_length": "refused"},
        ),
        ({"positions": "rotary"}, {"positions": "rotary", "sequence_length": 64}, {"model.sequence_length": "asked"}),
    ],
)
def test_only_what_changes_the_model_is_refused(saved, present, expected):
    assert kinds({"model": saved}, {"model": present}) == expected


def test_before_the_first_sample_only_the_model_counts():
    saved, present = {"train": {"seed": 1}}, {"train": {"seed": 2}, "model": {"hidden": 96}}
    assert kinds(saved, present) == {"train.seed": "asked", "model.hidden": "refused"}
    assert kinds(saved, present, has_trained=False) == {"train.seed": "free", "model.hidden": "refused"}


@pytest.mark.parametrize("text", [False, True])
def test_keys_of_text_count_only_where_text_is_read(text):
    saved, present = {"data": {}}, {"data": {"text_key": "body", "shuffle_tokens": 4096}}
    expected = (
        {"data.text_key": "refused", "data.shuffle_tokens": "asked"}
        if text
        else dict.fromkeys(("data.text_key", "data.shuffle_tokens"), "free")
    )
    assert kinds(saved, present, has_text=text) == expected
    assert kinds(saved, present, has_text=text, has_trained=False) == dict.fromkeys(expected, "free")


def test_paths_of_data_are_compared_by_contents():
    """Other places of the same files are free; what accepts changes is no change itself."""
    present = {"data": {"train": ["b"], "tokenizer": "c"}, "checkpoint": {"accept_changes": ["train.seed"]}}
    assert kinds({"data": {"train": ["a"]}}, present) == {"data.train": "free", "data.tokenizer": "free"}


def test_a_saved_configuration_is_read_even_if_it_is_no_longer_valid():
    tree = from_tree({"train": {"seed": 7}, "model": {"hidden": 96}}).model_dump(exclude_none=True)
    config, unknown = read_saved_config(tree)
    assert (config.train.seed, config.model.hidden, unknown) == (7, 96, [])
    tree["train"]["seed"] = "not a number"
    tree["train"]["gone"] = 1
    tree["lost"] = {"a": 1}
    tree["lr"] = "no table"
    config, unknown = read_saved_config(tree)
    assert (config.train.seed, config.model.hidden) == ("not a number", 96)
    assert config.lr == from_tree({}).lr
    assert sorted(unknown) == ["lost", "train.gone"]


def test_changes_are_explained_with_the_options_that_undo_them():
    refused = [Change("model.tied", True, False, "refused"), Change("model.kv_heads", None, 4, "refused")]
    questions = [Change("data.weights", [1.0, 2.5], None, "asked"), Change("train.seed", 1, 2, "asked")]
    free = [Change("lr.peak", 1e-3, 2e-3, "free")]
    assert explain_changes("a", free, []) is None
    text = explain_changes("a", refused + questions, ["train.seed"])
    assert text is not None
    assert (
        "the checkpoint 'a' is of another model: model.tied was true and is false; model.kv_heads was not set and is 4."
        in text
    )
    assert "Set --model.tied=true, no model.kv_heads to go on with it" in text
    text = explain_changes("a", questions + free, ["run"])
    assert text is not None
    assert "data.weights was 1.0,2.5 and is not set; train.seed was 1 and is 2." in text
    assert "--checkpoint.accept_changes=run,data.weights,train.seed" in text
    assert explain_changes("a", questions, ["train.seed", "data.weights"]) is None
    assert explain_changes("a", questions, ["train.seed"]) is not None
    expected = "settings changed after step 7: train.seed 1 -> 2; lr.peak 0.001 -> 0.002"
    assert format_changes([questions[1]] + free, 7) == expected
