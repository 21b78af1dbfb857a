"""Settings of a host's network, of a kernel's files as they look; a host without such ports is told nothing."""

from __future__ import annotations

import pytest

from megascale.cli.spans import describe_network
from megascale.core import strict_json
from megascale.observe.store.network_settings import check_network


@pytest.fixture
def system(tmp_path):
    files = {
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        "class/infiniband/mlx5_0/device/net/eth2/name": "",
        "class/net/eth2/ecn/roce_np/enable/3": "1\n",
        "class/net/eth2/ecn/roce_rp/enable/3": "0\n",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "class/infiniband/mlx5_1/ports/1/link_layer": "InfiniBand\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_is_wrong_is_told_from_what_cannot_be_read(system):
    result = check_network({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_TC": "106"}, system)
    report = {(item.device, item.name): item.good for item in result}
    assert report == {
        ("", "time-out"): True, ("mlx5_0/1", "link"): True, ("mlx5_0/1", "traffic class"): True,
        ("mlx5_0/1", "ECN notification"): True, ("mlx5_0/1", "ECN reaction"): False,
        ("mlx5_0/1", "PFC"): None, ("mlx5_0/1", "adaptive retransmission"): None, ("mlx5_1/1", "link"): False,
    }  # fmt: skip
    assert next(row for row in result if row.name == "time-out").value.endswith(": 137.4 s")


@pytest.mark.parametrize(
    ("timeout", "retries", "good"), [("18", "7", False), ("19", "7", True), ("20", "0", False), ("x", "7", False)]
)
def test_a_time_out_must_outlast_a_flap(system, timeout, retries, good):
    """4.096 us x 2^18 x 8 = 8.6 s."""
    first = check_network({"NCCL_IB_TIMEOUT": timeout, "NCCL_IB_RETRY_CNT": retries}, system)[0]
    assert first.good is good


def test_settings_that_are_not_made_are_named(system):
    result = {item.name: item for item in check_network({}, system)}
    assert result["time-out"].good is result["traffic class"].good is False
    assert "NCCL_IB_TIMEOUT=22" in result["time-out"].advised


def test_a_host_without_ports_is_told_nothing(tmp_path):
    assert check_network({}, tmp_path) == []


def test_the_command_tells_what_is_not_as_advised(tmp_path):
    class Tables:
        hosts = [tmp_path / "host=0", tmp_path / "host=1"]  # noqa: RUF012

    good = {"device": "a/1", "name": "link", "found": "4: ACTIVE", "advised": "4: ACTIVE", "good": True}
    for host, settings in zip(Tables.hosts, ([good, good | {"good": False, "found": "1: DOWN"}], "none"), strict=True):
        host.mkdir()
        (host / "state.json").write_text(strict_json.dumps({"network": settings}))
    assert describe_network(Tables()) == ["host=0 a/1 link: 1: DOWN; advised: 4: ACTIVE"]  # type: ignore[arg-type]
