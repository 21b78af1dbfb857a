"""OLMo 3: OLMo 2 with a window in three of four layers. Only layers without a window have scaled rotary positions."""

from megascale.model.huggingface.layer_rules import make_rope_by_kind_rules, read_window_interval
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
    has_divisible_hidden=False,
    layer_rules=make_rope_by_kind_rules(
        lambda keys, layers: read_window_interval(keys, layers, default=4), (500000.0, 500000.0)
    ),
).make_family()
