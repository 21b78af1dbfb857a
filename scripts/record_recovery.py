#!/usr/bin/env python3
"""Record docs/images/recovery.svg: a launched job, a trainer killed by kill -9, and how soon it trains again.

    scripts/record_recovery.py [--out docs/images/recovery.svg]

Needs the data set of `make train`. The job and its run folder are gone afterwards; what it printed is shown as it came,
with the seconds since the kill before each line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megascale.core.status import read_status

COMMAND = (
    "megascale launch examples/stdlib.toml --nodes 2 --spares 1 --train.micro_batch=2 --train.log_interval=1 "
    "--checkpoint.background=true --checkpoint.memory_interval=1"
)
KILL_AT = 8
STEPS_AFTER = 4
WIDTH = 118


def main() -> int:
    """Launch, kill, wait, write the picture; 1 if the job did not recover."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/recovery.svg"))
    inputs = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megascale-record-"))
    arguments = COMMAND.split()[1:] + [f"--train.runs={folder}", "--observe.progress=false"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": str(WIDTH)}
    job = subprocess.Popen(
        [sys.executable, "-m", "megascale"] + list(arguments), stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        shown, recovered = watch(job, folder / "stdlib")
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    picture(shown, inputs.out)
    return 0 if recovered else 1


def watch(job: subprocess.Popen[str], run: Path) -> tuple[list[tuple[float | None, str]], bool]:
    """Return the job's output from shortly before the kill on: (seconds since the kill, line), and its recovery."""
    begin, _, options = COMMAND.partition(" --checkpoint")
    shown: list[tuple[float | None, str]] = [
        (None, f"$ {begin} \\"),
        (None, f"    --checkpoint{options}"),
        (None, "..."),
    ]
    killed: float | None = None
    trained = 0
    assert job.stdout is not None
    for line in job.stdout:
        text = line.strip()
        step = re.search(r"step (\d+)/", text)
        if killed is None:
            if step and int(step[1]) > KILL_AT - 3:
                shown.append((None, text))
            if step and int(step[1]) == KILL_AT:
                status = read_status(run / "status" / "rank-1.status")
                assert status is not None
                assert status.pid > 1
                os.kill(status.pid, signal.SIGKILL)
                killed = time.monotonic()
                shown.append((None, f"$ kill -9 {status.pid}   # the trainer of rank 1"))
        elif step or text.startswith("driver"):
            shown.append((time.monotonic() - killed, text))
            trained += step is not None
            if trained == STEPS_AFTER:
                return shown, True
    return shown, False


def picture(shown: list[tuple[float | None, str]], out: Path, title: str = "kill -9, and on") -> None:
    """The lines as a terminal's picture."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        for start, line in shown:
            text = Text(f"{start:+6.1f} s  " if start is not None else " " * 10, style="bright_black")
            text.append(line, style="bold" if line.startswith("$") else "cyan" if line.startswith("driver") else "")
            console.print(text)
        console.save_svg(str(out), title=title)


if __name__ == "__main__":
    sys.exit(main())
