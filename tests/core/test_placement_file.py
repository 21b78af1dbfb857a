"""Placement files: what is written is read; what is damaged or for another job is refused with a remedy."""

from __future__ import annotations

import json

import pytest

from megascale.core.grid import Grid
from megascale.core.launch_files import PlacementFile, read_placement
from megascale.errors import ConfigError, DataError

GRID = Grid(data=3, ranks_per_host=1)


@pytest.fixture
def tree(tmp_path):
    PlacementFile("by hand", GRID, (4, 0, 2), ("n4", "n0", "n2")).write(tmp_path / "p.json")
    return json.loads((tmp_path / "p.json").read_text())


def test_what_is_written_is_read(tree, tmp_path):
    result = read_placement(tmp_path / "p.json", GRID, "resilience.placement")
    assert result == PlacementFile("by hand", GRID, (4, 0, 2), ("n4", "n0", "n2"))


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ({"hosts": [4, 0]}, "2 hosts, the job has 3"),
        ({"nodes": ["n4", "n0"]}, "2 nodes, the job has 3"),
        ({"nodes": ["n4", "n0", "n4"]}, "n4 twice"),
        ({"hosts": [1, 1, 2]}, "machine 1 twice"),
        ({"hosts": [-1, 1, 2]}, "not a placement file"),
        ({"hosts": [True, 0, 2]}, "not a placement file"),
        ({"nodes": ["n4", "n0", 7]}, "not a placement file"),
        ({"nodes": "n4"}, "not a placement file"),
        ({"grid": []}, "not a placement file"),
        ({"grid": {"tensor": 2}}, "the grid tensor 2; the job's is tensor 1, context 1, slice 1, expert 1, data 3"),
        ({"format": 2}, "format 2"),
    ],
)
def test_what_is_wrong_is_named(tree, tmp_path, change, report):
    (tmp_path / "p.json").write_text(json.dumps(tree | change))
    with pytest.raises(DataError, match=report):
        read_placement(tmp_path / "p.json", GRID, "resilience.placement")


def test_no_file_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"resilience\.placement=.*No such file.*megascale network placement"):
        read_placement(tmp_path / "none.json", GRID, "resilience.placement")
