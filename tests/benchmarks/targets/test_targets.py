"""`python -m benchmarks targets`: cases, the order of jobs and their GPUs, and the file of results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.targets import command, predicted, runs
from benchmarks.targets.cases import TargetCase, load_cases
from benchmarks.targets.others import load_command_targets
from benchmarks.targets.runs import ResultFile, TargetJob, TargetRun, choose_next_job, list_remaining_jobs, run_jobs
from megascale.errors import ConfigError, MegascaleError
from megascale.simulate.measured_runs import list_measured_runs
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import DEVICES
from tests.benchmarks.targets.target_cases import add_runs, case, make_report, make_run
from tests.forked import BENCHMARKS, Forked
from tests.test_commands import parse

SMALL = ["--model.layers=1", "--model.hidden=32", "--model.vocab_size=64", "--model.sequence_length=16"]
ARGUMENTS = json.dumps(["tiny"] + SMALL + ["--train.micro_batch=1", "--train.threads=1"])


def to_toml(name: str, **keys: str) -> str:
    """Return the TOML of a short case on the CPU. `keys` are TOML values."""
    table = {"name": f'"{name}"', "title": f'"{name}"', "arguments": ARGUMENTS, "gpus": "0", "batch": "1"}
    table |= {"steps": "2", "warmup": "2", "seconds": "1"} | keys
    return "\n".join(["[[case]]"] + [f"{key} = {value}" for key, value in table.items()]) + "\n"


def invoke(*arguments):
    """Run the command in this process, and return its output and exception."""
    return CliRunner().invoke(app, ["targets"] + [str(argument) for argument in arguments], env={"COLUMNS": "100"})


# Cases


@pytest.mark.parametrize("item", load_cases(None), ids=lambda target: target.name)
def test_every_shipped_case_is_valid_and_fits_with_each_number_of_replicas(item):
    for replicas in range(item.min_data, item.data + 1):
        config = item.make_config(replicas)
        assert config.train.global_batch == replicas * item.batch
        assert make_plan(config, replicas * item.gpus, DEVICES["H200"]).fits
    assert item.format_command(item.data).removeprefix("NCCL_P2P_DISABLE=1 ").startswith("python -m benchmarks ")


def test_shipped_targets_are_for_one_host_and_have_the_agreed_values():
    by_name = {item.name: item for item in load_cases(None)}
    assert max(item.max_gpus for item in by_name.values()) == 8
    assert by_name["T1"].target == {"mfu": 0.57}
    assert by_name["F2"].list_settings(8)[-2:] == ["--parallel.data=8", "--train.global_batch=16"]
    assert by_name["E3p4"].target == {}
    for name, target, stretch in (("EhD", 0.81, 0.76), ("EhDg", 0.81, 0.76), ("EhT", 0.84, 0.79), ("EhP", 0.87, 0.82)):
        assert by_name[name].max_gpus == 2
        assert by_name[name].target == {"step_seconds": target}
        assert by_name[name].stretch == {"step_seconds": stretch}
    assert by_name["F3"].list_settings(8)[-1] == by_name["T4"].list_settings(4)[-1] == "--train.global_batch=64"


def test_cases_that_exceed_the_gpus_memory_are_left_out():
    """T1 runs with one of its two replicas on four GPUs, which does not shard the optimizer state."""
    cases = [item for item in load_cases(None) if item.name in ("T1", "F3h", "G124")]
    assert command._split_by_memory(cases, 4, 139.7) == (cases, {})
    fitting, too_large = command._split_by_memory(cases, 4, 79.2)
    assert [item.name for item in fitting] == ["F3h", "G124"]
    assert too_large == {"T1": pytest.approx(103, abs=3)}
    assert command._split_by_memory(cases, 0, 79.2) == (cases, {})
    fewer_layers = ["--model.layers=20", "--parallel.layer_split=[2,2,2,2,2,2,2,2,3,1]"]
    halved = cases[0].model_copy(update={"arguments": cases[0].arguments + fewer_layers})
    assert command._split_by_memory([halved], 4, 79.2) == ([halved], {})


def test_a_call_without_a_case_that_fits_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_get_gpu_names", lambda *_: ["0", "1", "2", "3"])
    monkeypatch.setattr(command, "_get_gpu_gib", lambda _: 79.2)
    result = invoke("--only", "T1", "--only", "EL8", "--out", tmp_path / "results.json")
    assert isinstance(result.exception, ConfigError)
    for part in ("no case fits", "a GPU has 79 GiB", "T1 103 GiB", "EL8 ", "--model.layers=N"):
        assert part in str(result.exception)


@pytest.mark.parametrize(
    ("gpus", "keys", "replicas"),
    [
        (8, {"gpus": 2, "data": 4}, 4),
        (8, {"gpus": 2, "data": 2}, 2),
        (3, {"gpus": 2, "data": 4}, 1),
        (1, {"gpus": 2, "data": 4}, None),
        (7, {"gpus": 2, "data": 4, "min_data": 4}, None),
        (0, {"gpus": 0, "data": 2}, 2),
    ],
)
def test_a_case_runs_with_as_many_replicas_as_the_gpus_allow(gpus, keys, replicas):
    assert case(**keys).count_replicas(gpus) == replicas


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"target": "{mfi = 0.5}"}, "'mfi'"),
        ({"target": "{tensor_exposed = 0.5}"}, "tensor_exposed"),
        ({"target": "{speed_up = 1.1}"}, "baseline='F3'"),
        ({"target": "{mfu = 0.6}", "stretch": "{mfu = 0.5}"}, "stretch.mfu=0.5"),
        ({"stretch": "{mfu = 0.5}"}, "add target.mfu"),
        ({"baseline": '"B"'}, "'B'"),
        ({"min_data": "2"}, "min_data=2"),
        ({"bench": '"exposed"'}, "steps"),
        ({"batch": "0"}, "batch=0"),
        ({"gpu": "1"}, "unknown key gpu"),
        # Keys of earlier releases.
        ({"least": "2"}, "write min_data = 2"),
        ({"must": "{mfu = 0.5}"}, "write target = {'mfu': 0.5}"),
        ({"gpus": "2"}, "gpus=2"),
        ({"arguments": '["tiny", "--model.layer=1"]'}, "model.layer"),
        ({"arguments": '["tiny", "--train.micro_batch=3"]'}, "train.micro_batch"),
        ({"arguments": '["--model.layers=1"]'}, "arguments"),
    ],
)
def test_a_wrong_case_is_reported_before_any_run(tmp_path, monkeypatch, keys, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.toml").write_text(to_toml("A", **keys))
    result = invoke("--file", "cases.toml", "--gpus", 0)
    assert isinstance(result.exception, MegascaleError)
    assert "case A" in str(result.exception)
    assert part in str(result.exception)
    assert not (tmp_path / "bench-targets.json").exists()


def test_files_without_valid_cases_are_refused(tmp_path):
    file = tmp_path / "cases.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cases(file)
    for text, part in (
        ("case = 3", "case=3"),
        ("[[case", "not valid TOML"),
        (to_toml("A") * 2, "two cases are named 'A'"),
        ("[[case]]\nname = 'A'", "title is missing"),
        (to_toml("A", data="2") + to_toml("B", baseline='"A"'), "another data"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_cases(file)
        assert part in str(error.value)


def test_the_list_has_commands_targets_and_gpus(tmp_path):
    result = invoke("--list", "--only", "F8", "--only", "T4")
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()[::3]] == ["T4", "F3", "F8"]  # F3 is F8's baseline
    assert "NCCL_P2P_DISABLE=1 python -m benchmarks train gpt-13b --parallel.pipeline=2" in result.stdout
    assert "4 to 8 GPUs" in result.stdout
    assert "target ratio ≤1.150 (stretch 1.050), compared with F3; predicted step " in result.stdout
    assert "target step ≤3.160 s (stretch 2.800 s)" in result.stdout
    assert "T9" in str(invoke("--only", "T9").exception)


def test_the_list_ends_with_other_commands_that_exist():
    result = invoke("--list")
    section = result.stdout.partition("Targets that other commands measure:")[2]
    assert section.count("python -m benchmarks observe") == 4
    for item in load_command_targets():
        assert f"{item.title}\n  needs: {item.needs}\n  target: {item.target}\n" in section
        for line in item.commands:
            assert f"  {line}\n" in section
            if line.startswith("python tests/"):
                assert (Path(__file__).parents[3] / line.split()[1]).exists()
            else:
                parse(line)


@pytest.mark.parametrize("item", load_cases(None), ids=lambda target: target.name)
def test_every_shipped_case_has_a_prediction_for_each_size_of_machine(item):
    """Predict a changed case again: python -m benchmarks targets --predict >> predicted.toml."""
    for replicas in predicted.REPLICAS:
        if item.min_data <= replicas <= item.data:
            assert predicted.find_predicted_seconds(item, replicas), item.name
    assert predicted.find_predicted_seconds(item.model_copy(update={"warmup": 7}), item.data) is None
    seconds = predicted.find_predicted_seconds(item, item.data)
    assert f"predicted step {seconds:.3f} s" in invoke("--list", "--only", item.name).stdout


def test_predict_prints_toml_of_cases_without_a_prediction():
    assert invoke("--predict", "--only", "EhD").stdout == ""
    result = invoke("--predict", "--only", "EhD", "--train.micro_batch=1")
    (table,) = tomllib.loads(result.stdout)["predicted"]
    assert (table["case"], table["gpus"]) == ("EhD", 2)
    assert 0.5 < table["p10_p90"][0] < table["seconds"] < table["p10_p90"][1] < 2
    arguments = ["gpt-13b", "--model.layers=20", "--train.micro_batch=1", "--parallel.reduce_dtype=bfloat16"]
    fast = case(arguments=arguments, batch=8, data=2)
    slow = case(arguments=arguments, batch=8, data=2, environment={"NCCL_P2P_DISABLE": "1"})
    assert predicted.predict_step(slow, 2).seconds > 1.1 * predicted.predict_step(fast, 2).seconds


def test_settings_apply_to_all_cases_and_wrong_ones_are_refused():
    result = invoke("--list", "--only", "T3", "--overlap.gemms=off")
    assert "--overlap.gemms=off --parallel.data=2" in result.stdout
    assert "did you mean overlap.gemms?" in str(invoke("--only", "T3", "--overlp.gemms=off").exception)


def test_names_of_gpus_are_those_of_cuda_visible_devices(monkeypatch):
    from megascale import api

    monkeypatch.setattr(api, "visible_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert command._get_gpu_names(None, [case()]) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert command._get_gpu_names(None, [case()]) == ["5", "GPU-abc"]
    assert command._get_gpu_names(1, [case()]) == ["5"]
    with pytest.raises(ConfigError, match="--gpus=3"):
        command._get_gpu_names(3, [case()])


# Order of the jobs

SIZES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8)


def make_job(item: TargetCase, repeat: int = 0, seconds: float = 1) -> TargetJob:
    return TargetJob(item, repeat, replicas=1, seconds=seconds)


@given(SIZES, st.integers(0, 8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_case_that_fits_runs_in_each_repeat_without_sharing_a_gpu(sizes, gpus, repeats, random):
    cases = [case(f"C{i}", gpus=case_gpus, data=data) for i, (case_gpus, data) in enumerate(sizes)]
    results = ResultFile(Path("nowhere.json"), gpus)
    waiting = list_remaining_jobs(cases, results, repeats)
    running: list[TargetJob] = []
    started: list[TargetJob] = []
    while waiting or running:
        free_gpus = gpus - sum(job.gpus for job in running)
        assert free_gpus >= 0
        is_host_free = all(job.gpus for job in running)
        job = choose_next_job(waiting, free_gpus, is_host_free=is_host_free, remaining_seconds=1e9)
        if job is None:
            assert running, "nothing runs and nothing starts"
            running.remove(random.choice(running))
        else:
            assert job.repeat == min(candidate.repeat for candidate in waiting)
            waiting.remove(job)
            running.append(job)
            started.append(job)
            assert sum(job.gpus == 0 for job in running) <= 1
    for item in cases:
        case_jobs = [job for job in started if job.case is item]
        expected_repeats = list(range(repeats)) if item.gpus <= gpus else []
        assert sorted(job.repeat for job in case_jobs) == expected_repeats
        assert {job.replicas for job in case_jobs} <= {item.count_replicas(gpus)}


def test_small_jobs_overtake_a_large_one_in_its_repeat_only_and_late_jobs_do_not_block():
    def choose(waiting, free_gpus):
        return choose_next_job(waiting, free_gpus, is_host_free=True, remaining_seconds=60)

    large = make_job(case("L", gpus=4), seconds=10)
    small = make_job(case("S"), seconds=10)
    next_small = make_job(small.case, repeat=1, seconds=10)
    assert choose([large, small, next_small], 2) is small
    assert choose([large, next_small], 2) is None  # the large job starts first
    assert choose([large, next_small], 4) is large
    assert choose([make_job(large.case, seconds=90), next_small], 2) is next_small
    assert choose([small], 0) is None


def test_every_second_repeat_is_reversed_and_measured_durations_replace_estimates(tmp_path):
    first = case("A")
    cases = [first, case("B")]
    results = ResultFile(tmp_path / "results.json", 1)
    jobs = list_remaining_jobs(cases, results, 2)
    assert [(job.case.name, job.repeat) for job in jobs] == [("A", 0), ("B", 0), ("B", 1), ("A", 1)]
    results.save(make_job(first), make_run(first, seconds=33.0, report={"step_seconds": 1.0}))
    jobs = list_remaining_jobs(cases, results, 2)
    remaining = [(job.case.name, job.repeat, job.seconds) for job in jobs]
    assert remaining == [("B", 0, 1.0), ("B", 1, 1.0), ("A", 1, 33.0)]


# Processes

# Replaces `python -m benchmarks` and reports its arguments and environment. The preset selects its behaviour.
PROGRAM = """
import json, os, pathlib, sys, time
out = pathlib.Path(next(a for a in sys.argv if a.startswith("--out=")).partition("=")[2])
started = pathlib.Path(os.environ["STARTED"])
(started / out.parent.name).write_text("")
if sys.argv[2] == "meets":  # ends when all processes have started
    while len(list(started.iterdir())) < int(os.environ["MEMBERS"]):
        time.sleep(0.01)
if sys.argv[2] == "fails":
    sys.exit("the program fails")
if sys.argv[2] == "endless":
    time.sleep(600)
report = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "mark": os.environ.get("MARK"), "arguments": sys.argv[1:]}
report["ranks"] = [{"stretches": [1]}]
out.write_text(json.dumps(report))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return the command of PROGRAM."""
    folder = tmp_path / "started"
    folder.mkdir()
    monkeypatch.setenv("STARTED", str(folder))
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return [sys.executable, str(file)]


def make_runs(jobs, gpus, program, seconds=60.0, **options) -> dict[str, TargetRun]:
    """Run the jobs, and return their runs by the name of the case and the repeat."""
    ended = {}

    def save(job, run):
        ended[f"{job.case.name}{job.repeat}"] = run

    run_jobs(jobs, gpus, time.monotonic() + seconds, save, program=program, **options)
    return ended


def test_jobs_run_side_by_side_on_gpus_of_their_own(program, monkeypatch):
    monkeypatch.setenv("MEMBERS", "3")  # each process ends when all three run
    cases = [case("A", arguments=["meets"]), case("B", arguments=["meets"], environment={"MARK": "x"})]
    cases.append(case("C D", gpus=2, arguments=["meets"]))
    ended = make_runs([make_job(item) for item in cases], ["3", "GPU-x", "5", "6"], program)
    reports = [ended[name].report for name in ("A0", "B0", "C D0")]
    assert [report["gpus"] for report in reports] == ["3", "GPU-x", "5,6"]
    assert [report["mark"] for report in reports] == [None, "x", None]
    assert reports[0]["arguments"][:4] == ["train", "meets", "--parallel.data=1", "--train.global_batch=4"]
    assert reports[0]["ranks"] == [{}]  # traces are not saved


def test_jobs_run_one_at_a_time_and_a_failure_ends_its_case_only(program):
    bad = case("A", arguments=["fails"])
    good = case("B", arguments=["works"])
    jobs = [make_job(bad), make_job(good), make_job(good, repeat=1), make_job(bad, repeat=1)]
    ended = make_runs(jobs, ["0", "1"], program, is_sequential=True)
    assert list(ended) == ["A0", "B0", "B1"]
    assert ended["A0"].report is None
    assert ended["A0"].failure == ["exit code 1", "the program fails"]
    assert {ended["B0"].report["gpus"], ended["B1"].report["gpus"]} == {"0"}


def test_the_deadline_ends_running_jobs_and_starts_no_others(program, tmp_path):
    jobs = [
        make_job(case("A", arguments=["endless"]), seconds=0.1),
        make_job(case("B", arguments=["works"]), seconds=50.0),
    ]
    assert make_runs(jobs, ["0", "1"], program, seconds=0.5) == {}
    assert not (tmp_path / "started" / "B-0").exists()
    assert not [child for child in psutil.Process().children() if program[1] in child.cmdline()]


def test_a_process_that_ignores_the_signal_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "GRACE_PERIOD", 0.1)
    ready = tmp_path / "ready"
    code = "import signal, pathlib, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not ready.exists():
        time.sleep(0.01)
    runs._end([process])
    assert process.returncode == -signal.SIGKILL


# The file of results


def test_runs_of_changed_cases_and_other_machines_do_not_count(tmp_path):
    file = tmp_path / "results.json"
    old, new = case("A"), case("A", steps=7)
    ResultFile(file, 2).save(make_job(old), make_run(old, report={"n": 1}))
    results = ResultFile(file, 2)
    assert not results.has_outdated_run(old, 1)
    assert results.has_outdated_run(new, 1)
    assert results.has_outdated_run(old, 2)
    assert not results.has_outdated_run(case("A", seconds=9, title="other", target={"mfu": 0.5}), 1)
    assert results.get_runs(new, 1) == {}
    results.save(make_job(new, repeat=1), make_run(new, report={"n": 2}))
    assert list(ResultFile(file, 2).get_runs(new, 1)) == [1]
    assert not ResultFile(file, 2).get_runs(old, 1)
    with pytest.raises(ConfigError, match="--gpus=2"):
        ResultFile(file, 4)
    run = {"key": "k", "replicas": 1, "command": "", "seconds": 1.0, "failed": []}
    for tree in ({"gpus": 2, "cases": []}, {"gpus": 2, "cases": {"A": {"0": run}}}):
        file.write_text(json.dumps(tree))
        with pytest.raises(ConfigError, match="name another file"):
            ResultFile(file, 2)


def test_files_of_earlier_releases_and_of_simulate_keep_their_keys(tmp_path):
    """`megascale simulate calibrate --run` reads the keys `told` and `command`."""
    file = tmp_path / "results.json"
    item = case()
    run = {"key": item.make_key(1), "replicas": 1, "command": "c", "seconds": 2.0}
    failed_run = run | {"told": None, "failed": ["exit code 1", "last line"]}
    file.write_text(
        json.dumps({"gpus": 1, "cases": {"A": {"0": run | {"told": {"n": 1}, "failed": []}, "1": failed_run}}})
    )
    first, second = ResultFile(file, 1).get_runs(item, 1).values()
    assert first == TargetRun(item.make_key(1), 1, command="c", seconds=2.0, report={"n": 1}, failure=[])
    assert (second.report, second.failure) == (None, ["exit code 1", "last line"])
    saved = make_run(item, report=make_report(1.5, processes=1))
    saved.command = item.format_command(1)
    ResultFile(file, 1).save(make_job(item), saved)
    (measured,) = list_measured_runs(file)
    assert (measured.seconds, measured.gpus) == (1.5, 1)


def test_real_benchmarks_run_and_their_runs_are_saved_and_not_repeated(tmp_path, benchmarks):
    """Measure a training on the CPU, another with the first as baseline, and one that fails."""
    file = tmp_path / "cases.toml"
    out = tmp_path / "out.json"
    bad = to_toml("bad", arguments=ARGUMENTS.replace("threads=1", "device=cuda"), target="{mfu = 0.5}")
    good = to_toml("good", target="{step_seconds = 1e9, p99_over_median = 1e-9}")
    compared = {"baseline": '"good"', "target": "{step_ratio = 1e9}", "stretch": "{step_ratio = 1e-9}"}
    file.write_text(good + bad + to_toml("other", **compared))

    def measure(*arguments):
        return benchmarks("targets", "--file", file, "--out", out, *arguments, env={"COLUMNS": "120"})

    result = measure("--repeats", 1)
    assert result.returncode == 1, result.stderr
    cases = json.loads(out.read_text())["cases"]
    assert cases["good"]["0"]["told"]["all_step_seconds"]
    assert "runs" not in cases["good"]["0"]["told"]["settings"]["train"]
    assert cases["bad"]["0"]["told"] is None
    assert "train.device=cuda" in result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert " met " in lines["good"]
    assert "missed" in result.stdout
    assert "failed" in lines["bad"]
    assert " met " in lines["other"]
    assert not (tmp_path / "runs").exists()
    # Saved runs are not repeated.
    before = out.read_bytes()
    repeated = measure("--repeats", 1, "--only", "other")
    assert repeated.returncode == 0, repeated.stderr
    assert out.read_bytes() == before
    # Only the case that has changed runs.
    file.write_text(good + bad + to_toml("other", steps="3", baseline='"good"'))
    changed = measure("--repeats", 1, "--only", "other")
    assert changed.returncode == 0, changed.stderr
    assert "other has changed" in changed.stdout
    changed_cases = json.loads(out.read_text())["cases"]
    assert changed_cases["good"] == cases["good"]
    assert len(changed_cases["other"]["0"]["told"]["all_step_seconds"]) == 3
    # Without time nothing starts, and the missing runs are listed.
    late = measure("--only", "other", "--repeats", 2, "--seconds", 0)
    assert late.returncode == 0
    assert "2 runs are missing: other" in late.stdout
    assert "good" in late.stdout


def test_an_interruption_keeps_saved_runs_and_ends_running_processes(tmp_path):
    file = tmp_path / "cases.toml"
    out = tmp_path / "out.json"
    file.write_text(to_toml("done") + to_toml("endless", steps="1000000", data="2"))
    add_runs(ResultFile(out, 0), load_cases(file)[0], 1.0)
    process = Forked(["targets", "--file", file, "--out", out, "--repeats", "1"], cwd=tmp_path, module=BENCHMARKS)
    try:
        children = []
        while len(children) < 3 and process.poll() is None:  # the second case's benchmark and its two ranks
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert list(json.loads(out.read_text())["cases"]) == ["done"]
    assert "endless" in output.partition("missing")[2]
    assert len(children) == 3
    assert not psutil.wait_procs(children, timeout=60)[1]  # a killed process takes a moment to end
    assert {path.name for path in tmp_path.iterdir()} == {"cases.toml", "out.json"}
