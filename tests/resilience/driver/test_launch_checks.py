"""Nodes that a placement names: the cluster provides them first, and must have them if it knows its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.errors import DataError
from megascale.resilience.driver.launch_checks import JobFiles, check_nodes


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
