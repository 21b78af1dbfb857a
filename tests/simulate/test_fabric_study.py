"""A step on a simulated network: what is the calibration's own changes nothing, what is worse shows, and where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import load_command_line
from megascale.core import strict_json
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.fabric_study import Variant, estimate_steps_on_network
from megascale.simulate.network import RingNetwork, SharedFabricNetwork
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import find_stack
from megascale.simulate.step import estimate_step

GPUS = 256
OPTIONS = ["examples/gpt-175b.toml", "--train.global_batch=256", "--parallel.virtual_stages=2"]
SMALL = {"hosts": 32, "hosts_per_set": 8, "switch_ports": 16}


@pytest.fixture(scope="module")
def scenario():
    config = load_command_line(OPTIONS[0], OPTIONS[1:])
    cluster = load_cluster("a100-roce")
    constants = load_calibration(None, cluster.name)
    return Scenario(
        config, GPUS, cluster, constants, make_engine_software(config, find_stack("megascale")), "megascale"
    )


def test_the_calibrations_own_network_changes_nothing(scenario):
    (result,) = estimate_steps_on_network([scenario], Variant(changes={"hosts": GPUS // 8}, draws=2))
    assert result.seconds == pytest.approx(result.reference_step.seconds, rel=1e-3)


def test_what_is_worse_takes_longer(scenario):
    """Neighbours far apart; NICs of half the rate on the calibration's own switches, which double every transfer."""
    (far,) = estimate_steps_on_network([scenario], Variant(changes=SMALL, placement="adversarial", draws=3))
    assert (far.seconds > 1.01 * far.reference_step.seconds).all()
    assert far.seconds.min() < far.seconds.max()  # another start, other hashes
    assert far.seconds.min() <= far.median.seconds <= far.seconds.max()
    slow = Variant(changes={"hosts": GPUS // 8, "nic_gbps": 100.0, "port_gbps": 200.0})
    (half,) = estimate_steps_on_network([scenario], slow)
    ring = RingNetwork(scenario.cluster, scenario.calibration.constants.dp_efficiency)
    twice = estimate_step(scenario, network=SharedFabricNetwork(ring, np.array([2.0]), np.array([2.0])))
    assert half.seconds[0] == pytest.approx(twice.seconds, rel=0.01)


def test_a_part_that_is_down_counts_while_it_is(scenario):
    from megascale.simulate.fabric.transfer_times import Outage

    down = Variant(changes=SMALL, placement="adversarial", outages=(Outage("agg0", 10, 20), Outage("agg1", 10, 20)))
    before, during = (estimate_steps_on_network([scenario], replace(down, offset=at))[0] for at in (5.0, 15.0))
    assert during.seconds[0] > before.seconds[0]


def test_the_event_level_slows_the_stage_and_the_replica_that_are_slow(scenario):
    """One slow group costs something, all of them more."""
    ring = RingNetwork(scenario.cluster, scenario.calibration.constants.dp_efficiency)

    def seconds(data, pipeline):
        network = SharedFabricNetwork(ring, np.array(data), np.array(pipeline))
        return estimate_step(scenario, "event", network=network, jitter=False).seconds

    stages, replicas = scenario.config.parallel.pipeline, scenario.layout.grid.data
    calm = seconds([1.0] * stages, [1.0] * replicas)
    assert calm == pytest.approx(estimate_step(scenario, "event", jitter=False).seconds, rel=1e-9)
    last = seconds([1.0] * (stages - 1) + [20.0], [1.0] * replicas)
    every = seconds([20.0] * stages, [1.0] * replicas)
    assert calm < last < every
    single = seconds([1.0] * stages, [20.0] + [1.0] * (replicas - 1))
    assert calm < single <= seconds([1.0] * stages, [20.0] * replicas)


def test_the_command_shows_both_networks():
    arguments = ["simulate", "step"] + OPTIONS + ["--gpus", str(GPUS), "--fabric", "megascale", "--starts", "2"]
    arguments += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    shown = CliRunner().invoke(
        app, arguments + ["--placement", "random", "--outage", "core0@0:60", "--against", "none"]
    )
    assert shown.exit_code == 0, shown.output
    assert "down: core0" in shown.output
    assert "calibrated" in shown.output
    record = strict_json.loads(CliRunner().invoke(app, arguments + ["--against", "none", "--json"]).output)[0]
    assert len(record["network"]["seconds"]) == 2
    assert record["network"]["slowdowns"]["pipeline"]["calibrated"] >= 1
    assert record["seconds"] in record["network"]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (["--placement", "random"], "add --fabric"),
        (["--fabric", "megascale", "--outage", "core0"], "--outage='core0' must be PART@FROM:TO"),
        (["--fabric", "megascale", "--outage", "core0@5:1"], "0 <= start <= end"),
        (["--fabric", "megascale", "--outage", "core7777@0:60"], "core7777"),
        (["--fabric", "megascale", "--experts", "2"], "leave out --experts"),
    ],
)
def test_bad_options_name_the_remedy(arguments, report):
    result = CliRunner().invoke(app, ["simulate", "step"] + OPTIONS + ["--gpus", str(GPUS)] + arguments)
    assert isinstance(result.exception, ConfigError)
    assert report in str(result.exception)
