"""Checkpoint from which a run starts: its folder, its step and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.checkpoint.complete_checkpoint import CompleteCheckpoint, open_checkpoint
from megascale.errors import DataError


@dataclass(frozen=True)
class BaseModel:
    """Model in a committed checkpoint.

    Attributes:
        folder: folder or URL of the checkpoints.
        step: step of the checkpoint.
        fingerprint: hash of names, shapes and checksums of all stored weights.
    """

    folder: str
    step: int
    fingerprint: str

    def to_record(self) -> dict[str, Any]:
        """Return the record of this base model in the checkpoints of its adapters."""
        return {"folder": self.folder, "step": self.step, "fingerprint": self.fingerprint}


def open_base(path: Path | str, step: int | None, key: str) -> tuple[BaseModel, CompleteCheckpoint]:
    """Return the model of the newest checkpoint (or that of `step`) of a run, checkpoints folder or URL.

    Args:
        key: setting that names the path, for messages.

    Raises:
        DataError: there is no checkpoint, or it has adapters only.
    """
    try:
        checkpoint = open_checkpoint(path, step)
    except DataError as error:
        raise DataError(f"{key}={path} is unusable: {error}; name a run with a checkpoint") from None
    lora = checkpoint.state.get("config", {}).get("train", {}).get("lora")
    if lora is not None:
        raise DataError(
            f"{key}={path} holds adapters (train.lora) and no model; write the merged model with `megascale convert "
            "export`, import that folder, and start from it"
        )
    base = BaseModel(str(checkpoint.storage.url), checkpoint.commit.step, fingerprint_weights(checkpoint))
    return base, checkpoint


def fingerprint_weights(checkpoint: CompleteCheckpoint) -> str:
    """Return a hash of a checkpoint's weights, computed from the checksums of its chunks without reading weights.

    A copy of the checkpoint has the same fingerprint. A checkpoint with other chunks (`checkpoint reshard`) has
    another.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, shape, dtype, chunks in checkpoint.list_chunks():
        if name.startswith("model."):
            digest.update(json.dumps([name, shape, dtype, sorted(chunks)]).encode())
    return digest.hexdigest()
