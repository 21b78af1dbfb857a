"""Files that a launched job is started with: the placement of ranks on machines, and environment variables.

`megascale network placement` writes a placement file, and resilience.placement names the file. It is JSON with the keys

- `format`: version of the format,
- `strategy`: strategy of the placement,
- `grid`: axis sizes of the job,
- `hosts`: index in the fabric of the machine of each of the job's hosts, in the order of ranks (core/grid.py),
- `nodes`: names of the same machines, or null.

`megascale network tune` writes an environment file, and resilience.environment names the file. It has lines NAME=VALUE.
Only lines that a shell would read in the same way are accepted: no expansion, no quotes, no `export`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.config.text_files import decode_text
from megascale.core import strict_json
from megascale.core.grid import Grid
from megascale.core.untrusted_files import read_bounded
from megascale.errors import ConfigError, DataError

PLACEMENT_FORMAT = 1
_MAX_PLACEMENT_BYTES = 64 << 20
_MAX_NODE_NAME_CHARACTERS = 1024
_MAX_ENVIRONMENT_BYTES = 64 << 10
_MAX_VARIABLES = 256
# A line that a shell reads as an assignment of exactly this text.
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})=([A-Za-z0-9_.,:/@%+^=-]*)")
ALLOWED_PREFIXES = (
    "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "OFI_NCCL_", "IBV_", "RDMAV_", "MLX5_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_",
)  # fmt: skip
ALLOWED_NAMES = (
    "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING", "MALLOC_ARENA_MAX", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE",
    "WANDB_RUN_GROUP", "WANDB_SILENT", "WANDB_TAGS",
)  # fmt: skip
# A variable whose name has one of these words may load a library, run a command, or write a file. Examples are
# NCCL_NET_PLUGIN, UCX_MODULE_DIR, OMP_TOOL_LIBRARIES, UCX_GDB_COMMAND, NCCL_DEBUG_FILE, and NCCL_CONF_FILE, which names
# a file of further variables.
_REFUSED_WORDS = re.compile(
    r"_(CACHE|CMD|COMMAND|CONF|CONFIG|DEST|DIRECTORY|DIRS?|DRIVERS?|EXE|EXEC|EXECUTABLE|FILES?|FOLDER|HOME|HOOKS?|"
    r"INCLUDE|LIBRARY|LIBRARIES|LIBS?|LOADER|MAIL|MODULES?|PATH|PLUGINS?|PRELOAD|PROGRAM|SCRIPT|SHELL|TOOLS?)(_|$)"
)


@dataclass(frozen=True)
class PlacementFile:
    """Assignment of a job's hosts to machines.

    Attributes:
        hosts: index in the fabric of the machine of each of the job's hosts, in rank order.
        nodes: names of these machines; None if only their indices are known.
    """

    strategy: str
    grid: Grid
    hosts: tuple[int, ...]
    nodes: tuple[str, ...] | None = None

    def write(self, path: Path) -> None:
        """Write the file in the format of `read_placement`."""
        tree = {
            "format": PLACEMENT_FORMAT,
            "strategy": self.strategy,
            "grid": _list_sizes(self.grid),
            "hosts": list(self.hosts),
            "nodes": None if self.nodes is None else list(self.nodes),
        }
        path.write_text(strict_json.dumps(tree, indent=1) + "\n")


def read_placement(path: Path, grid: Grid, key: str) -> PlacementFile:
    """Read a placement file for a job with this grid. `key` is the option or setting that named the file.

    Raises:
        ConfigError: the file does not exist.
        DataError: the file is damaged, is for another grid or another number of machines, or lists a machine twice.
    """
    try:
        tree = strict_json.loads(read_bounded(path, _MAX_PLACEMENT_BYTES), _MAX_PLACEMENT_BYTES)
        version = tree["format"]
        file_grid = tree["grid"]
        strategy = tree["strategy"]
        hosts = _parse_hosts(tree["hosts"])
        nodes = _parse_nodes(tree["nodes"])
        if not isinstance(strategy, str) or not isinstance(file_grid, dict):
            raise TypeError
    except OSError as error:
        raise ConfigError(
            f"{key}={path}: {error.strerror or error}; write the file with megascale network placement --out"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a placement file; write one with megascale network placement --out") from None
    if version != PLACEMENT_FORMAT:
        raise DataError(f"{path} has format {version!r:.20}, this version reads {PLACEMENT_FORMAT}; write it anew")
    sizes = _list_sizes(grid)
    file_sizes = dict.fromkeys(sizes, 1) | file_grid  # an axis that is missing in the file has one rank
    if file_sizes != sizes:
        raise DataError(
            f"{path} is for the grid {_describe_sizes(file_grid)}; the job's is {_describe_sizes(sizes)}. Write it anew"
        )
    _check_machines(path, "hosts", hosts, grid.host_count)
    if nodes is not None:
        _check_machines(path, "nodes", nodes, grid.host_count)
    return PlacementFile(strategy, grid, hosts, nodes)


def _check_machines(path: Path, key: str, machines: Sequence[object], host_count: int) -> None:
    """Raise DataError unless `machines` has one machine for each host, and no machine twice.

    Args:
        key: key of the file whose value is `machines`.
    """
    if len(machines) != host_count:
        raise DataError(f"{path} lists {len(machines):,} {key}, the job has {host_count:,}; write it anew")
    visited: set[object] = set()
    for machine in machines:
        if machine in visited:
            raise DataError(f"{path} lists machine {machine} twice under {key}; each runs one host of the job")
        visited.add(machine)


def _list_sizes(grid: Grid) -> dict[str, int]:
    """Return the value of the key `grid` in a placement file."""
    return dict(grid.axes) | {"ranks_per_host": grid.ranks_per_host}


def _describe_sizes(sizes: Mapping[str, object]) -> str:
    """Describe sizes in a message. A file may have any values, so only the beginning of each is shown."""
    return ", ".join(f"{str(name)[:20]} {str(size)[:20]}" for name, size in list(sizes.items())[:10])


def _parse_hosts(values: object) -> tuple[int, ...]:
    """Return the value of the key `hosts`. Raises TypeError if it is not a list of indices."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise TypeError
    return tuple(values)


def _parse_nodes(values: object) -> tuple[str, ...] | None:
    """Return the value of the key `nodes`. Raises TypeError if it is neither null nor a list of names."""
    if values is None:
        return None
    if not isinstance(values, list):
        raise TypeError
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_NODE_NAME_CHARACTERS:
            raise TypeError
    return tuple(values)


def read_environment(path: Path, key: str) -> dict[str, str]:
    """Return the variables of an environment file. `key` is the setting that named the file.

    Raises:
        ConfigError: the file does not exist.
        DataError: a line is not NAME=VALUE without blanks and quotes, a name is repeated, or a name is not allowed.
    """
    try:
        text = decode_text(read_bounded(path, _MAX_ENVIRONMENT_BYTES))
    except OSError as error:
        raise ConfigError(
            f"{key}={path}: {error.strerror or error}; write the file with megascale network tune --out"
        ) from None
    except ValueError as error:
        raise DataError(f"{key}={path} is not a file of NAME=VALUE lines: {error}") from None
    variables: dict[str, str] = {}
    for line_number, raw_line in enumerate(text.splitlines(), 1):
        line = raw_line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(
                f"{path} line {line_number}: {line[:60]!r} is not NAME=VALUE without blanks and quotes, such as "
                "NCCL_IB_TIMEOUT=21"
            )
        name, value = match.groups()
        if not is_allowed(name):
            raise DataError(
                f"{path} line {line_number}: {name} is not accepted in {key}, because it may run code or change a "
                "file; leave it out, or set it on the nodes. Allowed are names that begin with "
                f"{', '.join(ALLOWED_PREFIXES)} and have no word such as PLUGIN, MODULE, LIBRARY, PATH or FILE, and: "
                + ", ".join(ALLOWED_NAMES)
            )
        if name in variables:
            raise DataError(f"{path} line {line_number}: {name} is set twice; keep one of the lines")
        variables[name] = value
    if len(variables) > _MAX_VARIABLES:
        raise DataError(f"{path} has {len(variables)} variables, at most {_MAX_VARIABLES} are allowed")
    return variables


def is_allowed(name: str) -> bool:
    """Return whether an environment file may set a variable of this name, because it cannot run code or write files."""
    if name in ALLOWED_NAMES:
        return True
    return name.startswith(ALLOWED_PREFIXES) and _REFUSED_WORDS.search(name) is None
