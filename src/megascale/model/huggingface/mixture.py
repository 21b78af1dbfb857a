"""Families of experts: a Llama-like family whose feed-forwards are experts, stored one by one in files.

Import stacks the experts of a layer into two logical tensors, `mlp.experts.in.weight` and `mlp.experts.out.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale.config import ModelConfig
from megascale.config.experts_section import ExpertsConfig
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.huggingface.family import ConfigKeys, Family, StoredWeight, linear_weights
from megascale.model.huggingface.llama_like import LlamaLike

# Settings that change training only, which any family may have.
_TRAINING_SETTINGS = ("sequence_loss", "z_loss")


@dataclass(frozen=True)
class Mixture:
    """Description of a family of experts.

    Attributes:
        base: everything but the feed-forwards.
        module: name of a layer's feed-forward of experts in the file.
        names: names of an expert's matrices in the file: gate, up, down.
        read: keys of [model] that config.json gives, beyond those of the base.
        write: keys of config.json, the reverse.
        settings: keys of [model.experts] that the family has; all others must have their defaults.
        required: keys of [model.experts] that have one value in the family.
        list_experts: returns the router and the experts of one layer, given the layer's name in the file, ours, its
            specification and the width of the model; None: experts are stored one by one, by `names`.
    """

    base: LlamaLike
    module: str
    names: tuple[str, str, str]
    read: Callable[[ConfigKeys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    settings: tuple[str, ...]
    required: Mapping[str, Any] = field(default_factory=dict)
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
        default, settings = ExpertsConfig(), model.expert_settings
        for key in ExpertsConfig.model_fields:
            value = getattr(settings, key)
            expected = self.required.get(key, getattr(default, key))
            if key in (*self.settings, *_TRAINING_SETTINGS) or value == expected:
                continue
            if key in self.required:
                faults.append(f"model.experts.{key}={value!r}, and {self.base.title} only has {expected!r}")
                continue
            if key != "width" or value != model.ffn:
                faults.append(f"model.experts.{key}={value!r}, which {self.base.title} does not have")
        return faults

    def list_weights(self, model: ModelConfig) -> list[StoredWeight]:
        """See Family.list_weights."""
        weights = self.base.list_weights(model)
        for index, spec in enumerate(resolve_layers(model)):
            if not isinstance(spec.feed_forward, ExpertsSpec):
                continue
            dense, hf_layer = f"model.layers.{index}.mlp.", f"model.layers.{index}.{self.module}"
            first = next(i for i, weight in enumerate(weights) if weight.name.startswith(dense))
            weights = [weight for weight in weights if not weight.name.startswith(dense)]
            weights[first:first] = self._list_layer(hf_layer, f"layers.{index}.mlp", spec.feed_forward, model.hidden)
        return weights

    def _list_layer(self, hf_name: str, name: str, spec: ExpertsSpec, hidden: int) -> list[StoredWeight]:
        """Return the router and the experts of one layer."""
        if self.list_experts is not None:
            return self.list_experts(hf_name, name, spec, hidden)
        weights = linear_weights(f"{hf_name}.gate", f"{name}.router", bias=False)
        gate, up, down = self.names
        inputs, outputs = (f"{name}.experts.in.weight",), (f"{name}.experts.out.weight",)
        for expert in range(spec.settings.number):
            stem = f"{hf_name}.experts.{expert}"
            weights.append(StoredWeight(f"{stem}.{gate}.weight", inputs, index=(expert, 0)))
            weights.append(StoredWeight(f"{stem}.{up}.weight", inputs, index=(expert, 1)))
        for expert in range(spec.settings.number):
            weights.append(StoredWeight(f"{hf_name}.experts.{expert}.{down}.weight", outputs, index=(expert,)))
        return weights
