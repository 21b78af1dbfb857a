"""Compiled kernels of FlashAttention-4 on disk, so that a node compiles each kernel once.

FlashAttention-4 compiles its kernels in each process: 10 s on an H200 (dev/log.md). It can keep the object files in a
folder. Its own default folder lies in the machine's temporary folder, where other users could put files that a trainer
would execute. Here the folder is in the user's cache, like Triton's, and belongs to the user alone.

The package's key of a kernel lacks the GPU for some kernels, and the compiler's version. Both are part of the folder's
name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from importlib import metadata
from pathlib import Path

import torch

log = logging.getLogger("megascale.train")
ENABLED_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # of the package; 0 turns the cache off
FOLDER_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"  # of the package
_PACKAGES = (
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "quack-kernels",
    "apache-tvm-ffi",
)
_COMPILER_PREFIX = "CUTE_DSL_"  # of environment variables that may change what is compiled
_ARCHITECTURE_VARIABLE = "FLASH_ATTENTION_ARCH"


def enable_kernel_cache() -> None:
    """Let FlashAttention-4 keep compiled kernels on disk. Call it before the package is imported.

    Variables that the environment already has are kept. Without a folder that belongs to the user alone, each process
    compiles, and a warning gives the reason.
    """
    if ENABLED_VARIABLE in os.environ or FOLDER_VARIABLE in os.environ:
        return
    try:
        folder = _make_private_folder(find_cache_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        log.warning(
            "each process compiles FlashAttention-4's kernels, since they cannot be kept on disk: %s; set %s to a "
            "folder that only this user can write",
            error,
            FOLDER_VARIABLE,
        )
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    os.environ[ENABLED_VARIABLE] = "1"


def find_cache_folder() -> Path:
    """Return the folder of kernels for this process's GPU, the installed packages and the compiler's variables.

    Raises RuntimeError if the user has no home folder and XDG_CACHE_HOME is not set.
    """
    cache_root = os.environ.get("XDG_CACHE_HOME")
    if not cache_root:
        cache_root = str(Path.home() / ".cache")
    parts = [f"cuda={torch.version.cuda}", f"gpu={_describe_architecture()}"]
    for package in _PACKAGES:
        parts.append(f"{package}={_find_version(package)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(_COMPILER_PREFIX):
            parts.append(f"{name}={value}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(cache_root) / "megascale" / f"flash4-{digest[:16]}"


def _describe_architecture() -> str:
    """Return the compute capability for which kernels are compiled, or the variable that replaces it."""
    override = os.environ.get(_ARCHITECTURE_VARIABLE, "")
    if override or not torch.cuda.is_available():
        return override
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _make_private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write, and return it.

    Raises OSError if it cannot be made or written, or if another user owns it or can write it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # A group may write the folder above, since some systems give each user a group of its own.
    for checked, forbidden_bits in ((folder, stat.S_IWGRP | stat.S_IWOTH), (folder.parent, stat.S_IWOTH)):
        status = checked.stat()
        if status.st_uid != os.geteuid() or status.st_mode & forbidden_bits:
            raise PermissionError(f"another user owns {str(checked)!r} or can write it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{str(folder)!r} is not writable")
    return folder
