"""Ministral: any of the layers may have the window."""

from megascale.model.huggingface.layer_rules import make_listed_window_rules
from megascale.model.huggingface.llama_like import LlamaLike

MINISTRAL = LlamaLike(
    "ministral",
    "MinistralForCausalLM",
    "Ministral",
    kv_heads=8,
    has_divisible_hidden=False,
    layer_rules=make_listed_window_rules(
        lambda keys, layers: [keys.get_nullable("sliding_window", default=4096) is not None] * layers,
    ),
).make_family()
