"""The file that says which machine holds which ranks: `megascale network placement` writes it, `megascale launch` takes
it as resilience.placement.

JSON: `format`; `strategy`, how it came about; `grid`, the sizes that it was made for; `hosts`, the machines' numbers in
the fabric, in rank order; `nodes`, their names in the same order, or null. The job's host h holds the ranks from
h x ranks_per_host on (core/grid.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale.core import strict_json
from megascale.core.grid import AXES, Grid
from megascale.core.untrusted_files import read_bounded
from megascale.errors import ConfigError, DataError

FORMAT = 1
_MOST_BYTES = 64 << 20
_MOST_NAME = 1024


@dataclass(frozen=True)
class PlacementFile:
    """Attributes:

    strategy: how it came about.
    grid: the job's.
    hosts: number in the fabric of each of the job's hosts, in rank order.
    nodes: their names, None if only the numbers are known.
    """

    strategy: str
    grid: Grid
    hosts: tuple[int, ...]
    nodes: tuple[str, ...] | None = None

    def write(self, path: Path) -> None:
        """As `read_placement` takes it."""
        tree = {
            "format": FORMAT,
            "strategy": self.strategy,
            "grid": _sizes(self.grid),
            "hosts": list(self.hosts),
            "nodes": None if self.nodes is None else list(self.nodes),
        }
        path.write_text(strict_json.dumps(tree, indent=1) + "\n")


def read_placement(path: Path, grid: Grid, key: str) -> PlacementFile:
    """A placement file for a job of this grid. `key`: the option or setting that named it.

    Raises:
        ConfigError: there is no such file.
        DataError: it is damaged, for another grid, with another number of machines, or with one of them twice.
    """
    try:
        tree = strict_json.loads(read_bounded(path, _MOST_BYTES), _MOST_BYTES)
        version, found, strategy = tree["format"], tree["grid"], tree["strategy"]
        hosts, nodes = _numbers(tree["hosts"]), _names(tree["nodes"])
        if not isinstance(strategy, str) or not isinstance(found, dict):
            raise TypeError
    except OSError as error:
        raise ConfigError(
            f"{key}={path}: {error.strerror or error}; write one with megascale network placement --out"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a placement file; write one with megascale network placement --out") from None
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r:.20}, this version reads {FORMAT}; write it anew")
    if found != _sizes(grid):
        raise DataError(f"{path} is for the grid {_said(found)}; the job's is {_said(_sizes(grid))}. Write it anew")
    for what, each in (("hosts", hosts), ("nodes", nodes)):
        if each is not None and len(each) != grid.host_count:
            raise DataError(f"{path} lists {len(each):,} {what}, the job has {grid.host_count:,}; write it anew")
        twice = None if each is None else _repeated(each)
        if twice is not None:
            raise DataError(f"{path} lists machine {twice} twice under {what}; each runs one host of the job")
    return PlacementFile(strategy, grid, hosts, nodes)


def _sizes(grid: Grid) -> dict[str, int]:
    return {axis: grid.size(axis) for axis in AXES} | {"ranks_per_host": grid.ranks_per_host}


def _said(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{str(name)[:20]} {str(size)[:20]}" for name, size in list(sizes.items())[:5])


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise TypeError
    return tuple(values)


def _names(values: object) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, str) and 0 < len(v) <= _MOST_NAME for v in values):
        raise TypeError
    return tuple(values)


def _repeated(values: Iterable[object]) -> object | None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
