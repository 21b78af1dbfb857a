"""Granite 3: multipliers on embeddings, attention scores, residuals and logits."""

from megascale.model.huggingface.llama_like import LlamaLike, Scalar

GRANITE = LlamaLike(
    "granite",
    "GraniteForCausalLM",
    "Granite",
    biases="shared",
    has_mlp_bias=True,
    declares_head_dim=False,
    scalars=(
        Scalar("embedding_multiplier", "embedding_multiplier", 1.0),
        Scalar("residual_multiplier", "residual_multiplier", 1.0),
        Scalar(
            "attention_multiplier",
            "attention_multiplier",
            1.0,
            write=lambda model: model.attention_multiplier or model.head_size**-0.5,
        ),
        Scalar(
            "logit_multiplier",
            "logits_scaling",
            1.0,
            read=lambda divisor: 1 / divisor,
            write=lambda model: 1 / model.logit_multiplier,
        ),
    ),
).make_family()
