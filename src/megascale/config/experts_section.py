"""Table [model.experts]: mixture of experts, for layers with model.mlp=experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import MAX_COUNT, MAX_LAYERS, Section


class ExpertsConfig(Section):
    """Mixture of experts: a router sends each token to a few of many MLPs. No token is dropped."""

    number: int = Field(8, ge=1, le=65_536, description="experts per layer")
    top_k: int = Field(2, ge=1, le=65_536, description="experts per token")
    width: int | None = Field(None, ge=1, le=MAX_COUNT, description="width inside an expert; default: model.ffn_hidden")
    dense_layers: int = Field(
        0, ge=0, le=MAX_LAYERS, description="first layers that have a dense MLP of model.ffn_hidden instead"
    )
    shared_width: int = Field(
        0, ge=0, le=MAX_COUNT, description="width of a dense MLP that every token passes, next to its experts; 0: none"
    )
    shared_gate: bool = Field(False, description="scale the shared MLP by a sigmoid of the token (Qwen2-MoE)")
    biases: bool = Field(
        False, description="biases on the router's logits and on both projections of each expert (gpt-oss)"
    )
    scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="function from the router's logits to the experts' scores, in float32"
    )
    normalize: Literal["none", "selected"] = Field(
        "selected",
        description="none: a token's weights are its scores; selected: the scores of its experts divided by their sum, "
        "which for softmax equals a softmax after the selection",
    )
    scaling: float = Field(1.0, gt=0, description="factor of the weights, after normalisation")
    groups: int = Field(1, ge=1, le=65_536, description="groups of consecutive experts")
    group_limit: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="groups from which a token takes its experts: those whose two best scores have the largest sum; "
        "default: the one group",
    )
    bias_rate: float = Field(
        0.0,
        ge=0,
        description="balance without a loss: after each step the bias of an expert that the global batch chose too "
        "rarely rises by this much, and that of others falls; the bias affects the selection only. 0: no bias",
    )
    sequence_loss: float = Field(
        0.0,
        ge=0,
        description="coefficient of the balance loss of each sequence (DeepSeek-V3), averaged over the global batch",
    )
    z_loss: float = Field(
        0.0, ge=0, description="coefficient of the squared log-sum-exp of the logits, averaged over the global batch"
    )

    @model_validator(mode="after")
    def _check_selection(self) -> ExpertsConfig:
        """Raise ValueError unless the selection is possible."""
        if self.top_k > self.number:
            raise ValueError(
                f"model.experts.top_k={self.top_k} is more than model.experts.number={self.number}; lower top_k to at "
                f"most {self.number}"
            )
        if self.shared_gate and not self.shared_width:
            raise ValueError(
                "model.experts.shared_gate=true has no effect without a shared MLP; set model.experts.shared_width, "
                "or shared_gate=false"
            )
        if self.biases and self.shared_width:
            raise ValueError(
                f"model.experts.biases=true with model.experts.shared_width={self.shared_width}: shared MLPs have no "
                "biases; set biases=false or shared_width=0"
            )
        if self.number % self.groups:
            raise ValueError(
                f"model.experts.groups={self.groups} does not divide model.experts.number={self.number}; choose a "
                "divisor"
            )
        if self.group_limit is None:
            if self.groups > 1:
                raise ValueError(
                    f"model.experts.groups={self.groups} has no effect without model.experts.group_limit; set "
                    "group_limit, or remove groups"
                )
            return self
        if self.group_limit > self.groups:
            raise ValueError(
                f"model.experts.group_limit={self.group_limit} is more than model.experts.groups={self.groups}; lower "
                f"group_limit to at most {self.groups}"
            )
        reachable = self.group_limit * (self.number // self.groups)
        if reachable < self.top_k:
            raise ValueError(
                f"model.experts.group_limit={self.group_limit} leaves {reachable} experts per token, fewer than "
                f"model.experts.top_k={self.top_k}; raise group_limit or lower top_k"
            )
        return self
