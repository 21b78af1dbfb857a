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
# What a job's own processes decide, or what would run something else in them.
_KEPT = re.compile(
    r"MEGASCALE_\w+|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)|LD_\w+|PYTHON\w*|PATH|CUDA_VISIBLE_DEVICES"
)


def read_environment(path: Path, key: str) -> dict[str, str]:
    """The variables of a file; `key`: the setting that named it.

    Raises:
        ConfigError: there is no such file.
        DataError: a line that is no NAME=VALUE without blanks and quotes, a name twice, or one that a job sets itself.
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
        if _KEPT.fullmatch(name):
            raise DataError(f"{path} line {number}: {name} is the job's own to set; leave it out")
        if name in found:
            raise DataError(f"{path} line {number}: {name} stands there twice; keep one")
        found[name] = value
    if len(found) > _MOST:
        raise DataError(f"{path} has {len(found)} variables, at most {_MOST} are taken")
    return found
