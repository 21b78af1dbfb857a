"""The device that an option of a command names."""

from __future__ import annotations

import torch

from megascale.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`: auto (a GPU if there is one), cpu, cuda or cuda:N.

    Raises ConfigError for any other name, and where this process does not see the GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ConfigError(f"--device={name} is unknown; use auto, cpu, cuda or cuda:N")
    if not gpus:
        raise ConfigError(f"--device={name} but this process sees no CUDA device; use --device=cpu or auto")
    if colon and int(number) >= gpus:
        raise ConfigError(f"--device={name} but this process sees {gpus} CUDA devices, numbered from 0")
    return torch.device(name)
