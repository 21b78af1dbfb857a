"""The settings that differ between a checkpoint and the start that resumes it, and which of them may differ. No torch.

The model, the tokenizer and the meaning of the data identify the run: another model is another run. Settings that
decide which samples are trained, or how, may change if the user accepts it (`checkpoint.accept_changes`). Layout,
number of steps, learning rate, batch sizes and all other settings are free: samples are counted, not steps, so no
sample is trained twice or skipped.
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

# Model settings without influence on a model whose weights exist.
_FREE_MODEL_KEYS = ("init_std", "vocab_multiple", "preset")
_ACCEPTANCE_KEY = "checkpoint.accept_changes"
_COMPARED_BY_CONTENTS = ("data.tokenizer", "data.train")  # compared where the files are read: they may have moved
_TEXT_ONLY_KEYS = ("data.text_key", "data.shuffle_tokens")
# After a change of these, a sample's number refers to other tokens. Runs and files are compared by contents.
OTHER_RUN = "train the other model under another --train.name"  # remedy for a start with another model
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
    """A setting that differs.

    Attributes:
        key: section.key.
        saved: value in the checkpoint.
        present: value of this start.
        kind: `refused`: never allowed; `asked`: allowed if it is accepted by name; `free`: allowed.
    """

    key: str
    saved: Any
    present: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key} was {_format_value(self.saved)} and is {_format_value(self.present)}"


def read_saved_config(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return a saved configuration and its keys that this release does not know.

    The values are not validated: a value that is no longer allowed is returned as it was saved.
    """
    try:
        return from_tree(tree), []
    except ConfigError:
        pass
    sections: dict[str, Section] = {}
    unknown = [name for name in tree if name not in Config.model_fields]
    for name, field in Config.model_fields.items():
        section_type: Any = field.annotation
        table = tree.get(name)
        if not isinstance(table, Mapping):
            table = {}
        unknown += [f"{name}.{key}" for key in table if key not in section_type.model_fields]
        values = {key: value for key, value in table.items() if key in section_type.model_fields}
        try:
            sections[name] = section_type.model_validate(values)
        except ValidationError:
            sections[name] = section_type.model_construct(**values)
    return Config.model_construct(**sections), unknown  # type: ignore[arg-type]


def find_changes(saved: Config, present: Config, *, begun: bool, text: bool = True) -> list[Change]:
    """Return the settings that differ, in the order of the configuration; equivalent values are free.

    Args:
        saved: the checkpoint's configuration, resolved.
        present: this start's configuration, resolved.
        begun: whether samples have been trained already; before the first sample only the model matters.
        text: whether data.train has text that is tokenised on the fly.
    """
    saved_values = _flatten(saved)
    saved_effects = saved_values | _effective_values(saved)
    present_values = _flatten(present)
    present_effects = present_values | _effective_values(present)
    has_other_optimizer = saved.optimizer.name != present.optimizer.name
    optimizer_keys = _optimizer_specific_keys()
    changes = []
    for key, value in present_values.items():
        saved_value = saved_values.get(key)
        if saved_value == value or key == _ACCEPTANCE_KEY:
            continue
        is_free = (
            present_effects[key] == saved_effects.get(key)
            or key in _COMPARED_BY_CONTENTS
            or (key in _TEXT_ONLY_KEYS and not text)
            or (key in PLUGIN_SETTINGS and not PLUGIN_SETTINGS[key].is_used(present))
            or (has_other_optimizer and key.removeprefix("optimizer.") in optimizer_keys)
        )
        kind: Kind
        if is_free:
            kind = "free"
        else:
            kind = _classify_change(key, present, begun)
        changes.append(Change(key, saved_value, value, kind))
    return changes


def _classify_change(key: str, present: Config, begun: bool) -> Kind:
    section, _, name = key.partition(".")
    if key == "model.sequence_length" and present.model.positions == "learned":
        return "refused"  # the table of positions has that length
    if section == "model" and key not in CHANGEABLE_KEYS and name not in _FREE_MODEL_KEYS:
        return "refused"
    if not begun:
        return "free"
    if key == "data.text_key":
        return "refused"
    return "asked" if key in CHANGEABLE_KEYS or key in PLUGIN_SETTINGS else "free"


def _flatten(config: Config) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, table in config.model_dump().items() for key, value in table.items()}


def _effective_values(config: Config) -> dict[str, Any]:
    """Return the effective values of some keys; None for a key without influence."""
    values = {f"model.{key}": value for key, value in _effective_model(config.model).items()}
    return values | {f"optimizer.{key}": None for key in _unused_optimizer_keys(config.optimizer)}


def _list_layer_effects(model: ModelConfig) -> list[dict[str, Any]]:
    """Return the settings of every layer that kinds of layers may change."""
    kinds = {}
    for letter in set(model.layer_pattern):
        kind = model.resolve_kind(letter)
        effects = {key: getattr(kind, key) for key in LayerKind.model_fields} | _effective_layer(kind)
        kinds[letter] = effects
    return [kinds[letter] for letter in model.layer_letters()]


def _effective_model(model: ModelConfig) -> dict[str, Any]:
    values = _effective_layer(model)
    if model.block != "parallel":
        values["parallel_norms"] = None
    layers = _list_layer_effects(model)
    return values | {"layer_pattern": layers, "layer_kinds": layers, "experts": _effective_experts(model)}


def _effective_experts(model: ModelConfig) -> dict[str, Any] | None:
    """Return what the settings of experts say about the model itself; balance losses concern its training."""
    if model.experts is None:
        return None
    values = model.experts.model_dump(exclude={"sequence_loss", "z_loss", "bias_rate"})
    return values | {"width": model.experts.width or model.ffn, "has_bias": model.experts.bias_rate > 0}


def _effective_layer(model: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden": model.ffn,
        "attention_out_bias": model.out_bias,
    }
    if model.positions != "rotary":
        values |= {"rotary_fraction": None, "rotary_base": None, "rotary_interleaved": None, "rotary_scaling": None}
    return values


def _unused_optimizer_keys(optimizer: OptimizerConfig) -> list[str]:
    if optimizer.name in OPTIMIZERS:
        used = OPTIMIZERS[optimizer.name].own_settings
    else:
        used = ()
    return [key for key in _optimizer_specific_keys() if key not in used]


def _optimizer_specific_keys() -> list[str]:
    """Return the keys that only one optimizer reads."""
    return [key for name in OPTIMIZERS.names() for key in OPTIMIZERS[name].own_settings]


def explain_changes(
    name: str, changes: Sequence[Change], accepted: Sequence[str], alternative: str = OTHER_RUN
) -> str | None:
    """Return one paragraph if some changes are not allowed, else None.

    Args:
        name: the checkpoint's name in the message.
        accepted: keys that the user accepts.
        alternative: what to do instead of going on with the saved model.
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
    parts = [f"{c.key} {_format_value(c.saved)} -> {_format_value(c.present)}" for c in changes]
    return f"settings changed after step {step}: {'; '.join(parts)}"


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
