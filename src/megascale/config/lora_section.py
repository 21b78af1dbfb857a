"""Table [train.lora]: low-rank adapters of the layers' matrices, which are trained instead of the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megascale.config.base import Section


def _split_names(value: Any) -> Any:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): y = W x + alpha / rank * B A x, where only A and B are trained."""

    rank: int = Field(ge=1, le=65536, description="rank of each adapter")
    alpha: float = Field(16.0, gt=0, description="an adapter's output is multiplied by alpha / rank")
    targets: Annotated[list[str], BeforeValidator(_split_names)] = Field(
        default_factory=list,
        description="matrices with adapters by their names within a layer, such as attention.query,mlp.out; default: "
        "all matrices of the layers",
    )
