#!/usr/bin/env python3
"""Record docs/images/keep-your-trainer.svg: a DistributedDataParallel script, one of whose ranks skips a collective.

    scripts/record_foreign.py [--out docs/images/keep-your-trainer.svg]

The script does not know this package. The run folder is removed at the end. Lines are shown as the driver printed
them, with the seconds since the last step before each; evidence is cut to some lines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record_recovery import WIDTH, picture

SCRIPT = Path(__file__).parents[1] / "tests" / "chaos" / "foreign" / "trainers" / "train_ddp.py"
PATTERN = "iter (?P<step>[0-9]+), loss (?P<loss>[0-9.]+)"
LAST_STEP = 17  # before the fault, whose step is in trainers/injected.py
STEPS_BEFORE = 3
STEPS_AFTER = 4
MAX_CHARACTERS = 560  # of a line


def main() -> int:
    """Launch, wait for the verdict and the resumed steps, write the picture; return 1 if the job did not recover."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/keep-your-trainer.svg"))
    inputs = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megascale-record-"))
    options = ["--nodes=2", "--spares=1", "--per-node=1", "--train.device=cpu", f"--foreign.patterns=['{PATTERN}']"]
    command = [sys.executable, "-m", "megascale", "launch", *options, f"--train.runs={folder}", "--train.name=ddp"]
    command += ["--", sys.executable, str(SCRIPT), "60", str(folder), "skip", "1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": str(WIDTH)}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        lines, is_recovered = watch(job)
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    begin: list[tuple[float | None, str]] = [
        (None, "$ megascale launch --nodes 2 --spares 1 --per-node 1 \\"),
        (None, f"    --foreign.patterns=\"['{PATTERN}']\" -- python train_ddp.py"),
        (None, "..."),
    ]
    picture(begin + lines, inputs.out, title="A script that skips a collective")
    return 0 if is_recovered else 1


def watch(job: subprocess.Popen[str]) -> tuple[list[tuple[float | None, str]], bool]:
    """Return (seconds since the last step before the fault, line) of a job's output, and whether it resumed."""
    lines: list[tuple[float | None, str]] = []
    last_step_time: float | None = None
    resumed_steps = 0
    assert job.stdout is not None
    for line in job.stdout:
        text = line.strip()
        _, separator, numbers = text.partition("iter ")
        step = int(numbers.partition(",")[0]) if separator else 0
        if last_step_time is None:
            if step > LAST_STEP - STEPS_BEFORE:
                lines.append((None, text))
            if step == LAST_STEP:
                last_step_time = time.monotonic()
        elif step or text.startswith("driver"):
            shown = text if len(text) < MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
            lines.append((time.monotonic() - last_step_time, shown))
            resumed_steps += step > 0
            if resumed_steps == STEPS_AFTER:
                return lines, True
    return lines, False


if __name__ == "__main__":
    sys.exit(main())
