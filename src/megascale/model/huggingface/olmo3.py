"""OLMo 3: OLMo 2 with a window in three of four layers, and scaled rotary positions in the others only."""

from megascale.model.huggingface.layer_rules import count_from_pattern, rope_by_kind
from megascale.model.huggingface.llama_like import LlamaLike

OLMO3 = LlamaLike(
    "olmo3",
    "Olmo3ForCausalLM",
    "OLMo 3",
    norm_eps=1e-5,
    biases="shared",
    qk_norm="projection",
    norm_placement="post",
    declares_head_dim=False,
    divides_hidden=False,
    layers=rope_by_kind(lambda keys, layers: count_from_pattern(keys, layers, default=4), (500000.0, 500000.0)),
).make_family()
