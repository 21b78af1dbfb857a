"""Sweeps and ablations: figures that a cluster file would refuse, ends of ranges, signs, digits on a narrow screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.simulate.split import BY_HASH, SETS, is_development
from megascale import config as configuration
from megascale.cli.common import DEFAULT_CLUSTER, DEFAULT_DEVICE
from megascale.cli.main import app
from megascale.cli.simulate_series import sweep
from megascale.errors import ConfigError
from megascale.simulate.calibration import Calibration
from megascale.simulate.cluster import load_cluster, set_value
from megascale.simulate.planner.layout_figures import DEVICES
from megascale.simulate.render import show_rows
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.series import ablate_in_turn, parse_vary, sweep_rows
from megascale.simulate.software import TECHNIQUES, find_stack


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    config = configuration.load("examples/gpt-175b.toml", ["train.global_batch=256"])
    cluster = load_cluster("a100-roce")
    return Scenario(
        config, 256, cluster, Calibration("none", cluster.name), make_engine_software(config, find_stack("megascale"))
    )


def test_the_examples_of_sweep_run():
    """The default cluster has no rates of Megatron-LM's kernels of 2023, with which the first example compares."""
    examples = [line.split() for line in (sweep.__doc__ or "").splitlines() if line.strip().startswith("megascale")]
    assert len(examples) == 2
    for words in examples:
        if "--plot" in words:
            words = words[: words.index("--plot")]
        done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("key", "value", "output"),
    [
        ("cluster.between.gbs", 0, "cluster.between.gbs=0"),
        ("cluster.between.gbs", -4.0, "cluster.between.gbs=-4.0"),
        ("cluster.between.gbs", "fast", "cluster.between.gbs='fast'"),
        ("cluster.stragglers.slow_hosts", 2, "cluster.stragglers.slow_hosts=2"),
        ("cluster.gpu.peak_tflops", float("inf"), "finite"),
        ("cluster.gpu.name", 3, "only numbers"),
        ("cluster.between.colour", 3, "no such figure"),
        ("cluster.network.gbs", 3, "parts: gpu"),
        ("cluster.gbs", 3, "PART.KEY"),
        ("gpus", 2.5, "gpus=2.5"),
        ("gpus", 0, "gpus=0"),
    ],
)
def test_a_varied_figure_is_checked_as_a_cluster_file_is(scenario, key, value, output):
    with pytest.raises(ConfigError, match=output):
        sweep_rows([(key, [value])], [scenario], "closed")


def test_bandwidths_of_a_link_move_together():
    cluster = load_cluster("a100-roce")
    half = set_value(cluster, "between", "gbs", cluster.between.gbs / 2)
    assert half.between.bus == [[r, b / 2] for r, b in cluster.between.bus]
    assert half.between.p2p_gbs == cluster.between.p2p_gbs / 2


def test_a_range_ends_at_its_end():
    assert parse_vary("gpus=256:12288")[1] == [256, 512, 1024, 2048, 4096, 8192, 12288]
    assert parse_vary("gpus=256:1024")[1] == [256, 512, 1024]


def test_leaving_a_technique_out_is_slower_by_a_positive_share(scenario):
    full, *rows = ablate_in_turn(scenario, list(TECHNIQUES), "closed")
    for _, result, slower in rows:
        assert slower == pytest.approx(result.seconds / full[1].seconds - 1)
    assert {name: s for name, _, s in rows}["without parallel-block"] > 0


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_digit_is_cut(width):
    report = io.StringIO()
    figures = ["12,288", "megatron-core-h200", "123.456", "120.01-129.99", "1,984,123"]
    show_rows(["GPUs", "software", "step, s", "P10-P90", "tokens/s"], [figures] * 3, Console(file=report, width=width))
    text = report.getvalue()
    assert all(text.count(figure) == 3 for figure in figures)
    assert max(map(len, text.splitlines())) <= width


def test_plan_and_simulate_plan_for_the_same_machine():
    gpu = load_cluster(DEFAULT_CLUSTER).gpu
    assert DEFAULT_DEVICE in gpu.name
    assert DEVICES[DEFAULT_DEVICE] == gpu.memory_gib


def test_the_split_depends_on_configurations_alone():
    keys = [f"{layers} 4096 32 2048" for layers in range(1, 200)]
    sides = [is_development("vtrain-multi", key) for key in keys]
    assert sides == [is_development("vtrain-multi", key) for key in keys]
    assert 60 < sum(sides) < 140
    for name, item in SETS.items():
        if item.side != BY_HASH:
            assert len({is_development(name, key) for key in keys}) == 1
