"""OLMo 2: norms on what attention and MLP add, and of queries and keys over their whole projections."""

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
    divides_hidden=False,
).make_family()
