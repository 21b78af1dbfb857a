"""The commands: what they print, and exit codes of bad input."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import load_command_line
from megascale.core import strict_json
from megascale.core.grid import Grid
from megascale.errors import ConfigError, DataError, FitError, MegascaleError
from megascale.simulate.fabric.placement import make_placement
from megascale.simulate.fabric.step_traffic import estimate_step_traffic
from megascale.simulate.fabric.transfer_times import FabricTimes, Outage
from megascale.simulate.fabric_study import Variant
from tests.simulate.fabric.fabric_cases import fabric

SMALL = ["--set", "hosts=32", "--set", "hosts_per_set=8", "--set", "switch_ports=16"]
MODEL = ["examples/gpt-175b.toml", "--gpus", "256", "--train.global_batch=256"]
MODEL_ON_SMALL = MODEL + SMALL


def network(*arguments: str) -> str:
    """Output of a command that succeeds."""
    result = CliRunner().invoke(app, ["network"] + list(arguments))
    if isinstance(result.exception, MegascaleError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_topology_prints_and_draws(tmp_path):
    result = strict_json.loads(network("topology", *SMALL, "--json", "--plot", str(tmp_path / "t.png")))
    assert result["switches"] == {"leaf": 32, "aggregation": 16, "core": 8}
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert "assumed" in network("topology", *SMALL)


def test_placement_writes_a_file_that_it_reads(tmp_path):
    out = str(tmp_path / "placement.json")
    result = strict_json.loads(network("placement", *MODEL_ON_SMALL, "--placement", "random", "--out", out, "--json"))
    repeated = strict_json.loads(network("placement", *MODEL_ON_SMALL, "--placement", out, "--json"))
    assert repeated["bytes"][out] == result["bytes"]["random"]


def test_flows_slow_with_oversubscription():
    rows = strict_json.loads(
        network("flows", *MODEL_ON_SMALL, "--vary", "leaf_oversubscription=1,4", "--placement", "adversarial", "--json")
    )
    assert rows[1]["data"] > 1.5 * rows[0]["data"]
    assert rows[1]["step_s"] > rows[0]["step_s"]


def test_ecmp_prints_both_forms():
    rows = strict_json.loads(network("ecmp", *SMALL, "--draws", "50", "--queue-pairs", "1,2", "--json"))
    assert [r["queue_pairs"] for r in rows] == [1, 2]
    assert "closed form" in network("ecmp", *SMALL, "--draws", "20", "--queue-pairs", "1")


def test_commands_that_take_long_say_on_a_terminal_what_they_do(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "hashing the flows 20 times" in network("ecmp", *SMALL, "--draws", "20", "--queue-pairs", "1")
    assert "network 1 of 1 (this network): " in network("flows", *MODEL_ON_SMALL)


def test_tune_writes_the_environment(tmp_path):
    out = tmp_path / "network.env"
    assert "certainty" in network("tune", "--flaps", "3", "--out", str(out), "--plot", str(tmp_path / "f.png"))
    assert "NCCL_IB_TIMEOUT=" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["topology", "--fabric", "none"], ConfigError),
        (["topology", "--set", "hosts"], ConfigError),
        (["topology", "--set", "nic_gbps=0"], ConfigError),
        (["topology", "--set", "leaf_split=9"], ConfigError),
        (["topology", "--set", 'failed=["agg0-core9999"]'], ConfigError),
        (["topology", "--set", "hosts_per_set=512"], FitError),
        (["placement"] + MODEL + ["--set", "hosts=8"], FitError),
        (["placement"] + MODEL_ON_SMALL + ["--placement", "near"], ConfigError),
        (["flows"] + MODEL_ON_SMALL + ["--vary", "colour=1"], ConfigError),
        (["flows"] + MODEL_ON_SMALL + ["--algorithm", "star"], ConfigError),
        (["ecmp", "--queue-pairs", "many"], ConfigError),
        (["tune", "--flaps", "nothing.txt"], DataError),
        (["tune", "--flaps", "-1"], ConfigError),
        (["tune", "--flaps", "nan"], ConfigError),
        (["tune", "--flaps", "3", "--restart", "inf"], ConfigError),
        (["tune", "--flaps", "3", "--out", "/nowhere/x.env"], ConfigError),
        (["topology", "--set", "nic_gbps=inf"], ConfigError),
        (["topology", "--set", "cable_ns=-1"], ConfigError),
        (["validate", "--only", "nothing like this"], ConfigError),
        (["placement"] + MODEL_ON_SMALL + ["--names", "none.txt"], ConfigError),
        (["placement"] + MODEL_ON_SMALL + ["--names", "none.txt", "--out", "p.json"], ConfigError),
        (["placement"] + MODEL_ON_SMALL + ["--out", "/nowhere/p.json"], ConfigError),
        (["tune", "--flaps", "3", "--adaptive", "maybe"], ConfigError),
        (["packets", "--control", "cubic"], ConfigError),
        (["packets", "--dcqcn", "mine"], ConfigError),
        (["packets", "--tiers", "5"], ConfigError),
    ],
    ids=lambda x: " ".join(x[:3]) if isinstance(x, list) else "",
)  # fmt: skip
def test_bad_input_names_key_and_remedy(arguments, error):
    with pytest.raises(error) as caught:
        network(*arguments)
    assert caught.value.exit_code in (2, 3, 4)
    assert len(str(caught.value)) > 30


def test_traffic_is_the_models():
    config = load_command_line("examples/gpt-175b.toml", [])
    sent = estimate_step_traffic(config, 12288)
    assert sent.grid == Grid(tensor=8, data=192, pipeline=8)
    # 175e9 parameters over 64 ranks, and the embedding; 4 bytes a gradient, 2 a parameter.
    assert sent.reduce == pytest.approx(4 * 175e9 / 64, rel=0.06)
    assert sent.reduce == 2 * sent.gather
    assert sent.transfers == 32 * 6
    assert sent.activation == 2048 * 12288 * 2 / 8
    with pytest.raises(FitError, match="global_batch"):
        estimate_step_traffic(load_command_line("examples/gpt-175b.toml", ["--train.global_batch=100"]), 12288)


def test_the_hook_tabulates_and_knows_what_is_concurrent_and_down():
    built = fabric()
    times = FabricTimes(
        built, make_placement(Grid(tensor=2, data=16, pipeline=4, ranks_per_host=2), built, "adversarial"), draws=3
    )
    alone = times.slowdown("data", ranks=[0, 1])
    together = times.slowdown("data")
    busy = times.slowdown("data", concurrent=(("pipeline", 1.0),))
    assert alone.worst * (1 + 1e-9) >= 1
    assert alone.worst <= together.worst * 1.02
    assert together.mean < busy.mean
    assert together.values.shape == (3, 8)
    assert together.quantile(0.1) <= together.quantile(0.9)
    assert times.slowdown("data") is together
    agg = f"agg{built.uplinks[0, 0]}"
    broken = FabricTimes(built, times.placement, draws=3, outages=(Outage(agg, 10.0, 20.0),))
    assert np.array_equal(broken.slowdown("data", offset=25.0).values, together.values)
    assert broken.slowdown("data", offset=15.0).mean > together.mean
    with pytest.raises(ConfigError, match="--axis"):
        times.slowdown("tensor")
    with pytest.raises(ConfigError, match="outage"):
        Outage("core0", 5, 1)


def test_variants_take_what_they_know():
    assert Variant().with_key("queue_pairs", "8").queue_pairs == 8
    assert Variant().with_key("pod", "rail").changes == {"pod": "rail"}
    with pytest.raises(ConfigError, match="queue_pairs"):
        Variant().with_key("queue_pairs", "0")
