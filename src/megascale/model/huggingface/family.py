"""Description of a Hugging Face model family: how to convert config.json, and which tensors its files hold.

A logical tensor is a parameter under this package's name (core/inventory.py). A file's tensor (`StoredWeight`) may hold
several logical tensors. `split_weight` returns these logical tensors, and `join_weight` makes the file's tensor of
them.
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

_MAX_VALUE_CHARACTERS = 200  # of a key's value in an error message

# model.activation for each GELU of transformers. All variants of "gelu_tanh" are the same formula.
GELU = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The name of transformers that is written for model.activation.
GELU_OUT = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


# Values of [model] settings in a family that does not have the feature: the only ones that it supports.
_DEFAULT_SUPPORTED_VALUES: dict[str, Sequence[Any]] = {
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

# Keys of config.json in any family that do not change the logits, in groups: file, execution, task, text generation.
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
# Keys of config.json in any family that are refused unless they have this value.
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
    """Order of dimensions in which a file stores the entries of a stack (the experts of a layer).

    Attributes:
        shape: shape of an entry of the logical tensor.
        dimensions: for each dimension of a stored entry, the dimensions of the logical entry that it flattens, in
            order.
    """

    shape: tuple[int, ...]
    dimensions: tuple[tuple[int, ...], ...]

    @property
    def _permutation(self) -> list[int]:
        """Dimensions of the logical entry in the order in which they are stored."""
        return [dimension for flattened in self.dimensions for dimension in flattened]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a stored entry."""
        sizes = []
        for flattened in self.dimensions:
            sizes.append(prod(self.shape[dimension] for dimension in flattened))
        return tuple(sizes)

    def to_stored(self, stack: Tensor) -> Tensor:
        """Return the stored form of logical entries [entries, ...]."""
        order = [0, *(dimension + 1 for dimension in self._permutation)]
        return stack.permute(order).reshape(len(stack), *self.stored_shape)

    def to_logical(self, stored: Tensor) -> Tensor:
        """Return the logical form of stored entries [entries, ...]."""
        permutation = self._permutation
        unflattened = stored.view(len(stored), *(self.shape[dimension] for dimension in permutation))
        inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
        return unflattened.permute([0, *(dimension + 1 for dimension in inverse)])


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a Hugging Face file, made of logical tensors.

    Attributes:
        name: name in the file.
        logical_names: logical tensors, concatenated along their first dimension.
        is_transposed: whether the file stores [in, out] instead of [out, in], like GPT-2's Conv1D.
        interleaved_heads: number of heads if the file interleaves the logical tensors head by head, as GPT-NeoX does:
            [head, logical tensor, head size, ...]; 0: no interleaving.
        row_counts: number of rows of each logical tensor; empty if all have the same shape.
        stack_index: index of the stored entry in the first dimensions of the only logical tensor, such as one expert;
            empty if the whole tensor is stored.
        stack_order: order of dimensions of the only logical tensor, a stack; None: the logical order.
    """

    name: str
    logical_names: tuple[str, ...]
    is_transposed: bool = False
    interleaved_heads: int = 0
    row_counts: tuple[int, ...] = ()
    stack_index: tuple[int, ...] = ()
    stack_order: StackOrder | None = None

    def compute_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the stored shape, given the shapes of the logical tensors by name."""
        # Without the dimensions that `stack_index` selects from.
        rows, *columns = shapes[self.logical_names[0]][len(self.stack_index) :]
        if self.stack_order is not None:
            return (rows, *self.stack_order.stored_shape)  # a whole stack: `rows` is the number of entries
        if self.row_counts:
            row_count = sum(self.row_counts)
        else:
            row_count = rows * len(self.logical_names)
        shape = (row_count, *columns)
        return shape[::-1] if self.is_transposed else shape


def list_linear_weights(
    name: str, *logical_layers: str, has_bias: bool = True, is_transposed: bool = False, interleaved_heads: int = 0
) -> list[StoredWeight]:
    """Return the stored weight, and the bias if `has_bias`, of a linear layer or norm.

    Args:
        name: name of the layer in the file, without `.weight`.
        logical_layers: names of the logical layers that it is made of, without `.weight`.
        is_transposed, interleaved_heads: as for `StoredWeight`.
    """
    weights = [
        StoredWeight(
            f"{name}.weight",
            tuple(f"{layer}.weight" for layer in logical_layers),
            is_transposed=is_transposed,
            interleaved_heads=interleaved_heads,
        )
    ]
    if has_bias:
        bias_names = tuple(f"{layer}.bias" for layer in logical_layers)
        weights.append(StoredWeight(f"{name}.bias", bias_names, interleaved_heads=interleaved_heads))
    return weights


def split_weight(weight: StoredWeight, tensor: Tensor) -> dict[str, Tensor]:
    """Return by name the logical tensors that a stored tensor holds, as views if strides allow.

    If the weight has a `stack_index`, the result is this entry of the logical tensor, not the whole tensor.
    """
    if weight.stack_order is not None:
        return {weight.logical_names[0]: weight.stack_order.to_logical(tensor)}
    if weight.is_transposed:
        tensor = tensor.t()
    count = len(weight.logical_names)
    if weight.interleaved_heads:
        by_head = tensor.unflatten(0, (weight.interleaved_heads, count, -1))
        return {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(weight.logical_names)}
    if weight.row_counts:
        logical = tensor.split(weight.row_counts)
    else:
        logical = tensor.chunk(count)
    return dict(zip(weight.logical_names, logical, strict=True))


def join_weight(weight: StoredWeight, tensors_by_name: Mapping[str, Tensor]) -> Tensor:
    """Return the stored tensor, contiguous, of the logical tensors that it holds. The inverse of `split_weight`."""
    if weight.stack_order is not None:
        return weight.stack_order.to_stored(tensors_by_name[weight.logical_names[0]]).contiguous()
    logical = [tensors_by_name[name][weight.stack_index] for name in weight.logical_names]
    if weight.interleaved_heads:
        by_head = [tensor.unflatten(0, (weight.interleaved_heads, -1)) for tensor in logical]
        stored = torch.stack(by_head, dim=1).flatten(0, 2)
    elif len(logical) > 1:
        stored = torch.cat(logical)
    else:
        stored = logical[0]
    if weight.is_transposed:
        stored = stored.t()
    return stored.contiguous()


@dataclass(frozen=True)
class Family:
    """Model family of transformers.

    Attributes:
        name: `model_type` in config.json.
        architecture: class name in config.json.
        prefix: prefix of all tensor names except those of the output head. Files of a model that was saved without its
            head omit the prefix.
        head_name: name of the weight of the logits.
        read_config: converts config.json to keys of [model]. Raises DataError if [model] cannot express a key.
        write_config: converts [model] to keys of config.json, for a model for which `find_faults` returns none.
        find_faults: returns the reasons why the family cannot express a model, one sentence per key.
        list_weights: returns the stored tensors of a model.
        ignored_tensors: regular expression for names of tensors without information, which some files contain.
        ignored_keys: keys of config.json that do not change the logits, in addition to IGNORED_KEYS.
        required_values: keys of config.json that are refused unless they have this value, in addition to
            REQUIRED_VALUES.
    """

    name: str
    architecture: str
    prefix: str
    head_name: str
    read_config: Callable[[ConfigKeys], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    find_faults: Callable[[ModelConfig], list[str]]
    list_weights: Callable[[ModelConfig], list[StoredWeight]]
    ignored_tensors: str
    ignored_keys: frozenset[str] = frozenset()
    required_values: Mapping[str, Any] = field(default_factory=dict)


class ConfigKeys:
    """Reader of a config.json. Errors name the file, the key and its value.

    Attributes:
        values: content of the file.
        source: path of the file, for messages.
        notes: remarks for the user.
        read_names: names of keys that were read. `refuse_unknown_keys` refuses all others.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source
        self.notes: list[str] = []
        self.read_names: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is present and not null, or `default`.

        The keys are synonyms. Raises DataError if two of them have different values.
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

    def get_nullable(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, None if it is null, and `default` if it is missing."""
        self.read_names.add(name)
        return self.values.get(name, default)

    def require_count(self, *names: str) -> int:
        """Return the value of a key with synonyms, like `get`. Raises DataError unless it is a positive integer."""
        value = self.get(*names)
        if value is None:
            raise DataError(f"{self.source} has no {names[0]}; it is not the configuration of a whole model")
        if type(value) is not int or value < 1:
            raise self.make_error(self._find_present_name(names), value, "it must be an integer of at least 1")
        return value

    def require_layers(self, *names: str) -> int:
        """Return the number of layers. Raises DataError above MAX_LAYERS, before memory is allocated per layer."""
        count = self.require_count(*names)
        if count > MAX_LAYERS:
            raise self.make_error(self._find_present_name(names), count, f"at most {MAX_LAYERS} layers are supported")
        return count

    def _find_present_name(self, names: Sequence[str]) -> str:
        """Return the first of these keys that is present and not null."""
        return next(name for name in names if self.values.get(name) is not None)

    def make_error(self, name: str, value: object, reason: str) -> DataError:
        """Return a DataError that names the file, the key and its value, with the reason."""
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
        """Raise DataError for a key that the import has not read and that may change the logits.

        A key that is null is accepted, because transformers writes null for a setting that was left out.
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

    def translate_activation(self, name: str, table: Mapping[str, str], default: str, *synonyms: str) -> str:
        """Return the table's entry for the activation that a key or its synonyms name.

        Raises DataError if the table does not have the activation.

        Args:
            default: value if none of the keys is present.
        """
        value = self.get(name, *synonyms, default=default)
        if value not in table:
            raise self.make_error(name, value, f"this activation is not supported; supported: {', '.join(table)}")
        return table[value]

    def read_dropout(self, *names: str, attention: str) -> float:
        """Return model.dropout, and add a note if training will differ from that of transformers.

        Args:
            names: keys of dropout on embeddings and residual branches.
            attention: key of dropout on attention probabilities, which is not supported.
        """
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
        family: name of the family in the sentences.
        supported: supported values by key of [model].
        allows_unrotated: whether some layers of the family may have no rotary positions.
        allows_rope_by_kind: whether rotary positions may differ between the family's kinds of layers.
    """
    faults = []
    for key, values in {**_DEFAULT_SUPPORTED_VALUES, **supported}.items():
        value = getattr(model, key)
        if value not in values:
            allowed = " or ".join(repr(v) for v in values)
            faults.append(f"model.{key}={value!r}, and {family} only has {allowed}")
    # Specification of a layer with the settings of [model] alone.
    uniform_model = model.model_copy(update={"layer_pattern": "S", "layer_kinds": LayerKinds()})
    common_layer = resolve_layers(uniform_model)[0]
    for letter in sorted(set(model.layer_pattern) & set(model.layer_kinds)):
        layer = resolve_layers(model.resolve_kind(letter))[0]
        # A kind of layer may have no window, but not a window of its own.
        is_window_shared = layer.window in (None, model.window)
        # Replace the settings in which the family's layers may differ. All others must equal those of the common layer.
        mixer = replace(layer.mixer, window=common_layer.mixer.window)
        if (allows_unrotated and mixer.rope is None) or (allows_rope_by_kind and mixer.rope is not None):
            mixer = replace(mixer, rope=common_layer.mixer.rope)
        if not is_window_shared or replace(layer, mixer=mixer) != common_layer:
            settings = model.layer_kinds[letter].model_dump(exclude_none=True)
            faults.append(f"model.layer_kinds.{letter}={settings}, and {family} has no such kinds of layers")
    return faults


def find_head_faults(model: ModelConfig, family: str) -> list[str]:
    """Return the faults for a family without grouped queries in which heads x head size must be the hidden size."""
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
    """Return for each layer whether it has a window that changes the model in transformers.

    A window as long as the training sequence changes the outputs of longer inputs only. With learned positions there
    are no longer inputs, so that such a window has no effect.
    """
    has_effect = model.positions != "learned" or (model.window or 0) < model.sequence_length
    return [has_effect and layer.window is not None for layer in resolve_layers(model)]


def find_window_faults(model: ModelConfig, family: str) -> list[str]:
    """Return the faults for a family without windows."""
    if not any(list_windowed_layers(model)):
        return []
    return [f"model.window={model.window}, and {family} has no sliding window"]
