"""Checkpoint of a base model: its folder, its step and a fingerprint of its weights.

A base model gives a new run its first weights (checkpoint.start_from, checkpoint.imported). With train.lora it is also
the model on which the adapters are trained. A resume reads the run's own checkpoints instead.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.checkpoint.complete_checkpoint import CompleteCheckpoint, open_checkpoint
from megascale.errors import DataError


@dataclass(frozen=True)
class BaseCheckpoint:
    """Identity of a committed checkpoint that holds a base model.

    Attributes:
        folder: checkpoints folder that holds the checkpoint, a path on a local disk or the URL of an object store.
        fingerprint: hash of all stored weights (see `fingerprint_weights`).
    """

    folder: str
    step: int
    fingerprint: str

    def to_record(self) -> dict[str, Any]:
        """Return the record of this checkpoint for checkpoints of adapters that are trained on it."""
        return {"folder": self.folder, "step": self.step, "fingerprint": self.fingerprint}


def open_base(path: Path | str, step: int | None, key: str) -> tuple[BaseCheckpoint, CompleteCheckpoint]:
    """Open the committed checkpoint of a base model, and return its identity and the checkpoint.

    Args:
        path: run folder, checkpoints folder or step-N folder, as a path or a URL.
        step: step of the checkpoint; None: the newest.
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
            "export RUN --out FOLDER`, import it with `megascale convert import FOLDER --out NEW_RUN`, and start from "
            "NEW_RUN"
        )
    base = BaseCheckpoint(str(checkpoint.storage.url), checkpoint.commit.step, fingerprint_weights(checkpoint))
    return base, checkpoint


def fingerprint_weights(checkpoint: CompleteCheckpoint) -> str:
    """Return a hash of a checkpoint's weights, computed from the checksums of its chunks without reading weights.

    A copy of the checkpoint has the same fingerprint. If `checkpoint reshard` divides the same weights into other
    chunks, the fingerprint differs.
    """
    digest = hashlib.blake2b(digest_size=16)
    # A chunk is (offsets, sizes, CRC-32).
    for name, shape, dtype, chunks in checkpoint.list_tensors_with_chunks():
        if name.startswith("model."):
            digest.update(json.dumps([name, shape, dtype, sorted(chunks)]).encode())
    return digest.hexdigest()
