"""Seed-OSS: biases on queries, keys and values, and a head size that is not hidden / heads."""

from megascale.model.huggingface.llama_like import LlamaLike

SEED_OSS = LlamaLike(
    "seed_oss",
    "SeedOssForCausalLM",
    "Seed-OSS",
    kv_heads=8,
    head_dim=128,
    biases="separate",
    has_mlp_bias=True,
    dropout_keys=("residual_dropout",),
    has_divisible_hidden=False,
    ignored_keys=frozenset({"pretraining_tp"}),
).make_family()
