#!/usr/bin/env python3
"""The pictures of docs/dashboard.md, of two runs in a folder: `demo` (of make demo) and `big` (12,288 ranks).

    python -m benchmarks dashboard --folder runs/big        # makes the second
    scripts/dashboard_pictures.py RUNS [--out docs/images] [--chromium /usr/bin/chromium]
    python -m benchmarks fleet --folder runs/fleet && scripts/dashboard_pictures.py runs/fleet --only fleet
    scripts/dashboard_pictures.py RUNS --only experts           # of a run `moe` whose model has experts
    scripts/dashboard_pictures.py RUNS --out checks --all-looks # every view 1,440 wide and on a phone, light and dark
    megascale faults inject stop-rank --run RUNS/demo --rank 5; sleep 5; scripts/dashboard_pictures.py RUNS --only hang

The last is of a job that runs (`make demo`, or megascale launch examples/demo.toml) and whose ranks wait already.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

WIDE = {"width": 1440, "height": 810}
PHONE = {"width": 390, "height": 844}

# Name, view with its choices, theme, and what is done before the picture is taken. A name with "phone" is of a phone.
PICTURES = (
    ("fleet", "fleet", "light", ()),
    ("overview", "overview?run=demo", "light", ()),
    ("heatmap", "heatmap?run=big", "light", ("wait .machine",)),
    ("timeline", "timeline?run=demo", "light", ("click section[aria-label='longest waits'] button",)),
    ("grid", "grid?run=demo&rank=1", "dark", ("wait section[aria-label=hang]:not(:has-text('Checking'))",)),
    ("hang", "grid?run=demo&figure=wait.tensor", "dark", ("wait section[aria-label=hang] .bad",)),
    ("nodes", "nodes?run=demo&node=n1", "light", ()),
    ("plan", "plan?run=demo", "light", ()),
    ("phone-light", "overview?run=demo", "light", ()),
    ("phone-dark", "overview?run=demo", "dark", ()),
    ("experts", "overview?run=moe", "light", ("part section[aria-label=experts]",)),
)


def list_looks(pictures: list[tuple]) -> list[tuple]:
    """List each picture of a wide window four times: wide and on a phone, light and dark."""
    looks = []
    for name, view, _, steps in pictures:
        if "phone" in name:
            continue
        for size in ("wide", "phone"):
            for theme in ("light", "dark"):
                looks.append((f"{name}-{size}-{theme}", view, theme, steps))
    return looks


def main() -> int:
    """Take them."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--all-looks", action="store_true", help="each view in both sizes and both themes, to check it")
    inputs = parser.parse_args()
    needs_own_run = ("fleet", "hang", "experts")
    expected = inputs.only.split(",") if inputs.only else [name for name, *_ in PICTURES if name not in needs_own_run]
    command = [
        sys.executable,
        "-m",
        "megascale",
        "dashboard",
        str(inputs.runs),
        "--port=0",
        "--no-browser",
        "--no-token",
    ]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        result = re.search(r"https?://\S+", served.stdout.readline())
        if result is None:
            return 1
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=inputs.chromium, args=["--no-sandbox"])
            pictures = [picture for picture in PICTURES if picture[0] in expected]
            if inputs.all_looks:
                pictures = list_looks(pictures)
            for name, view, theme, steps in pictures:
                size = PHONE if "phone" in name else WIDE
                context = browser.new_context(viewport=size, color_scheme=theme)
                page = context.new_page()
                page.goto(f"{result[0]}{view}")
                page.wait_for_selector("main[data-ready]")
                target = page
                for step in steps:
                    subject, _, where = step.partition(" ")
                    if subject == "click":
                        page.locator(where).first.click()
                    elif subject == "part":
                        target = page.locator(where)
                    else:
                        page.wait_for_selector(where)
                page.wait_for_timeout(1500)  # for a picture, not a test: drawings and live state come in
                file = inputs.out / f"dashboard-{name}.png"
                target.screenshot(path=file)
                # A palette makes the file a third as large. MAXCOVERAGE keeps rare colours, such as those of lines.
                picture = Image.open(file).convert("RGB")
                picture = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                picture.save(file, optimize=True)
                context.close()
            browser.close()
    finally:
        served.terminate()
        served.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
