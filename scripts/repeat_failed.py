#!/usr/bin/env python3
"""Repeat each failed test of the last pytest run alone, and tell a wrong test from one that a busy machine disturbed.

    scripts/repeat_failed.py [--times 5] [--most 3]

Exit 0 if at most `--most` tests failed and each passes `--times` times in a row by itself. These tests are listed: a
test that depends on what runs next to it is a fault that must be fixed. Exit 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CACHE = Path(".pytest_cache/v/cache/lastfailed")


def read_failed(cache: Path) -> list[str]:
    """Return the node ids of the tests that failed in the last run, sorted; empty without a record."""
    if not cache.exists():
        return []
    return sorted(json.loads(cache.read_text()))


def count_passes(test: str, times: int) -> int:
    """Run `test` until it fails or has passed `times` times; return how often it passed."""
    for passes in range(times):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            print(result.stdout[-6000:], result.stderr[-2000:], sep="\n")
            return passes
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="runs that must pass, per test")
    parser.add_argument("--most", type=int, default=3, help="failed tests that are repeated; more are a failure")
    parser.add_argument("--cache", type=Path, default=CACHE, help="pytest's record of failed tests")
    arguments = parser.parse_args()
    failed = read_failed(arguments.cache)
    if not 0 < len(failed) <= arguments.most:
        print(f"{len(failed)} tests failed; only 1 to {arguments.most} are repeated")
        return 1
    steady = True
    for test in failed:
        passes = count_passes(test, arguments.times)
        verdict = "unsteady" if passes == arguments.times else "FAILED"
        print(f"{verdict} {test}: passed {passes} of {arguments.times} alone")
        steady = steady and passes == arguments.times
    if steady:
        print("each failed test passes by itself: it depends on the load or on other tests, and must be made steady")
    return 0 if steady else 1


if __name__ == "__main__":
    sys.exit(main())
