"""Nodes that a placement names: the cluster provides them first, and must have them if it knows its nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.core.grid import Grid
from megascale.core.launch_files import PlacementFile
from megascale.errors import ConfigError, DataError
from megascale.resilience.driver.launch_checks import JobFiles, check_nodes, copy_job_files, read_job_files


class Machines:
    """The part of a cluster that chooses nodes: n0, n1, ..., as many as the job may get."""

    def __init__(self, is_known: bool = True) -> None:
        self.preferred: tuple[str, ...] = ()
        self._is_known = is_known

    def list_possible_nodes(self, count: int) -> list[str]:
        return [f"n{number}" for number in range(count)] if self._is_known else []

    def prefer(self, names: Sequence[str]) -> None:
        self.preferred = tuple(names)


def check(names: tuple[str, ...], cluster: Any, **limits: int) -> None:
    check_nodes(from_tree({"resilience": {"placement": "file.json", **limits}}), JobFiles(names), cluster)


def test_known_nodes_are_preferred_spares_included():
    cluster = Machines()
    check(("n3", "n0", "n2"), cluster, nodes=3, spares=1)
    assert cluster.preferred == ("n3", "n0", "n2")


def test_unknown_nodes_are_named_with_those_that_exist():
    cluster = Machines()
    expected = (
        r"^resilience\.placement=file\.json puts ranks on n3, m, which the cluster does not have; it has n0, n1, n2\. "
        "Write the file with these names, or leave the setting out$"
    )
    with pytest.raises(DataError, match=expected):
        check(("n3", "n0", "m"), cluster, nodes=2, spares=1)


def test_long_lists_are_cut():
    unknown = tuple("abcdefg")
    with pytest.raises(DataError, match=r"puts ranks on a, b, c, d, e and 2 more, .* it has n0, .*, n7 and 1 more"):
        check(unknown, Machines(), nodes=9, spares=0)
    with pytest.raises(DataError, match=r"puts ranks on a, b, c, d, e, which .* it has n0, .*, n7\."):
        check(unknown[:5], Machines(), nodes=8, spares=0)


def test_a_cluster_that_does_not_know_its_nodes_is_not_asked():
    cluster = Machines(is_known=False)
    check(("a", "b"), cluster, nodes=2)
    assert cluster.preferred == ("a", "b")


def test_without_a_placement_nothing_is_preferred():
    cluster = Machines()
    cluster.preferred = ("n1",)
    check((), cluster, nodes=2)
    assert cluster.preferred == ("n1",)


def make_files(folder: Path, names: tuple[str, ...] | None = ("n1", "n0")) -> Any:
    """Write both files for a job of two nodes and return its configuration."""
    parallel = {"data": 2, "gpus_per_host": 1}
    grid = Grid.from_config(from_tree({"parallel": parallel}).parallel, 2)
    placement, environment = folder / "my placement.json", folder / "my.env"
    PlacementFile("greedy", grid, (1, 0), names).write(placement)
    environment.write_text("NCCL_DEBUG=INFO\n")
    limits = {"placement": str(placement), "environment": str(environment)}
    return from_tree({"parallel": parallel, "resilience": limits})


def test_a_job_reads_the_files_that_its_settings_name(tmp_path: Path):
    assert read_job_files(from_tree({})) == JobFiles()
    config = make_files(tmp_path)
    assert read_job_files(config) == JobFiles(("n1", "n0"), {"NCCL_DEBUG": "INFO"})
    with pytest.raises(ConfigError, match=r"my placement\.json numbers machines of a simulated fabric"):
        read_job_files(make_files(tmp_path, names=None))


def test_a_placement_is_for_the_grid_of_the_job(tmp_path: Path):
    tree = json.loads(make_files(tmp_path).model_dump_json())
    tree["parallel"]["data"] = 1
    with pytest.raises(DataError, match=r"placement\.json is for the grid .* data 2"):
        read_job_files(from_tree(tree))


def test_a_successor_reads_the_copies_of_the_first_driver(tmp_path: Path):
    config, run = make_files(tmp_path), tmp_path / "run"
    expected = read_job_files(config)
    (run / "driver").mkdir(parents=True)
    with pytest.raises(DataError, match=r"driver/placement\.json is missing, the copy of resilience\.placement="):
        read_job_files(config, copies_in=run)
    for _ in range(2):  # a later driver replaces the copies
        copy_job_files(config, run)
    copies = sorted((run / "driver").iterdir())
    assert [(copy.name, copy.stat().st_mode & 0o777) for copy in copies] == [
        ("environment.env", 0o600),
        ("placement.json", 0o600),
    ]
    for name in ("my placement.json", "my.env"):
        (tmp_path / name).unlink()
    assert read_job_files(config, copies_in=run) == expected
    (run / "driver" / "environment.env").unlink()
    with pytest.raises(DataError, match=r"environment\.env is missing, the copy of resilience\.environment="):
        read_job_files(config, copies_in=run)
    # Copies of settings that are no longer there go.
    copy_job_files(from_tree({}), run)
    assert list((run / "driver").iterdir()) == []
