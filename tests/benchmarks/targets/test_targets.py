"""`python -m benchmarks targets`: cases as data, which run starts on which GPUs, and runs that are kept."""

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
from benchmarks.targets import command as targets
from benchmarks.targets import predicted as targets_predicted
from benchmarks.targets import runs as targets_runs
from benchmarks.targets.cases import load
from benchmarks.targets.others import load_others
from benchmarks.targets.runs import Record, TargetJob, TargetRun, choose, missing, run_all
from megascale.errors import ConfigError, MegascaleError
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.planner.layout_figures import DEVICES
from tests.benchmarks.targets.target_cases import add_runs, case
from tests.forked import BENCHMARKS, Forked
from tests.test_commands import parse

SMALL = ["--model.layers=1", "--model.hidden=32", "--model.vocab_size=64", "--model.sequence_length=16"]
ARGUMENTS = json.dumps(["tiny"] + SMALL + ["--train.micro_batch=1", "--train.threads=1"])


def in_toml(name: str, **keys: str) -> str:
    """A case on the CPU that takes a moment; keys are TOML."""
    report = {"name": f'"{name}"', "title": f'"{name}"', "arguments": ARGUMENTS, "gpus": "0", "batch": "1"}
    report |= {"steps": "2", "warmup": "2", "seconds": "1"} | keys
    return "\n".join(["[[case]]"] + [f"{key} = {value}" for key, value in report.items()]) + "\n"


def invoke(*arguments):
    return CliRunner().invoke(app, ["targets"] + [str(argument) for argument in arguments], env={"COLUMNS": "100"})


# Cases


@pytest.mark.parametrize("single", load(None), ids=lambda target: target.name)
def test_every_shipped_case_is_a_valid_run_of_each_size_that_it_may_have(single):
    for replicas in range(single.least, single.data + 1):
        config = single.config(replicas)
        assert config.train.global_batch == replicas * single.batch
        assert make_plan(config, replicas * single.gpus, DEVICES["H200"]).fits
    assert single.line(single.data).removeprefix("NCCL_P2P_DISABLE=1 ").startswith("python -m benchmarks ")


def test_shipped_targets_are_for_one_host_and_what_they_were_set_for():
    by_name = {item.name: item for item in load(None)}
    assert max(entry.slots for entry in by_name.values()) == 8
    assert by_name["T1"].must == {"mfu": 0.57}
    assert by_name["F2"].settings(8)[-2:] == ["--parallel.data=8", "--train.global_batch=16"]
    assert by_name["E3p4"].must == {}
    for name, must, aim in (("EhD", 0.81, 0.76), ("EhDg", 0.81, 0.76), ("EhT", 0.84, 0.79), ("EhP", 0.87, 0.82)):
        assert (by_name[name].slots, by_name[name].must["step_seconds"], by_name[name].aim["step_seconds"]) == (
            2,
            must,
            aim,
        )
    assert by_name["F3"].settings(8)[-1] == by_name["T4"].settings(4)[-1] == "--train.global_batch=64"


def test_what_gpus_cannot_hold_is_left_out():
    """On four GPUs a case of two replicas runs with one, whose optimizer state is not sharded."""
    cases = [item for item in load(None) if item.name in ("T1", "F3h", "G124")]
    assert targets._fitting(cases, 4, 139.7) == (cases, {})
    fit, too_large = targets._fitting(cases, 4, 79.2)
    assert [entry.name for entry in fit] == ["F3h", "G124"]
    assert too_large == {"T1": pytest.approx(103, abs=3)}
    assert targets._fitting(cases, 0, 79.2) == (cases, {})
    fewer = ["--model.layers=20", "--parallel.layer_split=[2,2,2,2,2,2,2,2,3,1]"]
    halved = cases[0].model_copy(update={"arguments": cases[0].arguments + fewer})
    assert targets._fitting([halved], 4, 79.2) == ([halved], {})


def test_a_call_of_which_the_gpus_can_hold_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "_devices", lambda *_: ["0", "1", "2", "3"])
    monkeypatch.setattr(targets, "_gpu_gib", lambda _: 79.2)
    done = invoke("--only", "T1", "--only", "EL8", "--out", tmp_path / "told.json")
    assert isinstance(done.exception, ConfigError)
    for part in ("no case fits", "79 here", "T1 (103)", "EL8 (", "--model.layers=N"):
        assert part in str(done.exception)


@pytest.mark.parametrize(
    ("gpus", "keys", "replicas"),
    [
        (8, {"gpus": 2, "data": 4}, 4),
        (8, {"gpus": 2, "data": 2}, 2),
        (3, {"gpus": 2, "data": 4}, 1),
        (1, {"gpus": 2, "data": 4}, None),
        (7, {"gpus": 2, "data": 4, "least": 4}, None),
        (0, {"gpus": 0, "data": 2}, 2),
    ],
)
def test_as_many_replicas_as_there_is_room_for(gpus, keys, replicas):
    assert case(**keys).replicas(gpus) == replicas


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"must": "{mfi = 0.5}"}, "'mfi'"),
        ({"must": "{tensor_exposed = 0.5}"}, "tensor_exposed"),
        ({"must": "{speed_up = 1.1}"}, "over"),
        ({"must": "{mfu = 0.6}", "aim": "{mfu = 0.5}"}, "aim"),
        ({"over": '"B"'}, "'B'"),
        ({"least": "2"}, "least=2"),
        ({"bench": '"exposed"'}, "steps"),
        ({"batch": "0"}, "batch=0"),
        ({"gpu": "1"}, "there is no key gpu"),
        ({"gpus": "2"}, "gpus=2"),
        ({"arguments": '["tiny", "--model.layer=1"]'}, "model.layer"),
        ({"arguments": '["tiny", "--train.micro_batch=3"]'}, "train.micro_batch"),
        ({"arguments": '["--model.layers=1"]'}, "arguments"),
    ],
)
def test_a_wrong_case_is_named_before_anything_runs(tmp_path, monkeypatch, keys, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.toml").write_text(in_toml("A", **keys))
    result = invoke("--file", "cases.toml", "--gpus", 0)
    assert isinstance(result.exception, MegascaleError)
    assert "case A" in str(result.exception)
    assert part in str(result.exception)
    assert not (tmp_path / "bench-targets.json").exists()


def test_files_that_are_no_cases_are_refused(tmp_path):
    file = tmp_path / "cases.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file)
    for text, part in (
        ("case = 3", "case=3"),
        ("[[case", "not valid TOML"),
        (in_toml("A") * 2, "two cases 'A'"),
        ("[[case]]\nname = 'A'", "title is missing"),
        (in_toml("A", data="2") + in_toml("B", over='"A"'), "another data"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load(file)
        assert part in str(error.value)


def test_the_list_says_what_to_type(tmp_path):
    result = invoke("--list", "--only", "F8", "--only", "T4")
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()[::2]] == ["T4", "F3", "F8"]  # F8 is over F3
    assert "NCCL_P2P_DISABLE=1 python -m benchmarks train gpt-13b --parallel.pipeline=2" in result.stdout
    assert "8 GPUs, at least 4" in result.stdout
    assert "ratio ≤1.150 (aim 1.050) over F3" in result.stdout
    assert "T9" in str(invoke("--only", "T9").exception)


def test_the_list_ends_with_the_other_commands():
    """Each is one that there is, with settings that there are."""
    result = invoke("--list")
    report = result.stdout.partition("In addition to these cases:")[2]
    assert report.count("python -m benchmarks observe") == 4
    for item in load_others():
        assert f"{item.title}: {item.needs}; {item.goal}" in report
        for line in item.lines:
            assert f"  {line}\n" in report
            if line.startswith("python tests/"):
                assert (Path(__file__).parents[3] / line.split()[1]).exists()
            else:
                parse(line)


@pytest.mark.parametrize("single", load(None), ids=lambda target: target.name)
def test_every_shipped_case_was_predicted_on_each_machine_that_it_may_run_on(single):
    """A case that changes is predicted again: python -m benchmarks targets --predict >> targets_predicted.toml."""
    for replicas in targets_predicted.REPLICAS:
        if single.least <= replicas <= single.data:
            assert targets_predicted.predicted(single, replicas), single.name
    assert targets_predicted.predicted(single.model_copy(update={"warmup": 7}), single.data) is None
    assert (
        f"predicted {targets_predicted.predicted(single, single.data):.3f} s"
        in invoke("--list", "--only", single.name).stdout
    )


def test_predictions_are_toml_of_what_was_not_predicted_yet():
    assert invoke("--predict", "--only", "EhD").stdout == ""
    result = invoke("--predict", "--only", "EhD", "--train.micro_batch=1")
    (output,) = tomllib.loads(result.stdout)["predicted"]
    assert (output["case"], output["gpus"]) == ("EhD", 2)
    assert 0.5 < output["p10_p90"][0] < output["seconds"] < output["p10_p90"][1] < 2
    arguments = ["gpt-13b", "--model.layers=20", "--train.micro_batch=1", "--parallel.reduce_dtype=bfloat16"]
    fast = case(arguments=arguments, batch=8, data=2)
    slow = case(arguments=arguments, batch=8, data=2, environment={"NCCL_P2P_DISABLE": "1"})
    assert targets_predicted.predict(slow, 2)[0] > 1.1 * targets_predicted.predict(fast, 2)[0]


def test_settings_hold_for_all_cases_and_wrong_ones_are_named():
    result = invoke("--list", "--only", "T3", "--overlap.gemms=off")
    assert "--overlap.gemms=off --parallel.data=2" in result.stdout
    assert "did you mean overlap.gemms?" in str(invoke("--only", "T3", "--overlp.gemms=off").exception)


def test_names_of_gpus_are_those_that_this_process_sees(monkeypatch):
    from benchmarks.targets.command import _devices
    from megascale import api

    monkeypatch.setattr(api, "visible_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _devices(None, [case()]) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert _devices(None, [case()]) == ["5", "GPU-abc"]
    assert _devices(1, [case()]) == ["5"]
    with pytest.raises(ConfigError, match="--gpus=3"):
        _devices(3, [case()])


# Which run starts

sizes = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8)


@given(sizes, st.integers(0, 8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_case_that_fits_runs_as_often_as_asked_and_no_gpu_twice_at_once(shapes, gpus, repeats, chance):
    cases = [case(f"C{i}", gpus=n, data=k) for i, (n, k) in enumerate(shapes)]
    record = Record(Path("nowhere.json"), gpus)
    waiting = missing(cases, record, repeats)
    running: list[TargetJob] = []
    built: list[TargetJob] = []
    while waiting or running:
        free = gpus - sum(job.gpus for job in running)
        assert free >= 0
        job = choose(waiting, free, all(job.gpus for job in running), 1e9)
        if job is None:
            assert running, "nothing runs and nothing starts"
            running.remove(chance.choice(running))
        else:
            assert job.repeat == min(peer.repeat for peer in waiting)
            waiting.remove(job)
            running.append(job)
            built.append(job)
            assert sum(job.gpus == 0 for job in running) <= 1
    for item in cases:
        local = [job for job in built if job.case is item]
        assert sorted(job.repeat for job in local) == (list(range(repeats)) if item.gpus <= gpus else [])
        assert {job.replicas for job in local} <= {item.replicas(gpus)}


def test_small_runs_overtake_a_large_one_within_a_pass_only_and_late_ones_hold_nobody_up():
    large, small = case("L", gpus=4), case("S")
    jobs = [TargetJob(large, 0, 1, 10), TargetJob(small, 0, 1, 10), TargetJob(small, 1, 1, 10)]
    assert choose(jobs, 2, True, 60) is jobs[1]
    assert choose([jobs[0], jobs[2]], 2, True, 60) is None  # the large one has its turn
    assert choose([jobs[0], jobs[2]], 4, True, 60) is jobs[0]
    assert choose([TargetJob(large, 0, 1, 90), jobs[2]], 2, True, 60) is jobs[2]
    assert choose([jobs[1]], 0, True, 60) is None


def test_every_second_pass_is_reversed_and_known_times_replace_estimates(tmp_path):
    cases = [case("A"), case("B")]
    record = Record(tmp_path / "t.json", 1)
    assert [(job.case.name, job.repeat) for job in missing(cases, record, 2)] == [
        ("A", 0),
        ("B", 0),
        ("B", 1),
        ("A", 1),
    ]
    record.keep(TargetJob(cases[0], 0, 1, 1.0), TargetRun(cases[0].key(1), 1, "", 33.0, {"step_seconds": 1.0}))
    remaining = missing(cases, record, 2)
    assert [(job.case.name, job.repeat, job.seconds) for job in remaining] == [
        ("B", 0, 1.0),
        ("B", 1, 1.0),
        ("A", 1, 33.0),
    ]


# Processes

# Stands for `python -m benchmarks`: writes what it was given. Its preset says what it does besides.
PROGRAM = """
import json, os, pathlib, sys, time
out = pathlib.Path(next(w for w in sys.argv if w.startswith("--out=")).partition("=")[2])
here = pathlib.Path(os.environ["HERE"])
mine = here / out.parent.name
mine.write_text("")
if sys.argv[2] == "meets":  # is done when all are there
    while len([f for f in here.iterdir() if f.suffix != ".json"]) < int(os.environ["MEMBERS"]):
        time.sleep(0.01)
if sys.argv[2] == "fails":
    sys.exit("no luck")
if sys.argv[2] == "endless":
    time.sleep(600)
told = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "mark": os.environ.get("MARK"), "words": sys.argv[1:]}
told["ranks"] = [{"stretches": [1]}]
out.write_text(json.dumps(told))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("HERE", str(folder))
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return [sys.executable, str(file)]


def make(jobs, gpus, program, seconds=60.0, **options) -> dict[str, TargetRun]:
    built = {}

    def keep(job, run):
        built[f"{job.case.name}{job.repeat}"] = run

    run_all(jobs, gpus, time.monotonic() + seconds, keep, program=program, **options)
    return built


def test_runs_go_side_by_side_on_gpus_of_their_own(program, monkeypatch):
    monkeypatch.setenv("MEMBERS", "3")  # each ends only when all three run
    cases = [case("A", arguments=["meets"]), case("B", arguments=["meets"], environment={"MARK": "x"})]
    cases.append(case("C D", gpus=2, arguments=["meets"]))
    built = make([TargetJob(item, 0, 1, 1) for item in cases], ["3", "GPU-x", "5", "6"], program)
    assert [built[name].told["gpus"] for name in ("A0", "B0", "C D0")] == ["3", "GPU-x", "5,6"]
    assert [built[name].told["mark"] for name in ("A0", "B0", "C D0")] == [None, "x", None]
    assert built["A0"].told["words"][:4] == ["train", "meets", "--parallel.data=1", "--train.global_batch=4"]
    assert built["A0"].told["ranks"] == [{}]  # a trace's stretches are not kept


def test_alone_means_alone_and_after_a_failure_the_others_go_on(program):
    bad, good = case("A", arguments=["fails"]), case("B", arguments=["works"])
    jobs = [TargetJob(bad, 0, 1, 1), TargetJob(good, 0, 1, 1), TargetJob(good, 1, 1, 1), TargetJob(bad, 1, 1, 1)]
    built = make(jobs, ["0", "1"], program, alone=True)
    assert list(built) == ["A0", "B0", "B1"]  # what failed is not tried again at once
    assert built["A0"].told is None
    assert built["A0"].failed == ["exit code 1", "no luck"]
    assert {built["B0"].told["gpus"], built["B1"].told["gpus"]} == {"0"}


def test_time_out_ends_what_runs_and_starts_nothing_more(program, tmp_path):
    jobs = [
        TargetJob(case("A", arguments=["endless"]), 0, 1, 0.1),
        TargetJob(case("B", arguments=["works"]), 0, 1, 50.0),
    ]
    assert make(jobs, ["0", "1"], program, seconds=0.5) == {}
    assert not (tmp_path / "here" / "B-0").exists()
    assert not [child for child in psutil.Process().children() if program[1] in child.cmdline()]


def test_what_does_not_answer_is_killed(program, monkeypatch, tmp_path):
    monkeypatch.setattr(targets_runs, "GRACE_PERIOD", 0.1)
    deaf = "import signal, pathlib, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (tmp_path / "deaf.py").write_text(f"{deaf}pathlib.Path({str(tmp_path / 'up')!r}).touch()\ntime.sleep(600)")
    process = subprocess.Popen([sys.executable, str(tmp_path / "deaf.py")])
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    targets_runs._end([process])
    assert process.returncode == -signal.SIGKILL


def test_other_words_and_other_machines(tmp_path):
    old, new = case("A"), case("A", steps=7)
    record = Record(tmp_path / "t.json", 2)
    record.keep(TargetJob(old, 0, 1, 1), TargetRun(old.key(1), 1, "", 1.0, {"n": 1}))
    record = Record(tmp_path / "t.json", 2)
    assert not record.has_other(old, 1)
    assert record.has_other(new, 1)
    assert record.has_other(old, 2)
    assert not record.has_other(case("A", seconds=9, title="other", must={"mfu": 0.5}), 1)
    assert record.runs(new, 1) == {}
    record.keep(TargetJob(new, 1, 1, 1), TargetRun(new.key(1), 1, "", 1.0, {"n": 2}))
    assert list(Record(tmp_path / "t.json", 2).runs(new, 1)) == [1]
    assert not Record(tmp_path / "t.json", 2).runs(old, 1)
    with pytest.raises(ConfigError, match="2 GPUs"):
        Record(tmp_path / "t.json", 4)
    (tmp_path / "t.json").write_text('{"gpus": 2, "cases": []}')
    with pytest.raises(ConfigError, match="no figures"):
        Record(tmp_path / "t.json", 2)


def test_real_benches_are_run_kept_and_not_made_again(tmp_path, benchmarks):
    """Two trainings on the CPU, one over the other, and one that fails."""
    file, out = tmp_path / "cases.toml", tmp_path / "out.json"
    bad = in_toml("bad", arguments=ARGUMENTS.replace("threads=1", "device=cuda"), must="{mfu = 0.5}")
    good = in_toml("good", must="{step_seconds = 1e9, p99_over_median = 1e-9}")
    file.write_text(good + bad + in_toml("other", over='"good"', must="{step_ratio = 1e9}", aim="{step_ratio = 1e-9}"))

    def bench(*arguments):
        return benchmarks("targets", "--file", file, "--out", out, *arguments, env={"COLUMNS": "100"})

    result = bench("--repeats", 1)
    assert result.returncode == 1, result.stderr
    runs = json.loads(out.read_text())["cases"]
    assert runs["good"]["0"]["told"]["all_step_seconds"]
    assert "runs" not in runs["good"]["0"]["told"]["settings"]["train"]
    assert runs["bad"]["0"]["told"] is None
    assert "train.device=cuda" in result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "reached" in lines["good"]
    assert "missed" in result.stdout
    assert "failed" in lines["bad"]
    assert "reached" in lines["other"]
    assert not (tmp_path / "runs").exists()
    # Existing results are not measured again.
    before = out.read_bytes()
    repeated = bench("--repeats", 1, "--only", "other")
    assert repeated.returncode == 0, repeated.stderr
    assert out.read_bytes() == before
    # A case that has changed is, and no other.
    file.write_text(good + bad + in_toml("other", steps="3", over='"good"'))
    changed = bench("--repeats", 1, "--only", "other")
    assert changed.returncode == 0, changed.stderr
    assert "other has changed" in changed.stdout
    after = json.loads(out.read_text())["cases"]
    assert after["good"] == runs["good"]
    assert len(after["other"]["0"]["told"]["all_step_seconds"]) == 3
    # Without time nothing starts, and what is missing is said.
    late = bench("--only", "other", "--repeats", 2, "--seconds", 0)
    assert late.returncode == 0
    assert "2 runs are missing: other" in late.stdout
    assert "good" in late.stdout


def test_an_interrupted_call_keeps_what_it_has_and_ends_what_runs(tmp_path):
    file, out = tmp_path / "cases.toml", tmp_path / "out.json"
    file.write_text(in_toml("done") + in_toml("endless", steps="1000000", data="2"))
    add_runs(Record(out, 0), load(file)[0], 1.0)
    process = Forked(["targets", "--file", file, "--out", out, "--repeats", "1"], cwd=tmp_path, module=BENCHMARKS)
    try:
        ranks = []
        while len(ranks) < 3 and process.poll() is None:  # the second case's bench and its two ranks
            ranks = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert list(json.loads(out.read_text())["cases"]) == ["done"]
    assert "endless" in output.partition("missing")[2]
    assert len(ranks) == 3
    assert not psutil.wait_procs(ranks, timeout=60)[1]  # a killed one takes a moment to be gone
    assert {p.name for p in tmp_path.iterdir()} == {"cases.toml", "out.json"}
