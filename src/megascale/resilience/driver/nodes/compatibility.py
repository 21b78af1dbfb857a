"""Whether a node that comes can be one of this job: its GPUs and its software, beside the driver's and the others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# What must be the same on all nodes, whose ranks talk to each other and must compute the same.
_ALIKE = ("torch", "numpy", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
# What the driver's own machine, which may lack GPUs, shares with them: releases, not builds.
_RELEASES = ("torch", "numpy")

Facts = Mapping[str, str]


def unfit(
    node: str,
    hardware: Facts,
    versions: Facts,
    driver: Facts,
    others: Iterable[tuple[str, Facts, Facts]],
    ranks: int,
    device: str,
) -> str:
    """Why a node cannot hold ranks of the job, "" if it can.

    Args:
        node: its name.
        hardware, versions: as its agent tells; what it does not tell is not judged.
        driver: versions on the driver's machine.
        others: (name, hardware, versions) of nodes that are in.
        ranks: a node's.
        device: train.device.
    """
    if text := _software(node, versions, driver, others := list(others)):
        return f"{text}; install the same on both: until then the node is not used"
    if device == "cpu" or "cores" not in hardware:
        return ""
    gpus = int(hardware.get("gpus", 0))
    if gpus < ranks and (gpus or device == "cuda"):
        return f"node {node} has {gpus} GPUs for its {ranks} ranks; lower parallel.data, or leave the node out"
    for name, theirs, _ in others:
        if "cores" in theirs and (int(theirs.get("gpus", 0)) > 0) != (gpus > 0):
            one, none = (node, name) if gpus else (name, node)
            return f"node {one} has GPUs and {none} has none: a job trains on one kind; say which by train.device"
    return ""


def _software(node: str, versions: Facts, driver: Facts, others: list[tuple[str, Facts, Facts]]) -> str:
    for package, shorten in (("python", _minor), *((name, _release) for name in _RELEASES)):
        mine, its = driver.get(package), versions.get(package)
        if mine and its and shorten(mine) != shorten(its):
            return f"node {node} has {package} {its}, the driver's machine {mine}"
    for name, _, theirs in others:
        for package in _ALIKE:
            one, other = versions.get(package), theirs.get(package)
            if one and other and one != other:
                return f"node {node} has {package} {one}, node {name} has {other}"
    return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(version: str) -> str:
    """Without the build: 2.13.0 of 2.13.0+cu130."""
    return version.partition("+")[0]
