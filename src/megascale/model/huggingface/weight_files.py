"""Weight files in the safetensors format, with the permissions of the user's other files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def write_weights(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors that share no memory.

    The library renames a private temporary file, so that its result has mode 600 whatever the umask is. The file
    gets the mode that a new file of this process has.
    """
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)
