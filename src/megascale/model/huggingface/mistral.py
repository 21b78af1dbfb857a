"""Mistral, and Mistral Nemo, whose head size is not hidden / heads: all layers have one window, or none."""

from megascale.model.huggingface.layer_rules import make_shared_window_rules
from megascale.model.huggingface.llama_like import LlamaLike

MISTRAL = LlamaLike(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    kv_heads=8,
    has_divisible_hidden=False,
    layer_rules=make_shared_window_rules(4096),
).make_family()
