"""Table [model.rotary_scaling]: frequencies of rotary positions for contexts longer than the original one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import MAX_COUNT, Section

# Required and optional keys by method.
REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("factor", "original_length"),
    "longrope": ("original_length", "short_factors", "long_factors"),
}
_OPTIONAL_KEYS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "is_range_rounded"),
    "longrope": ("attention_factor",),
}


class RotaryScaling(Section):
    """Scaling of rotary positions. The method decides which keys are required and allowed."""

    method: Literal["none", "linear", "llama3", "yarn", "longrope"] = Field(
        description="linear: divides all frequencies by factor; llama3: low frequencies only (Llama 3.1); yarn: low "
        "frequencies only, and scales attention (Peng et al. 2023); longrope: divides each frequency by its own "
        "factor, which depends on the length of the input (Phi-3); none: in a kind of layer, no scaling"
    )
    factor: float | None = Field(None, ge=1, description="factor by which positions are stretched")
    original_length: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="context length in tokens before the extension"
    )
    low_frequency_factor: float | None = Field(
        None, gt=0, description="turns in the original context below which a frequency is divided by factor"
    )
    high_frequency_factor: float | None = Field(
        None, gt=0, description="turns in the original context above which a frequency is unchanged"
    )
    beta_fast: float | None = Field(None, gt=0, description="yarn: turns above which a frequency is unchanged")
    beta_slow: float | None = Field(None, gt=0, description="yarn: turns below which a frequency is divided by factor")
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="yarn, longrope: factor of rotated queries and keys; default: 0.1 ln(factor) + 1 for yarn, else 1",
    )
    is_range_rounded: bool | None = Field(
        None, description="yarn: whether the range between the betas is rounded to whole frequencies; default: true"
    )
    short_factors: tuple[float, ...] | None = Field(
        None, description="longrope: divisor of each frequency for inputs of at most original_length tokens"
    )
    long_factors: tuple[float, ...] | None = Field(
        None, description="longrope: divisor of each frequency for longer inputs"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RotaryScaling:
        name = f"model.rotary_scaling of method {self.method}"
        required = REQUIRED_KEYS[self.method]
        allowed = (*required, *_OPTIONAL_KEYS.get(self.method, ()))
        for key, value in self:
            if key in required and value is None:
                raise ValueError(f"{name} has no {key}; set it, as config.json of the original model does")
            if key != "method" and key not in allowed and value is not None:
                raise ValueError(
                    f"{name} has {key}={value}, which has no effect; remove it (keys: {', '.join(allowed)})"
                )
        for key in ("short_factors", "long_factors"):
            for divisor in getattr(self, key) or ():
                if divisor <= 0:
                    raise ValueError(f"{name} has {divisor} among {key}; give positive factors")
        self._check_range("low_frequency_factor", self.low_frequency_factor, self.high_frequency_factor)
        self._check_range("beta_slow", self.beta_slow, self.beta_fast)
        return self

    @staticmethod
    def _check_range(key: str, low: float | None, high: float | None) -> None:
        """Raise ValueError unless the lower end of a range is below the upper end."""
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"model.rotary_scaling.{key}={low} is not below {high}, the other end of the range; swap the two values"
            )
