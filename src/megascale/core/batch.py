"""The record of a micro-batch that loader, feed, engine, model and loss pass on, and the optional fields of a run.

The record is generic in its arrays: NumPy arrays on the host, torch tensors on a device. No torch.
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
    """The optional fields that every sample of a run carries, known before the first sample is read.

    Attributes:
        loss_weights: each target has a weight in the loss.
        positions: each token has a position of its own.
        max_documents: largest number of documents in a sample; 0: samples carry no document boundaries.
    """

    loss_weights: bool = False
    positions: bool = False
    max_documents: int = 0

    def __or__(self, fields: SampleFields) -> SampleFields:
        return SampleFields(
            self.loss_weights or fields.loss_weights,
            self.positions or fields.positions,
            max(self.max_documents, fields.max_documents),
        )

    @property
    def concerns_blocks(self) -> bool:
        """True if blocks read a field, so that every pipeline stage needs the samples."""
        return self.positions or self.max_documents > 0


NO_FIELDS = SampleFields()


@dataclass(frozen=True, slots=True)
class Batch(Generic[ArrayT]):
    """A micro-batch. A field that is absent, or that its reader does not need, is None.

    Attributes:
        tokens: integers [sequence, batch].
        targets: the next token of each, integers [sequence, batch]; -100 is ignored.
        loss_weights: weight of each target in the loss, float32 [sequence, batch]; None: all count the same.
        positions: position of each token in its document, integers [sequence, batch]; None: 0 to sequence - 1.
        document_boundaries: cumulative lengths of each sample's documents, integers [max_documents + 1, batch]: from
            0 to the sequence length, which is repeated to the end. None: a sample is one document.
    """

    tokens: ArrayT | None = None
    targets: ArrayT | None = None
    loss_weights: ArrayT | None = None
    positions: ArrayT | None = None
    document_boundaries: ArrayT | None = None


def check_fields(fields: SampleFields, model: ModelConfig, setting: str, value: object) -> None:
    """Raise ConfigError if samples carry a field that the model would ignore.

    Args:
        setting, value: the key that named the data, and its value.
    """
    layers = resolve_layers(model)
    if fields.max_documents:
        for name in sorted({layer.mixer.name for layer in layers}):
            if not ATTENTIONS[name].masks_documents:
                raise ConfigError(
                    f"{setting}={value} has document boundaries, which model.attention={name} ignores; set "
                    "--model.attention=causal, or --data.document_mask=false"
                )
    # Positions that come with documents restart at each of them, which a model without positions may ignore.
    has_positions = model.positions == "learned" or any(layer.rope is not None for layer in layers)
    if fields.positions and not fields.max_documents and not has_positions:
        raise ConfigError(
            f"{setting}={value} has positions for its tokens, which model.positions={model.positions} ignores; set "
            "--model.positions=rotary, or use a format without `positions`"
        )
