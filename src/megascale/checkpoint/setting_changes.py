"""Which settings differ between a checkpoint and the start that would go on from it, and which of them may. No torch.

The model, the tokenizer and the meaning of the data make the run: another model is another run. What decides which
samples are trained, or how, may change where a person says so (`checkpoint.accept_changes`). Layout, number of steps,
learning rate, batch sizes and all else are free: samples are counted, not steps, so none is trained twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from megascale.config import CHANGEABLE_KEYS, Config, ModelConfig, OptimizerConfig, Section, from_tree
from megascale.config.optimizers import OPTIMIZERS
from megascale.errors import ConfigError

# Of the model, but without influence on one that has its weights.
_FREE_OF_MODEL = ("init_std", "vocab_multiple", "preset")
_OF_THIS_START = "checkpoint.accept_changes"
_BY_CONTENTS = ("data.tokenizer", "data.train")  # by whoever reads files: they may lie elsewhere
_ONLY_TEXT = ("data.text_key", "data.shuffle_tokens")
# After a change of these a sample's number means other tokens than before. A run or files are compared by contents.
CHANGES_SAMPLES = frozenset(
    {"data.weights", "data.shuffle", "data.shuffle_tokens", "model.sequence_length", "train.seed"}
)


@dataclass(frozen=True)
class Change:
    """A setting that differs.

    Attributes:
        key: section.key.
        saved, present: values.
        kind: `refused`: never; `asked`: only if it is accepted by name; `free`.
    """

    key: str
    saved: Any
    present: Any
    kind: Literal["refused", "asked", "free"]

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.saved)} and is {_shown(self.present)}"


def read_saved(tree: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """A saved configuration as this version understands it, and the keys that it does not know.

    It is not judged: a value that is no longer allowed stands as it was saved.
    """
    try:
        return from_tree(tree), []
    except ConfigError:
        pass
    sections: dict[str, Section] = {}
    unknown = [name for name in tree if name not in Config.model_fields]
    for name, field in Config.model_fields.items():
        kind: Any = field.annotation
        table = tree.get(name)
        table = table if isinstance(table, Mapping) else {}
        unknown += [f"{name}.{key}" for key in table if key not in kind.model_fields]
        known = {key: value for key, value in table.items() if key in kind.model_fields}
        try:
            sections[name] = kind.model_validate(known)
        except ValidationError:
            sections[name] = kind.model_construct(**known)
    return Config.model_construct(**sections), unknown  # type: ignore[arg-type]


def find_changes(saved: Config, present: Config, *, begun: bool, text: bool = True) -> list[Change]:
    """Settings that differ, in the order of the configuration; those that amount to the same are free.

    Args:
        saved, present: resolved, both.
        begun: samples have been trained already; before the first only the model counts.
        text: data.train has text that is tokenised on the fly.
    """
    there, here = _flat(saved), _flat(present)
    there_amounts, here_amounts = there | _amounts(saved), here | _amounts(present)
    changes = []
    for key, value in here.items():
        before = there.get(key)
        if before == value or key == _OF_THIS_START:
            continue
        kind = _kind(key, present, begun)
        if here_amounts[key] == there_amounts.get(key) or key in _BY_CONTENTS or (key in _ONLY_TEXT and not text):
            kind = "free"
        if saved.optimizer.name != present.optimizer.name and key.removeprefix("optimizer.") in _of_one_optimizer():
            kind = "free"  # it comes and goes with the name
        changes.append(Change(key, before, value, kind))
    return changes


def _kind(key: str, present: Config, begun: bool) -> Literal["refused", "asked", "free"]:
    section, _, name = key.partition(".")
    if key == "model.sequence_length" and present.model.positions == "learned":
        return "refused"  # the table of positions is of that length
    if section == "model" and key not in CHANGEABLE_KEYS and name not in _FREE_OF_MODEL:
        return "refused"
    if not begun:
        return "free"
    if key == "data.text_key":
        return "refused"
    return "asked" if key in CHANGEABLE_KEYS else "free"


def _flat(config: Config) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, table in config.model_dump().items() for key, value in table.items()}


def _amounts(config: Config) -> dict[str, Any]:
    """What some keys amount to, by key; None where one has no influence."""
    found = {f"model.{key}": value for key, value in _model(config.model).items()}
    return found | {f"optimizer.{key}": value for key, value in _optimizer(config.optimizer).items()}


def _model(model: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kv_heads": model.kv,
        "head_dim": model.head_size,
        "ffn_hidden": model.ffn,
        "attention_out_bias": model.out_bias,
    }
    if model.block != "parallel":
        found["parallel_norms"] = None
    if model.positions != "rotary":
        found |= {"rotary_fraction": None, "rotary_base": None, "rotary_interleaved": None}
    if model.window is None:
        found["window_pattern"] = None
    return found


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    own = OPTIMIZERS[optimizer.name].own_settings if optimizer.name in OPTIMIZERS else ()
    return {key: None for key in _of_one_optimizer() if key not in own}


def _of_one_optimizer() -> list[str]:
    """Keys that only one optimizer reads."""
    return [key for name in OPTIMIZERS.names() for key in OPTIMIZERS[name].own_settings]


def explain_changes(name: str, changes: Sequence[Change], accepted: Sequence[str]) -> str | None:
    """One paragraph if some changes are not allowed, else None. `name`: what to call the checkpoint."""
    refused = [change for change in changes if change.kind == "refused"]
    if refused:
        return (
            f"the checkpoint {name!r} is of another model: {'; '.join(map(str, refused))}. "
            f"Set {_options(refused)} to go on with it, or train the other model under another --train.name"
        )
    asked = [change for change in changes if change.kind == "asked" and change.key not in accepted]
    if asked:
        keys = ",".join([*accepted, *(change.key for change in asked)])
        return (
            f"this start would not go on as the checkpoint {name!r} was trained: {'; '.join(map(str, asked))}. Samples "
            f"could be trained twice, never or otherwise than before. Set {_options(asked)} to go on as before, or "
            f"accept it with --checkpoint.accept_changes={keys}"
        )
    return None


def _options(changes: Sequence[Change]) -> str:
    given = [c for c in changes if c.saved is not None]
    words = [f"--{c.key}={_shown(c.saved)}" for c in given]
    words += [f"no {c.key}" for c in changes if c.saved is None]
    return ", ".join(words)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return str(value)


def format_changes(changes: Sequence[Change], step: int) -> str:
    """The changes as one line for the terminal."""
    told = [f"{c.key} {_shown(c.saved)} -> {_shown(c.present)}" for c in changes]
    return f"settings changed after step {step}: {'; '.join(told)}"
