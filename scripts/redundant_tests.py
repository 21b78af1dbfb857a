#!/usr/bin/env python3
"""Compare tests by the lines that they execute and by the mutants that they notice.

    scripts/redundant_tests.py lines --out lines.json tests/exact/test_context.py
    scripts/redundant_tests.py mutants --lines lines.json --seed 1 --count 40 tests/exact/test_context.py

`lines` writes the lines of `src` that each test executes: in pytest's process, in the workers of `tests/exact`, and in
processes of `tests/forked.py`, which write them once per second and at their end.
Jobs of the fixture `one_process` are left out, since the first test with a reference trains it for all others.

`mutants` draws mutants of `mutate.py` on lines that tests under the mark `campaign` execute, and runs these tests until
one fails. If one fails, the other tests that execute the line run until one fails. A mutant that only a test of the
campaign notices is lost to the suite. The exit code is 1 if a mutant is lost.
A mutant replaces the code of functions in workers, and with --here in pytest's process; it is never written to a file.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of `tests`

from tests.line_recorder import FOLDER, ROOT, LineRecorder, Lines, read_processes

REQUEST = "MEGASCALE_REDUNDANT_TESTS"
TIME_LIMIT = 40.0  # seconds for a job of a worker whose code is a mutant


# Lines ----------------------------------------------------------------------------------------------------------------


def run_recorded(rank: int, world: int, function: Callable[..., Any], *args: Any) -> tuple[Any, Lines]:
    """Run a job of a worker; return its result and the lines that it executed."""
    with LineRecorder() as recorder:
        result = function(rank, world, *args)
    return result, recorder.read()


class LinePlugin:
    """Writes the lines of each test to the requested file."""

    def __init__(self, out: Path) -> None:
        from tests.exact.pool import Pool

        self.out = out
        self.tests: dict[str, dict[str, set[int]]] = {}
        self.current: dict[str, set[int]] = defaultdict(set)
        run = Pool.run
        plugin = self

        def run_job(self: Pool, function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> Any:
            caller = inspect.currentframe().f_back  # type: ignore[union-attr]
            is_reference = caller is not None and caller.f_code.co_qualname.startswith("one_process.")
            answers = run(self, run_recorded, world, function, *args, timeout=3 * timeout)
            for _, lines in answers:
                if not is_reference:
                    plugin.add(lines)
            return [result for result, _ in answers]

        Pool.run = run_job  # type: ignore[method-assign]

    def add(self, lines: Lines) -> None:
        """Count lines for the present test."""
        for file, numbers in lines.items():
            self.current[file].update(numbers)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test, its fixtures and the processes that it forks included."""
        self.current = self.tests.setdefault(item.nodeid, defaultdict(set))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ[FOLDER] = folder
            with LineRecorder() as recorder:
                result = yield
            del os.environ[FOLDER]
            for lines in read_processes(Path(folder)):
                self.add(lines)
        self.add(recorder.read())
        return result

    def pytest_unconfigure(self) -> None:
        """Write the file."""
        tests = {name: {file: sorted(numbers) for file, numbers in lines.items()} for name, lines in self.tests.items()}
        self.out.write_text(json.dumps(tests))


# Mutants --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A change of a source file that is applied to functions of a process.

    Attributes:
        file: relative to the repository.
        source: text of the changed file.
        line, change: where it is and what it does.
    """

    file: str
    source: str
    line: int
    change: str


@dataclass
class Outcome:
    """Outcome of a mutant.

    Attributes:
        file, line, change: of the mutant.
        noticed_by: the first test of the campaign that failed, or an empty string.
        killed_by: the first other test that failed then, or an empty string.
        seconds: duration of its tests.
    """

    file: str
    line: int
    change: str
    noticed_by: str
    killed_by: str
    seconds: float


def describe(outcome: Outcome) -> str:
    """Return "unnoticed" by the campaign, "killed" by the suite as well, or "lost" to it."""
    if not outcome.noticed_by:
        return "unnoticed"
    return "killed" if outcome.killed_by else "lost"


def _pair_codes(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code object of a file with its counterpart. ValueError if they have not the same functions."""
    yield old, new
    inner = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (old, new)]
    if [code.co_name for code in inner[0]] != [code.co_name for code in inner[1]]:
        raise ValueError(f"{old.co_qualname} has other functions than its mutant")
    for old_code, new_code in zip(*inner, strict=True):
        yield from _pair_codes(old_code, new_code)


def _list_functions(module: Any) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines, those under decorators included."""
    visited: set[int] = set()

    def walk(value: Any) -> Iterator[FunctionType]:
        if id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            yield from walk(value.__func__)
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset):
                if accessor is not None:
                    yield from walk(accessor)
        elif isinstance(value, type):
            if value.__module__ == module.__name__:
                for attribute in list(vars(value).values()):
                    yield from walk(attribute)
        elif isinstance(value, FunctionType):
            yield value
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__") or getattr(value, "func", None)
        if wrapped is not None and callable(wrapped):
            yield from walk(wrapped)

    for value in list(vars(module).values()):
        yield from walk(value)


def apply_mutant(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """Replace the code of the mutant's functions in this process; return the functions and the code that they had."""
    path = ROOT / mutant.file
    old = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    new = compile(mutant.source, str(path), "exec", dont_inherit=True)
    changed = {
        (old_code.co_qualname, old_code.co_firstlineno): new_code
        for old_code, new_code in _pair_codes(old, new)
        if old_code != new_code
    }
    name = mutant.file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    replaced = []
    for function in _list_functions(importlib.import_module(name)):
        code = function.__code__
        counterpart = changed.get((code.co_qualname, code.co_firstlineno))
        if counterpart is not None and code.co_filename == str(path):
            replaced.append((function, code))
            function.__code__ = counterpart
    if not replaced:
        raise ValueError(f"{mutant.file}:{mutant.line} changes no function that a process has")
    return replaced


_applied: Mutant | None = None


def run_mutated(rank: int, world: int, mutant: Mutant, function: Callable[..., Any], *args: Any) -> Any:
    """Run a job of a worker that has the mutant."""
    global _applied
    if _applied is None:
        apply_mutant(mutant)
        _applied = mutant
    assert _applied == mutant, "the worker has another mutant"
    return function(rank, world, *args)


class MutantPlugin:
    """Runs tests of each mutant until one fails."""

    def __init__(self, request: dict[str, Any]) -> None:
        from tests.exact.pool import Pool

        self.request = request
        self.tests: dict[str, Lines] = {}
        for path in request["lines"]:
            self.tests |= json.loads(Path(path).read_text())
        self.campaign: set[str] = set()
        self.mutant: Mutant | None = None
        self.outcomes: list[Outcome] = []
        self.pools: set[Pool] = set()
        run = Pool.run
        plugin = self

        def run_job(self: Pool, function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> Any:
            plugin.pools.add(self)
            if plugin.mutant is None:
                return run(self, function, world, *args, timeout=timeout)
            return run(self, run_mutated, world, plugin.mutant, function, *args, timeout=TIME_LIMIT)

        Pool.run = run_job  # type: ignore[method-assign]

    def list_mutants(self, names: set[str]) -> Iterator[Mutant]:
        """Yield mutants of lines that a test of the campaign executes."""
        import mutate

        lines: dict[str, set[int]] = defaultdict(set)
        for name in self.campaign & names:
            for file, numbers in self.tests[name].items():
                lines[file].update(numbers)
        equivalents = mutate.Equivalents(ROOT)
        candidates = []
        for file in sorted(lines):
            if not file.startswith(tuple(self.request["under"])):
                continue
            for mutation in mutate.find_mutations((ROOT / file).read_bytes()):
                if mutation.line in lines[file] and equivalents.reason(file, mutation) is None:
                    candidates.append((file, mutation))
        for file, mutation in mutate.draw(candidates, f"{self.request['seed']}/redundant"):
            source = (ROOT / file).read_bytes()
            if mutate.is_valid(source, mutation):
                yield Mutant(file, mutation.apply(source).decode(), mutation.line, mutation.change)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the campaign instead of the tests."""
        items = {item.nodeid: item for item in session.items if item.nodeid in self.tests}
        self.campaign = {name for name, item in items.items() if item.get_closest_marker("campaign") is not None}
        deadline = time.monotonic() + self.request["seconds"]
        for mutant in self.list_mutants(set(items)):
            if len(self.outcomes) == self.request["count"] or time.monotonic() > deadline:
                break
            with self.apply(mutant, session) as is_applied:
                if is_applied:
                    self.outcomes.append(self.run(mutant, items))
            self.write()
        return True

    @contextmanager
    def apply(self, mutant: Mutant, session: pytest.Session) -> Iterator[bool]:
        """Have workers, and pytest's process if requested, run the mutant."""
        for pool in self.pools:
            pool.close()
        for definition in session._fixturemanager.getfixturedefs("one_process", session.items[0]) or ():
            if definition.cached_result is not None and definition.cached_result[0] is not None:
                inspect.getclosurevars(definition.cached_result[0]).nonlocals["expected"].clear()
        replaced: list[tuple[FunctionType, CodeType]] = []
        is_applied = True
        try:
            replaced = apply_mutant(mutant)
        except ValueError as error:
            print(f"skipped: {error}", flush=True)
            is_applied = False
        if not self.request["here"]:
            _restore(replaced)
        self.mutant = mutant
        try:
            yield is_applied
        finally:
            _restore(replaced)
            self.mutant = None

    def run(self, mutant: Mutant, items: dict[str, pytest.Item]) -> Outcome:
        """Run tests of the campaign until one fails, then the others until one fails."""
        began = time.monotonic()
        names = [name for name in items if mutant.line in self.tests[name].get(mutant.file, ())]
        # Tests that execute few lines take less time.
        names.sort(key=lambda name: sum(map(len, self.tests[name].values())))
        noticed_by = find_failure((items[name] for name in names if name in self.campaign), self.request["limit"])
        killed_by = ""
        if noticed_by:
            killed_by = find_failure(items[name] for name in names if name not in self.campaign)
        seconds = round(time.monotonic() - began, 1)
        outcome = Outcome(mutant.file, mutant.line, mutant.change, noticed_by, killed_by, seconds)
        change = f"{mutant.file}:{mutant.line}: {mutant.change[:110]}"
        print(f"{describe(outcome):<9} {seconds:5.1f} s  {change}  [{noticed_by}] [{killed_by}]", flush=True)
        return outcome

    def write(self) -> None:
        """Write all outcomes."""
        Path(self.request["out"]).write_text(json.dumps([asdict(outcome) for outcome in self.outcomes], indent=1))


def _restore(replaced: list[tuple[FunctionType, CodeType]]) -> None:
    for function, code in replaced:
        function.__code__ = code


def find_failure(items: Iterable[pytest.Item], limit: float = math.inf) -> str:
    """Run tests until one fails, and begin none after `limit` seconds; return its name, or an empty string."""
    deadline = time.monotonic() + limit
    for item in items:
        if time.monotonic() > deadline:
            break
        if not is_passed(item):
            return item.nodeid
    return ""


def is_passed(item: Any) -> bool:
    """Run a test, its fixtures included, without a report."""
    from _pytest.runner import runtestprotocol

    # Keep what the session and the file have set up.
    item.session._setupstate.teardown_exact(item.parent)
    item._initrequest()
    reports = runtestprotocol(item, log=False, nextitem=item.parent)
    return all(report.passed or report.skipped for report in reports)


# Command line ---------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of the request."""
    text = os.environ.pop(REQUEST, None)
    if text is None:
        return
    request = json.loads(text)
    if request["command"] == "lines":
        config.pluginmanager.register(LinePlugin(Path(request["out"])))
    else:
        config.pluginmanager.register(MutantPlugin(request))


def main() -> int:
    """Run pytest with the plugin; for mutants, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("lines", "mutants"))
    parser.add_argument("--out", type=Path, default=Path("redundant.json"), help="JSON file for the result")
    parser.add_argument("--lines", action="append", help="a file that `lines` has written; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--under", nargs="+", default=["src/"], metavar="PREFIX", help="mutants of these files only")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no mutant after this time")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for the tests of the campaign per mutant")
    parser.add_argument("--here", action="store_true", help="mutants hold in pytest's process too")
    parser.add_argument("words", nargs="*", metavar="WORD", help="for pytest")
    args = parser.parse_intermixed_args()
    request = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    paths = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        REQUEST: json.dumps(request),
        "MEGASCALE_EXACT_CASES": "all",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q", "-s"]
    code = subprocess.run(command + args.words, env=env, cwd=ROOT, check=False).returncode
    if args.command == "lines" or code:
        return code
    outcomes = [Outcome(**row) for row in json.loads(args.out.read_text())]
    counts = Counter(map(describe, outcomes))
    noticed = counts["killed"] + counts["lost"]
    print(f"{len(outcomes)} mutants: {noticed} noticed by the campaign, {counts['killed']} of them by the other tests")
    return int(counts["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
