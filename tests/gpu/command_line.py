"""Command lines of the programs in this folder: help, names of cases, and the GPUs that they need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable

import torch


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help page is the docstring of a program."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def require_gpu() -> None:
    """End the program with exit code 2 on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        remedy = "install a release of torch for CUDA"
    else:
        remedy = "run it on a machine with a GPU, and check CUDA_VISIBLE_DEVICES and nvidia-smi"
    exit_with(f"this program needs a GPU, and torch {torch.__version__} has none; {remedy}")


def check_names(option: str, chosen: Iterable[str], names: Collection[str]) -> None:
    """End the program with exit code 2 if a chosen name is unknown."""
    unknown = [name for name in chosen if name not in names]
    if unknown:
        exit_with(f"{option}={unknown[0]!r} is unknown; choose among: {'; '.join(names)}")


def exit_with(message: str) -> None:
    """Print an error and end the program with the exit code of wrong usage."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
