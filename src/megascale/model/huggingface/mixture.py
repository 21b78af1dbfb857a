"""Families with experts: a Llama-like family whose feed-forwards are mixtures of experts.

Files may store the experts of a layer one by one. The logical tensors `mlp.experts.in.weight` and
`mlp.experts.out.weight` stack all experts of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale.config import ModelConfig
from megascale.config.experts_section import ExpertsConfig
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.huggingface.family import ConfigKeys, Family, StoredWeight, list_linear_weights
from megascale.model.huggingface.llama_like import LlamaLike

# Keys of [model.experts] that change training only, so that every family supports all their values.
_TRAINING_SETTINGS = ("sequence_loss", "z_loss")


@dataclass(frozen=True)
class Mixture:
    """Description of a family with experts.

    Attributes:
        base: description of the family except for its feed-forwards.
        experts_module: name in the file of the module that holds the experts of a layer.
        matrix_names: names in the file of an expert's gate, up and down matrices.
        read: returns keys of [model.experts], given config.json.
        write: returns keys of config.json for a model, in addition to those of the base.
        settings: keys of [model.experts] that config.json can express. All others must have their defaults.
        required_settings: keys of [model.experts] that have only this value in the family.
        list_experts: returns the router and the experts of one layer, given the name of the module in the file, the
            logical name of the feed-forward, its specification and the hidden size. None: the file stores experts one
            by one.
    """

    base: LlamaLike
    experts_module: str
    matrix_names: tuple[str, str, str]
    read: Callable[[ConfigKeys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    settings: tuple[str, ...]
    required_settings: Mapping[str, Any] = field(default_factory=dict)
    list_experts: Callable[[str, str, ExpertsSpec, int], list[StoredWeight]] | None = None

    def make_family(self) -> Family:
        """Return the family for import and export."""
        family = self.base.make_family()
        return replace(
            family,
            read_config=self.read_config,
            write_config=self.write_config,
            find_faults=self.find_faults,
            list_weights=self.list_weights,
        )

    def read_config(self, keys: ConfigKeys) -> dict[str, Any]:
        """See Family.read_config."""
        model = self.base.read_config(keys) | {"mlp": "experts", "experts": self.read(keys)}
        coefficient = keys.get("router_aux_loss_coef", default=0.0)
        if keys.get("output_router_logits", default=False) and coefficient:
            keys.notes.append(
                f"router_aux_loss_coef={coefficient} is ignored: it balances each micro-batch; balance the global "
                "batch with model.experts.bias_rate or sequence_loss"
            )
        return model

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """See Family.write_config."""
        routing = {"num_experts_per_tok": model.expert_settings.top_k, "output_router_logits": False}
        return self.base.write_config(model) | routing | self.write(model)

    def find_faults(self, model: ModelConfig) -> list[str]:
        """See Family.find_faults."""
        faults = self.base.find_faults(model)
        defaults = ExpertsConfig()
        for key in ExpertsConfig.model_fields:
            value = getattr(model.expert_settings, key)
            expected = self.required_settings.get(key, getattr(defaults, key))
            if key in (*self.settings, *_TRAINING_SETTINGS) or value == expected:
                continue
            if key in self.required_settings:
                faults.append(f"model.experts.{key}={value!r}, and {self.base.title} only has {expected!r}")
                continue
            # By default experts are as wide as a dense feed-forward.
            if key != "width" or value != model.ffn:
                faults.append(f"model.experts.{key}={value!r}, which {self.base.title} does not have")
        return faults

    def list_weights(self, model: ModelConfig) -> list[StoredWeight]:
        """See Family.list_weights."""
        weights = self.base.list_weights(model)
        for index, spec in enumerate(resolve_layers(model)):
            if not isinstance(spec.feed_forward, ExpertsSpec):
                continue
            # Replace the weights of the dense feed-forward by those of the experts, at the same place of the list.
            dense_prefix = f"model.layers.{index}.mlp."
            position = [weight.name.startswith(dense_prefix) for weight in weights].index(True)
            weights = [weight for weight in weights if not weight.name.startswith(dense_prefix)]
            weights[position:position] = self._list_layer(
                f"model.layers.{index}.{self.experts_module}", f"layers.{index}.mlp", spec.feed_forward, model.hidden
            )
        return weights

    def _list_layer(self, hf_name: str, name: str, spec: ExpertsSpec, hidden: int) -> list[StoredWeight]:
        """Return the router and the experts of one layer."""
        if self.list_experts is not None:
            return self.list_experts(hf_name, name, spec, hidden)
        weights = list_linear_weights(f"{hf_name}.gate", f"{name}.router", has_bias=False)
        gate, up, down = self.matrix_names
        input_stack = (f"{name}.experts.in.weight",)
        output_stack = (f"{name}.experts.out.weight",)
        for expert in range(spec.settings.number):
            hf_expert = f"{hf_name}.experts.{expert}"
            weights.append(StoredWeight(f"{hf_expert}.{gate}.weight", input_stack, stack_index=(expert, 0)))
            weights.append(StoredWeight(f"{hf_expert}.{up}.weight", input_stack, stack_index=(expert, 1)))
        for expert in range(spec.settings.number):
            hf_expert = f"{hf_name}.experts.{expert}"
            weights.append(StoredWeight(f"{hf_expert}.{down}.weight", output_stack, stack_index=(expert,)))
        return weights
