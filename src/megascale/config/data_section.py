"""The section [data]: where tokens come from and how they are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megascale.config.base import MAX_COUNT, Section, expand_home


class DataConfig(Section):
    """Where tokens come from."""

    train: list[str] = Field(
        default_factory=list,
        description="token files (path without .bin/.idx), or files and folders of jsonl, parquet or text that are "
        "tokenised on the fly; more than one makes a blend",
    )
    weights: list[float] | None = Field(
        None, description="shares of the samples, one a file, in any unit; default: every window once an epoch"
    )
    valid: str | None = Field(None, description="held-out token file (path without .bin/.idx)")
    tokenizer: str | None = Field(None, description="tokenizer.json; default: the one beside the first train file")
    shuffle: bool = Field(True, description="draw samples in a random order that is a pure function of train.seed")
    shuffle_tokens: int = Field(
        1 << 20,
        ge=1,
        le=MAX_COUNT * 1000,
        description="on the fly: windows are shuffled within runs of so many tokens of shuffled text",
    )
    text_key: str = Field("text", description="on the fly: where jsonl records and parquet rows have their text")
    loader: Literal["auto", "host", "local"] = Field(
        "auto",
        description="host: one process a host reads ahead into shared memory for all its ranks; local: each rank reads "
        "for itself; auto: host on GPUs, and where ranks of a host share samples or text is tokenised on the fly",
    )
    loader_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="on the fly: threads that tokenise; default: half of the cores that may be used",
    )
    ring_steps: int = Field(2, ge=1, le=10_000, description="steps that the host's loader keeps ready in shared memory")

    _paths = field_validator("train", "valid", "tokenizer")(expand_home)

    @model_validator(mode="after")
    def _weights(self) -> DataConfig:
        bad = [w for w in self.weights or () if not 0 < w < float("inf")]
        if bad:
            raise ValueError(
                f"data.weights={self.weights} has the weight {bad[0]}; weights are positive numbers: leave a file out "
                "of data.train to give it none"
            )
        return self
