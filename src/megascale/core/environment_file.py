"""Files of environment variables, NAME=VALUE a line, as `megascale network tune` writes and a shell's `.` reads them.

Only what a shell and this reader understand alike is taken: no expansion, no quotes, no `export`, so that a file never
means one thing in a terminal and another in a job.
"""

from __future__ import annotations

import re
from pathlib import Path

from megascale.config.text_files import decode_text
from megascale.core.untrusted_files import read_bounded
from megascale.errors import ConfigError, DataError

_MOST_BYTES = 64 << 10
_MOST = 256  # variables
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})=([A-Za-z0-9_.,:/@%+^=-]*)")
# Settings of the libraries that trainers communicate and compute with, and of the storage and services they report to.
PREFIXES = (
    "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "OFI_NCCL_", "IBV_", "RDMAV_", "MLX5_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_",
)  # fmt: skip
NAMES = (
    "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING", "MALLOC_ARENA_MAX", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE",
    "WANDB_RUN_GROUP", "WANDB_SILENT", "WANDB_TAGS",
)  # fmt: skip
# A name with one of these words may load a library, run a command, or write a file: NCCL_NET_PLUGIN, UCX_MODULE_DIR,
# OMP_TOOL_LIBRARIES, UCX_GDB_COMMAND, NCCL_CONF_FILE (which sets the others), NCCL_DEBUG_FILE.
_REFUSED_WORD = re.compile(
    r"_(CACHE|CMD|COMMAND|CONF|CONFIG|DEST|DIRECTORY|DIRS?|DRIVERS?|EXE|EXEC|EXECUTABLE|FILES?|FOLDER|HOME|HOOKS?|"
    r"INCLUDE|LIBRARY|LIBRARIES|LIBS?|LOADER|MAIL|MODULES?|PATH|PLUGINS?|PRELOAD|PROGRAM|SCRIPT|SHELL|TOOLS?)(_|$)"
)


def read_environment(path: Path, key: str) -> dict[str, str]:
    """The variables of a file; `key`: the setting that named it.

    Raises:
        ConfigError: there is no such file.
        DataError: a line that is no NAME=VALUE without blanks and quotes, a name twice, or one that is not allowed.
    """
    try:
        text = decode_text(read_bounded(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"{key}={path}: {error.strerror or error}; write one with megascale network tune --out"
        ) from None
    except ValueError as error:
        raise DataError(f"{key}={path} is no file of NAME=VALUE lines: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(
                f"{path} line {number}: {line[:60]!r} is not NAME=VALUE without blanks and quotes, such as "
                "NCCL_IB_TIMEOUT=21"
            )
        name, value = match.groups()
        if not is_allowed(name):
            raise DataError(
                f"{path} line {number}: {name} is not taken from {key}, because it may run code or change a file; "
                "leave it out, or set it on the nodes. Names are taken that begin with "
                f"{', '.join(PREFIXES)} and have no word such as PLUGIN, MODULE, LIBRARY, PATH or FILE, and: "
                + ", ".join(NAMES)
            )
        if name in found:
            raise DataError(f"{path} line {number}: {name} stands there twice; keep one")
        found[name] = value
    if len(found) > _MOST:
        raise DataError(f"{path} has {len(found)} variables, at most {_MOST} are taken")
    return found


def is_allowed(name: str) -> bool:
    """Return whether a variable of this name only sets figures, addresses or keys, and loads or runs nothing."""
    if name in NAMES:
        return True
    return name.startswith(PREFIXES) and _REFUSED_WORD.search(name) is None
