"""Settings that differ between a checkpoint and the start that resumes it, and whether they may. Needs no torch.

The model, the tokenizer and the meaning of the data identify the run, so they must not change. Settings that decide
which samples are trained, or how, may change if the user accepts the change (`checkpoint.accept_changes`). Layout,
number of steps, learning rate, batch sizes and all other settings may change freely. A run counts its samples and not
its steps, so such a change repeats or skips no sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from megascale.config import CHANGEABLE_KEYS, Config, ModelConfig, OptimizerConfig, Section, from_tree
from megascale.config.model_section import LayerKind
from megascale.config.parts import OPTIMIZERS
from megascale.config.plugin_settings import PLUGIN_SETTINGS
from megascale.errors import ConfigError

Kind = Literal["refused", "asked", "free"]

# Model settings that have no effect once the weights exist.
_FREE_MODEL_KEYS = ("init_std", "vocab_multiple", "preset")
_ACCEPTANCE_KEY = "checkpoint.accept_changes"
# Paths of files that may have moved. The code that reads the files compares their contents.
_COMPARED_BY_CONTENTS = ("data.tokenizer", "data.train")
_TEXT_ONLY_KEYS = ("data.text_key", "data.shuffle_tokens")  # without effect on tokenised data
OTHER_RUN = "train the other model under another --train.name"  # remedy for a start with another model
# If one of these settings changes, a sample's number refers to other tokens.
SAMPLE_ORDER_KEYS = frozenset(
    {
        "data.weights",
        "data.shuffle",
        "data.shuffle_tokens",
        "data.document_mask",
        "data.packing",
        "data.max_documents",
        "model.sequence_length",
        "train.seed",
    }
)


@dataclass(frozen=True)
class Change:
    """Setting that differs between the checkpoint and this start.

    Attributes:
        key: name of the setting, `SECTION.KEY`.
        saved: value in the checkpoint.
        present: value of this start.
        kind: `refused` if the change is never allowed, `asked` if the user must accept it, `free` if it is allowed.
    """

    key: str
    saved: Any
    present: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key} was {_format_value(self.saved)} and is {_format_value(self.present)}"


def read_saved_config(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return a saved configuration, and its keys that this release does not know.

    A value that is no longer valid is returned as it was saved.
    """
    try:
        return from_tree(tree), []
    except ConfigError:
        pass
    sections: dict[str, Section] = {}
    unknown_keys = [name for name in tree if name not in Config.model_fields]
    for name, field in Config.model_fields.items():
        section_type: Any = field.annotation
        table = tree.get(name)
        if not isinstance(table, Mapping):
            table = {}
        unknown_keys += [f"{name}.{key}" for key in table if key not in section_type.model_fields]
        values = {key: value for key, value in table.items() if key in section_type.model_fields}
        try:
            sections[name] = section_type.model_validate(values)
        except ValidationError:
            sections[name] = section_type.model_construct(**values)
    return Config.model_construct(**sections), unknown_keys  # type: ignore[arg-type]


def find_changes(saved: Config, present: Config, *, has_trained: bool, has_text: bool = True) -> list[Change]:
    """Return the settings that differ, in the order of the configuration. Changes without an effect are free.

    Args:
        saved: resolved configuration of the checkpoint.
        present: resolved configuration of this start.
        has_trained: whether samples have been trained already. Before the first sample only the model must be equal.
        has_text: whether data.train has text that is tokenised during training.
    """
    saved_values = _flatten(saved)
    saved_effects = saved_values | _list_effective_values(saved)
    present_values = _flatten(present)
    present_effects = present_values | _list_effective_values(present)
    has_other_optimizer = saved.optimizer.name != present.optimizer.name
    optimizer_keys = _list_optimizer_specific_keys()
    changes = []
    for key, value in present_values.items():
        saved_value = saved_values.get(key)
        if saved_value == value or key == _ACCEPTANCE_KEY:
            continue
        is_free = (
            present_effects[key] == saved_effects.get(key)
            or key in _COMPARED_BY_CONTENTS
            or (key in _TEXT_ONLY_KEYS and not has_text)
            or (key in PLUGIN_SETTINGS and not PLUGIN_SETTINGS[key].is_used(present))
            or (has_other_optimizer and key.removeprefix("optimizer.") in optimizer_keys)
        )
        kind: Kind
        if is_free:
            kind = "free"
        else:
            kind = _classify_change(key, present, has_trained)
        changes.append(Change(key, saved_value, value, kind))
    return changes


def _classify_change(key: str, present: Config, has_trained: bool) -> Kind:
    """Return the kind of a change that has an effect."""
    section, _, name = key.partition(".")
    if key == "model.sequence_length" and present.model.positions == "learned":
        return "refused"  # the table of learned positions has this length
    if section == "model" and key not in CHANGEABLE_KEYS and name not in _FREE_MODEL_KEYS:
        return "refused"
    if not has_trained:
        return "free"
    if key == "data.text_key":
        return "refused"
    return "asked" if key in CHANGEABLE_KEYS or key in PLUGIN_SETTINGS else "free"


def _flatten(config: Config) -> dict[str, Any]:
    values = {}
    for section, settings in config.model_dump().items():
        for key, value in settings.items():
            values[f"{section}.{key}"] = value
    return values


def _list_effective_values(config: Config) -> dict[str, Any]:
    """Return the effective values of keys whose value is resolved from others. A key without an effect has None."""
    values = {f"model.{key}": value for key, value in _resolve_model(config.model).items()}
    return values | {f"optimizer.{key}": None for key in _list_unused_optimizer_keys(config.optimizer)}


def _list_layer_effects(model: ModelConfig) -> list[dict[str, Any]]:
    """Return for every layer the effective values of the settings in which layers may differ."""
    kinds = {}
    for letter in set(model.layer_pattern):
        kind = model.resolve_kind(letter)
        effects = {key: getattr(kind, key) for key in LayerKind.model_fields} | _resolve_layer(kind)
        kinds[letter] = effects
    return [kinds[letter] for letter in model.layer_letters()]


def _resolve_model(model: ModelConfig) -> dict[str, Any]:
    values = _resolve_layer(model)
    if model.block != "parallel":
        values["parallel_norms"] = None
    # Two spellings of the layers' kinds are equal if they give the same list of layers.
    layers = _list_layer_effects(model)
    return values | {"layer_pattern": layers, "layer_kinds": layers, "experts": _resolve_experts(model)}


def _resolve_experts(model: ModelConfig) -> dict[str, Any] | None:
    """Return the settings of experts that change the model itself, without those of balance losses."""
    if model.experts is None:
        return None
    values = model.experts.model_dump(exclude={"sequence_loss", "z_loss", "bias_rate"})
    return values | {"width": model.experts.width or model.ffn, "has_bias": model.experts.bias_rate > 0}


def _resolve_layer(model: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden": model.ffn,
        "attention_out_bias": model.out_bias,
    }
    if model.positions != "rotary":
        values |= {"rotary_fraction": None, "rotary_base": None, "rotary_interleaved": None, "rotary_scaling": None}
    return values


def _list_unused_optimizer_keys(optimizer: OptimizerConfig) -> list[str]:
    if optimizer.name in OPTIMIZERS:
        used = OPTIMIZERS[optimizer.name].own_settings
    else:
        used = ()
    return [key for key in _list_optimizer_specific_keys() if key not in used]


def _list_optimizer_specific_keys() -> list[str]:
    """Return the keys that only one optimizer reads."""
    return [key for name in OPTIMIZERS.names() for key in OPTIMIZERS[name].own_settings]


def explain_changes(
    name: str, changes: Sequence[Change], accepted: Sequence[str], alternative: str = OTHER_RUN
) -> str | None:
    """Return an error message if some changes are not allowed, or None.

    Args:
        name: name of the checkpoint in the message.
        accepted: keys whose changes the user accepts.
        alternative: remedy for a user who does not want to continue with the saved model.
    """
    refused = [change for change in changes if change.kind == "refused"]
    if refused:
        return (
            f"the checkpoint {name!r} is of another model: {'; '.join(map(str, refused))}. "
            f"Set {_format_options(refused)} to go on with it, or {alternative}"
        )
    open_changes = [change for change in changes if change.kind == "asked" and change.key not in accepted]
    if open_changes:
        keys = ",".join(list(accepted) + [change.key for change in open_changes])
        return (
            f"this start would not go on as the checkpoint {name!r} was trained: "
            f"{'; '.join(map(str, open_changes))}. Samples could be trained twice, never or otherwise than before. Set "
            f"{_format_options(open_changes)} to go on as before, or accept it with --checkpoint.accept_changes={keys}"
        )
    return None


def format_changes(changes: Sequence[Change], step: int) -> str:
    """Return the changes as one line for the terminal."""
    texts = [f"{c.key} {_format_value(c.saved)} -> {_format_value(c.present)}" for c in changes]
    return f"settings changed after step {step}: {'; '.join(texts)}"


def _format_options(changes: Sequence[Change]) -> str:
    """Return the command-line options that restore the saved values."""
    options = [f"--{c.key}={_format_value(c.saved)}" for c in changes if c.saved is not None]
    options += [f"no {c.key}" for c in changes if c.saved is None]
    return ", ".join(options)


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(_format_value, value))
    return str(value)
