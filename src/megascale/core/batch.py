"""The record of a micro-batch, which loader, feed, engine, model and loss share, and its optional fields. No torch.

The record is generic in the type of its arrays: NumPy arrays on the host, torch tensors on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from megascale.config import ModelConfig
from megascale.config.parts import ATTENTIONS
from megascale.core.inventory import resolve_layers
from megascale.errors import ConfigError

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class SampleFields:
    """Which optional fields all samples of a run have; known before the first sample is read.

    Attributes:
        loss_weights: whether each target has a weight in the loss.
        positions: whether each token has a given position.
        max_documents: largest number of documents in a sample; 0: samples have no document boundaries.
    """

    loss_weights: bool = False
    positions: bool = False
    max_documents: int = 0

    def __or__(self, fields: SampleFields) -> SampleFields:
        """Return the fields that either operand has."""
        return SampleFields(
            self.loss_weights or fields.loss_weights,
            self.positions or fields.positions,
            max(self.max_documents, fields.max_documents),
        )

    @property
    def concerns_blocks(self) -> bool:
        """True if the model's layers read a field, so that every pipeline stage needs the samples."""
        return self.positions or self.max_documents > 0


NO_FIELDS = SampleFields()


@dataclass(frozen=True, slots=True)
class Batch(Generic[ArrayT]):
    """A micro-batch. A field that the data lacks or the receiver does not need is None.

    Attributes:
        tokens: integers [sequence, batch].
        targets: the next token of each token, integers [sequence, batch]; the loss ignores -100.
        loss_weights: weight of each target in the loss, float32 [sequence, batch]; None: equal weights.
        positions: position of each token in its document, integers [sequence, batch]; None: 0 to sequence - 1.
        document_boundaries: cumulative lengths of each sample's documents, integers [max_documents + 1, batch], from 0
            to the sequence length, which fills up unused entries. None: a sample is one document.
    """

    tokens: ArrayT | None = None
    targets: ArrayT | None = None
    loss_weights: ArrayT | None = None
    positions: ArrayT | None = None
    document_boundaries: ArrayT | None = None


def check_fields(fields: SampleFields, model: ModelConfig, setting: str, value: object) -> None:
    """Raise ConfigError if samples have a field that the model would ignore.

    Args:
        setting, value: the key that names the data, and its value.
    """
    layers = resolve_layers(model)
    if fields.max_documents:
        for name in sorted({layer.mixer.name for layer in layers}):
            if not ATTENTIONS[name].masks_documents:
                raise ConfigError(
                    f"{setting}={value} has document boundaries, which model.attention={name} ignores; set "
                    "--model.attention=causal, or --data.document_mask=false"
                )
    # If a sample has several documents, positions restart at each of them. A model without positions may ignore that.
    has_positions = model.positions == "learned" or any(layer.rope is not None for layer in layers)
    if fields.positions and not fields.max_documents and not has_positions:
        raise ConfigError(
            f"{setting}={value} has positions for its tokens, which model.positions={model.positions} ignores; set "
            "--model.positions=rotary, or use a format without `positions`"
        )
