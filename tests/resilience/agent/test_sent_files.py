"""Files of trainers reach the run folder on another machine: complete, once and in order, despite kills."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.observe.store import parquet
from megascale.observe.store.frames import COUNTER, COUNTERS, ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.tables import SpanTables
from megascale.resilience.agent import sent_files
from megascale.resilience.agent.file_tails import MetricsTail
from megascale.resilience.agent.sent_files import SentFiles
from megascale.resilience.driver.telemetry.trainer_files import ReceivedFiles
from megascale.resilience.protocol.agent_messages import FROM_AGENT, FileData
from tests.damaged_records import damaged_lines


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss, "grad_norm": 0.5, "seconds": 0.1}) + "\n"


def test_metrics_are_followed_through_cut_lines_and_rewrites(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(tmp_path)
    assert tail.read_new_steps().replaces_earlier  # what a driver knew before counts no more
    full = line(3)
    file.write_text(line(1) + '{"step": 1, "valid_loss": 2.0}\n' + line(2) + full[:9])
    assert [s.step for s in tail.read_new_steps().steps] == [1, 2]
    with open(file, "a") as out:
        out.write(full[9:] + line(4, float("nan")))
    result = tail.read_new_steps()
    assert not result.replaces_earlier
    third, fourth = FROM_AGENT.decode(FROM_AGENT.encode(result)).steps
    assert (third.step, third.loss, third.grad_norm, third.seconds) == (3, 1.0, 0.5, 0.1)
    assert fourth.loss != fourth.loss
    assert tail.read_new_steps() is None
    # A resumed run puts another file in its place.
    (tmp_path / "new").write_text(line(1) + line(2))
    os.replace(tmp_path / "new", file)
    result = tail.read_new_steps()
    assert (result.replaces_earlier, [s.step for s in result.steps]) == (True, [1, 2])
    tail.begin_session()  # another driver knows nothing yet
    assert [s.step for s in tail.read_new_steps().steps] == [1, 2]


class Link:
    """Both ends, without the network between them; `lossy` drivers write and die before they confirm."""

    def __init__(self, local: Path, present: Path) -> None:
        self.local, self.remote = local, present
        local.mkdir(parents=True)
        present.mkdir(parents=True)
        self.agent = SentFiles(local)

    def carry(self, confirm: bool = True) -> None:
        """Have all that is to be sent written by a driver."""
        driver = ReceivedFiles(self.remote, lambda: "settings = 1\n")
        confirmed: list[tuple[str, int]] = []
        while pieces := self.agent.take():
            for piece in pieces:
                assert driver.receive(
                    FROM_AGENT.decode(FROM_AGENT.encode(piece)),
                    lambda *confirmation: confirmed.append(confirmation),
                    self.local.name,
                )
        driver.close()
        if confirm:
            for retained in confirmed:
                self.agent.confirm(*retained)


def write(file: Path, text: str, mode: str = "a") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, mode) as out:
        out.write(text)


STEPS = ("metrics.jsonl", "samples/ledger.jsonl")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from(["go", "driver", "lost", "move"]))))
@settings(max_examples=40, deadline=None)
def test_the_run_folder_tells_the_story_of_a_run_that_goes_back_moves_and_loses_its_driver(tmp_path_factory, story):
    """(steps done, steps lost, what happens then): nothing; another driver; one that did not confirm; another node."""
    folder = tmp_path_factory.mktemp("link")
    link = Link(folder / "n0", folder / "run")
    number = 0
    done = 0
    link.agent.follow((0,))
    expected: dict[str, list[str]] = {name: [] for name in STEPS}
    log, events = "", ""
    for steps, lost, then in story:
        done = max(0, done - lost)
        for name in STEPS:  # as RunFolder.rewind
            expected[name] = [text for text in expected[name] if json.loads(text)["step"] <= done]
            local = link.local / name
            if lost and local.exists():
                text = "".join(t for t in local.read_text().splitlines(True) if json.loads(t)["step"] <= done)
                write(local.with_suffix(".tmp"), text, "w")
                os.replace(local.with_suffix(".tmp"), local)
        for _ in range(steps):
            done += 1
            for name in STEPS:
                expected[name].append(json.dumps({"step": done, "n": len(events)}) + "\n")
                write(link.local / name, expected[name][-1])
            log += f"step {done}\n"
            write(link.local / "logs" / "rank-0.log", f"step {done}\n")
            events += json.dumps({"time": len(events), "event": "x"}) + "\n"
            write(link.local / "events.jsonl", events.splitlines(True)[-1])
        link.carry(confirm=then != "lost")
        if then == "driver":
            link.agent.begin_session()
        elif then == "lost":
            link.agent.begin_session()
            link.carry()
        elif then == "move":
            number += 1
            present = link.remote
            link.local = folder / f"n{number}"
            link.local.mkdir()
            link.agent = SentFiles(link.local)
            link.agent.follow((0,))
            assert link.remote is present
    if story:
        for name in STEPS:
            assert (link.remote / name).read_text() == "".join(expected[name])
        assert (link.remote / "events.jsonl").read_text() == events
        if all(then != "lost" for _, _, then in story):
            assert (link.remote / "logs" / "rank-0.log").read_text() == log


def test_a_node_that_dies_while_it_sends_its_rewritten_steps_again_takes_none_away(tmp_path):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((0,))
    steps = [line(n) for n in range(1, 3001)]  # several pieces
    write(link.local / "metrics.jsonl", "".join(steps))
    link.carry()
    assert (link.remote / "metrics.jsonl").read_text() == "".join(steps)
    write(link.local / "new", "".join(steps[:2000]))  # it went back to step 2000
    os.replace(link.local / "new", link.local / "metrics.jsonl")
    write(link.local / "metrics.jsonl", line(2001, 0.5))
    driver = ReceivedFiles(link.remote, lambda: "")
    (piece,) = link.agent.take()
    assert driver.receive(piece, lambda *confirmation: None)
    assert driver.flush(10.0)  # and no more of this node
    assert (link.remote / "metrics.jsonl").read_text() == "".join(steps)
    link.local = tmp_path / "n1"
    write(link.local / "metrics.jsonl", line(2001, 0.25) + line(2002, 0.25))
    link.agent = SentFiles(link.local)
    link.agent.follow((0,))
    link.carry()
    assert (link.remote / "metrics.jsonl").read_text() == "".join(steps[:2000]) + line(2001, 0.25) + line(2002, 0.25)
    driver.close()


def test_lines_that_a_crash_has_cut_in_the_run_folder_come_whole(tmp_path):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((0,))
    names = STEPS + ("events.jsonl",)
    for name in names:
        write(link.local / name, "".join(line(n) for n in (1, 2)))
    link.carry()
    for name in names:
        write(link.local / name, line(3) + line(4))
        write(link.remote / name, line(3)[:20])  # the driver's machine went down
    link.agent.begin_session()
    link.carry()
    for name in names:
        assert (link.remote / name).read_text() == "".join(line(n) for n in (1, 2, 3, 4)), name


def test_no_more_than_a_window_is_on_its_way_and_what_is_not_confirmed_comes_again(tmp_path, monkeypatch):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((3,))
    monkeypatch.setattr(sent_files, "LOG_BACKLOG_BYTES", 1 << 30)
    text = "".join(f"{n:09d}\n" for n in range(400_000))  # 4 MB
    write(link.local / "logs" / "rank-3.log", text)
    sent = 0
    while pieces := link.agent.take():
        sent += sum(len(piece.data) for piece in pieces)
    assert sent == sent_files.WINDOW_BYTES
    monkeypatch.setattr(sent_files, "RESEND_SECONDS", 0.0)
    (piece,) = link.agent.take()
    assert (piece.start, piece.first) == (0, True)
    monkeypatch.undo()
    monkeypatch.setattr(sent_files, "LOG_BACKLOG_BYTES", 1 << 30)
    link.agent.begin_session()
    for _ in range(8):
        link.carry()
    assert (link.remote / "logs" / "rank-3.log").read_text() == text


def test_of_a_log_that_grows_too_fast_the_middle_is_left_out(tmp_path):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((0,))
    write(link.local / "logs" / "rank-0.log", "x" * (3 * sent_files.LOG_BACKLOG_BYTES) + "end\n")
    for _ in range(8):
        link.carry()
    result = (link.remote / "logs" / "rank-0.log").read_text()
    assert len(result) < sent_files.LOG_BACKLOG_BYTES
    assert f"[{3 * sent_files.LOG_BACKLOG_BYTES + 4 - sent_files.LOG_BACKLOG_BYTES // 2} bytes left out]" in result
    assert result.endswith("end\n")


def test_the_runs_tokenizer_comes_in_pieces_and_is_replaced_by_a_shorter_one(tmp_path):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((0, 1))
    long = "".join(f"{n:09d}," for n in range(30_000))  # several pieces
    write(link.local / "tokenizer.json", long)
    write(link.local / "chat_template.jinja", "{{ messages }}")
    link.carry()
    link.agent.begin_session()
    link.carry()
    assert (link.remote / "tokenizer.json").read_text() == long
    assert (link.remote / "chat_template.jinja").read_text() == "{{ messages }}"
    write(link.local / "new", long[::-1][:100_000])
    os.replace(link.local / "new", link.local / "tokenizer.json")
    link.carry()
    assert (link.remote / "tokenizer.json").read_text() == long[::-1][:100_000]


def test_small_files_come_as_a_whole_and_the_settings_with_the_identity(tmp_path):
    link = Link(tmp_path / "n0", tmp_path / "run")
    link.agent.follow((0,))
    write(link.local / "identity", "abc\n")
    link.carry()
    assert (link.remote / "identity").read_text() == "abc\n"
    assert (link.remote / "config.toml").read_text() == "settings = 1\n"
    write(link.local / "kernels.json", "{}")
    link.carry()
    assert (link.remote / "kernels.json").read_text() == "{}"


MORE = ("tensorboard/events.out.tfevents.1/../../x", "tensorboard/x", "faults/1.json", "status/rank-0.evidence")


def test_no_other_file_of_the_run_folder_is_written(tmp_path):
    driver = ReceivedFiles(tmp_path, lambda: "")
    for name in ("journal.sqlite", "../x", "/etc/x", "driver/token", "logs/rank-0.log/../../x", "checkpoints/x") + MORE:
        assert not driver.receive(FileData(name, 0, b"x"), lambda *confirmation: None)
    assert not list(tmp_path.iterdir())


def record(run: Path, host: int, rank: int, steps: int) -> Ingest:
    """The span service of a node, `steps` steps after its start."""
    out = run / "spans" / f"host={host}"
    ingest = Ingest(out, job="run", host=host, hostname=run.name, sink=ParquetWriter, segment_seconds=1.0)
    (out / "ranks.jsonl").write_text(json.dumps({"attempt": 1, "rank": rank, "data": rank}) + "\n")
    ring = SpanRing(rank=rank, attempt=1)
    for step in range(1, steps + 1):
        ring.write(ROLLUPS, step, np.ones(4, ROLLUP), 0)
        ring.write(SPANS, step, np.random.default_rng(step).integers(0, 99, 4000).astype("i8").view(SPAN)[:500], 0)
        ingest.take_frames(ring)
    return ingest


def spans_of(run: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """(host, rank): steps with roll-ups, and spans."""
    with SpanTables(run) as tables:
        assert tables.skipped == {}
        result = tables.query(
            "SELECT host, rank, (SELECT count(DISTINCT step) FROM rollups r WHERE r.host = s.host AND r.rank = s.rank) "
            "AS steps, count(*) AS n FROM spans s GROUP BY host, rank ORDER BY host, rank"
        )
        assert tables.query("SELECT count(DISTINCT rank) AS n FROM ranks")["n"][0] == len(set(result["rank"].tolist()))
    return {(h, r): (steps, n) for h, r, steps, n in zip(*(column.tolist() for column in result.values()), strict=True)}


def test_spans_of_nodes_apart_lie_in_the_run_folder(tmp_path, monkeypatch):
    """Spans arrive as they grow, then as tables, under any driver, also from a later node of the same host."""
    monkeypatch.setattr(sent_files, "SPANS_INTERVAL", 0.0)
    monkeypatch.setattr(sent_files, "PIECE_BYTES", 5000)
    link = Link(tmp_path / "n0", tmp_path / "run")
    ingest = record(link.local, 0, 7, 40)
    link.agent.follow((7,))
    link.carry()
    present = link.remote / "spans" / "host=0@n0"
    assert spans_of(link.remote) == {(0, 7): (40, 20_000)}
    assert (present / "spool-000000.bin").read_bytes() == (link.local / "spans/host=0/spool-000000.bin").read_bytes()

    ingest.maintain(1e9)  # the segment has become tables: a driver has a piece of them, does not confirm it and is gone
    driver = ReceivedFiles(link.remote, lambda: "")
    pieces = link.agent.take()
    assert [piece.has_more for piece in pieces if "spans-000000" in piece.name] == [True]
    for piece in pieces:
        assert driver.receive(piece, lambda *confirmation: None, "n0")
    driver.close()
    assert spans_of(link.remote) == {(0, 7): (40, 20_000)}
    link.agent.begin_session()
    link.carry()
    names = sorted(path.name for path in present.iterdir())
    assert names == ["ranks.jsonl", "rollups-000000.parquet", "spans-000000.parquet"]
    assert spans_of(link.remote) == {(0, 7): (40, 20_000)}

    monkeypatch.setattr(parquet, "_MERGED_FILES", 2)
    link.local = tmp_path / "1"  # a node whose name is a number
    ingest = record(link.local, 0, 7, 30)
    link.agent = SentFiles(link.local)
    link.agent.follow((7,))
    link.carry()
    assert spans_of(link.remote) == {(0, 7): (40, 35_000)}
    ingest.maintain(1e9)
    link.carry()
    ingest.add_records(COUNTERS, np.ones(1, COUNTER))
    ring = SpanRing(rank=7, attempt=1)
    for step in (41, 42):
        ring.write(SPANS, step, np.ones(5, SPAN), 0)
        ring.write(ROLLUPS, step, np.ones(1, ROLLUP), 0)
        ingest.take_frames(ring)
        ingest.maintain(1e9 * step)
    assert (link.local / "spans/host=0/spans-000000-000001.parquet").exists()
    link.carry()
    assert spans_of(link.remote) == {(0, 7): (42, 35_010)}
    assert {path.name for path in (link.remote / "spans/host=0@1").iterdir()} == {
        path.name for path in (link.local / "spans/host=0").iterdir()
    } - {"rings.json"}


def test_a_piece_of_a_table_that_is_missing_is_asked_for_again(tmp_path):
    driver, report = ReceivedFiles(tmp_path, lambda: ""), []
    name = "spans/host=0/spans-000001.parquet"
    for piece in (
        FileData(name, 8, b"rest PAR1"),
        FileData(name, 0, b"PAR1 is ", has_more=True),
        FileData(name, 8, b"rest PAR1"),
        FileData("spans/host=0/../x", 0, b"x"),
        FileData("spans/host=0@n1/spans-000001.parquet", 0, b"x"),
    ):
        driver.receive(piece, lambda *confirmation: report.append(confirmation), "a/b")
    driver.close()
    assert report == [(name, 8), (name, 17)]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == [
        "spans/host=0@a_b/spans-000001.parquet"
    ]


def test_a_piece_that_cannot_be_taken_in_keeps_no_later_one_out(tmp_path: Path, caplog) -> None:
    """The thread that writes would end without a word, and nothing of any node be written any more."""
    confirmed: list[tuple[str, int]] = []
    files = ReceivedFiles(tmp_path, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    (tmp_path / "metrics.jsonl").write_text(line(1))
    for data in (b'{"step": Infinity}\n', b'{"step": ' + b"[" * 100_000 + b"\n"):
        assert files.receive(FileData("metrics.jsonl", 0, data, first=True), lambda *receipt: confirmed.append(receipt))
    assert files.receive(
        FileData("identity", 0, b"a\n", replaces_file=True), lambda *receipt: confirmed.append(receipt)
    )
    assert files.receive(FileData("logs/rank-0.log", 0, b"words\n"), lambda *receipt: confirmed.append(receipt))
    assert files.flush(30.0)
    files.close()
    assert confirmed[-1] == ("logs/rank-0.log", 6)
    assert "identity" not in dict(confirmed)  # its agent sends it again
    assert "writing a received file failed (ZeroDivisionError" in caplog.text


@settings(max_examples=60)
@given(data=st.data())
def test_figures_of_damaged_records_can_be_sent(tmp_path_factory, data) -> None:
    """A figure that cannot be sent would end the file reader, and the driver's reports of steps."""
    run = tmp_path_factory.getbasetemp() / "damaged"
    run.mkdir(exist_ok=True)
    sound = [json.loads(line(step)) for step in range(4)]
    (run / "metrics.jsonl").write_bytes(data.draw(damaged_lines(sound)))
    steps = MetricsTail(run).read_new_steps()
    assert steps is not None
    for figures in FROM_AGENT.decode(FROM_AGENT.encode(steps)).steps:
        assert 0 <= figures.step < 1 << 53
        assert 0 <= figures.seconds <= 1e9


def test_a_line_without_end_and_a_pipe_hold_nothing_up(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail, files = MetricsTail(tmp_path), SentFiles(tmp_path)
    file.write_text(line(1))
    assert [s.step for s in tail.read_new_steps().steps] == [1]
    with open(file, "a") as out:
        out.write("x" * (3 << 20) + "\n" + line(2))
    result: list[int] = []
    for _ in range(5):
        steps = tail.read_new_steps()
        result += [s.step for s in steps.steps] if steps is not None else []
    assert result == [2]
    files.follow([0])
    sent = b""
    while pieces := [piece for piece in files.take() if piece.name == "metrics.jsonl"]:
        sent += b"".join(piece.data for piece in pieces)
        files.confirm("metrics.jsonl", len(sent))
    assert sent == file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    assert tail.read_new_steps() is None
    assert not [piece for piece in files.take() if piece.name == "metrics.jsonl"]
