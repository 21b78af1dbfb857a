"""Settings, names and sizes that must change a prediction, be refused, or be named in a caution."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from megascale.cli.common import DEFAULT_CLUSTER
from megascale.cli.main import app
from megascale.cli.simulate_options import load_scenario
from megascale.config import load
from megascale.core import flops
from megascale.core.flops import device_peak_tflops
from megascale.core.parameter_counts import count_stage_parameters
from megascale.errors import ConfigError, FitError, MegascaleError
from megascale.simulate.cluster import list_shipped_clusters, load_cluster
from megascale.simulate.fabric.step_traffic import estimate_step_traffic
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import find_device_gib
from megascale.simulate.run_plan import plan_run
from megascale.simulate.step import StepEstimate, estimate_step

BASE = ["--model.preset=gpt-1.3b", "--parallel.tensor=2", "--train.micro_batch=2", "--train.global_batch=64"]


def estimate(*settings: str, gpus: int = 16, cluster: str = DEFAULT_CLUSTER) -> StepEstimate:
    scenario, _ = load_scenario(None, [*BASE, *settings], gpus, cluster=cluster, calibration=None, software=None)
    return estimate_step(scenario, check_memory=False)


def invoke(line: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "120"})
    if isinstance(result.exception, MegascaleError):
        assert result.exception.exit_code == code, result.exception
        return result.output + str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    ("name", "gib", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.6, 312.0),
        ("A100-80GB", 79.2, 312.0),
        ("A100 64 GiB", 63.4, 312.0),
        ("NVIDIA H100 80GB HBM3", 79.2, 989.4),
        ("NVIDIA H100 PCIe", 79.2, 756.5),
        ("NVIDIA H100 NVL", 93.0, 835.5),
        ("NVIDIA H200", 139.8, 989.4),
        ("NVIDIA GH200 480GB", 94.8, 989.4),
        ("NVIDIA GB200", 178.3, 2500.0),
        ("h100", 79.2, 989.4),
    ],
)
def test_variants_of_a_gpu_have_their_own_memory_and_peak(name, gib, tflops):
    assert find_device_gib(name) == gib
    assert device_peak_tflops(name) == tflops


@pytest.mark.parametrize("name", ["H100 96GB", "V100", ""])
def test_a_device_without_known_memory_is_refused(name):
    with pytest.raises(ConfigError, match="--device-gib"):
        find_device_gib(name)


@pytest.mark.parametrize("cluster", list_shipped_clusters())
def test_plan_and_simulate_know_the_same_memory(cluster):
    gpu = load_cluster(cluster).gpu
    assert find_device_gib(gpu.name) == gpu.memory_gib


@pytest.mark.parametrize("cluster", ["a100-roce", "h100-dgx"])
@pytest.mark.parametrize("settings", [(), ("--parallel.pipeline=2",), ("--parallel.zero=3",)])
def test_plan_and_simulate_give_the_same_memory_and_flops(cluster, settings):
    result = estimate(*settings, cluster=cluster)
    scenario = result.scenario
    plan = make_plan(scenario.config, scenario.gpus, scenario.cluster.gpu.memory_gib).to_dict()
    assert result.memory_gib == pytest.approx(plan["needed_gib"], abs=0.01)
    counted = result.mfu * result.seconds * scenario.gpus * scenario.cluster.gpu.peak_tflops * 1e12
    assert counted == pytest.approx(plan["flops"]["per_step"], rel=1e-9)


def test_adapters_have_no_weight_gradients():
    full = estimate()
    adapters = estimate('--train.lora={"rank"=8}')
    counts = flops.flops_per_token(full.scenario.config.model)
    # Two thirds of the GEMMs remain: those of forward and of the gradients of inputs.
    assert adapters.parts["gemm"] == pytest.approx(full.parts["gemm"] * 2 / 3, rel=0.05)
    assert adapters.parts["optimizer"] == 0.0
    assert adapters.parts["data"] == 0.0
    counted = adapters.mfu * adapters.seconds / (full.mfu * full.seconds)
    assert counted == pytest.approx(counts.adapter_training / counts.training)
    assert any("train.lora" in text for text in adapters.cautions)


def test_the_gate_of_attention_takes_time_and_flops():
    plain = estimate()
    gated = estimate("--model.attention_gate=true")
    assert gated.seconds > 1.02 * plain.seconds
    case = gated.scenario.make_case()
    assert float(case.flops) == pytest.approx(
        flops.count_training_flops(gated.scenario.config.model) * 64 * gated.scenario.config.model.sequence_length
    )


@pytest.mark.parametrize(
    ("setting", "caution"),
    [
        ("--optimizer.name=muon", "optimizer.name=muon"),
        ("--kernels.attention=flex", "kernels.attention=flex"),
        ("--kernels.attention=eager", "kernels.attention=eager"),
        ("--data.document_mask=true", "data.document_mask"),
    ],
)
def test_a_setting_without_a_price_is_named(setting, caution):
    assert not any(caution in text for text in estimate().cautions)
    assert any(caution in text for text in estimate(setting).cautions)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_another_precision_is_refused(precision):
    with pytest.raises(ConfigError, match=f"train.precision={precision} has no price"):
        estimate(f"--train.precision={precision}")


def test_the_hosts_of_the_configuration_count():
    settings = ("--parallel.tensor=8", "--train.micro_batch=1")
    on_eight = estimate(*settings)
    on_four = estimate(*settings, "--parallel.gpus_per_host=4")
    assert on_four.parts["tensor"] > 1.5 * on_eight.parts["tensor"]  # tensor parallelism crosses the network
    line = "simulate sweep --gpus 16 --vary parallel.gpus_per_host=4,8 --no-memory --json " + " ".join(BASE)
    rows = json.loads(invoke(f"{line} --parallel.tensor=8"))["rows"]
    assert rows[0]["seconds"] > 1.1 * rows[1]["seconds"]


def write_cluster(folder: Path, **changes: object) -> str:
    """Write the file of h100-dgx with other figures, by "part.key" with two underscores for the dot."""
    text = (resources.files("megascale.simulate") / "clusters" / "h100-dgx.toml").read_text()
    tree = tomllib.loads(text)
    for name, value in changes.items():
        *parts, key = name.split("__")
        table = tree
        for part in parts:
            table = table[part]
        table[key] = value
    file = folder / "cluster.toml"
    file.write_text(tomli_w.dumps(tree))
    return str(file)


def test_a_cluster_file_sets_the_hosts_of_the_configuration(tmp_path):
    cluster = write_cluster(tmp_path, gpus_per_host=4)
    result = estimate("--parallel.tensor=8", cluster=cluster)
    assert result.scenario.layout.grid.host_count == 4
    assert result.seconds > estimate("--parallel.tensor=8").seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inside__bus": [[8, 349.0], [2, 207.0]]}, "rises from row to row"),
        ({"inside__bus": [[2, -40.0], [8, 349.0]]}, "positive"),
        ({"inside__bus": [[0, 40.0], [8, 349.0]]}, "positive"),
        ({"inside__bus": [[2], [8]]}, "pairs"),
        ({"inside__bus": []}, "pairs"),
        ({"between__bus": [[2, 400.0]]}, r"between.bus=400 .* Gbit/s"),
        ({"between__p2p_gbs": 400.0}, r"between.p2p_gbs=400 .* Gbit/s"),
        ({"kernels__attention__cudnn": [[8192, 545.0], [2048, 391.0]]}, "rises from row to row"),
        ({"kernels__attention__cudnn": [[2048, 391e12]]}, "TFLOP/s"),
        ({"kernels__attention__flash9": [[2048, 391.0]]}, "flash9 is unknown"),
        ({"gpu__peak_tflops": 0.989}, "TFLOP/s"),
        ({"gpu__peak_tflops": 989.4e12}, "TFLOP/s"),
        ({"gpu__memory_gbs": 3.35}, "GB/s"),
        ({"gpu__memory_gib": 80.0 * 2**30}, "GiB"),
    ],
)
def test_a_cluster_file_in_other_units_or_order_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(write_cluster(tmp_path, **changes))


def test_a_nic_faster_than_any_is_named():
    line = "simulate sweep --gpus 16 --vary cluster.between.gbs=50,400 " + " ".join(BASE)
    output = invoke(line).replace("\n", " ")
    assert "(cluster.between.gbs=400) between.gbs=400 GB/s are 3,200 Gbit/s" in output


def test_a_model_without_pipeline_has_no_negative_bubble():
    plan = make_plan(load(None, ["model.preset=olmo2-32b", "parallel.tensor=8", "train.micro_batch=1",
                                 "train.global_batch=256"]), 8, 80.0)  # fmt: skip
    assert f"{plan.bubble:.2%} {plan.idle:.2%}" == "0.00% 0.00%"


def test_a_sweep_over_gpus_chooses_a_layout_that_runs():
    line = "simulate sweep --model.preset=gpt-13b --vary gpus=8:32 --json"
    output = json.loads(invoke(line))
    assert [row["gpus"] for row in output["rows"]] == [8, 16, 32]
    assert output["left_out"] == []
    assert len({row["global_batch"] for row in output["rows"]}) == 1
    speeds = [row["tokens_per_second"] for row in output["rows"]]
    assert speeds == sorted(speeds)


def test_a_sweep_over_the_layout_keeps_the_number_of_gpus():
    line = "simulate sweep --model.preset=gpt-1.3b --gpus 8 --vary parallel.tensor=1,2 --json"
    output = json.loads(invoke(line))
    assert [row["data"] for row in output["rows"]] == [8, 4]


def test_a_sweep_without_a_point_that_runs_fails():
    line = "simulate sweep --model.preset=gpt-13b --parallel.tensor=1 --train.micro_batch=8 --gpus 1"
    output = invoke(f"{line} --vary train.global_batch=8,16", code=3)
    assert "skipped train.global_batch=8" in output
    assert "none of the values can run" in output


def test_a_sweep_names_the_values_that_a_caution_is_about():
    line = "simulate sweep --gpus 16 --vary optimizer.name=adamw,muon " + " ".join(BASE)
    assert "caution (optimizer.name=muon) optimizer.name=muon: its update" in invoke(line).replace("\n", " ")


def test_a_sweep_compares_with_a_stack_that_the_cluster_has_kernels_for():
    line = "simulate sweep --gpus 16 --vary parallel.zero=1,2 --json " + " ".join(BASE)
    rows = json.loads(invoke(f"{line} --against auto"))["rows"]
    assert {row["label"] for row in rows} == {"megatron-core-h200", "megascale-h200"}
    assert "such as megatron-core-h200" in invoke(f"{line} --against megatron-2023", code=2)


@pytest.mark.parametrize("gpus", ["0", "-8", "64:8", "8:", "8:0", "a:b"])
def test_a_wrong_range_of_gpus_is_refused(gpus):
    assert "--gpus" in invoke(f"simulate search --model.preset=gpt-1.3b --gpus {gpus}", code=2)


def test_a_run_that_faults_never_let_end_is_no_result():
    line = "simulate effective --gpus 64 --trials 10 " + " ".join(BASE)
    assert "does not end within" in invoke(f"{line} --tokens 1e20", code=3)
    output = invoke(f"{line} --host-mtbf 100")
    assert "host_mtbf_days = 100: given" in output
    assert "detect = 600: paper" in output
    twelve = json.loads(invoke(f"{line.replace('64', '12', 1)} --train.global_batch=48 --json"))
    assert twelve["hosts"] == 2


@pytest.mark.parametrize(
    ("option", "name"), [("--csv", "missing/rows.csv"), ("--trace", "file/trace.json"), ("--plot", "file/steps.png")]
)
def test_an_output_that_cannot_be_written_is_named(tmp_path, megascale, option, name):
    (tmp_path / "file").touch()
    path = tmp_path / name
    done = megascale("simulate", "step", "--gpus", "16", "--against", "none", *BASE, option, str(path))
    assert done.returncode == 2
    assert re.search("cannot be (read or )?written: ", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_between_hosts_is_that_of_the_plan(zero):
    scenario, _ = load_scenario(
        None, [*BASE, f"--parallel.zero={zero}"], 16, cluster=DEFAULT_CLUSTER, calibration=None, software=None
    )
    plan = make_plan(scenario.config, 16, 80.0)
    sent = estimate_step_traffic(scenario.config, 16)
    planned = plan.traffic(0)
    assert sent.reduce * 7 / 8 == pytest.approx(planned.data_reduce)
    assert sent.gather * 7 / 8 == pytest.approx(planned.data_gather)
    parameters = count_stage_parameters(scenario.config.model, scenario.config.parallel, 0)
    reductions = {0: 2, 1: 1}.get(zero, 4)  # four micro-batches
    assert sent.reduce == pytest.approx(4 * parameters * reductions, rel=0.08)  # the tied embedding is reduced once


@pytest.mark.parametrize("chunks", [1, 2])
def test_bytes_of_pipeline_transfers_are_those_of_the_plan(chunks):
    from megascale.simulate.fabric.fabric_spec import load_fabric
    from megascale.simulate.fabric.placement import make_placement, make_step_flows
    from megascale.simulate.fabric.topology import build_topology

    settings = ["--model.preset=gpt-1.3b", "--parallel.tensor=8", "--parallel.pipeline=2", "--train.global_batch=8",
                "--train.micro_batch=1", f"--parallel.virtual_stages={chunks}"]  # fmt: skip
    scenario, _ = load_scenario(None, settings, 16, cluster=DEFAULT_CLUSTER, calibration=None, software=None)
    plan = make_plan(scenario.config, 16, 80.0)
    traffic = estimate_step_traffic(scenario.config, 16)
    topology = build_topology(load_fabric("megascale", {"hosts": 2}))
    placement = make_placement(traffic.grid, topology, "data")
    flows = make_step_flows(placement, "pipeline", traffic.pipeline, wrap_share=traffic.wrap_share)
    planned = sum(8 * plan.traffic(stage).pipeline for stage in (0, 1))
    assert flows.size.sum() == pytest.approx(planned)


def test_placements_that_the_layout_excludes_are_skipped():
    line = "network placement examples/gpt-13b-3d.toml --gpus 4"
    output = invoke(line)
    assert "skipped replicas" in output
    with pytest.raises(FitError, match="--placement data"):
        CliRunner().invoke(app, shlex.split(f"{line} --placement replicas"), catch_exceptions=False)


def test_a_run_of_unknown_size_is_planned_for_its_configuration(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[model]\npreset = "tiny"\nvocab_size = 512\n[parallel]\ntensor = 2\ndata = 3\n[train]\nglobal_batch = 24\n'
    )
    assert plan_run(tmp_path, 0)["gpus"] == 6
