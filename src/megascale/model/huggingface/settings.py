"""Settings of a model on both sides: reading a Hugging Face config.json, and what a family asks of a model of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.config import ModelConfig
from megascale.config.base import DEEP
from megascale.errors import DataError
from megascale.model.huggingface.tensor_names import Weight

_SHOWN = 200  # characters of a value in a message

# Names of the GELU variants in transformers and ours; all that are listed with "gelu_tanh" are the same formula.
GELU = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
GELU_OUT = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


@dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
        name: its `model_type`.
        architecture: the class that config.json names.
        prefix: begins the names of tensors that belong to the model without its head; some files leave it out.
        head: name of the logits' weight there.
        read: config.json to keys of [model]; DataError on what they cannot say.
        write: the reverse, for a model with no faults.
        faults: why a model of ours is not of this family, a sentence for each key; empty if it is.
        weights: its tensors, for a model of ours.
        buffers: tensors that some files hold and that carry nothing, as a regular expression.
    """

    name: str
    architecture: str
    prefix: str
    head: str
    read_config: Callable[[Keys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    faults: Callable[[ModelConfig], list[str]]
    list_weights: Callable[[ModelConfig], list[Weight]]
    buffers: str


class Keys:
    """A config.json; every error names it, the key and its value. `notes` collects what is worth telling a person."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self.notes: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The named key, or another of its names, that is there and not null; DataError if two of them differ."""
        there = [name for name in names if self.values.get(name) is not None]
        for other in there[1:]:
            if self.values[other] != self.values[there[0]]:
                raise self.refuse(
                    other, self.values[other], f"beside {there[0]}={self.values[there[0]]!r}, which means the same"
                )
        return self.values[there[0]] if there else default

    def need(self, *names: str) -> int:
        """A count, as `get`; DataError without any."""
        value = self.get(*names)
        if value is None:
            raise DataError(f"{self.source} has no {names[0]}; it is not the configuration of a whole model")
        if type(value) is not int or value < 1:
            raise self.refuse(next(n for n in names if self.values.get(n) is not None), value, "a count is from 1 on")
        return value

    def layers(self, *names: str) -> int:
        """The number of layers, as `need`; bounded before anything is made for each of them."""
        count = self.need(*names)
        if count > DEEP:
            name = next(n for n in names if self.values.get(n) is not None)
            raise self.refuse(name, count, f"models have up to {DEEP} layers here")
        return count

    def refuse(self, name: str, value: object, why: str) -> DataError:
        """An error to raise: a key whose value has no counterpart here."""
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
        return DataError(f"{self.source} has {name}={shown}: {why}")

    def only(self, name: str, allowed: object, why: str, default: Any = None) -> None:
        """DataError unless the key (or its default) has this value."""
        value = self.get(name, default=default)
        if value != allowed:
            raise self.refuse(name, value, f"{why}; only {name}={allowed!r} can be imported")

    def choice(self, name: str, table: Mapping[str, str], default: str) -> str:
        """The key's value translated; DataError if the table does not have it."""
        value = self.get(name, default=default)
        if value not in table:
            raise self.refuse(name, value, f"there is no such activation here; known: {', '.join(table)}")
        return table[value]

    def dropout(self, *names: str, attention: str) -> float:
        """Dropout of embeddings and residual branches; notes where it cannot be the same in training."""
        rates = {name: float(self.get(name, default=0.0)) for name in names}
        if float(self.get(attention, default=0.0)):
            self.notes.append(f"{attention}={self.values[attention]} is left out: attention has no dropout here")
        if len(set(rates.values())) > 1:
            told = ", ".join(f"{name}={rate}" for name, rate in rates.items())
            self.notes.append(f"{told}: model.dropout={max(rates.values())} stands for all of them")
        return max(rates.values(), default=0.0)

    def rotary(self, fraction: float, base_key: str, fraction_key: str = "partial_rotary_factor") -> dict[str, Any]:
        """Keys of rotary positions, as transformers reads them: `rope_scaling`, without it `rope_parameters`; what
        these do not say from the keys that older files have. A key that it would pass over must say the same.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in ("rope_scaling", "rope_parameters"):
            rope = self.get(name, default={})
            if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
                raise self.refuse(name, rope, "rotary positions that differ between layers cannot be represented here")
            found |= {name: rope} if rope else {}
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self.refuse(f"{name}.rope_type", kind, "scaled rotary positions cannot be represented here")
        name, rope = next(iter(found.items()), ("rope_parameters", {}))
        base = rope.get("rope_theta") or self.get(base_key, default=10000.0)
        share = rope.get("partial_rotary_factor") or self.get(fraction_key, default=fraction)
        for other, values in found.items():
            for key, value in (("rope_theta", base), ("partial_rotary_factor", share)):
                if values.get(key, value) not in (value, None):
                    raise self.refuse(f"{other}.{key}", values[key], f"beside {name}, by which it is {value!r}")
        for key, value in ((base_key, base), ("rope_theta", base), (fraction_key, share)):
            if self.get(key, default=value) != value:
                raise self.refuse(key, self.values[key], f"beside {name}, by which it is {value!r}")
        return {"positions": "rotary", "rotary_base": float(base), "rotary_fraction": float(share)}


def fraction_of(width: int, size: int) -> float:
    """The share of a head of `size` that int(share x size) turns back into `width`."""
    share = width / size
    return share if int(share * size) == width else math.nextafter(share, 2.0)


def rotary_width(model: ModelConfig) -> int:
    """How much of a head rotates."""
    return int(model.head_size * model.rotary_fraction)


def asks(model: ModelConfig, family: str, wanted: Mapping[str, Sequence[Any]]) -> list[str]:
    """A sentence for each key of [model] whose value is not among those wanted."""
    faults = []
    for key, values in wanted.items():
        value = getattr(model, key)
        if value not in values:
            told = " or ".join(repr(v) for v in values)
            faults.append(f"model.{key}={value!r}, and {family} only has {told}")
    return faults


def plain_heads(model: ModelConfig, family: str) -> list[str]:
    """What is wrong for a family whose heads all have keys and values and together are as wide as the model."""
    faults = []
    if model.kv != model.heads:
        faults.append(f"model.kv_heads={model.kv} for model.heads={model.heads}, and {family} has no grouped queries")
    if model.head_size * model.heads != model.hidden:
        faults.append(
            f"model.head_dim={model.head_size} x model.heads={model.heads} is not model.hidden={model.hidden}, "
            f"which {family} takes for granted"
        )
    return faults


def windows(model: ModelConfig) -> list[bool]:
    """Which layers see a window. One as long as the training sequence counts: only learned positions end there."""
    reached = model.positions != "learned" or (model.window or 0) < model.sequence_length
    return [reached and model.layer_window(i) is not None for i in range(model.layers)]


def no_windows(model: ModelConfig, family: str) -> list[str]:
    """What is wrong for a family of full attention."""
    return [f"model.window={model.window}, and {family} has no sliding window"] if any(windows(model)) else []
