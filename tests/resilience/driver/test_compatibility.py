"""Nodes of other software or with too few GPUs are refused by name."""

from __future__ import annotations

import pytest

from megascale.resilience.driver.telemetry.admission import find_incompatibility

VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.1.0"}
GOOD = {"python": "3.11.2", "torch": "2.13.0+cu130", "numpy": "2.1.0", "nvidia-nccl-cu13": "2.28.3"}
GPUS = {"cores": "96", "gpus": "8"}


def judge(hardware=GPUS, versions=GOOD, peers=(), ranks=8, device="auto"):
    return find_incompatibility(
        "n1", hardware, versions, driver_versions=VERSIONS, members=peers, ranks_per_node=ranks, device=device
    )


def test_the_same_release_in_another_build_than_the_drivers_is_welcome():
    assert judge(peers=[("n0", GPUS, GOOD)]) == ""
    assert judge(hardware={}, versions={}) == ""


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        (
            {"torch": "2.12.0+cu130"},
            "node n1 has torch 2.12.0+cu130, the driver's machine 2.13.0+cpu; install the same",
        ),
        ({"python": "3.12.1"}, "node n1 has python 3.12.1, the driver's machine 3.11.7"),
        ({"torch": "2.13.0+cu126"}, "node n1 has torch 2.13.0+cu126, node n0 has 2.13.0+cu130"),
        ({"nvidia-nccl-cu13": "2.27.0"}, "node n1 has nvidia-nccl-cu13 2.27.0, node n0 has 2.28.3"),
    ],
)
def test_other_software_is_named_with_both_versions(changes, output):
    assert output in judge(versions=GOOD | changes, peers=[("n0", GPUS, GOOD)])


def test_gpus_are_counted():
    assert "n1 has 4 GPUs for its 8 ranks" in judge(hardware={"cores": "96", "gpus": "4"})
    assert "n1 has 0 GPUs for its 8 ranks" in judge(hardware={"cores": "96"}, device="cuda")
    assert "node n0 has GPUs and n1 has none" in judge(hardware={"cores": "96"}, peers=[("n0", GPUS, GOOD)])
    assert judge(hardware={"cores": "96"}, peers=[("n0", {"cores": "8"}, GOOD)]) == ""
    assert judge(hardware={"cores": "96"}, device="cpu", peers=[("n0", GPUS, GOOD)]) == ""
