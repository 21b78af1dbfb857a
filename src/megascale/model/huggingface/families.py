"""The families that can be imported and exported, and which of them a model of ours is of."""

from __future__ import annotations

from megascale.config import ModelConfig
from megascale.core.inventory import logical_shapes
from megascale.errors import ConfigError
from megascale.model.huggingface.gpt2 import GPT2
from megascale.model.huggingface.gpt_neox import GPT_NEOX
from megascale.model.huggingface.gptj import GPTJ
from megascale.model.huggingface.llama import LLAMA, MISTRAL, QWEN2
from megascale.model.huggingface.settings import Family

FAMILIES = {family.name: family for family in (GPT2, GPTJ, GPT_NEOX, LLAMA, MISTRAL, QWEN2)}


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The named family, or the one that this model is of; ConfigError naming the keys that stand in the way.

    Of several, the one that has the fewest tensors which the model has not (biases, written as zeros).
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"--family={name} is not a family that can be exported; known: {', '.join(FAMILIES)}")
    fits = [family for family in FAMILIES.values() if not family.faults(model)]
    if name is None:
        if fits:
            own = logical_shapes(model)
            lacking = {f.name: sum(part not in own for w in f.list_weights(model) for part in w.parts) for f in fits}
            return min(fits, key=lambda family: lacking[family.name])
        nearest = min(FAMILIES.values(), key=lambda family: len(family.faults(model)))
        raise ConfigError(
            f"this model is of no family of transformers that can be exported; the nearest is {nearest.name}: "
            f"{'; '.join(nearest.faults(model))}"
        )
    faults = FAMILIES[name].faults(model)
    if faults:
        hint = f"it can be exported as {' or '.join(f.name for f in fits)}" if fits else "no other family takes it"
        raise ConfigError(f"this model cannot be exported as {name}: {'; '.join(faults)}. Of the others, {hint}")
    return FAMILIES[name]
