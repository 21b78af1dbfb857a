"""Ministral: some layers may have a window."""

from megascale.model.huggingface.layer_rules import list_windows
from megascale.model.huggingface.llama_like import LlamaLike

MINISTRAL = LlamaLike(
    "ministral",
    "MinistralForCausalLM",
    "Ministral",
    kv_heads=8,
    divides_hidden=False,
    layers=list_windows(
        lambda keys, layers: [keys.get_present("sliding_window", default=4096) is not None] * layers,
    ),
).make_family()
