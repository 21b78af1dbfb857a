"""Description of a Hugging Face family, reading of its config.json, and the table of its tensors.

A `StoredWeight` names the logical tensors of which one tensor of a file is made; `split_weight` and `join_weight` are
inverse to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.config.base import MAX_LAYERS
from megascale.config.model_section import LayerKinds
from megascale.core.inventory import resolve_layers
from megascale.errors import DataError

_MAX_VALUE_CHARACTERS = 200  # in a message

# Our names of the GELU variants of transformers; all variants of "gelu_tanh" are the same formula.
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


# Values of settings that most families do not have.
_PLAIN_VALUES: dict[str, Sequence[Any]] = {
    "qk_norm": ["none"],
    "norm_placement": ["pre"],
    "rotary_scaling": [None],
    "mlp": ["dense"],
    "attention_multiplier": [None],
    "attention_softcap": [None],
    "attention_sinks": [False],
    "attention_gate": [False],
    "logit_softcap": [None],
    "embedding_multiplier": [1.0],
    "residual_multiplier": [1.0],
    "logit_multiplier": [1.0],
}

# Keys of config.json of any family that have no effect on the logits, by what they are about.
_FILE_KEYS = """
    model_type architectures transformers_version _name_or_path name_or_path _commit_hash torch_dtype dtype
    tokenizer_class initializer_range unsloth_version unsloth_fixed
"""
_EXECUTION_KEYS = """
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate tie_last_hidden_states
    use_cache cache_implementation gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss attn_implementation
    _attn_implementation _attn_implementation_autoset experts_implementation chunk_size_feed_forward
"""
_TASK_KEYS = """
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout classifier_bias
    classifier_activation
"""
_TEXT_KEYS = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
"""
IGNORED_KEYS = frozenset((_FILE_KEYS + _EXECUTION_KEYS + _TASK_KEYS + _TEXT_KEYS).split())
# Keys of config.json of any family that may have one value only.
REQUIRED_VALUES: dict[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}


@dataclass(frozen=True)
class StackOrder:
    """Order of dimensions in which a file holds the entries of a stack.

    Attributes:
        shape: shape of an entry of the logical tensor.
        dimensions: for each dimension of a stored entry, the dimensions of the logical entry that it joins.
    """

    shape: tuple[int, ...]
    dimensions: tuple[tuple[int, ...], ...]

    @property
    def _permutation(self) -> list[int]:
        return [dimension for joined in self.dimensions for dimension in joined]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a stored entry."""
        return tuple(prod(self.shape[dimension] for dimension in joined) for joined in self.dimensions)

    def to_stored(self, stack: Tensor) -> Tensor:
        """Return the stored form of logical entries [entries, ...]."""
        order = [0, *(dimension + 1 for dimension in self._permutation)]
        return stack.permute(order).reshape(len(stack), *self.stored_shape)

    def to_logical(self, stored: Tensor) -> Tensor:
        """Return the logical form of stored entries [entries, ...]."""
        permutation = self._permutation
        split = stored.view(len(stored), *(self.shape[dimension] for dimension in permutation))
        inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
        return split.permute([0, *(dimension + 1 for dimension in inverse)])


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a Hugging Face file, made of logical tensors.

    Attributes:
        name: name in the file.
        parts: its logical tensors, stacked along their first dimension; of one shape unless `rows` says otherwise.
        transposed: stored as [in, out], like GPT-2's Conv1D.
        heads: above 0, the parts are interleaved head by head (GPT-NeoX): [head, part, head size, ...].
        rows: rows of each part, if the parts differ in them.
        index: entry of the first dimensions of its only part that is stored: one expert of a stack.
        order: order of dimensions of its only part, a stack, if the file has another one.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    heads: int = 0
    rows: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    order: StackOrder | None = None

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the stored shape, given the shapes of the logical tensors."""
        rows, *columns = shapes[self.parts[0]][len(self.index) :]
        if self.order is not None:
            return (rows, *self.order.stored_shape)
        stacked = (sum(self.rows) or rows * len(self.parts), *columns)
        return stacked[::-1] if self.transposed else stacked


def linear_weights(
    name: str, *parts: str, bias: bool = True, transposed: bool = False, heads: int = 0
) -> list[StoredWeight]:
    """Return weight and bias of a linear layer; `parts` are logical names without `.weight`."""
    weights = [StoredWeight(f"{name}.weight", tuple(f"{part}.weight" for part in parts), transposed, heads)]
    if bias:
        weights.append(StoredWeight(f"{name}.bias", tuple(f"{part}.bias" for part in parts), heads=heads))
    return weights


def split_weight(weight: StoredWeight, tensor: Tensor) -> dict[str, Tensor]:
    """Return the logical tensors of a stored one by name, or the entries of them, as views if strides allow."""
    if weight.order is not None:
        return {weight.parts[0]: weight.order.to_logical(tensor)}
    tensor = tensor.t() if weight.transposed else tensor
    count = len(weight.parts)
    if weight.heads:
        by_head = tensor.unflatten(0, (weight.heads, count, -1))
        return {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(weight.parts)}
    parts = tensor.split(weight.rows) if weight.rows else tensor.chunk(count)
    return dict(zip(weight.parts, parts, strict=True))


def join_weight(weight: StoredWeight, logical: Mapping[str, Tensor]) -> Tensor:
    """Return the stored tensor of logical ones, contiguous. The inverse of `split_weight`."""
    if weight.order is not None:
        return weight.order.to_stored(logical[weight.parts[0]]).contiguous()
    parts = [logical[name][weight.index] for name in weight.parts]
    if weight.heads:
        tensor = torch.stack([part.unflatten(0, (weight.heads, -1)) for part in parts], dim=1).flatten(0, 2)
    else:
        if len(parts) > 1:
            tensor = torch.cat(parts)
        else:
            tensor = parts[0]
    return (tensor.t() if weight.transposed else tensor).contiguous()


@dataclass(frozen=True)
class Family:
    """Model family of transformers.

    Attributes:
        name: `model_type` in config.json.
        architecture: class name in config.json.
        prefix: prefix of the tensors of the model without its head; some files omit it.
        head: name of the weight of the logits.
        read_config: converts config.json to keys of [model]; raises DataError if they cannot express it.
        write_config: the reverse, for a model without faults.
        find_faults: reasons why a model is not of this family, one sentence per key; empty if it is.
        list_weights: the tensors of a model.
        buffers: regular expression of tensors that some files contain and that have no information.
        ignored_keys: keys of config.json that have no effect on the logits, in addition to those of all families.
        required_values: keys of config.json that may have one value only, in addition to those of all families.
    """

    name: str
    architecture: str
    prefix: str
    head: str
    read_config: Callable[[ConfigKeys], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    find_faults: Callable[[ModelConfig], list[str]]
    list_weights: Callable[[ModelConfig], list[StoredWeight]]
    buffers: str
    ignored_keys: frozenset[str] = frozenset()
    required_values: Mapping[str, Any] = field(default_factory=dict)


class ConfigKeys:
    """Reader of a config.json. Errors name the file, the key and its value.

    Attributes:
        notes: remarks for the user.
        read_names: names that were asked for, so that the other keys can be refused.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source
        self.notes: list[str] = []
        self.read_names: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of a key that has one of these names and is not null, else `default`.

        Raises DataError if two names have different values.
        """
        self.read_names.update(names)
        present = [name for name in names if self.values.get(name) is not None]
        if not present:
            return default
        value = self.values[present[0]]
        for name in present[1:]:
            if self.values[name] != value:
                raise self.make_error(name, self.values[name], f"but {present[0]}={value!r} has the same meaning")
        return value

    def get_present(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, None if it is null, and `default` if it is missing."""
        self.read_names.add(name)
        return self.values.get(name, default)

    def require_count(self, *names: str) -> int:
        """Return a positive integer like `get`. Raises DataError if it is missing."""
        value = self.get(*names)
        if value is None:
            raise DataError(f"{self.source} has no {names[0]}; it is not the configuration of a whole model")
        if type(value) is not int or value < 1:
            name = next(name for name in names if self.values.get(name) is not None)
            raise self.make_error(name, value, "it must be an integer of at least 1")
        return value

    def require_layers(self, *names: str) -> int:
        """Return the number of layers, bounded before anything is allocated for each layer."""
        count = self.require_count(*names)
        if count > MAX_LAYERS:
            name = next(name for name in names if self.values.get(name) is not None)
            raise self.make_error(name, count, f"at most {MAX_LAYERS} layers are supported")
        return count

    def make_error(self, name: str, value: object, reason: str) -> DataError:
        """Return the error for a key whose value is not supported."""
        text = repr(value)
        if len(text) > _MAX_VALUE_CHARACTERS:
            text = f"{text[:_MAX_VALUE_CHARACTERS]} ..."
        return DataError(f"{self.source} has {name}={text}: {reason}")

    def require_value(self, name: str, allowed: object, reason: str, default: Any = None) -> None:
        """Raise DataError unless the key (or its default) has the allowed value."""
        value = self.get(name, default=default)
        if value != allowed:
            raise self.make_error(name, value, f"{reason}; only {name}={allowed!r} can be imported")

    def refuse_unknown_keys(self, family: Family) -> None:
        """Raise DataError for a key that the import has not read and that may have an effect on the logits.

        A key that is null says nothing: transformers writes it for a setting that was left out.
        """
        for name, allowed in (REQUIRED_VALUES | dict(family.required_values)).items():
            self.require_value(name, allowed, f"it has no other meaning in {family.name}", default=allowed)
        accepted_names = self.read_names | IGNORED_KEYS | family.ignored_keys
        for name in sorted(set(self.values) - accepted_names):
            if self.values[name] is not None:
                raise self.make_error(
                    name,
                    self.values[name],
                    f"this key of {family.name} is not known, so the model may compute something else than its "
                    "import; remove the key if it has no effect on the logits",
                )

    def translate(self, name: str, table: Mapping[str, str], default: str, *synonyms: str) -> str:
        """Return the table's entry for the value of a key, which may have other names. Raises DataError without one."""
        value = self.get(name, *synonyms, default=default)
        if value not in table:
            raise self.make_error(name, value, f"this activation is not supported; supported: {', '.join(table)}")
        return table[value]

    def read_dropout(self, *names: str, attention: str) -> float:
        """Return the dropout of embeddings and residual branches, with a note if training will differ."""
        rates = {name: float(self.get(name, default=0.0)) for name in names}
        if float(self.get(attention, default=0.0)):
            self.notes.append(f"{attention}={self.values[attention]} is ignored: attention has no dropout")
        if len(set(rates.values())) > 1:
            values = ", ".join(f"{name}={rate}" for name, rate in rates.items())
            self.notes.append(f"{values}: model.dropout={max(rates.values())} replaces all of them")
        return max(rates.values(), default=0.0)


def find_unsupported_values(
    model: ModelConfig,
    family: str,
    supported: Mapping[str, Sequence[Any]],
    *,
    allows_unrotated: bool = False,
    allows_rope_by_kind: bool = False,
) -> list[str]:
    """Return a sentence for each key of [model] whose value the family does not support.

    Args:
        allows_unrotated: whether layers of the family may be without rotary positions.
        allows_rope_by_kind: whether layers of the family may have rotary positions of their own.
    """
    faults = []
    for key, values in {**_PLAIN_VALUES, **supported}.items():
        value = getattr(model, key)
        if value not in values:
            allowed = " or ".join(repr(v) for v in values)
            faults.append(f"model.{key}={value!r}, and {family} only has {allowed}")
    common = resolve_layers(model.model_copy(update={"layer_pattern": "S", "layer_kinds": LayerKinds()}))[0]
    for letter in sorted(set(model.layer_pattern) & set(model.layer_kinds)):
        kind = resolve_layers(model.resolve_kind(letter))[0]
        is_window_shared = kind.window in (None, model.window)
        mixer = replace(kind.mixer, window=common.mixer.window)
        if (allows_unrotated and mixer.rope is None) or (allows_rope_by_kind and mixer.rope is not None):
            mixer = replace(mixer, rope=common.mixer.rope)
        if not is_window_shared or replace(kind, mixer=mixer) != common:
            settings = model.layer_kinds[letter].model_dump(exclude_none=True)
            faults.append(f"model.layer_kinds.{letter}={settings}, and {family} has no such kinds of layers")
    return faults


def find_head_faults(model: ModelConfig, family: str) -> list[str]:
    """Return faults for a family without grouped queries whose heads together are as wide as the model."""
    faults = []
    if model.num_kv_heads != model.heads:
        faults.append(
            f"model.kv_heads={model.num_kv_heads} for model.heads={model.heads}, and {family} has no grouped queries"
        )
    if model.head_size * model.heads != model.hidden:
        faults.append(
            f"model.head_dim={model.head_size} x model.heads={model.heads} is not model.hidden={model.hidden}, "
            f"which {family} requires"
        )
    return faults


def list_windowed_layers(model: ModelConfig) -> list[bool]:
    """Return for each layer whether it has a window.

    A window as long as the training sequence counts, except with learned positions, which end there.
    """
    has_effect = model.positions != "learned" or (model.window or 0) < model.sequence_length
    return [has_effect and layer.window is not None for layer in resolve_layers(model)]


def find_window_faults(model: ModelConfig, family: str) -> list[str]:
    """Return the faults for a family of full attention."""
    if not any(list_windowed_layers(model)):
        return []
    return [f"model.window={model.window}, and {family} has no sliding window"]
