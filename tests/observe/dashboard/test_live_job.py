"""The page on a running job: a slow rank in the heat map, a stopped one in the grid, orders from the page."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megascale.resilience.driver.api.access import read_tokens
from megascale.resilience.faults.inject import Options, inject
from tests.resilience.conftest import launch

__all__ = ["launch"]  # the fixture

# Asks again until the page says so: a job that runs has its views drawn anew at any moment.
expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'"
).expect
expect.set_options(timeout=30_000)

OPTIONS = ["--resilience.nodes=4", "--train.steps=100000", "--resilience.faults=true"]
# Without a spare the driver does not evict a slow node itself, however long the person takes.
LASTING = [
    "--resilience.spares=0",
    "--resilience.interval=20",
    "--resilience.window=120",
    "--observe.spans=5",
    "--parallel.data=4",
    "--train.global_batch=8",
]


def row(page, node: str):
    return page.locator("section[aria-label=nodes] tr", has=page.get_by_role("button", name=node, exact=True))


def order(page, button: str, token: str, output: str, why: str = "tried from the page") -> None:
    """Press a button, read what it will do, show the token, and do it."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(output)
    dialog.get_by_label("why").fill(why)
    dialog.get_by_label("acting token").fill(token)
    dialog.locator("button:not([type=button])").click()


@pytest.mark.xdist_group("browser")
def test_a_person_finds_and_evicts_a_slow_node_and_sees_who_stands_still(page, launch):
    job = launch("watched", "--dashboard=0", *OPTIONS, *LASTING)
    job.until_step(2)
    act = read_tokens(job.run).act.decode()
    # Slow also where the machine is busy and all steps take longer.
    inject(job.run, "slow-rank", Options(rank=2, seconds=0.1, persistent=True))
    address, file = job.wait(
        lambda: re.search(r"dashboard of .*: (http\S+)\n.* the token in (\S+)\n", job.output.read_text()), "its page"
    ).groups()

    # Who looks sees the slow rank, among four.
    page.goto(f"{address}heatmap#token={Path(file).read_text()}")
    page.wait_for_selector("section[aria-label=outliers] >> text=rank 2", timeout=180_000)
    page.locator(".outliers button", has_text="rank 2").click()
    expect(page.locator("section[aria-label='rank 2']")).to_contain_text("an outlier")

    # The timeline says that the others' waits began with it.
    page.goto(f"{address}timeline")
    page.locator("section[aria-label='longest waits'] button").first.click()
    expect(page.locator("section[aria-label='what it waited for'] h2")).to_contain_text(" waited ")
    page.locator("canvas[role=application]").focus()
    page.keyboard.press("+")
    page.wait_for_url(lambda url: "from=" in url)
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "from=" not in url)

    # The plan stands beside what is measured; the step of a cluster that is named is predicted.
    page.goto(f"{address}plan")
    page.wait_for_selector("section[aria-label=memory]")
    page.get_by_label("Predict for").select_option("h100-dgx")
    page.wait_for_selector("section[aria-label=step] >> text=P10 to P90")

    # Without the token nothing is done; with it the node goes, and its rank starts on the spare.
    page.goto(f"{address}nodes?node=n2")
    page.wait_for_selector("section[aria-label='node n2']")
    order(page, "Evict", "x" * 64, "its rank 2 starts again on a spare")
    page.wait_for_selector("dialog [role=alert] >> text=not the run's acting token")
    assert job.events()[-1].kind != "eviction_asked"
    page.get_by_role("dialog").get_by_label("acting token").fill(act)
    page.get_by_role("dialog").locator("button:not([type=button])").click()
    job.until("node_evicted", nodes=("n2",))
    assert any("tried from the page" in line for entry in job.events() for line in entry.evidence)
    job.until("first_step")
    page.wait_for_selector("section[aria-label=nodes] .tag >> text=evicted")
    expect(row(page, "n2")).to_contain_text("evicted")

    # A rank that is stopped: the grid says who waits for whom, and with whom it began.
    stopped = job.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        page.goto(f"{address}grid")
        page.wait_for_selector("section[aria-label=hang] .kind")
        verdict = page.locator("section[aria-label=hang]")
        for _ in range(20):
            page.get_by_role("button", name="Look for a hang").click()
            page.wait_for_selector("section[aria-label=hang]:not([aria-busy])")
            if "a process is stopped" in (report := verdict.inner_text()):
                break
        assert "a process is stopped" in report
        # Who looks again reads on meanwhile.
        page.get_by_role("button", name="Look for a hang").click()
        assert "It began with" in verdict.inner_text()
        verdict.get_by_role("button", name="rank 1").click()
        expect(page.locator("section[aria-label='rank 1']")).to_contain_text("stopped")
    finally:
        os.kill(stopped, signal.SIGCONT)

    # Pause and resume; cordon and uncordon. The token is kept for as long as the page is open.
    page.goto(f"{address}nodes?node=n0")
    page.wait_for_selector("section[aria-label='node n0']")
    order(page, "Cordon", act, "n0 gets nothing new")
    page.wait_for_selector("section[aria-label=nodes] .tag >> text=cordoned")
    page.get_by_role("button", name="Uncordon", exact=True).click()
    expect(page.get_by_role("dialog").get_by_label("acting token")).to_have_value(act)
    page.keyboard.press("Escape")
    order(page, "Pause", act, "saves and stops")
    job.until("paused")
    page.wait_for_selector(".chip >> text=paused")
    order(page, "Resume", act, "continues from its last checkpoint")
    job.until("first_step")
    times = {entry.kind: entry.time for entry in job.events()}
    assert times["first_step"] - times["continued"] < 60  # a node in place of the cordoned one is asked for at once
    page.goto(f"{address}overview")
    page.wait_for_selector(".events >> text=node evicted")
    spent = page.locator("section[aria-label='where the time went']")
    expect(spent).to_contain_text("stopped: paused by a person")
    expect(spent).to_contain_text("stopped: node evicted by a person")
    expect(spent).not_to_contain_text("not running")

    # Its page ends with the driver, however that ends.
    (server,) = [pid for pid in pids() if f"dashboard\0{job.run}\0" in command(pid)]
    job.process.kill()
    deadline = time.monotonic() + 60
    while "dashboard" in command(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
