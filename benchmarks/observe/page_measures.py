"""Measurements of the dashboard in a browser: time to a view, frames while zooming and moving, memory, delay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import usage
from megascale.core import strict_json

FRAMES = 120
# In the page: an event a frame, and the time from one frame to the next. A frame is what people see move.
_MOVE = """
async ([selector, kind, frames]) => {
  const canvas = document.querySelector(selector);
  const box = canvas.getBoundingClientRect();
  const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  const frame = () => new Promise((go) => requestAnimationFrame(go));
  const send = (name, type, more) => canvas.dispatchEvent(new type(name, {bubbles: true, cancelable: true, pointerId: 1,
    clientX: x, clientY: y, ...more}));
  canvas.setPointerCapture = () => {};
  const lasted = [];
  if (kind === "zoom") for (let i = 0; i < 4; i++) send("wheel", WheelEvent, {deltaY: -120});
  let before = await frame();
  if (kind === "move") send("pointerdown", PointerEvent, {button: 0});
  for (let i = 0; i < frames; i++) {
    if (kind === "zoom") send("wheel", WheelEvent, {deltaY: i % 60 < 30 ? -60 : 60});
    else send("pointermove", PointerEvent, {clientX: x + 80 * Math.sin(i / 8), clientY: y + 40 * Math.cos(i / 8)});
    const now = await frame();
    lasted.push(now - before);
    before = now;
  }
  if (kind === "move") send("pointerup", PointerEvent, {});
  return lasted;
}
"""


@contextmanager
def chromium(program: str) -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--js-flags=--expose-gc"])
        yield result
        result.close()


def view_seconds(browser: Any, address: str, times: int) -> list[float]:
    """Seconds from the start of the navigation to the view's first answer shown, each in a fresh profile."""
    result = []
    for _ in range(times):
        context = browser.new_context(viewport={"width": 1280, "height": 720})
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("main[data-ready]", timeout=60_000)
        result.append(int(page.locator("main").get_attribute("data-ready")) / 1e3)
        context.close()
    return result


def frame_seconds(page: Any, selector: str, kind: str) -> list[float]:
    """Return the seconds between frames while a drawing is zoomed or moved."""
    return [each / 1e3 for each in page.evaluate(_MOVE, [selector, kind, FRAMES])]


def page_bytes(browser: Any) -> int:
    """Memory of the largest renderer process: the page's."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return max(usage.memory(item["id"]) for item in processes if item["type"] == "renderer")


def server_bytes(pid: int) -> int:
    """The most memory that the server and the processes that answer have had, each for itself; what they share counts
    in each."""
    result = 0
    for item in [pid] + usage.children(pid):
        for line in Path(f"/proc/{item}/status").read_text().splitlines():
            result += 1024 * int(line.split()[1]) if line.startswith("VmHWM:") else 0
    return result


def live_seconds(page: Any, run: Path, times: int, step: int) -> list[float]:
    """Return the seconds from a record's last byte to its step in the page. Both use the same clock."""
    result = []
    for number in range(step + 1, step + times + 1):
        record = {"step": number, "time": time.time(), "loss": 2.0, "seconds": 6.34, "tokens_per_second": 2e6}
        with open(run / "metrics.jsonl", "a") as out:
            out.write(strict_json.dumps(record) + "\n")
        began = time.monotonic()
        page.wait_for_selector(f".tile.now >> text=step {number:,}", timeout=30_000)
        result.append(time.monotonic() - began)
        time.sleep(0.3 * (number % 3))  # at other moments of the server's look
    return result


def summarise(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and most."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "most": ordered[-1],
    }
