"""Span store from rings to tables: nothing acknowledged is lost or doubled, nothing torn is read, all is bounded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config import load
from megascale.core.spans import SpanAxis, SpanKind
from megascale.errors import ConfigError, DataError
from megascale.observe.store import parquet, span_sinks
from megascale.observe.store.frames import CLOCK, CLOCKS, COUNTER, COUNTERS, ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import open_span_sinks
from megascale.observe.store.spool import Segment, get_segment_file, list_segments, save_orphan
from megascale.observe.store.tables import SpanTables

OFFSET = 10**18  # of the common clock


class Unplugged:
    """A sink that cannot be reached until it is `plugged` in."""

    def __init__(self, folder: Path) -> None:
        self.writer = ParquetWriter(folder)
        self.plugged = False

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        if not self.plugged:
            raise OSError(28, "no space left")
        return self.writer.write_segment(number, segment)

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run" / "spans" / "host=0"


def ingest(out: Path, **inputs: Any) -> Ingest:
    inputs.setdefault("sink", ParquetWriter)
    return Ingest(out, job="it's a run", host=0, hostname="node-0", clock_ns=OFFSET, **inputs)


def step_of(ring: SpanRing, step: int, spans: int = 3) -> None:
    """A step's roll-ups in two parts, and its spans."""
    rollups = np.zeros(2, ROLLUP)
    rollups["kind"], rollups["count"], rollups["total_ns"] = [SpanKind.STEP, SpanKind.FORWARD], 1, [100, 60]
    rollups["first_ns"], rollups["last_ns"], rollups["longest_ns"] = 1000 * step, 1000 * step + 100, [100, 60]
    ring.write(ROLLUPS, step, rollups, 5)
    ring.write(ROLLUPS, step, rollups[1:], 5)
    records = np.zeros(spans, SPAN)
    records["kind"], records["axis"] = SpanKind.WAIT, SpanAxis.TENSOR
    records["start_ns"], records["end_ns"] = 1000 * step, 1000 * step + np.arange(spans)
    ring.write(SPANS, step, records, 5)


def counted(out: Path) -> dict[str, Any]:
    """Return the rows of the tables."""
    with SpanTables(out.parent.parent) as tables:
        assert not tables.skipped
        steps = tables.query("SELECT step, count(*) AS n FROM spans GROUP BY step ORDER BY step")
        totals = tables.query(
            "SELECT action, sum(total_ns)::BIGINT AS total, sum(count)::BIGINT AS n FROM rollups GROUP BY action"
        )
    return {
        "spans": dict(zip(steps["step"].tolist(), steps["n"].tolist(), strict=True)),
        "rollups": {a: (t, n) for a, t, n in zip(*(c.tolist() for c in totals.values()), strict=True)},
    }


def expected(steps: int) -> dict[str, Any]:
    spans = dict.fromkeys(range(1, steps + 1), 3)
    return {"spans": spans, "rollups": {"step": (100 * steps, steps), "forward": (120 * steps, 2 * steps)}}


def test_spool_and_files_hold_the_same_table(out):
    first, ring = ingest(out), SpanRing(rank=4, attempt=2)
    for step in (1, 2):
        step_of(ring, step)
    first.take_frames(ring)
    assert counted(out) == expected(2)
    first.maintain(end=True)
    assert list_segments(out) == []
    step_of(ring, 3)
    first.take_frames(ring)
    assert counted(out) == expected(3)  # a file and the spool
    first.close()
    assert counted(out) == expected(3)
    with SpanTables(out.parent) as tables:
        result = tables.query("SELECT * FROM spans ORDER BY step, end_ns LIMIT 1")
        assert {name: column.tolist()[0] for name, column in result.items()} == {
            "attempt": 2, "rank": 4, "step": 1, "action": "wait", "chunk": 0, "microbatch": 0, "axis": "tensor",
            "bytes": 0, "start_ns": OFFSET + 1000, "end_ns": OFFSET + 1000, "waited_on": 0, "clock_error_ns": 5,
            "host": 0,
        }  # fmt: skip
        merged = tables.query("SELECT count(*) AS n FROM rollups WHERE step = 1")
        assert merged["n"].tolist() == [2]  # parts of one step and action were added up


@pytest.mark.parametrize("moment", ["before it is acknowledged", "while a file is written", "between rename and end"])
def test_a_killed_service_loses_and_repeats_nothing(out, moment, monkeypatch):
    ring = SpanRing()
    first = ingest(out)
    step_of(ring, 1)
    first.take_frames(ring)
    step_of(ring, 2)
    if moment == "before it is acknowledged":
        monkeypatch.setattr(ring, "release", lambda size: None)
        first.take_frames(ring)
        monkeypatch.undo()
        with open(get_segment_file(out, 0), "ab") as file:  # and of what came then a part was written
            step_of(ring, 3)
            file.write(ring.read()[-200:-100])
    elif moment == "while a file is written":
        first.take_frames(ring)
        number = first._spool.rotate()
        assert number == 0
        (out / "rollups-000000.tmp").write_bytes(b"half")
    else:
        first.take_frames(ring)
        number = first._spool.rotate()
        retained = get_segment_file(out, 0).read_bytes()
        first._unconverted_segments.append(0)
        first._convert_segments(0.0)
        get_segment_file(out, 0).write_bytes(retained)
        (out / "rings.json").unlink()
    assert counted(out)["spans"] == {1: 3, 2: 3}
    repeated = ingest(out)
    repeated.take_frames(ring)
    repeated.close()
    done = 3 if moment == "before it is acknowledged" else 2
    assert counted(out) == expected(done)
    assert not list(out.glob("*.tmp"))
    last = ingest(out)
    last.take_frames(ring)
    last.close()
    assert counted(out) == expected(done)


def test_what_a_rank_left_is_read_and_adopted_once(out):
    ring = SpanRing(rank=1)
    first = ingest(out)
    step_of(ring, 1)
    first.take_frames(ring)
    frames = ring.read()
    step_of(ring, 2)
    save_orphan(out, {"job": "it's a run", "host": 0, "clock_ns": OFFSET}, ring.identity, frames + ring.read())
    assert counted(out) == expected(2)
    repeated = ingest(out)
    assert counted(out) == expected(2)
    repeated.close()
    assert counted(out) == expected(2)
    assert not list(out.glob("left-*"))


def test_frames_that_were_kept_before_are_left_out_of_what_a_rank_left(out):
    ring, first = SpanRing(rank=1), ingest(out)
    step_of(ring, 1)
    data = ring.read()
    first.take_frames(ring)
    save_orphan(out, {"job": "it's a run", "host": 0, "clock_ns": OFFSET}, ring.identity, data)
    assert counted(out) == expected(1)
    ingest(out).close()
    assert counted(out) == expected(1)


def test_a_sink_that_is_down_gets_all_of_it_later(out):
    built: list[Unplugged] = []

    def sink(folder: Path) -> Unplugged:
        built.append(Unplugged(folder))
        return built[0]

    first = ingest(out, sink=sink, segment_seconds=1.0)
    ring = SpanRing()
    current = 1e9
    for step in range(1, 6):
        step_of(ring, step)
        first.take_frames(ring)
        first.maintain(current := current + 20.0)
    assert first.failures == 5
    assert "no space left" in first.error
    assert counted(out) == expected(5)
    built[0].plugged = True
    first.maintain(current + 20.0)
    assert list_segments(out) == []
    assert counted(out) == expected(5)


def test_a_full_disk_keeps_frames_in_the_ring(out, monkeypatch):
    first, ring = ingest(out), SpanRing()
    step_of(ring, 1)
    real, written = os.write, []

    def short(handle: int, data: Any) -> int:
        if len(written) >= 2:
            raise OSError(28, "No space left on device")
        written.append(1)
        return real(handle, bytes(data)[:100] if len(written) > 1 else data)

    monkeypatch.setattr(os, "write", short)
    assert first.take_frames(ring) == 0
    monkeypatch.undo()
    assert first.failures == 1
    assert counted(out)["spans"] == {}  # half a frame was written and taken back
    assert first.take_frames(ring) > 0
    assert counted(out) == expected(1)


def test_the_folder_keeps_its_limit_and_roll_ups_stay_longest(out):
    first = ingest(out, limit=60_000, segment_seconds=1.0)
    ring = SpanRing()
    current = 1e9
    for step in range(1, 60):
        step_of(ring, step, spans=300)
        first.take_frames(ring)
        first.maintain(current := current + 2.0)
    assert sum(path.stat().st_size for path in out.iterdir()) <= 60_000
    assert first.removed_files > 0
    with SpanTables(out.parent) as tables:
        retained = tables.query("SELECT min(step) AS first, max(step) AS last FROM spans")
        assert retained["last"].tolist() == [59]
        assert 1 < retained["first"][0] < 59
        assert 1 < tables.query("SELECT min(step) AS first FROM rollups")["first"][0] <= retained["first"][0]


def test_times_follow_the_common_clock(out):
    """The host's clock is put right while it runs; a span between two words of it lies between their offsets."""
    first, ring = ingest(out), SpanRing()
    first.add_clock(1_000, 2 * 10**18, 50)
    first.add_clock(3_000, 2 * 10**18 + 400, 50)
    step_of(ring, 2)
    first.take_frames(ring)
    first.close()
    with SpanTables(out.parent) as tables:
        assert tables.query("SELECT start_ns FROM spans")["start_ns"].tolist() == [2 * 10**18 + 2_200] * 3
        assert tables.query("SELECT max(error_ns) AS e FROM clocks")["e"].tolist() == [50]


def test_strings_of_strangers_stay_strings(out):
    first = ingest(out)
    records = np.zeros(1, COUNTER)
    records["time_ns"], records["value"] = 5, 1.5
    records["name"], records["device"] = b"'; DROP TABLE spans; --", b"\xff\x00\xfe"
    first.add_records(COUNTERS, records)
    first.add_records(CLOCKS, np.zeros(1, CLOCK))
    first.close()
    with SpanTables(out.parent) as tables:
        result = tables.query("SELECT name, device, value FROM counters")
        assert result["name"].tolist() == ["'; DROP TABLE spans; --"]
        assert result["value"].tolist() == [1.5]


def test_what_is_damaged_is_left_out_and_named(out):
    first, ring = ingest(out), SpanRing()
    step_of(ring, 1)
    first.take_frames(ring)
    first.close()
    (out / "spans-000007.parquet").write_bytes(b"PAR1 half a file")
    get_segment_file(out, 9).write_bytes(b"no spool at all")
    get_segment_file(out, 10).write_bytes(b"MSspool1")
    with SpanTables(out.parent) as tables:
        assert set(map(os.path.basename, tables.skipped)) == {"spans-000007.parquet", "spool-000009.bin"}
        assert tables.query("SELECT count(*) AS n FROM spans")["n"].tolist() == [3]
    repeated = ingest(out)
    repeated.close()
    assert repeated.failures == 1
    assert (out / "spool-000009.damaged").exists()


def test_a_ring_that_holds_rubbish_is_given_up_and_counted(out):
    first, ring = ingest(out), SpanRing()
    step_of(ring, 1)
    good = len(ring.read())
    step_of(ring, 2)
    ring._map[4096 + good + 80] ^= 0xFF
    assert first.take_frames(ring) > good
    assert first.damaged == 1
    assert counted(out)["spans"] == {1: 3}
    step_of(ring, 3)
    first.take_frames(ring)
    assert counted(out)["spans"] == {1: 3, 3: 3}


def test_another_folder_and_another_question_name_the_remedy(out, tmp_path):
    with pytest.raises(DataError, match=r"observe\.timers=true"):
        SpanTables(tmp_path)
    ingest(out)
    with SpanTables(out.parent) as tables, pytest.raises(DataError, match="the query over the spans of"):
        tables.query("SELECT nothing FROM nowhere")


def test_several_sinks_each_get_each_segment_once(out, monkeypatch):
    """One of another package is down for a while: it misses nothing, and the other is not told twice."""
    got: list[int] = []
    down = [True]

    class OtherStore:
        def __init__(self, folder: Path, address: str) -> None: ...

        def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
            if down[0]:
                raise RuntimeError("no route to host")
            got.append(number)
            return {}

        def close(self) -> None: ...

    span_sinks.register("other", OtherStore, "counts")
    try:
        assert load(None, ["--observe.span_sinks=parquet,other"]).observe.span_sinks == ["parquet", "other"]
        first = ingest(out, sink=open_span_sinks(["parquet", "other"]), segment_seconds=1.0)
        ring = SpanRing()
        current = 1e9
        for step in range(1, 4):
            step_of(ring, step)
            first.take_frames(ring)
            first.maintain(current := current + 20.0)
        assert "other: RuntimeError: no route to host" in first.error
        assert counted(out) == expected(3)
        down[0] = False
        first.maintain(current + 20.0)
        assert got == [0, 1, 2]
        assert counted(out) == expected(3)
    finally:
        span_sinks.SINK_FACTORIES.remove("other")
        span_sinks.SPAN_SINKS.remove("other")
    with pytest.raises(ConfigError, match=r"observe\.span_sinks"):
        load(None, ["--observe.span_sinks=nothing"])


def test_a_sink_that_is_gone_does_without_what_there_is_no_room_for(out):
    """The first sink has all of it, and nothing is left in the rings."""

    class Away:
        def __init__(self, folder: Path, address: str) -> None: ...

        def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
            raise OSError(113, "no route to host")

        def close(self) -> None: ...

    span_sinks.register("away", Away, "is not there")
    try:
        sink = open_span_sinks(["parquet", "away"])
        first = ingest(out, sink=sink, segment_seconds=1.0, limit=1_000_000)
        ring = SpanRing()
        current = 1e9
        for step in range(1, 21):
            step_of(ring, step, spans=1000)
            assert first.take_frames(ring)
            first.maintain(current := current + 20.0)
        assert not ring.read()
        waiting = len(list_segments(out))
        assert 0 < waiting < 10
        assert first.dropped_segments == 20 - waiting
        assert "no route to host" in first.error
        with SpanTables(out.parent) as tables:
            assert tables.query("SELECT count(DISTINCT step) AS n FROM spans")["n"].tolist() == [20]
    finally:
        span_sinks.SINK_FACTORIES.remove("away")
        span_sinks.SPAN_SINKS.remove("away")


def test_small_files_are_merged_and_count_once(out, monkeypatch):
    """Whenever somebody dies or looks: while both the merged file and those it was made of are there, too."""
    monkeypatch.setattr(parquet, "_MERGED_FILES", 4)
    first = ingest(out, segment_seconds=1.0)
    ring = SpanRing()
    current = 1e9
    observed = []
    unlink = Path.unlink

    def looking(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".parquet" and not observed:
            observed.append(len(list(out.glob("rollups-*.parquet"))))
            assert counted(out) == expected(step)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", looking)
    for step in range(1, 20):
        step_of(ring, step)
        first.take_frames(ring)
        first.maintain(current := current + 2.0)
        assert counted(out) == expected(step)
    assert observed == [6]  # four, the new one, and that of the segment which is still there
    retained = sorted(path.name for path in out.glob("rollups-*.parquet"))
    assert len(retained) <= 7
    assert any(name.count("-") == 2 for name in retained)
    remaining = out / "rollups-000001.parquet"
    remaining.write_bytes((out / retained[-1]).read_bytes())  # as one that died before removing it leaves it
    assert counted(out) == expected(19)
    monkeypatch.undo()
    ParquetWriter(out).close()
    assert not remaining.exists()
    assert counted(out) == expected(19)


def test_a_damaged_segment_goes_before_tables_do(out):
    """It is kept for a look at it, but not at the cost of what can be read."""
    local, ring = ingest(out, limit=1 << 20), SpanRing(capacity=1 << 20)
    step_of(ring, 1)
    local.take_frames(ring)
    local.maintain(end=True)
    get_segment_file(out, 7).write_bytes(b"no spool")
    os.truncate(get_segment_file(out, 7), 1 << 40)  # sparse
    repeated = ingest(out, limit=1 << 20)
    repeated.maintain(end=True)
    assert not list(out.glob("spool-*")) + list(out.glob("*.damaged"))
    assert repeated.removed_files == 1
    assert counted(out)["spans"] == {1: 3}
