#!/usr/bin/env python3
"""Counts the processor time of the tests: of all that pytest starts, and of what outlives its parent.

    scripts/count_cpu.py [--top N] [--out FILE] [WORD ...]         (words for pytest; `--` before options)
    scripts/count_cpu.py                                           each test by itself, one after the other
    scripts/count_cpu.py -- -n 2 --dist loadgroup                  the total of the suite as `make test` runs it
    scripts/count_cpu.py --top 20 tests/ops tests/train

Prints the user and system seconds of everything, then (without xdist, which runs tests of several files at once) the
dearest files and tests. A fixture is counted in the first test that asks for it. Linux only: this process becomes the
parent of what lost its own (a child subreaper), so fork servers, ranks and services all end up in its count. What
still runs once pytest has ended gets 20 seconds to end, then is killed, and is counted too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK")
ROOT, RESULT = "MEGASCALE_CPU_ROOT", "MEGASCALE_CPU_RESULT"


def processes() -> dict[int, tuple[int, float]]:
    """Parent and processor seconds (its own and of the children it has waited for) of every process here."""
    result = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone
                continue
            result[int(name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return result


def below(root: int, snapshot: dict[int, tuple[int, float]] | None = None) -> dict[int, float]:
    """Return the processor seconds of each process under `root`, which is not one of them."""
    result = processes() if snapshot is None else snapshot
    inside: dict[int, bool] = {root: True, 0: False}

    def is_inside(pid: int) -> bool:
        if pid not in inside:
            inside[pid] = False  # against a circle of numbers that were used again
            inside[pid] = pid in result and is_inside(result[pid][0])
        return inside[pid]

    return {pid: seconds for pid, (_, seconds) in result.items() if pid != root and is_inside(pid)}


class Counted:
    """The plugin: after each test, what everything has used since the test before it."""

    def __init__(self, root: int, result: Path) -> None:
        self.root, self.result = root, result
        self.tests: dict[str, float] = {}
        self.before = 0.0
        self.own_seconds = 0.0

    def _used(self) -> float:
        # Reading /proc takes 10 ms per test on a busy machine, which is not the tests' time.
        began = time.process_time()
        snapshot = processes()
        # Those that the root has waited for are in its own count of children.
        used = sum(below(self.root, snapshot).values()) + snapshot[self.root][1] - self.own_seconds
        self.own_seconds += time.process_time() - began
        return used

    def pytest_collection_finish(self) -> None:
        self.before = self._used()
        self.tests["(imports and collection)"] = self.before

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        used = self._used()
        self.tests[nodeid] = round(used - self.before, 2)
        self.before = used

    def pytest_unconfigure(self) -> None:
        self.tests["(reading of /proc, not of the tests)"] = round(self.own_seconds, 2)
        self.result.write_text(json.dumps(self.tests))


def pytest_configure(config: pytest.Config) -> None:
    """Where this file is loaded as a plugin: count by test unless xdist spreads them."""
    if ROOT in os.environ and getattr(config.option, "dist", "no") == "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counted(int(os.environ[ROOT]), Path(os.environ[RESULT])))


def run(arguments: list[str], result: Path) -> tuple[int, float, float, float]:
    """Runs pytest and waits for all that it left behind.

    Returns:
        its exit code; user, system and wall seconds.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no child subreaper")
    local = Path(__file__).resolve().parent
    paths = [str(local), str(local.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        ROOT: str(os.getpid()),
        RESULT: str(result),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    began = time.monotonic()
    pytest_ = subprocess.Popen([sys.executable, "-m", "pytest", "-p", Path(__file__).stem] + list(arguments), env=env)
    # Orphans are waited for at once, as init does: some tests look whether a process is gone.
    while pytest_.returncode is None:
        pid, status = os.wait()
        if pid == pytest_.pid:
            pytest_.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - began
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in below(os.getpid())])
    signal.setitimer(signal.ITIMER_REAL, 20, 1)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
        except ProcessLookupError:  # one ended between the list and its signal
            continue
    signal.setitimer(signal.ITIMER_REAL, 0)
    used = os.times()
    return pytest_.returncode, used.children_user, used.children_system, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=15, metavar="N", help="this many files and tests")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the seconds of each test as JSON")
    parser.add_argument("words", nargs="*", metavar="WORD", help="for pytest")
    args = parser.parse_args()
    result = args.out or Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('tests')}")
    code, user, system, wall = run(args.words, result)
    tests = json.loads(result.read_text() or "{}") if result.exists() else {}
    files: Counter[str] = Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    for title, counts in (("file", files), ("test", Counter(tests))):
        if counts:
            print(f"\nCPU s  {title}")
            for name, seconds in counts.most_common(args.top):
                print(f"{seconds:5.1f}  {name}")
    print(f"\n{user:.0f} s user + {system:.0f} s system = {(user + system) / 60:.2f} CPU-minutes in {wall:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    main()
