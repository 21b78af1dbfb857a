"""The span service in its own process: ranks hand over rings, it is killed and comes again, and leaves nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megascale.core import strict_json
from megascale.core.spans import SpanKind
from megascale.observe.rank import span_link
from megascale.observe.rank.span_link import SpanLink
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.span_messages import locate_service
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_service import SpanService
from megascale.observe.store.tables import SpanTables
from tests.forked import context
from tests.forked_services import forked_services


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forked_services():
        yield


def wait_for(met, subject: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"{subject} did not come within {seconds:g} s"
        time.sleep(0.05)


def link(ring: SpanRing, out: Path, wait: float = 0.0) -> SpanLink:
    return SpanLink(ring, out, "job", 0, {"data": str(ring.rank), "hostname": "here"}, 64, out.parent / "log", wait)


def write(ring: SpanRing, step: int) -> None:
    rollups = np.zeros(1, ROLLUP)
    rollups["kind"], rollups["count"], rollups["total_ns"] = SpanKind.STEP, 1, 10
    ring.write(ROLLUPS, step, rollups, 0)
    ring.write(SPANS, step, np.zeros(4, SPAN), 0)


def steps_of(out: Path) -> dict[int, list[int]]:
    with SpanTables(out.parent) as tables:
        result = tables.query("SELECT rank, step FROM rollups WHERE action = 'step' ORDER BY rank, step")
    report: dict[int, list[int]] = {}
    for rank, step in zip(result["rank"].tolist(), result["step"].tolist(), strict=True):
        report.setdefault(rank, []).append(step)
    return report


def count_descriptors(file: Path) -> int:
    """Return how many descriptors of this process refer to a file."""
    return sum(os.path.realpath(entry) == str(file.resolve()) for entry in Path("/proc/self/fd").iterdir())


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "spans" / "host=0"
    yield folder
    pid = locate_service(folder).find_service_pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def test_two_ranks_one_service_and_a_kill(out, monkeypatch):
    monkeypatch.setattr(span_link, "_FIRST_PAUSE_SECONDS", 0.05)
    rings = [SpanRing(rank=rank, attempt=3) for rank in (0, 1)]
    links = [link(ring, out) for ring in rings]
    for ring in rings:
        write(ring, 1)
    wait_for(lambda: out.exists() and all(not ring.read() for ring in rings), "taking over")
    pid = locate_service(out).find_service_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for ring in rings:
        write(ring, 2)
    wait_for(lambda: locate_service(out).find_service_pid() not in (None, pid), "another service")
    wait_for(lambda: all(not ring.read() for ring in rings), "taking over")
    (out.parent / "asked.json").write_text(strict_json.dumps({"first": 7, "last": 8}))
    wait_for(lambda: all(ring.is_requested(7) for ring in rings), "being asked")
    rings[1].write(SPANS, 3, np.zeros(1, SPAN), 0)
    write(rings[0], 3)
    for item in links:
        item.close()
    wait_for(lambda: not locate_service(out).folder.exists(), "the end of the service")
    assert steps_of(out) == {0: [1, 2, 3], 1: [1, 2]}
    assert not list(out.glob("*.bin"))
    with SpanTables(out.parent) as tables:
        assert tables.query("SELECT count(*) AS n FROM spans")["n"].tolist() == [4 * 5 + 1]
        name = tables.query("SELECT DISTINCT rank, attempt, data, hostname, host FROM ranks ORDER BY rank")
        assert name["data"].tolist() == [0, 1]
        assert name["attempt"].tolist() == [3, 3]
        assert name["hostname"].tolist() == ["here", "here"]
    state = strict_json.loads((out / "state.json").read_text())
    assert (state["failures"], state["damaged"], state["lost_spans"]) == (0, 0, {})


def test_a_short_run_starts_no_service_and_leaves_its_frames(out):
    ring = SpanRing(rank=2)
    single = link(ring, out, wait=100.0)
    write(ring, 1)
    single.close()
    assert locate_service(out).find_service_pid() is None
    assert not locate_service(out).folder.exists()
    assert steps_of(out) == {2: [1]}
    with SpanTables(out.parent) as tables:
        assert tables.query("SELECT data FROM ranks")["data"].tolist() == [2]


def test_a_rank_that_leaves_an_attempt_does_not_wait_for_a_starting_service(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_link, "_END_SECONDS", 600.0)
    location = locate_service(out)
    location.folder.mkdir(mode=0o700)
    ring = SpanRing(rank=4)
    with open(location.starting_lock_path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as held by another rank that starts the service
        leaving = link(ring, out)
        write(ring, 1)
        wait_for(lambda: count_descriptors(location.starting_lock_path) == 2, "the link's wait for the lock")
        closing = threading.Thread(target=leaving.close, kwargs={"awaits_service": False}, daemon=True)
        closing.start()
        closing.join(60.0)
        assert not closing.is_alive()
        assert steps_of(out) == {4: [1]}
    leaving._thread.join(60.0)
    assert not leaving._thread.is_alive()
    assert not leaving._is_handed_over
    wait_for(lambda: not location.folder.exists(), "the end of the service")
    assert steps_of(out) == {4: [1]}


def test_a_rank_that_dies_loses_nothing_it_wrote(out, tmp_path):
    """It is killed right after its last word, with all of it still in its ring."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from tests.observe.test_span_service import link, write\n"
        "from megascale.observe.store.span_ring import SpanRing\n"
        f"ring = SpanRing(rank=5); kept = link(ring, Path({str(out)!r}))\n"
        "while kept._conversation is None: time.sleep(0.01)\n"
        "for step in range(1, 50): write(ring, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2])] + [path for path in sys.path if path])
    done = subprocess.run([sys.executable, str(program)], env=os.environ | {"PYTHONPATH": paths}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not locate_service(out).folder.exists(), "the end of the service")
    assert steps_of(out) == {5: list(range(1, 50))}


def test_a_service_that_cannot_start_costs_nothing_but_detail(out, monkeypatch):
    monkeypatch.setattr(
        span_link, "make_launch_command", lambda *ignored: span_link.host_service.Launch("no.such.module", [])
    )
    monkeypatch.setattr(span_link.host_service, "START_TIMEOUT", 1.0)
    ring = SpanRing()
    single = link(ring, out)
    write(ring, 1)
    single.close()
    assert steps_of(out) == {0: [1]}


@pytest.mark.parametrize("fault", ["socket", "files"])
def test_a_service_that_cannot_serve_ends(out, tmp_path, fault):
    """It used to live on without a socket, once for each start of a run."""
    where = locate_service(out)
    if fault == "socket":
        where.socket_path.mkdir(parents=True)
    else:
        (out / "folder.tmp").mkdir(parents=True)
    arguments = [str(where.folder), "--out", str(out), "--job", "job", "--host", "0"]
    command = [sys.executable, "-m", "megascale.observe.store.span_service"] + arguments
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        if fault == "socket":
            where.socket_path.rmdir()
        shutil.rmtree(where.folder, ignore_errors=True)
    assert done.returncode == 1
    assert {"socket": "spans.sock", "files": "folder.tmp"}[fault] in done.stderr


def test_two_hosts_share_one_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    outs = [tmp_path / "spans" / f"host={host}" for host in (0, 1)]
    rings = [SpanRing(rank=host) for host in (0, 1)]
    links = [
        SpanLink(ring, out, "job", host, {}, 64, tmp_path / f"log-{host}", wait=0.0, hosts=2)
        for host, (ring, out) in enumerate(zip(rings, outs, strict=True))
    ]

    def errors() -> list[int]:
        if not all(list(out.glob("spool-*.bin")) for out in outs):
            return []
        with SpanTables(tmp_path) as tables:
            result = tables.query("SELECT error_ns FROM clocks WHERE host = 1 ORDER BY time_ns")
        return [error for error in result["error_ns"].tolist() if error >= 0]

    try:
        wait_for(errors, "an answer of host 0")
        assert errors()[-1] < 100_000_000
    finally:
        for item in links:
            item.close()
    for out in outs:
        wait_for(lambda out=out: not locate_service(out).folder.exists(), "the end of the service")
    assert not (tmp_path / "spans" / "clock.json").exists()
    with SpanTables(tmp_path) as tables:
        names = tables.query("SELECT DISTINCT name FROM counters WHERE host = 1")["name"].tolist()
    assert "cpu_busy_seconds" in names


def _serve_and_fail(folder: Path) -> None:
    service = SpanService(folder, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    service.start()
    time.sleep(60.0)


def test_a_service_that_cannot_keep_spans_ends(tmp_path: Path) -> None:
    """A service that stayed would accept rings that no process empties."""
    process = context.Process(target=_serve_and_fail, args=(tmp_path,))
    process.start()
    process.join(30.0)
    assert process.exitcode == 1
