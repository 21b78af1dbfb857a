"""Writing of safetensors files with the permissions of the user's other files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def write_weights(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors, which must not share memory, into a new file with the mode that the umask gives.

    safetensors writes a temporary file of mode 600 and renames it, so the mode is set afterwards.
    """
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)
