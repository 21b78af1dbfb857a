"""Families that can be imported and exported, and the choice of a family for a model."""

from __future__ import annotations

from collections.abc import Mapping

from megascale.config import ModelConfig
from megascale.core.inventory import logical_shapes
from megascale.errors import ConfigError
from megascale.model.huggingface.cohere import COHERE, COHERE2
from megascale.model.huggingface.family import Family
from megascale.model.huggingface.gemma import GEMMA2, GEMMA3
from megascale.model.huggingface.gpt2 import GPT2
from megascale.model.huggingface.gpt_neox import GPT_NEOX
from megascale.model.huggingface.gpt_oss import GPT_OSS
from megascale.model.huggingface.gptj import GPTJ
from megascale.model.huggingface.granite import GRANITE
from megascale.model.huggingface.llama import LLAMA
from megascale.model.huggingface.ministral import MINISTRAL
from megascale.model.huggingface.mistral import MISTRAL
from megascale.model.huggingface.mixtral import MIXTRAL
from megascale.model.huggingface.olmo2 import OLMO2
from megascale.model.huggingface.olmo3 import OLMO3
from megascale.model.huggingface.phi3 import PHI3
from megascale.model.huggingface.qwen import QWEN2, QWEN3
from megascale.model.huggingface.qwen_moe import QWEN3_MOE
from megascale.model.huggingface.seed_oss import SEED_OSS
from megascale.model.huggingface.smollm3 import SMOLLM3

# If several families fit a model equally well, export uses the first of them.
_ORDERED_FAMILIES = [
    GPT2, GPTJ, GPT_NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, SEED_OSS, MINISTRAL,
    COHERE, COHERE2, GRANITE, OLMO3, GEMMA2, GEMMA3, PHI3, MIXTRAL, QWEN3_MOE, GPT_OSS,
]  # fmt: skip
FAMILIES = {family.name: family for family in _ORDERED_FAMILIES}


def choose_family(model: ModelConfig, name: str | None = None) -> Family:
    """Return the family of this name, or the best family for a model.

    The best family has the fewest tensors that the model lacks (biases, written as zeros). Raises ConfigError naming
    the keys that prevent the export.
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"--family={name} cannot be exported; choose among {', '.join(FAMILIES)}")
    fitting = [family for family in FAMILIES.values() if not family.find_faults(model)]
    if name is None:
        if fitting:
            shapes = logical_shapes(model)
            return min(fitting, key=lambda family: _count_missing_tensors(family, model, shapes))
        nearest = min(FAMILIES.values(), key=lambda family: len(family.find_faults(model)))
        raise ConfigError(
            f"no family of transformers fits this model; the nearest is {nearest.name}: "
            f"{'; '.join(nearest.find_faults(model))}"
        )
    faults = FAMILIES[name].find_faults(model)
    if faults:
        if fitting:
            hint = f"it can be exported as {' or '.join(family.name for family in fitting)}"
        else:
            hint = "no other family fits"
        raise ConfigError(f"this model cannot be exported as {name}: {'; '.join(faults)}; {hint}")
    return FAMILIES[name]


def _count_missing_tensors(family: Family, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many logical tensors of the family a model with these `shapes` lacks."""
    count = 0
    for weight in family.list_weights(model):
        for logical_name in weight.logical_names:
            if logical_name not in shapes:
                count += 1
    return count
