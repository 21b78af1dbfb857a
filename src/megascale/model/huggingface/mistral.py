"""Mistral and Mistral Nemo (heads of their own size): one window for all layers, or none."""

from megascale.model.huggingface.layer_rules import share_window
from megascale.model.huggingface.llama_like import LlamaLike

MISTRAL = LlamaLike(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    kv_heads=8,
    divides_hidden=False,
    layers=share_window(4096),
).make_family()
