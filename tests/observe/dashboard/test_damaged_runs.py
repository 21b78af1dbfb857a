"""Run folders whose files are damaged in any way: each view answers with figures or a sentence, each command too."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.core.calls import CallLog
from megascale.core.status import StatusFile
from megascale.errors import DataError, MegascaleError
from megascale.observe.dashboard import questions
from megascale.observe.dashboard.questions import Questions, Sources
from megascale.observe.dashboard.run_reader import RunList, _describe_clock
from megascale.observe.store.frames import COUNTER, COUNTERS, ROLLUP, ROLLUPS, SPANS, FrameHead, pack_frame
from megascale.observe.store.spool import pack_header, read_segment, save_orphan
from megascale.observe.store.tables import SpanTables
from megascale.resilience.driver.api import client as job_view
from megascale.resilience.driver.state.journal import Journal
from megascale.simulate.run_plan import plan_run
from tests.conftest import lines
from tests.damaged_records import damaged_lines, json_values, limited_memory
from tests.observe.dashboard.conftest import JOB, make_records, write_metrics, write_spans

CURVES: dict[str, Any] = {"keys": ["loss", "valid_loss"], "points": 10, "low": None, "high": None}
OF_FILES: list[tuple[str, dict[str, Any]]] = [
    ("overview", {}),
    ("pulse", {}),
    ("events", {"count": 50}),
    ("series", CURVES | {"x": "tokens"}),
    ("series", CURVES | {"x": "time"}),
    ("nodes", {}),
]
WINDOW = {"first": None, "last": None}
OF_SPANS: list[tuple[str, dict[str, Any]]] = [
    ("spans_heat", {"figure": "", "among": "", **WINDOW}),
    ("spans_stragglers", WINDOW),
    ("spans_history", {"figure": "own.step", "rank": 0}),
    ("spans_rank", {"rank": 0, **WINDOW}),
    ("spans_timeline", {"step": None, "ranks": "", "view": "pipeline"}),
    ("plan", {"cluster": ""}),
]
SMALL = replace(JOB, tensor=1, virtual=1, data=4, microbatches=2)
WORLD = SMALL.world
EVENTS = [
    {"event": "run_started", "time": 1.7e9, "attempt": 1, "rank": 0},
    {"event": "attempt_started", "time": 1.7e9 + 1, "attempt": 2, "by": "driver", "nodes": ["n0"], "ranks": [0]},
    {"event": "evaluated", "time": 1.7e9 + 2, "attempt": 2, "loss": 2.0},
    {"event": "run_finished", "time": 1.7e9 + 3, "attempt": 2, "evidence": ["\udcff"]},
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launched run of eight ranks with all files that views read."""
    run = tmp_path_factory.mktemp("sound") / "run"
    run.mkdir()
    write_metrics(run, 6)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    (run / "config.toml").write_text("[model]\nvocab_size = 64\n[train]\nsteps = 500\nglobal_batch = 64\n")
    write_spans(run, SMALL)
    shutil.copytree(run / "spans" / "host=0", run / "spans" / "host=1")
    save_orphan(run / "spans" / "host=1", {"ranks": [{"rank": 0, "attempt": 0}], "clock_ns": 5}, 7, b"")
    (run / "spans" / "host=1" / "state.json").write_text('{"network": [], "steps": {"0": 12}}')
    for rank in range(WORLD):
        status, calls = StatusFile(run / "status", rank), CallLog(run / "status", rank, WORLD)
        calls.register_group("world", WORLD)
        status.update("train", 3)
        calls.begin_wait(calls.begin_call("world", "all_reduce", 4))
        calls.close()
        status.close()
    Journal.take(run, 1.0)[0].close()
    return run


@pytest.fixture(scope="module", autouse=True)
def _quick_hang() -> Iterator[None]:
    """Looks at a hang once: nothing of these runs moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "WATCH_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def copied(sound: Path) -> Callable[[], Path]:
    """Makes a fresh copy of the run."""

    def copy() -> Path:
        run = sound.parent.parent / "damaged" / "run"
        shutil.rmtree(run, ignore_errors=True)
        return Path(shutil.copytree(sound, run))

    return copy


def look(run: Path, questions: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Ask; anything but an answer or a sentence fails. Returns the answers."""
    requested, answers = Questions(Sources(job_view.describe_job, job_view.describe_nodes, plan_run), "320MB"), {}
    try:
        for question, details in questions:
            try:
                answers[question] = json.loads(requested._answer(question, run, details))
            except MegascaleError as error:
                assert str(error)
    finally:
        for opened in requested._tables.values():
            opened.tables.close()
    return answers


COMMANDS_ON_SPANS = ("spans", "stragglers", "timeline", "whatif", "decline")


def command(*arguments: object) -> Result:
    """Run a command and return its result. It must end with 0 or 1, or refuse with a sentence."""
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    if isinstance(done.exception, MegascaleError):
        assert str(done.exception).strip()
        assert "\n  File " not in str(done.exception)
        return done
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    # Code 2 without a MegascaleError is the parser's: the test would name an option that does not exist.
    assert done.exit_code in (0, 1), done.output
    return done


def test_commands_answer_for_a_sound_run(sound):
    for name in COMMANDS_ON_SPANS:
        done = command(name, sound)
        if name == "decline":
            assert "and 20 are needed: wait, or choose windows" in str(done.exception)
        else:
            assert done.exception is None, (name, done.exception, done.output)
            assert done.output.strip(), name
    for arguments in (("events", sound, "--all"), ("hang", sound, "--no-ask", "--watch", 0)):
        done = command(*arguments)
        assert done.exception is None, (arguments, done.exception, done.output)
        assert done.output.strip(), arguments


def test_a_sound_run_answers_all(sound):
    answers = look(sound, OF_FILES + OF_SPANS)
    assert set(answers) == {question for question, _ in OF_FILES + OF_SPANS}
    assert answers["overview"]["now"]["phase"] == "done"
    assert answers["spans_heat"]["outliers"]


@settings(max_examples=25)
@given(metrics=st.data())
def test_views_of_damaged_metrics_and_events(copied, sound, metrics):
    run = copied()
    (run / "metrics.jsonl").write_bytes(metrics.draw(damaged_lines(lines(sound / "metrics.jsonl"))))
    (run / "events.jsonl").write_bytes(metrics.draw(damaged_lines(EVENTS)))
    assert {"overview", "pulse", "events", "series"} <= set(look(run, OF_FILES))
    command("events", run, "--all")


@pytest.mark.parametrize(
    "text",
    [
        '{"event": "run_started", "time": 1.7e9, "attempt": 0}',
        '{"event": "run_failed", "time": 1.7e9, "attempt": 1e400}',
        '{"event": "resumed", "time": 1e300, "attempt": 1e300}\n{"event": ["a"], "time": "b"}\n{"time": {}}',
        "",
    ],
    ids=["no step yet", "infinite attempt", "huge", "empty"],
)
def test_an_overview_before_the_first_step(tmp_path, text):
    (tmp_path / "events.jsonl").write_text(text + "\n")
    current = look(tmp_path, OF_FILES)["overview"]["now"]
    assert 0 <= current["attempt"] <= 1
    assert current["step"] == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_views_of_damaged_status_files(copied, seed):
    run, draw = copied(), random.Random(seed)
    for file in draw.sample(sorted((run / "status").iterdir()), 3):
        damage(file, draw)
    assert {"overview", "hang"} <= set(look(run, OF_FILES[:2] + [("hang", {})]))
    command("hang", run, "--no-ask", "--watch", 0)


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 32), ranks=st.data(), value=json_values)
def test_views_of_damaged_spans(copied, sound, seed, ranks, value):
    run, draw = copied(), random.Random(seed)
    facts = run / "spans" / "host=0" / "ranks.jsonl"
    if draw.random() < 0.5:
        facts.write_bytes(ranks.draw(damaged_lines(lines(facts))))
    (run / "spans" / "host=1" / "state.json").write_text(json.dumps({"network": value, "steps": value}))
    save_orphan(run / "spans" / "host=1", {"ranks": value, "clock_ns": value, "rings": value}, 7, b"MSpn" * 20)
    files = sorted(file for file in (run / "spans").rglob("*") if file.suffix in (".parquet", ".bin"))
    for file in draw.sample(files, 2):
        damage(file, draw)
    look(run, OF_SPANS)
    for name in COMMANDS_ON_SPANS:
        command(name, run)


EXTREMES = (0, 1, -1, 10**9, (1 << 31) - 1, -(1 << 31), 1 << 53, 10**18, (1 << 62) - 1, -(1 << 62))


def wrecked(records: np.ndarray[Any, Any], draw: random.Random) -> np.ndarray[Any, Any]:
    """Return records in which a field of one or of all has an extreme value."""
    records = records.copy()
    name = draw.choice(records.dtype.names)
    if records.dtype[name].kind in "iu":
        limits = np.iinfo(records.dtype[name])
        value = max(int(limits.min), min(int(limits.max), draw.choice(EXTREMES)))
        records[name][draw.randrange(len(records)) if draw.random() < 0.7 else slice(None)] = value
    return records


@settings(max_examples=4)
@given(seed=st.integers(0, 1 << 32))
@example(seed=866068)  # chunk -32768
def test_views_of_spans_with_extreme_values(copied, seed):
    """Frames whose checksums are right: micro-batches without end, links without a limit, ranks of no step."""
    run, draw = copied(), random.Random(seed)
    shutil.rmtree(run / "spans" / "host=1")
    host = run / "spans" / "host=0"
    for file in host.glob("*.parquet"):
        file.unlink()
    frames = []
    for kind, full, steps in ((ROLLUPS, False, 24), (SPANS, True, 3)):
        for rank, step, records in make_records(SMALL, steps, full):
            records = wrecked(records, draw) if draw.random() < 0.05 else records
            if draw.random() > 0.01:
                frames.append(pack_frame(FrameHead(kind, 1, len(frames) + 1, rank, 0, step), records))
    counters = np.zeros(2, COUNTER)
    counters["name"], counters["device"] = [b"nic_rate_limit", b"nic_rx_rate"], b"eth0"
    counters["value"] = [draw.choice((0.0, np.nan, 1e9)), draw.choice((np.inf, 1.0))]
    frames.append(pack_frame(FrameHead(COUNTERS, 1, len(frames) + 1, 0, 0, 0), counters))
    (host / "spool-000000.bin").write_bytes(pack_header({"clock_ns": draw.choice((0, 10**18))}, {}) + b"".join(frames))
    assert not read_segment(host / "spool-000000.bin").damage
    look(run, OF_SPANS)
    for name in COMMANDS_ON_SPANS:
        command(name, run)


def test_numbers_beyond_any_job_end_a_segment(tmp_path):
    """Views make a row for each rank: one of a damaged frame would take all memory."""
    for rank, attempt, step in ((1 << 31, 0, 0), (0, 1 << 31, 0), (0, 0, 1 << 63)):
        frame = pack_frame(FrameHead(ROLLUPS, 1, 1, rank, attempt, step), np.zeros(1, ROLLUP))
        (tmp_path / "spool-000000.bin").write_bytes(pack_header({}, {}) + frame)
        assert (
            f"the frame has an invalid rank {rank}, attempt {attempt} or step {step}"
            in read_segment(tmp_path / "spool-000000.bin").damage
        )


def damage(file: Path, draw: random.Random) -> None:
    """Change bytes of a file, cut it, or put a pipe in its place."""
    if draw.random() < 0.1:
        file.unlink()
        return os.mkfifo(file)
    data = bytearray(file.read_bytes())
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 600))
        kind = draw.random()
        if kind < 0.4:
            data[at] = draw.randrange(256)
        elif kind < 0.7:
            word = struct.pack("<Q", draw.choice((0, (1 << 64) - 1, 1 << 63, 1 << 31, (1 << 32) - 1, 1 << 53)))
            data[at : at + 8] = word[: len(data) - at]
        elif kind < 0.9 and at:
            del data[at:]
    file.write_bytes(data)
    return None


def test_a_pipe_in_place_of_any_file_blocks_no_view(copied):
    run = copied()
    for file in sorted(file for file in run.rglob("*") if file.is_file()):
        file.unlink()
        os.mkfifo(file)
    assert "overview" in look(run, OF_FILES + OF_SPANS + [("hang", {})])
    for name in ("spans", "events", "plot", "jobs", "nodes"):
        command(name, run)


def test_files_of_any_length_take_bounded_memory(copied):
    """All are sparse: they take no room on the disk, and would take all of the memory."""
    run = copied()
    host = run / "spans" / "host=1"
    for name in ("spool-000009.bin", "left-0000000000000009.bin"):
        shutil.copy(host / "left-0000000000000007.bin", host / name)
    for file in sorted(file for file in run.rglob("*") if file.is_file() and file.name != "journal.sqlite"):
        os.truncate(file, 1 << 33)
    # Lines without an end are walked through: of these less.
    for name in ("metrics.jsonl", "events.jsonl", "spans/host=0/ranks.jsonl", "spans/host=1/ranks.jsonl"):
        os.truncate(run / name, 1 << 27)
    with SpanTables(run) as tables:
        assert str(host / "spool-000009.bin") not in tables.skipped  # its frames count, up to where it is torn
    with limited_memory(1 << 29):
        assert "overview" in look(run, OF_FILES + [("hang", {})])
        command("spans", run)
        command("events", run, "--all")
        command("plot", run)


def test_a_clock_that_goes_back_is_named():
    steady = {"time": np.array([1.0, 2.0, np.nan, 3.0])}
    assert _describe_clock(steady) == []
    assert _describe_clock({}) == []
    (note,) = _describe_clock({"time": np.array([1000.0, 400.0, 401.0])})
    assert "went back by 600 s" in note


def test_spans_of_a_folder_whose_name_is_not_utf8_are_refused(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    (folder / "spans" / "host=0").mkdir(parents=True)
    with pytest.raises(DataError, match="not UTF-8"):
        SpanTables(folder)


def test_runs_whose_names_cannot_be_shown_are_counted(tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for folder in (odd, tmp_path / "plain"):
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    runs = RunList(tmp_path)
    assert runs.list_names() == ["plain"]
    assert runs.list_unlisted() == [odd]
