"""Nodes on one machine: which GPUs a node's agent gets when others have ended."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from megascale.resilience.cluster import local
from megascale.resilience.cluster.local import STATE, LocalCluster
from megascale.resilience.process_birth import born

GONE = {"pid": 2**22 - 1, "born": 1}


def node(cluster: LocalCluster, name: str, devices: str | None, lives: bool) -> None:
    """The folder of a node whose agent is this process, or has ended."""
    state = {"pid": os.getpid(), "born": born(os.getpid())} if lives else GONE
    folder = cluster.folder / name
    folder.mkdir(exist_ok=True)
    (folder / STATE).write_text(json.dumps(state | ({} if devices is None else {"devices": devices})))


def devices(cluster: LocalCluster, name: str) -> str:
    (cluster.folder / name).mkdir(exist_ok=True)
    return asyncio.run(cluster._free_devices(name))


def test_a_node_that_replaces_another_gets_its_gpus(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, [["0", "1"], ["2", "3"]])
    assert [devices(cluster, "n0"), devices(cluster, "n1")] == ["0,1", "2,3"]
    node(cluster, "n0", "0,1", lives=True)
    node(cluster, "n1", "2,3", lives=False)
    assert devices(cluster, "n1") == "2,3"  # started again
    assert devices(cluster, "n2") == "2,3"  # in its place; it saw all four before
    node(cluster, "n2", "2,3", lives=True)
    node(cluster, "n0", None, lives=False)  # of a version that did not write them down
    assert devices(cluster, "n3") == "0,1"
    assert devices(cluster, "n1") == "0,1"  # its own are another's by now


def test_a_node_without_a_free_gpu_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path, [["0"], ["1"]])
    for number in range(2):
        node(cluster, f"n{number}", None, lives=True)
    monkeypatch.setattr(local, "UNTIL_FREE", 0.0)
    assert devices(cluster, "n2") == ""
