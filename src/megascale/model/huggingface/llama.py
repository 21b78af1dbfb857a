"""Llama: Llama 2, and Llama 3.1 to 3.3 with scaled rotary positions."""

from megascale.model.huggingface.llama_like import LlamaLike

LLAMA = LlamaLike(
    "llama",
    "LlamaForCausalLM",
    "Llama",
    biases="shared",
    has_mlp_bias=True,
    ignored_keys=frozenset({"pretraining_tp"}),  # changes the order of sums only
).make_family()
