"""Plots of runs: what lies along the bottom, averages, gaps, and pictures of the right runs; Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.errors import ConfigError, DataError
from megascale.observe.metrics import Wandb
from megascale.observe.plots import Curves, choose_unit, plot_runs, read_metrics, smooth
from tests.damaged_records import damaged_lines, limited_memory


def record(step: int, loss: float) -> dict:
    return {"step": step, "tokens": 512 * step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0, "seconds": 1.8}


RECORDS = [
    record(1, 4.0),
    record(2, 3.0),
    {"step": 2, "tokens": 1024, "valid_loss": 3.5},
    record(3, float("nan")),
    record(4, 2.0),
    {"step": 4, "tokens": 2048, "valid_loss": 2.5},
]


def run_folder(path: Path, records: list[dict]) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("axis", "locations"),
    [
        ("tokens", [512, 1024, 1536, 2048]),
        ("steps", [1, 2, 3, 4]),
        ("hours", [0.0005, 0.0010, 0.0015, 0.0020]),
    ],
)
def test_each_axis_places_steps_and_evaluations(axis, locations):
    curves = Curves.from_records("a", RECORDS, axis)
    assert curves.x == pytest.approx(locations)
    assert curves.valid_points == [(pytest.approx(locations[1]), 3.5), (pytest.approx(locations[3]), 2.5)]
    assert math.isnan(curves.loss[2])
    assert "held out 2.500" in curves.format_label(0.9)
    assert curves.format_label(0).startswith("a: 2.000")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.95]))
def test_an_average_lies_among_what_it_averages(values, weight):
    out = smooth(values, weight)
    assert out[0] == pytest.approx(values[0])
    for i, value in enumerate(out):
        assert min(values[: i + 1]) - 1e-9 <= value <= max(values[: i + 1]) + 1e-9
    if weight == 0:
        assert out == pytest.approx(values)


def test_gaps_stay_out_of_the_average():
    out = smooth([math.nan, 2.0, math.nan, 2.0], 0.9)
    assert math.isnan(out[0])
    assert out[1:] == pytest.approx([2, 2, 2])


def test_losses_that_are_not_finite_are_counted(tmp_path):
    warnings: list[str] = []
    records = read_metrics(run_folder(tmp_path / "run", RECORDS), warnings.append)
    assert "the loss of 1 of 4 steps is not a finite number" in warnings[0]
    assert Curves.from_records("run", records, "steps").format_label(0.5).startswith("run: 2.")
    assert "1 step not finite" in Curves.from_records("run", records, "steps").format_label(0.5)


def test_units_keep_numbers_short():
    assert [choose_unit(n)[1] for n in (7, 7e3, 7e6, 7e9, 3e11, 2e13)] == [
        "",
        "thousands",
        "millions",
        "billions",
        "billions",
        "trillions",
    ]


@pytest.mark.parametrize(("axis", "weight"), [("tokens", 0.9), ("steps", 0.0), ("hours", 0.9)])
def test_several_runs_in_one_picture(tmp_path, axis, weight):
    runs = [run_folder(tmp_path / part / "same", RECORDS) for part in ("a", "b")]
    out = plot_runs(runs, tmp_path / "new" / "out.png", x=axis, smoothing=weight)
    assert out.read_bytes()[:4] == b"\x89PNG"
    single = plot_runs(runs[:1], tmp_path / "one.png", x=axis, smoothing=weight)
    assert single.read_bytes() != out.read_bytes()


def test_a_folder_without_steps_is_named(tmp_path):
    with pytest.raises(DataError, match="metrics"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="not finished a step"):
        read_metrics(run_folder(tmp_path / "a", [{"step": 0, "valid_loss": 1.0}]))
    full = run_folder(tmp_path / "b", RECORDS)
    with open(full / "metrics.jsonl", "a") as out:
        out.write('{"step": 5, "lo')  # a crash cut the last line
    assert len(read_metrics(full)) == len(RECORDS)


@given(damaged_lines(RECORDS), st.sampled_from(["tokens", "steps", "hours"]))
@settings(max_examples=60)
def test_curves_of_damaged_records_are_numbers_gaps_or_a_sentence(tmp_path_factory, text, axis):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(text)
    try:
        curves = Curves.from_records("a", read_metrics(folder), axis)
    except DataError:
        return
    assert curves.format_label(0.9)
    for values in (curves.x, curves.loss, curves.rate, curves.norm, [y for _, y in curves.valid_points]):
        assert all(math.isnan(value) or abs(value) <= 1e30 for value in values)


WILD = {
    "nan": [{"step": 1, "tokens": 64, "loss": "NaN", "grad_norm": "NaN", "learning_rate": 1e-3, "seconds": 0.1}],
    "bare": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": -1e308}, {"step": 10**400, "loss": 1.0}],
    "extreme": [
        record(1, 1e308),
        record(2, 5e-324),
        record(3, 1e30),
        record(4, -1.0),
        {"step": 4, "valid_loss": "NaN"},
    ],
    "types": [record(1, 2.0) | {"loss": [1], "grad_norm": {"a": 1}, "seconds": None, "tokens": True}],
    "_$x$ \\frac{ \udcff": RECORDS,
}


@pytest.mark.parametrize("names", [["nan"], sorted(WILD)], ids=["nan alone", "all"])
def test_any_records_make_a_picture(tmp_path, names):
    runs = [run_folder(tmp_path / name, WILD[name]) for name in names]
    assert plot_runs(runs, tmp_path / "out.png", x="steps").read_bytes()[:4] == b"\x89PNG"


def test_records_without_a_place_on_the_axis_are_named(tmp_path):
    with pytest.raises(DataError, match="have no tokens; draw them along another axis, such as --x steps"):
        plot_runs([run_folder(tmp_path / "a", WILD["bare"])], tmp_path / "a.png")


def test_a_line_without_end_and_a_pipe_are_named(tmp_path):
    run, output = run_folder(tmp_path / "a", RECORDS), []
    os.truncate(run / "metrics.jsonl", 1 << 27)  # sparse: an eighth of a gibibyte of zeros in one line
    with limited_memory(64 << 20):
        assert len(read_metrics(run, output.append)) == len(RECORDS)
    assert "1 line is damaged or longer than 1,048,576 bytes, and left out" in output[0]
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(DataError, match="it is a pipe or a device"):
        read_metrics(run)


@pytest.mark.parametrize("name", ["x.foo", "x", "x.png.txt"])
def test_a_format_that_cannot_be_drawn_is_named(tmp_path, name):
    for arguments in (["plot", str(tmp_path), "--out", name], ["plan", "--gpus", "1", "--plot", name]):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ConfigError)
        assert f"{name}: pictures are written as .png, .svg, .pdf" in str(result.exception)


def test_what_follows_a_finished_run_changes_no_exit_code(tiny, megascale, tmp_path):
    """Its plot cannot be written, and there is nothing to generate with: the run has finished all the same."""
    plots = tmp_path / "runs" / "tiny" / "plots" / "loss.png"
    plots.mkdir(parents=True)
    result = megascale("train", tiny, "--train.steps=1", "--train.sample_prompt=a")
    assert result.returncode == 0, result.stderr
    assert "no loss curve was drawn" in result.stdout
    assert "no sample was generated" in result.stdout


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, as Weights & Biases keeps offline runs: 32 KiB blocks of parts, each
    with a checksum, a length and whether it is a whole record (1) or its first, a middle or its last part (2, 3, 4)."""
    at, full = 7, b""  # after the file's own header
    while at < len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        full = (b"" if kind in (1, 2) else full) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield full


def offline_records(run: Path) -> list[dict]:
    """Return the records of offline runs of Weights & Biases."""
    from wandb.proto import wandb_internal_pb2

    result = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            part = wandb_internal_pb2.Record()
            part.ParseFromString(data)
            if part.history.item:
                result.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in part.history.item})
    return result


def test_weights_and_biases_gets_every_step_and_goes_on_after_a_resume(tiny, megascale, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "runs" / "tiny"
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for steps in (2, 4):  # in processes of their own: the package's file is whole once its process has ended
        result = megascale("train", tiny, f"--train.steps={steps}", "--observe.wandb=mine", env=offline)
        assert result.returncode == 0, result.stderr
    retained = offline_records(run)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["_step"]: record["train/loss"] for record in retained if "train/loss" in record}
    assert losses == {r["step"]: r["loss"] for r in metrics if "loss" in r}
    assert sorted(losses) == [1, 2, 3, 4]
    assert any("valid/loss" in record for record in retained)
    identity = (run / "wandb-id").read_text().strip()
    assert all(path.name.endswith(identity) for path in run.glob("wandb/offline-run-*"))
    assert len(list(run.glob("wandb/offline-run-*"))) == 2


def test_weights_and_biases_missing_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"observe\.wandb='mine'.*\[wandb\]"):
        Wandb("mine", tmp_path, {})
    assert not os.listdir(tmp_path)
