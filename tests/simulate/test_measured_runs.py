"""Run folders as measurements, search, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale import config as configuration
from megascale.cli.main import app
from megascale.errors import ConfigError, DataError, FitError
from megascale.simulate.calibrating import calibrate, measure_runs
from megascale.simulate.calibration import Calibration, Constants, load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_runs import list_measured_runs, load_predictions, measure_run
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.search import find_fastest, find_fewest_gpus, list_divisors, search_layouts
from megascale.simulate.sensitivity import compute_sensitivities
from megascale.simulate.series import parse_vary
from megascale.simulate.software import ENGINE_RECOMPUTE, MEGASCALE, find_stack, switch_techniques
from megascale.simulate.step import estimate_step
from tests.damaged_records import damaged_lines

EXAMPLE = "examples/gpt-175b.toml"
SMALL = ["model.preset=gpt-1.3b", "train.micro_batch=4", "train.global_batch=64"]
ONE_GPU = ["--gpus", "8", "--parallel.tensor=1", "--parallel.pipeline=1", "--parallel.virtual_stages=1"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["simulate"] + list(arguments), catch_exceptions=False)


def write_run(folder, settings, seconds, world, steps=20):
    folder.mkdir(parents=True)
    config = configuration.load(None, settings)
    (folder / "config.toml").write_text(config.to_toml())
    if world:
        (folder / "events.jsonl").write_text(json.dumps({"event": "run_started", "world": world}) + "\n")
    lines = [{"step": i + 1, "seconds": 9.0 if i < 5 else seconds, "mfu": 0.5} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"step": ')
    return folder


def test_measure_takes_the_median_after_the_warm_up(tmp_path):
    folder = write_run(
        tmp_path / "r", ["model.preset=gpt-1.3b", "train.micro_batch=4", "train.global_batch=64"], 2.0, 1
    )
    measured = measure_run(folder)
    assert (measured.seconds, measured.steps, measured.gpus) == (2.0, 15, 1)
    with pytest.raises(DataError, match="at least"):
        measure_run(write_run(tmp_path / "short", ["model.preset=gpt-1.3b"], 2.0, 1, steps=7))
    silent = write_run(tmp_path / "silent", SMALL, 2.0, None)
    with pytest.raises(DataError, match="how many GPUs"):
        measure_run(silent)
    assert measure_run(silent, 2).gpus == 2
    (silent / "events.jsonl").write_text('{"event": "run_started", "world": 4}\n{"event": "active"}\n{"ev')
    assert measure_run(silent).gpus == 4
    with pytest.raises(DataError, match="is not a run folder"):
        measure_run(tmp_path / "nothing")


def test_a_bench_is_a_measurement_too(tmp_path, megascale):
    file = tmp_path / "tiny.json"
    settings = ["--model.block=parallel", "--train.global_batch=1", "--model.layers=2", "--model.sequence_length=32"]
    settings += ["--train.micro_batch=1", "--train.device=cpu", "--model.vocab_size=64"]
    done = megascale("bench", "train", "tiny", *settings, "--steps", "4", "--warmup", "1", "--out", str(file))
    assert done.returncode == 0, done.stderr
    measured = measure_run(file)
    assert (measured.gpus, measured.steps) == (1, 4)
    assert (measured.config.model.block, measured.config.model.layers) == ("parallel", 2)
    assert measured.seconds == json.loads(file.read_text())["step_seconds"]
    for command in (["compare", str(file)], ["calibrate", "--run", str(file)]):
        refused = megascale("simulate", *command)
        assert refused.returncode == 2
        assert "ran on a CPU" in refused.stderr
    report = json.loads(file.read_text())
    # All that `python -m benchmarks targets` has timed on links as they are.
    run = {"told": report, "command": "megascale bench train tiny"}
    slow, failed = {**run, "command": "NCCL_P2P_DISABLE=1 megascale bench train tiny"}, {**run, "told": None}
    traced = {**run, "told": {"ranks": []}}
    cases = {"T1": {"0": run, "1": run}, "T4": {"0": slow}, "T5": {"0": traced}, "F1": {"1": failed}}
    every = tmp_path / "all.json"
    every.write_text(json.dumps({"gpus": 1, "cases": cases}))
    assert [item.folder.name for item in list_measured_runs(every)] == [f"all.json, T1, repeat {n}" for n in (1, 2)]
    every.write_text(json.dumps({"gpus": 1, "cases": {"T4": {"0": slow}}}))
    with pytest.raises(DataError, match="holds no timed run"):
        list_measured_runs(every)
    assert list_measured_runs(file) == [measured]
    for damage in ({"all_step_seconds": [1.0]}, {"settings": {"model": {"layers": -1}}}, {"processes": None}):
        file.write_text(json.dumps(report | damage))
        with pytest.raises(DataError, match=r"tiny\.json"):
            measure_run(file)


def test_calibrate_from_runs_recovers_the_constant(tmp_path):
    """Runs made by the model itself with compute 1.23."""
    cluster = load_cluster("h200-host")
    folders = []
    for name, tensor, micro in (("a", 1, 4), ("b", 2, 8), ("c", 2, 4), ("d", 1, 2)):
        settings = [
            "model.preset=gpt-1.3b",
            f"parallel.tensor={tensor}",
            f"train.micro_batch={micro}",
            "train.global_batch=64",
        ]
        config = configuration.load(None, settings)
        truth = Calibration("t", "h200-host", Constants(compute=1.23))
        software = make_engine_software(config, find_stack("megascale-h200"))
        seconds = estimate_step(Scenario(config, tensor, cluster, truth, software)).seconds
        folders.append(write_run(tmp_path / name, settings, seconds, tensor))
    result, table = calibrate(measure_runs(folders, cluster, None, None), cluster, "compute")
    assert result.constants.compute == pytest.approx(1.23, rel=1e-3)
    assert len(result.rows) == len(table) == 4
    assert not result.warnings
    steps = measure_runs(folders[:1], cluster, None, None)
    single, _ = calibrate(steps, cluster, "compute,fixed")
    assert any("cannot decide" in w for w in single.warnings)
    with pytest.raises(ConfigError, match="nothing to fit"):
        measure_runs([], cluster, None, None)
    with pytest.raises(ConfigError, match="not a constant"):
        calibrate(steps, cluster, "warp")


@pytest.fixture(scope="module")
def scenario():
    config = configuration.load(EXAMPLE)
    cluster = load_cluster("a100-roce")
    return Scenario(
        config, 12288, cluster, load_calibration(None, "a100-roce"), make_engine_software(config, MEGASCALE)
    )


def test_search_finds_layouts_that_fit(scenario):
    result = search_layouts(scenario.config, scenario.cluster, scenario.calibration, scenario.software, 64, 12288)
    assert (result.tensor * result.pipeline * result.data == result.gpus).all()
    results = find_fastest(result, scenario.config, scenario, 3072)
    seconds = [r.seconds for r in results]
    assert seconds == sorted(seconds)
    assert all(r.memory_gib <= 80 and r.scenario.gpus == 3072 for r in results)
    # The search includes the paper's own layout, which is not faster than the best.
    paper = estimate_step(Scenario(**{**vars(scenario), "gpus": 3072}))
    assert seconds[0] <= paper.seconds * 1.0001


def test_search_chooses_what_to_recompute():
    """Half of gpt-13b on eight H100s: a larger micro-batch that fits by recomputing is faster than a smaller one."""
    arguments = ["model.preset=gpt-13b", "train.precision=bfloat16", "train.global_batch=64"]
    config = configuration.load(None, arguments)
    cluster = load_cluster("h100-dgx")
    base = find_stack("megascale-h200")
    calibration = load_calibration("h100-engine", "h100-host")
    scenario = Scenario(config, 8, cluster, calibration, make_engine_software(config, base), base=base)
    fastest = {}
    for kinds in (["none"], ["full"], list(ENGINE_RECOMPUTE)):
        output = search_layouts(config, cluster, calibration, scenario.software, 8, 8, kinds)
        fastest[kinds[-1], len(kinds)] = find_fastest(output, config, scenario, 8)
    everything = fastest[ENGINE_RECOMPUTE[-1], len(ENGINE_RECOMPUTE)]
    assert everything[0].seconds <= min(fastest["none", 1][0].seconds, fastest["full", 1][0].seconds)
    used = {result.scenario.config.parallel.recompute for result in everything}
    assert used - {"none"}
    for result in everything:
        parallel = result.scenario.config.parallel
        assert result.scenario.software.recompute == parallel.recompute
        assert result.memory_gib <= 80
    layouts = [
        (r.scenario.config.parallel.model_dump_json(exclude={"recompute"}), r.scenario.config.train.micro_batch)
        for r in everything
    ]
    assert len(set(layouts)) == len(layouts)


def test_search_prices_the_files_precision_and_kinds_that_are_known():
    arguments = ["--model.preset=gpt-13b", "--gpus", "8", "--cluster", "h100-dgx", "--train.global_batch=64", "--json"]
    plain, fast = (
        json.loads(invoke("search", *arguments, *more).stdout)["layouts"][0]
        for more in ([], ["--train.linear_precision=float8"])
    )
    assert (plain["precision"], fast["precision"]) == ("bfloat16", "float8")
    assert fast["seconds"] < 0.85 * plain["seconds"]
    with pytest.raises(ConfigError, match="'some' is unknown"):
        invoke("search", *arguments, "--recompute", "none,some")
    without = json.loads(invoke("search", *arguments, "--recompute", "none", "--no-memory").stdout)["layouts"]
    assert {item["recompute"] for item in without} == {"none"}
    assert without[0]["seconds"] < plain["seconds"]


def test_search_takes_long_rounds_where_the_network_is_slow():
    arguments = ["model.preset=gpt-13b", "train.precision=bfloat16", "parallel.reduce_dtype=bfloat16"]
    config = configuration.load(None, arguments + ["train.global_batch=64", "parallel.recompute=selective"])
    fast = load_cluster("h200-host")
    slow = fast.model_copy(update={"inside": fast.inside.model_copy(update={"bus": [[2, 11.2]], "p2p_gbs": 11.0})})
    for cluster, expected in ((fast, False), (slow, True)):
        result = search_layouts(
            config, cluster, load_calibration("h200-engine", "h200-host"), make_engine_software(config, MEGASCALE), 8, 8
        )
        long = result.micro_batch_group_size > 0
        # PP2 in five chunks and DP4: fits, and gains a fifth where links are slow.
        equal = (result.tensor == 1) & (result.pipeline == 2) & (result.virtual == 5) & (result.micro == 2)
        assert (equal & ~long).sum() == 1
        assert (equal & long).any() == expected
        if expected:
            assert result.seconds[equal & long][0] < 0.85 * result.seconds[equal & ~long][0]
        one_stage = long & (result.pipeline == 1)
        assert one_stage.any()
        assert (result.micro_batch_group_size[one_stage] * result.micro[one_stage] * result.data[one_stage] == 64).all()
    scenario = Scenario(
        config, 8, slow, load_calibration("h200-engine", "h200-host"), make_engine_software(config, MEGASCALE)
    )
    assert any(
        r.scenario.config.parallel.micro_batch_group_size for r in find_fastest(result, config, scenario, 8, count=20)
    )


def test_fewest_meets_the_deadline(scenario):
    result = search_layouts(scenario.config, scenario.cluster, scenario.calibration, scenario.software, 64, 12288)
    small = find_fewest_gpus(result, scenario.config, scenario, 300e9, 5.0)
    assert small.days(300e9) <= 5.0
    longer = find_fewest_gpus(result, scenario.config, scenario, 300e9, 10.0)
    assert longer.scenario.gpus < small.scenario.gpus
    with pytest.raises(FitError, match="cannot be done"):
        find_fewest_gpus(result, scenario.config, scenario, 300e9, 0.5)


def test_sensitivities_have_the_right_sign(scenario):
    changes = compute_sensitivities(scenario)
    assert next(iter(changes)) == "GPU peak"
    for name in ("GPU peak", "NIC bandwidth", "NVLink bandwidth", "HBM bandwidth"):
        assert changes[name][0] >= 0 >= changes[name][1]


def test_divisors():
    assert list_divisors(96) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]


def test_switches_undo_themselves():
    off = switch_techniques(MEGASCALE, ["tp-overlap", "window"], False)
    assert not off.tp_overlap
    assert off.window is None
    assert switch_techniques(off, ["tp-overlap", "window"], True) == MEGASCALE
    with pytest.raises(ConfigError, match="unknown"):
        switch_techniques(MEGASCALE, ["magic"], True)


def test_the_configuration_decides_what_it_names():
    config = configuration.load(EXAMPLE)
    software = make_engine_software(config, MEGASCALE)
    assert software.parallel_block
    assert software.window == config.model.window
    assert software.tp_overlap
    plain = ["overlap.tensor=off", "overlap.data=false", "kernels.mode=reference", "kernels.attention=flash"]
    off = make_engine_software(
        configuration.load(EXAMPLE, plain + ["parallel.zero=0", "model.block=serial"]), MEGASCALE
    )
    assert (off.tp_overlap, off.dp_overlap, off.fused_operators, off.parallel_block) == (False,) * 4
    assert off.attention == "flash2"
    assert not off.distributed_optimizer


@pytest.mark.parametrize(
    ("text", "points"),
    [("gpus=256:1024", [256, 512, 1024]), ("a.b=1,2.5,x", [1, 2.5, "x"]), ("gpus=3:4", [3, 4])],
)
def test_vary(text, points):
    assert parse_vary(text)[1] == points


def test_step_compares_both_stacks(tmp_path):
    result = invoke(
        "step",
        EXAMPLE,
        "--cluster",
        "a100-roce",
        "--gpus",
        "12288",
        "--json",
        "--csv",
        str(tmp_path / "s.csv"),
        "--plot",
        str(tmp_path / "s.png"),
    )
    first, second = json.loads(result.stdout)
    assert (first["label"], second["label"]) == ("megatron-2023", "megascale")
    assert second["seconds"] < first["seconds"]
    for record in (first, second):
        assert sum(record["parts"].values()) == pytest.approx(record["seconds"])
        assert record["p10"] < record["seconds"] < record["p90"]
    assert (tmp_path / "s.csv").read_text().count("\n") == 3
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    table = invoke("step", EXAMPLE, "--gpus", "12288")
    assert "where the step goes" in table.stdout
    (tmp_path / "a.json").write_text(result.stdout)
    compared = invoke("compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--json")
    assert all(row["difference, s"] == 0 for row in json.loads(compared.stdout))


def test_event_level_writes_a_trace(tmp_path):
    file = tmp_path / "t.json"
    result = invoke(
        "step", EXAMPLE, "--gpus", "256", "--train.global_batch=64", "--trace", str(file), "--against", "none"
    )
    assert "events in" in result.stdout
    events = json.loads(file.read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in work} == set(range(8))
    assert {"forward", "backward", "send_forward", "reduce_grads"} <= {e["name"] for e in work}
    assert all(e["dur"] > 0 for e in work)


def test_ablate_sweep_search_effective(tmp_path):
    paper = ["--cluster", "a100-roce", "--gpus", "256", "--train.global_batch=256"]
    actions = json.loads(invoke("ablate", EXAMPLE, *paper, "--json").stdout)
    mfu = [r["seconds"] for r in actions["cumulative"]]
    assert mfu == sorted(mfu, reverse=True)
    assert len(mfu) == 8
    swept = invoke(
        "sweep", EXAMPLE, "--vary", "gpus=256:1024", "--vary", "cluster.between.gbs=12.5,25", "--json",
        "--train.global_batch=768", "--plot", str(tmp_path / "w.png"),
    )  # fmt: skip
    rows = json.loads(swept.stdout)["rows"]
    assert len(rows) == 6
    assert rows[0]["seconds"] > rows[1]["seconds"] > rows[3]["seconds"]
    result = json.loads(invoke("search", EXAMPLE, "--gpus", "1024:4096", "--days", "9", "--json").stdout)
    assert result["layouts"][0]["gpus"] <= 4096
    spent = json.loads(invoke("effective", EXAMPLE, "--gpus", "12288", "--trials", "40", "--json").stdout)
    assert 0.3 < spent["effective_p10"] <= spent["effective"] <= 1


def test_compare_explains_a_run(tmp_path):
    folder = write_run(tmp_path / "mine", SMALL, 2.6, 1)
    rows = json.loads(invoke("compare", str(folder), "--json").stdout)
    assert rows[0]["value"] == 2.6
    closing = [r for r in rows if "closes the gap" in str(r["remark"])]
    assert any("compute" in r["what"] for r in closing)


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (["step", EXAMPLE, "--gpus", "100"], 3, "cannot be laid out"),
        (["step", EXAMPLE] + ONE_GPU, 3, "GiB"),
        (["step", EXAMPLE, "--gpus", "256", "--cluster", "moon"], 2, "neither a shipped cluster"),
        (["step", EXAMPLE, "--gpus", "256", "--software", "magic"], 2, "unknown"),
        (["step", EXAMPLE, "--gpus", "256", "--level", "deep"], 2, "closed or event"),
        (["search", EXAMPLE, "--gpus", "7"], 3, "no layout"),
        (["sweep", EXAMPLE, "--vary", "gpus"], 2, "KEY=VALUES"),
        (["sweep", EXAMPLE, "--vary", "gpus=1:inf"], 2, "finite"),
        (["compare"], 2, "give two JSON files"),
        (["compare", "--runs", "runs"], 2, "--predictions FILE"),
        (["step", EXAMPLE, "--gpus", "256", "--top-k", "9"], 3, "--top-k=9"),
        *((["step", EXAMPLE, "--gpus", "256", f"--{option}", value], 2, f"'--{option}'")
          for option in ("tokens", "price", "watts") for value in ("inf", "nan")),
        (["search", EXAMPLE, "--gpus", "256", "--days", "inf"], 2, "'--days'"),
        (["effective", EXAMPLE, "--gpus", "256", "--host-mtbf", "nan"], 2, "'--host-mtbf'"),
    ],
)  # fmt: skip
def test_what_cannot_run_exits_with_the_reason(arguments, code, output, megascale):
    done = megascale("simulate", *(Path(EXAMPLE).absolute() if word == EXAMPLE else word for word in arguments))
    assert done.returncode == code, done.stderr
    assert output in done.stderr


def test_no_torch():
    """The simulator runs where torch is not."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from megascale.cli.main import app\n"
        "from typer.testing import CliRunner\n"
        f"r = CliRunner().invoke(app, ['simulate', 'step', {EXAMPLE!r}, '--gpus', '12288', '--level', 'event'])\n"
        "assert r.exit_code == 0, r.output\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_predictions_are_written_before_and_read_after(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[run]]\nname = "first"\ngpus = 1\nsettings = {json.dumps(SMALL)}\n')
    out = tmp_path / "said.toml"
    done = invoke("predict", str(plan), "--calibration", "h200-engine", "--note", "nothing measured", "--out", str(out))
    assert done.exit_code == 0, done.output
    built, (output,) = load_predictions(out)
    assert "h200-engine" in built
    assert "nothing measured" in built
    assert (output.name, output.gpus) == ("first", 1)
    assert output.low < output.seconds < output.high
    write_run(tmp_path / "runs" / "first", list(output.settings), output.seconds * 1.1, 1)
    rows = json.loads(invoke("compare", "--runs", str(tmp_path / "runs"), "--predictions", str(out), "--json").output)
    assert len(rows) == 1
    plan.write_text("[[run]]\nname = 'first'\n")
    with pytest.raises(ConfigError, match="gpus"):
        invoke("predict", str(plan))


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_records_are_measured_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        write_run(folder, SMALL, 2.0, 1)
    sound = [{"step": step, "seconds": 2.0, "mfu": 0.5} for step in range(12)]
    (folder / "metrics.jsonl").write_bytes(data.draw(damaged_lines(sound)))
    (folder / "events.jsonl").write_bytes(data.draw(damaged_lines([{"event": "run_started", "world": 4}])))
    try:
        measured = measure_run(folder)
    except DataError as error:
        assert "steps after" in str(error) or "how many GPUs" in str(error)
        return
    assert 0 < measured.seconds < 1e9
    assert measured.gpus > 0
