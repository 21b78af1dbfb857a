"""OLMo 2: norms after attention and MLP, and norms of queries and keys over all heads."""

from megascale.model.huggingface.llama_like import LlamaLike

OLMO2 = LlamaLike(
    "olmo2",
    "Olmo2ForCausalLM",
    "OLMo 2",
    norm_eps=1e-5,
    biases="shared",
    qk_norm="projection",
    norm_placement="post",
    declares_head_dim=False,
    has_divisible_hidden=False,
).make_family()
