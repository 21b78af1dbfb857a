#!/usr/bin/env python3
"""Seeds small faults into the sources and counts those that the tests notice.

    scripts/mutate.py --list                                        areas with their sources and tests
    scripts/mutate.py --seed 1 --area optimizer --count 20
    scripts/mutate.py --seed 1                                      all areas
    scripts/mutate.py --rerun bench-mutants.json                    the survivors of an earlier campaign again

A mutant is one change of one source file: a comparison, an arithmetic operator, a constant, a removed call, two swapped
arguments or a negated condition. Mutants are drawn from the seed, in turn over these operators. `mutation_areas.toml`
names the source files of each area and the test files that guard them; `mutants_equivalent.toml` lists mutants that no
test can notice, with the reason. Nothing in the checkout changes: mutants live in a temporary copy of the tree.

A mutant is killed if a test fails, the tests cannot be collected, or they exceed the time limit. The table counts the
last apart ("timed out", among the killed): on a busy machine, run such mutants again. The exit code is 1 if a mutant
survived. Linux only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutations import Mutation, draw, find_mutations, is_valid

ROOT = Path(__file__).resolve().parents[1]
AREAS = "scripts/mutation_areas.toml"
EQUIVALENT = "scripts/mutants_equivalent.toml"
TIME_LIMIT = "time limit"
IGNORED_BY_COPY = (
    ".git",
    ".venv*",
    ".site",
    ".hypothesis",
    ".*_cache",
    "__pycache__",
    "node_modules",
    "runs",
    "datasets",
    "dist",
)


@dataclass
class Area:
    """A part of the system.

    Attributes:
        name: of the area.
        sources: files that get mutants.
        tests: files that guard them, or single tests of a file (`FILE::TEST`) where all would take too long.
    """

    name: str
    sources: list[str]
    tests: list[str]


def read_areas(root: Path) -> dict[str, Area]:
    """Return the areas by name. ValueError for a file that is missing."""
    areas = {}
    for name, table in tomllib.loads((root / AREAS).read_text()).items():
        area = Area(name, table["sources"], table["tests"])
        files = list(area.sources) + [test.partition("::")[0] for test in area.tests]
        missing = [file for file in files if not (root / file).is_file()]
        if missing:
            raise ValueError(f"{AREAS}: area {name!r} names files that are missing: {', '.join(missing)}")
        areas[name] = area
    return areas


class Equivalents:
    """The committed list of mutants that no test can notice: single ones, and all of a function.

    A function's entry with `after` holds for the lines behind the one with that text: what only a GPU runs, say.
    """

    def __init__(self, root: Path) -> None:
        path = root / EQUIVALENT
        tables = tomllib.loads(path.read_text()) if path.exists() else {}
        self.mutants = {
            (each["file"], each["line"], each["mutation"]): each["reason"] for each in tables.get("mutant", [])
        }
        self._spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for each in tables.get("function", []):
            source = (root / each["file"]).read_bytes()
            first, last = _function_lines(source, each["function"], each.get("after"))
            if not first:
                raise ValueError(f"{EQUIVALENT}: {each} does not fit the file; correct or remove the entry")
            self._spans[each["file"]].append((first, last, each["reason"]))

    def reason(self, file: str, mutation: Mutation) -> str | None:
        """Return why no test can notice this mutant, or None if one should."""
        for first, last, reason in self._spans.get(file, []):
            if first <= mutation.line <= last:
                return reason
        return self.mutants.get((file, mutation.line_text, mutation.change))


def _function_lines(source: bytes, function: str, after: str | None) -> tuple[int, int]:
    """Return the first and last line of a function, or of what follows `after` in it; (0, 0) if it has none."""
    for name, node in _functions(ast.parse(source)):
        if name != function:
            continue
        last = node.end_lineno or node.lineno
        if after is None:
            return node.lineno, last
        for number, line in enumerate(source.decode().split("\n")[:last], 1):
            if number > node.lineno and line.strip() == after:
                return number + 1, last
    return 0, 0


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (dotted name, node) of functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


@dataclass
class TestRun:
    """End of a run of tests.

    Attributes:
        code: pytest's exit code; None if it exceeded the time limit.
        seconds: its duration.
        failed: the first test that failed, or an empty string.
        output: all that it printed.
    """

    code: int | None
    seconds: float
    failed: str
    output: str


@dataclass
class Result:
    """One mutant and what became of it: killed, survived or equivalent."""

    area: str
    file: str
    operator: str
    line: int
    line_text: str
    mutation: str
    outcome: str
    by: str = ""
    seconds: float = 0.0
    diff: str = ""


class Sandbox:
    """A temporary copy of the tree, in which one file at a time differs from the checkout."""

    def __init__(self, root: Path, python: str) -> None:
        self.python = python
        self.folder = Path(tempfile.mkdtemp(prefix="mutate-"))
        self.tree = self.folder / "tree"
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*IGNORED_BY_COPY))
        self._token = uuid.uuid4().hex
        # A file of the same size and time as before would be taken for the one that was compiled.
        self._time = time.time() + 10

    def close(self) -> None:
        """Remove the copy and end what its tests left running."""
        self._end_processes()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, file: str, source: bytes) -> None:
        """Give a file of the copy other contents."""
        path = self.tree / file
        path.write_bytes(source)
        self._time += 2
        os.utime(path, (self._time, self._time))

    def run(self, tests: Sequence[str], limit: float) -> TestRun:
        """Run test files in this order until one fails, for at most `limit` seconds."""
        temporary = self.folder / "t"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        command = [self.python, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--durations=0"]
        command += ["-vv", f"--basetemp={temporary / 'p'}"] + list(tests)
        environment = os.environ | {
            "MEGASCALE_MUTANT": self._token,
            "PYTHONPATH": os.pathsep.join([str(self.tree / "src"), str(self.tree)]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        }
        began = time.monotonic()
        with (self.folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                command, cwd=self.tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            code: int | None
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            seconds = time.monotonic() - began
            self._end_processes()
            process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return TestRun(code, seconds, failed[1] if failed else "", text)

    def _end_processes(self) -> None:
        """End what the tests left running: all processes that inherited the token of this copy."""
        token = f"MEGASCALE_MUTANT={self._token}".encode()
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            try:
                if token in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or it is of another user


def durations_by_file(output: str) -> Counter[str]:
    """Return the seconds that pytest --durations=0 reports, by test file."""
    seconds: Counter[str] = Counter()
    for number, file in re.findall(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+([^\s:]+)::", output, re.MULTILINE):
        seconds[file] += float(number)
    return seconds


def order_tests(tests: Sequence[str], seconds: Counter[str], kills: Counter[str]) -> list[str]:
    """Return tests in the order of mutants killed per second."""

    def rank(test: str) -> float:
        file = test.partition("::")[0]
        return -(1 + kills[file]) / (0.5 + seconds[file])

    return sorted(tests, key=rank)


def run_area(
    sandbox: Sandbox, area: Area, mutants: Iterator[tuple[str, Mutation]], equivalents: Equivalents, count: int
) -> Iterator[Result]:
    """Yield the results of mutants until `count` that are not equivalent have run.

    Raises RuntimeError if the tests fail without a mutant.
    """
    baseline = sandbox.run(area.tests, 1800.0)
    if baseline.code != 0:
        raise RuntimeError(
            f"{area.name}: the tests fail without a mutant: {baseline.failed}\n{baseline.output[-2000:]}"
        )
    seconds = durations_by_file(baseline.output)
    limit = 30 + 4 * baseline.seconds
    print(f"{area.name}: tests take {baseline.seconds:.0f} s, limit {limit:.0f} s", flush=True)
    kills: Counter[str] = Counter()
    kills_of_source: dict[str, Counter[str]] = defaultdict(Counter)
    done = 0
    for file, mutation in mutants:
        if done == count:
            return
        result = Result(
            area.name, file, mutation.operator, mutation.line, mutation.line_text, mutation.change, "equivalent"
        )
        reason = equivalents.reason(file, mutation)
        if reason is not None:
            result.by = reason
            yield result
            continue
        source = (sandbox.tree / file).read_bytes()
        if not is_valid(source, mutation):
            continue
        done += 1
        sandbox.write(file, mutation.apply(source))
        # The same tests tend to notice the mutants of one source file.
        weights = kills + Counter({test: 3 * number for test, number in kills_of_source[file].items()})
        outcome = sandbox.run(order_tests(area.tests, seconds, weights), limit)
        sandbox.write(file, source)
        result.seconds = round(outcome.seconds, 1)
        result.outcome = "survived" if outcome.code == 0 else "killed"
        if outcome.code == 0:
            result.diff = make_diff(file, source, mutation.apply(source))
        elif outcome.code is None:
            result.by = TIME_LIMIT
        else:
            result.by = outcome.failed or f"exit code {outcome.code}"
            kills[outcome.failed.partition("::")[0]] += 1
            kills_of_source[file][outcome.failed.partition("::")[0]] += 1
        yield result


def make_diff(file: str, before: bytes, after: bytes) -> str:
    """Return a unified diff."""
    old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, f"a/{file}", f"b/{file}", n=2))


def find_again(root: Path, results: Sequence[Result]) -> Iterator[tuple[str, Mutation]]:
    """Yield (file, mutation) of earlier results, for those whose lines are still there."""
    for result in results:
        matching = [
            mutation
            for mutation in find_mutations((root / result.file).read_bytes())
            if (mutation.line_text, mutation.change) == (result.line_text, result.mutation)
        ]
        if matching:
            yield result.file, min(matching, key=lambda each: abs(each.line - result.line))
        else:
            print(f"{result.file}: no longer has {result.mutation}", flush=True)


def describe_sources(root: Path) -> dict[str, Any]:
    """Return the commit of a tree and its source files that differ from it; nothing outside of a git checkout.

    A campaign copies the files as they are: a change that was meant for a moment would be in all its mutants.
    """
    command = ["git", "-C", str(root)]
    commit = subprocess.run(command + ["rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode != 0:
        return {}
    status = command + ["status", "--porcelain", "--", "src"]
    changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.splitlines()
    return {"commit": commit.stdout.strip(), "changed": [line[3:] for line in changed]}


def write_json(file: Path, seed: int, sources: dict[str, Any], results: Sequence[Result]) -> None:
    """Write all results, their numbers by area, and what was tested."""
    table = {area: dict(Counter(each.outcome for each in rows)) for area, rows in _by_area(results).items()}
    record = {"seed": seed, **sources, "areas": table, "mutants": [asdict(each) for each in results]}
    file.write_text(json.dumps(record, indent=1))


def print_table(results: Sequence[Result]) -> None:
    """Print the numbers of each area, then the diffs of survivors."""
    for result in results:
        if result.outcome == "survived":
            print(f"\nsurvived, {result.area}, {result.operator}: {result.mutation}\n{result.diff}")
    columns = ("mutants", "killed", "timed out", "survived", "equivalent", "seconds")
    print(f"{'area':<20}" + "".join(f"{column:>12}" for column in columns))
    for area, rows in _by_area(results).items():
        counts = Counter(each.outcome for each in rows)
        numbers = (
            len(rows) - counts["equivalent"],
            counts["killed"],
            sum(each.by == TIME_LIMIT for each in rows),
            counts["survived"],
            counts["equivalent"],
            round(sum(each.seconds for each in rows)),
        )
        print(f"{area:<20}" + "".join(f"{number:>12}" for number in numbers))


def _by_area(results: Sequence[Result]) -> dict[str, list[Result]]:
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        rows[result.area].append(result)
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn (default: 1)")
    parser.add_argument("--area", action="append", metavar="NAME", help="an area; may be repeated (default: all)")
    parser.add_argument("--count", type=int, default=20, help="mutants per area that are not equivalent (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("bench-mutants.json"), help="JSON file for the results")
    parser.add_argument("--rerun", type=Path, metavar="JSON", help="run the survivors of an earlier campaign again")
    parser.add_argument("--list", action="store_true", help="print the areas and exit")
    return parser.parse_args(arguments)


def main() -> int:
    """Run a campaign; return 1 if a mutant survived."""
    args = parse_arguments()
    areas = read_areas(ROOT)
    if args.list:
        for area in areas.values():
            print(f"{area.name}\n  sources: {', '.join(area.sources)}\n  tests:   {', '.join(area.tests)}")
        return 0
    unknown = set(args.area or ()) - set(areas)
    if unknown:
        print(f"--area {', '.join(sorted(unknown))} is unknown; choose among {', '.join(areas)}", file=sys.stderr)
        return 2
    equivalents = Equivalents(ROOT)
    earlier: dict[str, list[Result]] = {}
    if args.rerun is not None:
        rows = [Result(**row) for row in json.loads(args.rerun.read_text())["mutants"]]
        earlier = _by_area([row for row in rows if row.outcome == "survived"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    print(f"seed {args.seed}", flush=True)
    results: list[Result] = []
    sources = describe_sources(ROOT)
    if sources.get("changed"):
        print(f"source files that differ from the commit: {', '.join(sources['changed'])}", flush=True)
    sandbox = Sandbox(ROOT, sys.executable)
    try:
        for name in args.area or areas:
            area = areas[name]
            if args.rerun is not None:
                mutants, count = find_again(sandbox.tree, earlier.get(name, [])), len(earlier.get(name, []))
                if not count:
                    continue
            else:
                # Of the copy: the checkout may change during a campaign, and a mutant is a range of bytes.
                candidates = [
                    (f, mutation) for f in area.sources for mutation in find_mutations((sandbox.tree / f).read_bytes())
                ]
                mutants, count = draw(candidates, f"{args.seed}/{name}"), args.count
            for result in run_area(sandbox, area, mutants, equivalents, count):
                results.append(result)
                write_json(args.out, args.seed, sources, results)
                where = f"{result.file}:{result.line}"
                print(
                    f"{result.outcome:<10} {result.seconds:5.1f} s  {where}: {result.mutation[:120]}  [{result.by}]",
                    flush=True,
                )
    finally:
        sandbox.close()
    print_table(results)
    return int(any(result.outcome == "survived" for result in results))


if __name__ == "__main__":
    sys.exit(main())
