"""Kill ranks of a launched job on real GPUs: seconds from the kill to the next new step, by phase.

One file to run on a GPU host; it needs megascale with its `driver` extra:

    PYTHONPATH=src python tests/gpu/recovery.py --preset gpt-1.3b --kills 3 --out recovery.json

The job is `megascale launch` on one node with all GPUs, on tokens drawn at random, saving every step to the host's
memory. Any setting can follow as --section.key=value; `--preset tiny --train.device=cpu --parallel.data=2` tries it
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT = 180.0  # seconds for a start or a recovery

SETTINGS = """
[data]
train = ["{folder}/train"]
[train]
runs = "{folder}/runs"
name = "recovery"
steps = 1000000
global_batch = 64
precision = "bfloat16"
[checkpoint]
interval = 0
at_end = false
memory_interval = 1
background = true
[resilience]
nodes = 1
spares = 0
faults = true
retries = 100
[observe]
tensorboard = false
progress = false
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="gpt-1.3b")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--out", default="recovery.json")
    arguments, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="megascale-recovery-") as name:
        rows = recover(Path(name), arguments, settings)
    Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")


def recover(folder: Path, arguments: argparse.Namespace, settings: list[str]) -> list[dict[str, Any]]:
    """Start the job, kill a rank again and again, and read what the journal says of each time."""
    import numpy as np

    from megascale.data.dataset.indexed import IndexedWriter
    from megascale.resilience.faults.inject import Options, inject

    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(200):
            writer.add_document([rng.integers(0, 256, size=20000)])
    file, run, log = folder / "job.toml", folder / "runs" / "recovery", folder / "log"
    file.write_text(SETTINGS.format(folder=folder))
    command = [sys.executable, "-m", "megascale.cli.main", "launch", str(file), f"--model.preset={arguments.preset}"]
    with open(log, "wb") as out:
        job = subprocess.Popen([*command, *settings], stdout=out, stderr=out, start_new_session=True)
    rows = []
    try:
        begun = time.time()
        first = wait(job, log, lambda: next((e for e in events(run) if e.kind == "first_step"), None))
        print(f"launch to first step {first.time - begun:.1f} s", flush=True)
        for number in range(arguments.kills):
            before = last_step(run)
            wait(job, log, lambda before=before: last_step(run) >= before + 4)
            step, injected = last_step(run), time.time()
            inject(run, "kill-rank", Options(rank=arguments.rank))
            wait(
                job,
                log,
                lambda injected=injected: any(e.kind == "first_step" and e.time > injected for e in events(run)),
            )
            noted = [e for e in events(run) if e.time > injected]
            row = {"kill": number, "last step before": step, "events": []}
            for e in noted:
                row["events"].append({"seconds": e.time - injected, "kind": e.kind, "action": e.action, "text": str(e)})
                print(f"  {e.time - injected:7.2f} s  {e.kind:16s} {e.action or '':10s} {e.evidence[:1]}", flush=True)
            wait(job, log, lambda step=step: last_step(run) > step)
            row["new step recorded"] = time.time() - injected
            print(
                f"kill {number}: at step {step}, newer step on record after {row['new step recorded']:.2f} s",
                flush=True,
            )
            rows.append(row)
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
        text = log.read_text(errors="replace").splitlines()
        print("\n".join(line[:200] for line in text[-40:]))
    return rows


def events(run: Path) -> list[Any]:
    """What the driver has written down so far."""
    from megascale.errors import DataError
    from megascale.resilience.driver.state.journal import JournalReader

    try:
        reader = JournalReader(run)
    except DataError:
        return []
    try:
        return reader.events()
    finally:
        reader.close()


def last_step(run: Path) -> int:
    """The newest step on record."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith("}")), default=0)


def wait(job: Any, log: Path, found: Any) -> Any:
    """What `found` gives once it gives something; SystemExit with the log's end if the job ends or it lasts."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        if job.poll() is not None:
            break
        time.sleep(0.02)
    sys.exit("no recovery:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]))


if __name__ == "__main__":
    main()
