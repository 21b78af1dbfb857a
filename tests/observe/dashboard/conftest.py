"""A browser, a dashboard served by its command, and run folders: one that is well, a hostile one, a damaged one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.observe.dashboard_set import write_metrics, write_ranks
from benchmarks.observe.synthetic_spans import Job, make_records
from megascale.core import strict_json
from megascale.observe.store.frames import ROLLUPS, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from tests.forked import Forked

JOB = Job(tensor=2, stages=2, virtual=2, data=8, microbatches=4)
STEPS = 12  # of roll-ups
SIZE: Any = {"width": 1280, "height": 720}  # pixels of a page
SLOW = 7  # the rank that made spans have a tenth slower
# The headless shell takes a third of the processor time of the whole browser.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What would run if any of it became a part of the page.
EVIL = "<img src=x onerror=\"window.hacked='yes'\"><script>window.hacked='yes'</script>'\"&${1}"

# Python that a served dashboard runs first: the server that forked it forks its query processes too, which as new
# processes take half a second each. `test_guard.py` has servers with new processes.
FORKED_QUERIES = """
import multiprocessing
from types import SimpleNamespace
from megascale.observe.dashboard import query_process
from tests.forked import context

query_process.multiprocessing = SimpleNamespace(
    get_context=lambda method: context, parent_process=multiprocessing.parent_process
)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, the system's own. Playwright has an event loop run in this thread for as long as it is there:
    what calls asyncio.run, or forks, must come after it."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'"
    )
    program = os.environ.get("MEGASCALE_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no chromium: apt-get install chromium, or name one in MEGASCALE_CHROMIUM")
    with playwright.sync_playwright() as started:
        result = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """Open a tab of 1280 x 720. A new tab has a new process, which takes three times as long as to load a view.

    Nothing moves on it: without a GPU a chip that pulses is a third of what a browser computes.
    """
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    tab = context.new_page()
    tab.set_default_timeout(30_000)
    yield tab
    context.close()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """Yield the tab without state of earlier tests; script errors and what the policy refuses fail the test."""
    wrong: list[str] = []

    def note_error(error: Any) -> None:
        wrong.append(str(error))

    def note_refusal(message: Any) -> None:
        if "Content Security Policy" in message.text:
            wrong.append(message.text)

    tab.on("pageerror", note_error)
    tab.on("console", note_refusal)
    yield tab
    tab.remove_listener("pageerror", note_error)
    tab.remove_listener("console", note_refusal)
    tab.unroute_all(behavior="ignoreErrors")
    if tab.url.startswith("http"):
        tab.evaluate("localStorage.clear(); sessionStorage.clear()")
        # Scripts end with their document. A blank page would get another process.
        with contextlib.suppress(Exception):  # the server has ended
            tab.goto(f"{'/'.join(tab.url.split('/')[:3])}/nothing", wait_until="commit")
    tab.mouse.move(0, 0)
    tab.set_viewport_size(SIZE)
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    assert not wrong


def write_spans(run: Path, job: Job = JOB) -> None:
    """Roll-ups of STEPS steps and spans of three, of every rank, through a ring into the tables of one host."""
    ring = SpanRing(capacity=8 << 20)
    ingest = Ingest(run / "spans" / "host=0", job="made", host=0, hostname="here", sink=ParquetWriter, clock_ns=10**18)
    for kind, full, steps in ((ROLLUPS, False, STEPS), (SPANS, True, 3)):
        for rank, step, records in make_records(job, steps, full):
            ring.rank = rank
            ring.write(kind, step, records, 1000)
            ingest.take_frames(ring)
    ingest.close()
    write_ranks(run, job)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: calm, other, EVIL's and one of which every file is damaged."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    for name in ("calm", "other"):
        (folder / name).mkdir(parents=True)
        write_metrics(folder / name, 200)
        (folder / name / "config.toml").write_text('[train]\nname = "calm"\nsteps = 500\n')
    write_spans(folder / "calm")
    evil = folder / EVIL.replace("/", "\u2215")
    (evil / "spans" / "host=0").mkdir(parents=True)
    write_metrics(evil, 10)
    with open(evil / "events.jsonl", "a") as out:
        details = {"time": time.time(), "event": EVIL, "evidence": [EVIL], "nodes": [EVIL], "ranks": [EVIL], EVIL: EVIL}
        out.write(strict_json.dumps(details) + "\n")
    with open(evil / "metrics.jsonl", "a") as out:
        out.write(strict_json.dumps({"step": 11, "loss": EVIL, EVIL: 1.0, "time": 1e300, "seconds": -1e300}) + "\n")
    subject = {"attempt": 0, "rank": 0, "hostname": EVIL, "device": EVIL, "tensor": 0, "pipeline": 0, "data": 0}
    (evil / "spans" / "host=0" / "ranks.jsonl").write_text(strict_json.dumps(subject) + "\n")
    (evil / "checkpoints" / f"step-3{EVIL.replace('/', '')}").mkdir(parents=True)
    damaged = folder / "damaged"
    (damaged / "spans" / "host=0").mkdir(parents=True)
    (damaged / "checkpoints" / "step-5").mkdir(parents=True)
    (damaged / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.5, "seconds": 1, "time": 5}\n{"step": 2, "lo\n\xff\xfe\n'
    )
    (damaged / "events.jsonl").mkdir()
    (damaged / "config.toml").write_text("[train\n")
    (damaged / "journal.sqlite").write_bytes(b"SQLite format 3\0" + b"\1" * 500)
    (damaged / "spans" / "host=0" / "rollups-000000.parquet").write_bytes(b"PAR1 torn")
    return folder


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts `megascale dashboard`, without a token for reading unless the words name one; returns its address."""
    folder = tmp_path_factory.mktemp("served")
    started: list[Forked] = []

    def begin(location: Path, *arguments: str) -> str:
        output = folder / f"{len(started)}.out"
        access = [] if "--token-file" in arguments else ["--no-token"]
        process = Forked(
            ["dashboard", location, "--port=0", "--no-browser"] + access + list(arguments),
            output=output,
            cwd=folder,
            before=FORKED_QUERIES,
        )
        started.append(process)
        deadline = time.monotonic() + 60
        while not (result := re.search(r"dashboard of .*: (https?://\S+)\n", output.read_text())):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        return result[1]

    yield begin
    for process in started:
        process.send_signal(signal.SIGINT)
    for process in started:
        process.wait(30)


@pytest.fixture(scope="session")
def address(serve: Callable[..., str], runs: Path) -> str:
    """Return the address of the server for the folder of runs."""
    return serve(runs)
