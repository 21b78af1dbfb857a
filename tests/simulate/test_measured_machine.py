"""`simulate measure` on this CPU, small: its files load, carry what was measured, and price a step."""

from __future__ import annotations

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_machine import make_cluster
from tests.simulate.simulator_cases import GPT_13B, case


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One measurement of this machine, two processes for the collectives."""
    start_processes = pytest.importorskip("torch.multiprocessing").start_processes
    folder = tmp_path_factory.mktemp("machine")
    arguments = ["simulate", "measure", "--device", "cpu", "--seconds", "0.02", "--processes", "2"]
    with pytest.MonkeyPatch.context() as patch:
        # Its two processes fork from the suite's server, which has torch.
        patch.setattr("torch.multiprocessing.spawn", partial(start_processes, start_method="forkserver"))
        patch.setenv("FORCE_COLOR", "1")  # as on a terminal, which shows what is being measured
        done = CliRunner().invoke(app, arguments + ["--out", str(folder), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "measuring collectives" in done.stderr
    return folder, json.loads(done.stdout)


def test_files_say_what_was_measured_and_what_was_not(measured):
    folder, figures = measured
    cluster = load_cluster(str(folder / "this-machine.toml"))
    fastest = max(row[-1] for row in figures["gemms"])
    assert cluster.gpu.peak_tflops == pytest.approx(fastest)
    assert cluster.inside.bus == [row[:2] for row in figures["collectives"]]
    assert cluster.sources["kernels.gemm_best"].startswith("measured")
    assert cluster.sources["between.gbs"].startswith("not measured, of h200-host")
    constants = load_calibration(str(folder / "this-machine-calibration.toml"), cluster.name)
    assert constants.cluster == cluster.name
    assert not constants.fitted
    assert any("launch" in row for row in constants.rows)


def test_a_step_of_the_measured_machine_takes_longer_than_a_gpu_s(measured):
    folder, _ = measured
    cluster, single = load_cluster(str(folder / "this-machine.toml")), case(1, 1, 1, 1, 1, 4, model=GPT_13B)
    assert float(compute_step_parts(cluster, single).total) > 10 * float(
        compute_step_parts(load_cluster("a100-roce"), single).total
    )


def test_a_gpu_s_figures_keep_its_printed_peak_and_power_limit(measured):
    _, figures = measured
    gemms = [[4096, 4096, 4096, 700.0], [8192, 8192, 8192, 790.0], [2048, 6144, 12288, 730.0]]
    report = figures | {"device": "NVIDIA H200", "memory_gib": 139.8, "processors": 132, "gemms": gemms}
    report |= {"sustained_tflops": 670.0, "watts": 692.0, "copy_gbs": 4170.0, "add_gbs": 4200.0}
    report["collectives"] = [[2, 320.0, 330.0, 12.0]]  # NVLink's; those of this CPU's processes have other magnitudes
    base = load_cluster("h200-host")
    cluster = make_cluster(report, base, "mine")
    assert cluster.gpu.peak_tflops == base.gpu.peak_tflops
    assert cluster.kernels.gemm_best == pytest.approx(790 / 989.4)
    assert cluster.power is not None
    assert cluster.power.gemm_sustained == pytest.approx(670 / 989.4)
    assert "692 W" in cluster.sources["power.gemm_sustained"]
    assert cluster.power.float8_sustained == pytest.approx(670 / 989.4 * 0.627 / 0.685)
    cool = make_cluster(report | {"sustained_tflops": 795.0}, base, "cool")
    # Nothing is held back: a GEMM alone holds its best rate for as long as it runs.
    assert cool.power is not None
    assert cool.power.gemm_sustained > cool.kernels.gemm_best


def test_wrong_devices_are_refused():
    for arguments, output in (
        (["--device", "tpu"], "use auto, cpu, cuda"),
        (["--like", "nowhere"], "neither a shipped"),
    ):
        with pytest.raises(ConfigError, match=output):
            CliRunner().invoke(app, ["simulate", "measure", "--seconds", "0.01"] + arguments, catch_exceptions=False)
