#!/usr/bin/env python3
"""`make demo`: a small job of 8 ranks on this machine, its page open; a node is slowed down, later a rank is stopped.

    scripts/demo.py [--no-browser] [--port=8265] [--steps=600]

Ctrl-C ends all of it; the run folder stays in runs/demo.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

RUN = Path("runs/demo")
# Share of the steps after which it happens, the fault, and its text.
FAULTS = (
    (0.1, ["slow-rank", "--node", "n1", "--seconds", "0.3", "--persistent"], "node n1 is slow: the heat map shows it"),
    (
        0.25,
        ["stop-rank", "--rank", "5"],
        "rank 5 is stopped: the grid says who waits for whom, then the driver recovers",
    ),
)


def main() -> int:
    """Run it; the exit code of the job."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--port", type=int, default=8265)
    parser.add_argument("--steps", type=int, default=600)
    inputs = parser.parse_args()
    command = [sys.executable, "-m", "megascale"]
    launched = command + [
        "launch",
        "examples/demo.toml",
        f"--train.steps={inputs.steps}",
        "--observe.progress=false",
    ]
    job = subprocess.Popen(launched)
    over = threading.Event()
    threading.Thread(target=break_it, args=(command, inputs.steps, over), daemon=True).start()
    page = None
    try:
        while not RUN.is_dir() and job.poll() is None:
            time.sleep(0.2)
        shown = [*command, "dashboard", str(RUN), f"--port={inputs.port}"] + ["--no-browser"] * inputs.no_browser
        page = subprocess.Popen(shown)
        code = job.wait()
        print(f"the job has ended with exit code {code}; its page stays until Ctrl-C", flush=True)
        if not inputs.no_browser:
            page.wait()
        return code
    except KeyboardInterrupt:
        return 130
    finally:
        over.set()
        if page is not None:
            page.terminate()
            page.wait()
        job.wait()


def break_it(command: list[str], steps: int, over: threading.Event) -> None:
    """Inject each fault once its step was trained."""
    for share, arguments, output in FAULTS:
        step = int(share * steps)
        while newest_step() < step:
            if over.wait(0.5):
                return
        print(f"demo: step {step}: {output}", flush=True)
        subprocess.run([*command, "faults", "inject", *arguments, "--run", str(RUN)], check=False)


def newest_step() -> int:
    """Of rank 0's metrics; 0 before the first."""
    try:
        last = (RUN / "metrics.jsonl").read_text().rstrip().rsplit("\n", 1)[-1]
        return int(last.split('"step": ')[1].split(",")[0])
    except (OSError, IndexError, ValueError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
