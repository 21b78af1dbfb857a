"""`python -m benchmarks shapes`: several shapes in the same processes, failures of some, and errors of the file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import peer_shapes
from benchmarks.training.peer_shapes import make_comparison
from benchmarks.training.shape_file import PeerRun, Shape, load_shapes
from benchmarks.training.shapes import Task, check_tasks, list_tasks, load_configs, summarise_peaks
from megascale.core.layout import lay_out
from megascale.core.rank_memory import GPU_CONTEXT
from megascale.errors import ConfigError
from tests.forked import BENCHMARKS, Forked

BENCHMARKS_FOLDER = Path(__file__).parents[3] / "benchmarks"
GPU_BYTES = 79 << 30  # of an H100 with 80 GB
H200_BYTES = 139.8 * 2**30  # for shapes whose name ends in "H200"

DEFAULTS = """
[defaults]
steps = 2
warmup = 1
seconds = 300
settings = ["--model.layers=2", "--model.hidden=32", "--model.heads=2", "--model.sequence_length=16",
    "--model.vocab_size=64", "--train.micro_batch=2", "--train.global_batch=4", "--train.precision=float32",
    "--train.threads=1"]
"""


def write_shapes(folder: Path, *shapes: str) -> Path:
    file = folder / "shapes.toml"
    file.write_text(DEFAULTS + "".join(f"\n[[shape]]\n{shape}\n" for shape in shapes))
    return file


def read_rows(file: Path) -> list[dict]:
    return json.loads(file.read_text())["rows"]


def wait_for_rows(out: Path, count: int, process: Any) -> None:
    """Wait until the file of a running process has so many rows."""
    deadline = time.monotonic() + 120
    while not (out.exists() and len(read_rows(out)) >= count):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_layouts_follow_each_other_in_the_same_processes(benchmarks, tmp_path):
    file = write_shapes(
        tmp_path,
        'name = "data, 2 ranks"\narguments = ["tiny"]',
        'name = "tensor"\narguments = ["tiny", "--parallel.tensor=2"]',
        'name = "pipeline"\narguments = ["tiny", "--parallel.pipeline=2"]\nsteps = 3',
    )
    profiles = tmp_path / "profiles"
    result = benchmarks(
        "shapes",
        file,
        "--nproc=2",
        "--device=cpu",
        "--gemm-seconds=0.2",
        "--profile",
        profiles,
        "--out",
        tmp_path / "rows.json",
    )
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [row["shape"] for row in rows] == ["data, 2 ranks", "tensor", "pipeline"]
    assert not any("failed" in row for row in rows), result.stderr
    tables = {table.stem: table.read_text() for table in profiles.glob("*.txt")}
    assert sorted(tables) == ["data-2-ranks", "pipeline", "tensor"]
    assert "Profiler clears events" not in result.stderr  # torch 2.11 warns without `acc_events`
    # A table has the 40 rows with the longest times, which waits and preemption change on a busy machine.
    assert all("aten::" in table for table in tables.values())
    assert [row["processes"] for row in rows] == [2, 2, 2]
    assert [len(row["all_step_seconds"]) for row in rows] == [2, 2, 3]
    assert [row["earlier_shapes"] for row in rows] == [0, 1, 2]
    # Groups that are not left keep three threads or more per shape. A thread of a closed connection ends a bit later.
    assert rows[2]["threads"] < rows[0]["threads"] + 6
    # Two replicas see other tokens than one; all start with the same weights.
    assert rows[1]["losses"][0] == pytest.approx(rows[2]["losses"][0], rel=1e-5)
    assert rows[0]["losses"][0] != pytest.approx(rows[1]["losses"][0], rel=1e-5)
    assert "pipeline" in result.stdout


# The second step of a model of three layers fails on rank 1, while rank 0 waits for it.
FAIL_ON_RANK_1 = """
import os
from megascale.train.engine import Engine
train_step = Engine.step
def step(engine, read_batch, number, *arguments, **options):
    if os.environ.get("RANK") == "1" and engine.config.model.layers == 3 and number == 2:
        raise MemoryError("no memory for activations")
    return train_step(engine, read_batch, number, *arguments, **options)
Engine.step = step
"""


def test_a_shape_that_fails_on_one_rank_has_its_reason_and_the_next_follows(tmp_path):
    file = write_shapes(
        tmp_path,
        'name = "large"\narguments = ["tiny", "--parallel.tensor=2", "--model.layers=3"]',
        'name = "small"\narguments = ["tiny", "--parallel.tensor=2"]',
    )
    out = tmp_path / "rows.json"
    words = ["shapes", file, "--nproc=2", "--device=cpu", "--out", out]
    process = Forked(words, cwd=tmp_path, split=True, module=BENCHMARKS, before=FAIL_ON_RANK_1)
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.wait() == 0, errors
    failed, measured = read_rows(out)
    assert failed["failed"].startswith("rank 1: MemoryError: no memory for activations (")
    assert measured["step_seconds"] > 0
    assert "large: failed: rank 1" in output
    assert "the first to end" not in errors  # the same processes go on


def test_each_shape_can_have_processes_of_its_own(benchmarks, tmp_path):
    """A shape of which less than half of the time limit remains does not begin."""
    file = write_shapes(
        tmp_path,
        'name = "first"\narguments = ["tiny"]',
        'name = "long"\narguments = ["tiny"]\nseconds = 900',
        'name = "second"\narguments = ["tiny"]',
    )
    out = tmp_path / "rows.json"
    result = benchmarks("shapes", file, "--nproc=1", "--device=cpu", "--fresh", "--minutes=5", "--out", out)
    assert result.returncode == 0, result.stderr
    rows = read_rows(out)
    assert [row["shape"] for row in rows] == ["first", "long", "second"]
    assert [row["earlier_shapes"] for row in rows if "failed" not in row] == [0, 0]
    assert rows[1]["failed"] == "not begun: less than 450 s of --minutes remained"


# The time limit of "endless" is over on rank 0 in its step END_STEP. Lines of progress are due after each step.
END_IN_STEP = """
import time
from types import SimpleNamespace
from benchmarks.harness import rank_series
from megascale.bench import step_monitor
from megascale.train.engine import Engine
train_step = Engine.step
offset = [0.0]
def step(engine, read_batch, number, *arguments, **options):
    offset[0] = 1000.0 if number >= END_STEP and engine.config.model.layers == 3 else 0.0
    return train_step(engine, read_batch, number, *arguments, **options)
Engine.step = step
rank_series.time = SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0], sleep=time.sleep)
step_monitor.StepMonitor.__init__.__kwdefaults__["interval"] = 0.0
"""


@pytest.mark.parametrize(
    ("end_step", "layout", "processes"), [(5, "--parallel.tensor=2", 2), (5, "--parallel.data=1", 1), (2, "", 2)]
)
def test_a_shape_that_takes_too_long_ends_and_the_next_follows(tmp_path, end_step, layout, processes):
    """The steps before the limit have figures. Without a timed step, the reason says how far the warm-up was."""
    settings = f'arguments = ["tiny", "--model.layers=3", "{layout or "--parallel.tensor=2"}"]'
    warmup = 1 if end_step > 2 else 100000000
    file = write_shapes(
        tmp_path,
        f'name = "endless"\n{settings}\nsteps = 100000000\nwarmup = {warmup}',
        'name = "next"\narguments = ["tiny"]',
    )
    out = tmp_path / "rows.json"
    words = ["shapes", file, f"--nproc={processes}", "--device=cpu", "--out", out]
    before = END_IN_STEP.replace("END_STEP", str(end_step)) + "Engine.count_exchange_bytes = lambda engine: 3 << 30\n"
    process = Forked(words, cwd=tmp_path, split=True, module=BENCHMARKS, before=before)
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.wait() == 0, errors
    row, measured = read_rows(out)
    assert measured["step_seconds"] > 0
    assert "the first to end" not in errors  # the same processes go on
    if end_step == 2:
        assert "took longer than 300 s (warm-up step " in row["failed"]
        assert "of 100000000" in row["failed"]
        return
    assert row["exchange_memory_gib"] == 3
    steps = len(row["all_step_seconds"])
    assert steps >= 3
    assert row["step_seconds"] > 0
    assert "took longer than 300 s (timed step " in row["cut"]
    assert "failed" not in row
    assert f"endless (cut, {steps} steps)" in output
    assert re.search(r"megascale endless: warm-up step 1 of 1, \d+\.\d{4} s per step", output)
    assert re.search(r"megascale endless: timed step 3 of 100000000, \d+\.\d{4} s per step", output)


def test_a_killed_rank_costs_its_shape_only(tmp_path):
    """The remaining shapes get new processes, and the rows so far stay."""
    file = write_shapes(
        tmp_path,
        'name = "first"\narguments = ["tiny", "--parallel.tensor=2"]',
        'name = "killed"\narguments = ["tiny", "--parallel.tensor=2"]\nsteps = 100000000',
        'name = "last"\narguments = ["tiny", "--parallel.tensor=2"]',
    )
    out = tmp_path / "rows.json"
    words = ["shapes", file, "--nproc=2", "--device=cpu", "--out", out]
    process = Forked(words, cwd=tmp_path, split=True, module=BENCHMARKS)
    try:
        wait_for_rows(out, 1, process)
        os.kill(find_rank(1, tmp_path), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.wait() == 0, errors
    first, killed, last = read_rows(out)
    assert first["step_seconds"] > 0
    assert killed["failed"]
    assert last["step_seconds"] > 0


def find_rank(rank: int, folder: Path) -> int:
    """Return the process id of a rank, which is not 0, by the log that it writes."""
    log = folder / "runs" / "bench-shapes" / "logs" / f"rank-{rank}.log"
    for process in Path("/proc").iterdir():
        try:
            if os.readlink(process / "fd" / "1") == str(log):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no process writes {log}")


def test_settings_are_checked_before_anything_starts(benchmarks, tmp_path):
    file = write_shapes(tmp_path, 'name = "odd"\narguments = ["tiny", "--parallel.tensor=3"]')
    result = benchmarks("shapes", file, "--nproc=2", "--device=cpu")
    assert result.returncode == 3
    assert "shape odd on 2 processes" in result.stderr
    result = benchmarks("shapes", file, "--nproc=3", "--device=cpu", "--only=even")
    assert result.returncode == 2
    assert "--only=even" in result.stderr
    assert not (tmp_path / "bench-shapes.json").exists()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ('name = "a"', "arguments"),
        ('name = "a"\narguments = ["--model.layers=2"]', "name a shipped model shape first"),
        ('name = "a"\narguments = ["tiny"]\nstep = 3', "step=3"),
        ('name = "a"\narguments = ["tiny"]\n[[shape.peer]]\ntrainer = "nobody"', "trainer='nobody'"),
        (
            'name = "a"\narguments = ["tiny"]\n[[shape.peer]]\nsettings = {cuda_graph_impl = "transformer_engine"}',
            "use one of none, local, full_iteration",
        ),
        (
            'name = "a"\narguments = ["tiny"]\n[[shape.peer]]\nsettings = {attention_backend = "cudnn"}',
            "attention_backend='cudnn' is unknown; use one of auto, flash, fused",
        ),
        ('name = "a"\narguments = ["tiny"]\n[[shape]]\nname = "a"\narguments = ["tiny"]', "'a' is used twice"),
        (
            'name = "a, b"\narguments = ["tiny"]\n[[shape]]\nname = "a b"\narguments = ["tiny"]',
            "'a, b' and 'a b' give the same file of a profile, a-b",
        ),
    ],
)
def test_errors_of_a_file_name_key_and_value(tmp_path, shape, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_shapes(write_shapes(tmp_path, shape))


@pytest.mark.parametrize(
    "file", sorted((BENCHMARKS_FOLDER / "training").glob("shapes_*.toml")), ids=lambda file: file.stem
)
def test_every_shape_of_the_repository_can_be_measured(file):
    """All settings are valid, the layout divides, graphs are possible where requested, and the plan fits the GPUs."""
    for shape in load_shapes(file):
        assert re.fullmatch(r"[A-Za-z0-9-]+", shape.file_name)
        world = {"two GPUs": 2, "one GPU": 1}.get(shape.name.rpartition(", ")[-1], 4)
        (config,) = load_configs(list_tasks([shape], "megascale", []), world, device=None)
        layout = lay_out(config, world)
        for stage in range(layout.grid.pipeline):
            memory, no_graphs = layout.stage_memory(stage)
            gpu_bytes = H200_BYTES if "H200" in shape.name else GPU_BYTES
            assert memory.total + GPU_CONTEXT <= gpu_bytes, shape.name
            assert not (no_graphs and layout.config.kernels.graphs == "on"), f"{shape.name}: {no_graphs}"


def test_peaks_of_ranks_are_those_of_each_rank():
    assert summarise_peaks([40.0, 41.0, None]) == {"peak_memory_gib": 41.0, "peak_memory_gib_by_rank": [40.0, 41.0]}
    assert summarise_peaks([None, None]) == {}


# A device whose peak is 2 GiB, and exchanges of another size on each rank.
DIFFERENT_EXCHANGES = """
import os
from benchmarks.harness import rank_series
from megascale.train.engine import Engine
rank_series.read_peak_gib = lambda: 2.0
Engine.count_exchange_bytes = lambda engine: (1 + int(os.environ["RANK"])) << 30
"""


def test_each_rank_reports_the_memory_of_its_own_exchanges(tmp_path):
    """Stages of a pipeline differ, so rank 0's exchanges say nothing about other ranks."""
    file = write_shapes(tmp_path, 'name = "a"\narguments = ["tiny"]')
    out = tmp_path / "rows.json"
    words = ["shapes", file, "--nproc=2", "--device=cpu", "--out", out]
    process = Forked(words, cwd=tmp_path, split=True, module=BENCHMARKS, before=DIFFERENT_EXCHANGES)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.wait() == 0, errors
    (row,) = read_rows(out)
    assert row["peak_memory_gib_by_rank"] == [3.0, 4.0]


def test_a_check_lists_all_rows_and_those_that_cannot_run(benchmarks, tmp_path):
    file = write_shapes(
        tmp_path,
        'name = "one"\narguments = ["tiny"]',
        'name = "two"\narguments = ["tiny", "--parallel.tensor=2"]',
        'name = "three"\narguments = ["tiny", "--parallel.pipeline=3"]',
        'name = "last"\narguments = ["tiny"]',
    )
    result = benchmarks("shapes", file, "--nproc=1", "--device=cpu", "--check")
    assert result.returncode == 3, result.stderr
    lines = result.stdout.splitlines()
    for name in ("one", "last"):
        assert any(line.startswith(f"{name}: ") and "GiB planned" in line for line in lines)
    for name in ("two", "three"):
        assert any(line.startswith(f"{name}: cannot run: shape {name} on 1 processes: ") for line in lines)
    assert "2 of 4 rows cannot run on 1 processes" in " ".join(result.stderr.split())
    wrong = [Task(Shape(name=name, arguments=["tiny", "--model.layers=0"])) for name in ("four", "five")]
    with pytest.raises(ConfigError, match=r"2 of 2 rows .* Correct their settings"):
        check_tasks(wrong, 1, "cpu")
    result = benchmarks("shapes", file, "--nproc=1", "--device=cpu", "--check", "--only=one", "--only=two")
    assert result.returncode == 3
    assert "shape two on 1 processes" in " ".join(result.stderr.split())


def test_each_run_of_a_peer_has_a_row(tmp_path):
    peers = '[[shape.peer]]\nlabel = "a2a"\n[[shape.peer]]\nlabel = "p2p"\ncontext_exchange = "p2p"\nseconds = 9'
    file = write_shapes(tmp_path, f'name = "a"\narguments = ["tiny"]\n{peers}', 'name = "b"\narguments = ["tiny"]')
    shapes = load_shapes(file)
    tasks = list_tasks(shapes, "megatron-core", [])
    assert [tuple(task.key.values()) for task in tasks] == [
        ("a", "megatron-core", "a2a"),
        ("a", "megatron-core", "p2p"),
        ("b", "megatron-core", ""),
    ]
    assert [task.seconds for task in tasks] == [300, 9, 300]
    assert tasks[2].peer == PeerRun()
    assert [task.key["shape"] for task in list_tasks(shapes, "megascale", ["b"])] == ["b"]


def test_shapes_of_several_trainers_are_compared_by_the_median_of_turns(tmp_path):
    file = write_shapes(
        tmp_path,
        'name = "serial"\narguments = ["tiny"]',
        'name = "parallel"\narguments = ["tiny"]\ncompare_with = "serial"',
        'name = "alone"\narguments = ["tiny"]\npeer = []',
    )

    def row(shape, trainer, seconds, label="", **details):
        figures = {"step_seconds": seconds, "tokens_per_second_per_device": 100 / seconds, "mfu": 0.1 / seconds}
        figures |= {"peak_memory_gib": 3.0, "gemm_flop_per_s": [6e14, 7e14]}
        return {"shape": shape, "trainer": trainer, "label": label} | figures | details

    failed = {"shape": "serial", "trainer": "megatron-core", "label": "graphs", "failed": "rank 0: no memory"}
    runs = [
        row("serial", "megascale", 1.0),
        row("parallel", "megascale", 0.8),
        row("alone", "megascale", 5.0),
        row("serial", "megatron-core", 1.2, "eager"),
        row("serial", "megatron-core", 1.1, "best"),
        failed,
        row("serial", "megascale", 1.2),
        row("serial", "megascale", 1.1),
    ]
    rows = make_comparison(load_shapes(file), runs)
    figures = {(item["shape"], item["label"]): item for item in rows if item["trainer"] == "megatron-core"}
    ours = {item["shape"]: item for item in rows if item["trainer"] == "megascale"}
    assert ours["serial"]["step_seconds"] == 1.1
    assert ours["serial"]["spread"] == pytest.approx(0.2 / 1.1)
    assert ours["serial"]["tokens_per_second_per_device"] == pytest.approx(100 / 1.1)
    assert ours["serial"]["ours_over_it"] == 1.0  # the fastest run of a peer counts
    assert ours["parallel"]["ours_over_it"] == pytest.approx(1.1 / 0.8)
    assert ours["alone"]["ours_over_it"] is None
    assert figures["serial", "eager"]["ours_over_it"] == pytest.approx(1.2 / 1.1)
    assert figures["serial", "graphs"]["step_seconds"] is None
    assert len(rows) == 6


def test_a_row_that_the_time_limit_cut_is_marked(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    figures = {"step_seconds": 1.5, "tokens_per_second_per_device": 10.0, "mfu": None, "peak_memory_gib": None}
    figures |= {"gemm_flop_per_s": None, "all_step_seconds": [1.4, 1.6], "peer_settings": "all overlaps"}
    row = {"shape": "a", "trainer": "megatron-core", "label": "", "cut": "rank 0: took longer than 170 s"} | figures
    shapes = load_shapes(write_shapes(tmp_path, 'name = "a"\narguments = ["tiny"]'))
    peer_shapes.print_comparison(make_comparison(shapes, [row]), [row])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith("megatron-core a (cut, 2 steps)  ") and "1.5000" in line for line in lines)
    assert lines[-1].endswith("10 tokens/s per GPU, rank 0: took longer than 170 s")


def test_a_trainer_that_takes_too_long_keeps_its_complete_rows(tmp_path, monkeypatch):
    """The time is over when the first shape has its row."""
    file = write_shapes(
        tmp_path,
        'name = "first"\narguments = ["tiny"]',
        'name = "endless"\narguments = ["tiny"]\nsteps = 100000000',
    )
    out = tmp_path / "rows.json"
    limit = 1000.0

    class Limited(Forked):
        def __init__(self, command):
            assert command[:3] == [sys.executable, "-m", "benchmarks"]
            super().__init__(command[3:], module=BENCHMARKS)

        def wait(self, timeout=None):
            if timeout != limit:
                return super().wait(timeout)
            wait_for_rows(out, 1, self)
            raise subprocess.TimeoutExpired(self.arguments, limit)

    monkeypatch.setattr(peer_shapes.subprocess, "Popen", Limited)
    monkeypatch.chdir(tmp_path)
    rows = peer_shapes.run_trainer(file, "megascale", out, limit=limit, options=["--nproc=1", "--device=cpu"])
    assert [item["shape"] for item in rows] == ["first"]


def test_options_of_shapes_are_refused_beside_a_file(benchmarks, tmp_path):
    file = write_shapes(tmp_path, 'name = "first"\narguments = ["tiny"]')
    result = benchmarks("peers", file, "--steps=3")
    assert result.returncode == 2
    assert "--steps: with a file of shapes" in result.stderr
    result = benchmarks("peers", file, "--peer=nobody")
    assert result.returncode == 2
    assert "--peer=nobody" in result.stderr
