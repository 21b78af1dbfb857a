#!/usr/bin/env python3
"""Choose the parametrized tests that stay in the suite; the others run as a campaign (`tests/campaign.toml`).

    scripts/covering_tests.py record --out record.json tests/exact
    scripts/count_cpu.py --out seconds.json -- tests/exact
    scripts/covering_tests.py choose --record record.json --seconds seconds.json --out tests/campaign.toml

`record` writes what each test covers: the lines of `src` that it executes (`redundant_tests.py lines`) and its factors.
Factors are the settings of the layouts that it runs in the workers of `tests/exact`, in classes (an axis has one rank
or several, a number is the default or another), the jobs with their flags, and the values of parameters that tests
share.

`choose` keeps the cheapest set of tests, greedily by new coverage per processor second, which covers
- each executed line, by any test,
- each test function, and each value of a parameter that several of its tests have, by a test of the function (each pair
  of values if they are of three parameters or more),
- each value of a factor of a job, and each pair of axes, by any test. Axes of one rank form no pairs.
Tests without parameters stay, tests of functions that take less than a second in all, and those that guard an area of
`mutate.py`. The others are added to the file.
`scripts/redundant_tests.py mutants` checks the choice: it runs faults of the sources.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from redundant_tests import ROOT, LinePlugin

REQUEST = "MEGASCALE_COVERING_TESTS"
SECTIONS = ("model", "parallel", "train", "optimizer", "overlap", "kernels")
# Sizes that follow from other factors, or that no code path depends on.
IGNORED = {
    "model.heads",
    "model.hidden",
    "model.init_std",
    "model.layers",
    "model.sequence_length",
    "model.vocab_multiple",
    "model.vocab_size",
    "optimizer.clip",
    "train.global_batch",
    "train.micro_batch",
    "train.name",
    "train.precision",
    "train.seed",
}
DEFAULTS = {"1", "even", "enough"}
AXES = {"tensor", "pipeline", "data", "context", "expert", "replicate", "virtual_stages"}
# Factors whose pairs tests cover. Pairs of the job, ZeRO, recomputation and the kind of block kept 35 processor seconds
# more (2026-11-28). Mutants showed no need for them.
PAIRED = {f"parallel.{axis}" for axis in AXES}
CHEAP_FUNCTION = 1.0  # processor seconds of all tests of a function, which stay
CHEAP_TEST = 0.02  # processor seconds that a test counts at least

Factors = dict[str, str]


# Records --------------------------------------------------------------------------------------------------------------


def describe_tree(tree: Mapping[str, Any]) -> Factors:
    """Return the classes of the settings that a configuration names, and of its axes and micro-batches."""
    factors = {f"parallel.{axis}": "1" for axis in AXES}
    for section in SECTIONS:
        factors |= dict(_describe_section(section, tree.get(section) or {}))
    parallel = tree.get("parallel") or {}
    stages = parallel.get("pipeline", 1)
    if "global_batch" in (tree.get("train") or {}):
        samples = tree["train"].get("micro_batch", 1) * parallel.get("data", 1)
        count = tree["train"]["global_batch"] // samples
        factors["micro-batches"] = "1" if count == 1 else "uneven" if count % stages else "even"
        factors["micro-batches of stages"] = "fewer" if count < stages else "enough"
    return factors


def _describe_section(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        path = f"{name}.{key}"
        if path in IGNORED:
            continue
        if isinstance(value, Mapping):
            yield from _describe_section(path, value)
        elif key in AXES:
            yield path, "1" if value == 1 else "several"
        elif key in ("zero", "norm", "block") or isinstance(value, (bool, str)):
            yield path, str(value)
        elif value is not None and value != []:
            yield path, "set"


def describe_job(function: Callable[..., Any], world: int, arguments: Iterable[Any]) -> Factors:
    """Return the factors of a job of the workers."""
    factors: dict[str, Any] = {"job": getattr(function, "__qualname__", str(function))}
    factors["world"] = "1" if world == 1 else "several"
    for index, value in enumerate(arguments):
        if isinstance(value, Mapping) and not value.keys().isdisjoint(SECTIONS):
            factors |= describe_tree(value)
        elif callable(value):
            factors[f"argument {index}"] = getattr(value, "__qualname__", str(value))
        elif is_dataclass(value):
            factors |= {f"{type(value).__name__}.{name}": flag for name, flag in vars(value).items() if _is_flag(flag)}
        elif _is_flag(value):
            factors[f"argument {index}"] = value
    return {name: str(value) for name, value in factors.items() if value != "nullcontext"}


def _is_flag(value: Any) -> bool:
    """Return whether a value chooses what a job does. Numbers and paths are data."""
    return value is True or (isinstance(value, str) and os.sep not in value)


class RecordPlugin(LinePlugin):
    """Writes the lines and factors of each test to the requested file."""

    def __init__(self, out: Path) -> None:
        from tests.exact.pool import Pool

        self.jobs: dict[str, list[Factors]] = defaultdict(list)
        self.items: dict[str, dict[str, Any]] = {}
        self.name = ""
        run = Pool.run
        plugin = self

        def run_job(self: Pool, function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> Any:
            plugin.jobs[plugin.name].append(describe_job(args[0], world, args[1:]))
            return run(self, function, world, *args, timeout=timeout)

        Pool.run = run_job  # type: ignore[method-assign]
        super().__init__(out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test, its fixtures included."""
        self.name = item.nodeid
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec is not None else {}
        self.items[item.nodeid] = {
            "parameters": {name: str(value)[:200] for name, value in parameters.items()},
            "is_campaign": item.get_closest_marker("campaign") is not None,
        }
        return (yield from super().pytest_runtest_protocol(item))

    def pytest_unconfigure(self) -> None:
        """Write the file."""
        records = {}
        for name, lines in self.tests.items():
            # The reference of one process has all settings without their layout.
            jobs = [job for job in self.jobs[name] if job["world"] != "1"] or self.jobs[name]
            records[name] = self.items[name] | {
                "jobs": jobs,
                "lines": {file: sorted(numbers) for file, numbers in lines.items()},
            }
        self.out.write_text(json.dumps(records))


# Choice ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A test with its cost in processor seconds and the elements that it covers."""

    name: str
    seconds: float
    elements: frozenset[tuple[Any, ...]]


def list_candidates(records: Mapping[str, Any], seconds: Mapping[str, float]) -> list[Candidate]:
    """Return the tests of the suite with their elements."""
    values = count_parameter_values(records)
    candidates = []
    for name, record in records.items():
        if record["is_campaign"]:
            continue
        function = name.partition("[")[0]
        elements: set[tuple[Any, ...]] = {(function,)}
        elements.update((file, number) for file, numbers in record["lines"].items() for number in numbers)
        parameters = sorted(item for item in record["parameters"].items() if values[function, *item] > 1)
        elements.update((function, *parameter) for parameter in parameters)
        if len(parameters) > 2:
            elements.update((function, *pair) for pair in combinations(parameters, 2))
        for job in record["jobs"]:
            factors = sorted((key, value) for key, value in job.items() if value not in DEFAULTS)
            elements.update(("factor", *factor) for factor in factors)
            elements.update(combinations([factor for factor in factors if factor[0] in PAIRED], 2))
        candidates.append(Candidate(name, seconds.get(name, 0.0), frozenset(elements)))
    return candidates


def count_parameter_values(records: Mapping[str, Any]) -> Counter[tuple[str, str, str]]:
    """Count the tests by function, parameter and value. A value of a single test is the name of the case."""
    return Counter(
        (name.partition("[")[0], key, value)
        for name, record in records.items()
        for key, value in record["parameters"].items()
    )


def list_required(candidates: Collection[Candidate]) -> set[str]:
    """Return the names of tests without parameters and of tests of cheap functions."""
    seconds: Counter[str] = Counter()
    for candidate in candidates:
        seconds[candidate.name.partition("[")[0]] += candidate.seconds  # type: ignore[assignment]
    return {
        candidate.name
        for candidate in candidates
        if "[" not in candidate.name or seconds[candidate.name.partition("[")[0]] < CHEAP_FUNCTION
    }


def choose(candidates: Collection[Candidate], required: Collection[str]) -> set[str]:
    """Return the names of tests that cover all elements of all candidates: the required ones, then the cheapest."""
    chosen = {candidate.name for candidate in candidates if candidate.name in required}
    covered = set().union(*(candidate.elements for candidate in candidates if candidate.name in chosen))
    remaining = {
        candidate.name: (candidate, candidate.elements - covered)
        for candidate in candidates
        if candidate.name not in chosen
    }
    while remaining:
        best, elements = max(remaining.values(), key=lambda item: len(item[1]) / max(item[0].seconds, CHEAP_TEST))
        if elements:
            chosen.add(best.name)
        remaining = {
            name: (candidate, uncovered - elements)
            for name, (candidate, uncovered) in remaining.items()
            if not uncovered <= elements
        }
    return drop_covered(candidates, chosen, required)


def drop_covered(candidates: Collection[Candidate], chosen: set[str], required: Collection[str]) -> set[str]:
    """Return the chosen names without tests that later choices have made redundant, the dearest first."""
    counts: Counter[tuple[Any, ...]] = Counter()
    chosen_candidates = [candidate for candidate in candidates if candidate.name in chosen]
    for candidate in chosen_candidates:
        counts.update(candidate.elements)
    result = set(chosen)
    for candidate in sorted(chosen_candidates, key=lambda candidate: -candidate.seconds):
        if candidate.name not in required and all(counts[element] > 1 for element in candidate.elements):
            counts.subtract(candidate.elements)
            result.remove(candidate.name)
    return result


def read_campaign(path: Path) -> set[str]:
    """Return the tests that a file names, or none without it."""
    if not path.exists():
        return set()
    return {f"{file}::{name}" for file, names in tomllib.loads(path.read_text()).items() for name in names}


def read_guards(path: Path) -> set[str]:
    """Return the single tests that guard areas of `mutate.py`."""
    areas = tomllib.loads(path.read_text())
    return {test for area in areas.values() for test in area["tests"] if "::" in test}


def write_campaign(path: Path, names: Iterable[str]) -> None:
    """Write the tests of the campaign by file."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in names:
        file, _, test = name.partition("::")
        by_file[file].append(test)
    parts = [HEADER]
    for file in sorted(by_file):
        tests = "".join(f"    {json.dumps(test, ensure_ascii=False)},\n" for test in sorted(by_file[file]))
        parts.append(f"{json.dumps(file)} = [\n{tests}]\n")
    path.write_text("\n".join(parts))


HEADER = """\
# Tests that run only with MEGASCALE_EXACT_CASES=all (dev/soak.md). Other tests of the same file execute their lines.
# Other tests have each pair of their axes. `scripts/covering_tests.py choose` adds names.
"""


# Command line ---------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of the request."""
    out = os.environ.pop(REQUEST, None)
    if out is not None:
        config.pluginmanager.register(RecordPlugin(Path(out)))


def record_tests(out: Path, arguments: list[str]) -> int:
    """Run pytest with the plugin."""
    paths = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {REQUEST: str(out), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q"]
    return subprocess.run(command + arguments, env=env, cwd=ROOT, check=False).returncode


def read_json(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the merged objects of files."""
    result: dict[str, Any] = {}
    for path in paths:
        result |= json.loads(path.read_text())
    return result


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "choose"))
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--record", type=Path, action="append", default=[], help="a file of `record`")
    parser.add_argument("--seconds", type=Path, action="append", default=[], help="a file of `count_cpu.py`")
    parser.add_argument("--keep", action="append", default=[], help="a test that stays; may be repeated")
    parser.add_argument("words", nargs="*", metavar="WORD", help="for pytest")
    args = parser.parse_intermixed_args()
    if args.command == "record":
        return record_tests(args.out, args.words)
    records, seconds = read_json(args.record), read_json(args.seconds)
    candidates = list_candidates(records, seconds)
    required = list_required(candidates) | read_guards(ROOT / "scripts/mutation_areas.toml") | set(args.keep)
    chosen = choose(candidates, required)
    dropped = [candidate for candidate in candidates if candidate.name not in chosen]
    write_campaign(args.out, read_campaign(args.out) | {candidate.name for candidate in dropped})
    total = sum(candidate.seconds for candidate in candidates)
    saved = sum(candidate.seconds for candidate in dropped)
    print(f"{len(dropped)} of {len(candidates)} tests leave, {saved:.1f} of {total:.1f} processor seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
