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
import random
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AREAS = "scripts/mutation_areas.toml"
EQUIVALENT = "scripts/mutants_equivalent.toml"
TIME_LIMIT = "time limit"
OPERATORS = ("comparison", "arithmetic", "constant", "removed call", "swapped argument", "negated condition")

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # whose mutants negate the comparison
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
# What people read; tests do not compare it word by word.
SPEECH = {"print", "echo", "log", "note", "record_choice", "debug", "info", "warn", "warning", "error", "exception"}
# `strict` of zip checks a fact that holds anyway.
IGNORED_KEYWORDS = {"help", "description", "message", "doc", "strict"}
# A mutant must not end another process or delete another file: arguments of these stay as they are.
HARMFUL = {"kill", "killpg", "pidfd_send_signal", "send_signal", "terminate", "rmtree", "unlink", "remove", "rmdir"}
# Calls that mutants leave out while they keep the receiver, or the first argument.
UNWRAPPED_METHODS = {
    "abs",
    "clamp",
    "clamp_min",
    "clone",
    "copy",
    "detach",
    "lower",
    "resolve",
    "sqrt",
    "square",
    "strip",
}
UNWRAPPED_FUNCTIONS = {"abs", "max", "min", "reversed", "round", "set", "sorted"}
COMMUTATIVE = {"max", "min", "maximum", "minimum", "isclose", "gcd", "lcm", "promote_types"}
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


@dataclass(frozen=True)
class Mutation:
    """One change of a source file.

    Attributes:
        operator: one of OPERATORS.
        start, stop: the bytes of the file that `replacement` takes the place of.
        line: number of the line where they begin, from 1.
        line_text: that line, without surrounding white space.
        change: the smallest expression around it, before and after: `a < b -> a <= b`.
    """

    operator: str
    start: int
    stop: int
    replacement: bytes
    line: int
    line_text: str
    change: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this change."""
        return source[: self.start] + self.replacement + source[self.stop :]


class MutationFinder(ast.NodeVisitor):
    """Collects the mutations of one module.

    Docstrings, annotations, decorators, assertions, texts for people, `__all__`, blocks for type checkers and GPU
    kernels (functions under `@jit`, which CPU tests do not run) have none.
    """

    def __init__(self, source: bytes) -> None:
        self.source = source
        lines = source.split(b"\n")
        self.lines = [line.decode() for line in lines]
        self.line_starts = [0]
        for line in lines:
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)
        self.mutations: list[Mutation] = []
        self.visit(ast.parse(source))

    # positions --------------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first byte of a node and the one behind its last."""
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, stop

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        start, stop = self.span(node)
        return self.source[start:stop].decode()

    def add(self, operator: str, around: ast.AST, start: int, stop: int, replacement: str) -> None:
        """Keep the mutation that replaces bytes start to stop, which lie in the node `around`."""
        first, last = self.span(around)
        new = replacement.encode()
        before = self.source[first:last].decode()
        after = (self.source[first:start] + new + self.source[stop:last]).decode()
        line = self.source.count(b"\n", 0, start) + 1
        change = f"{' '.join(before.split())} -> {' '.join(after.split())}"
        self.mutations.append(Mutation(operator, start, stop, new, line, self.lines[line - 1].strip(), change))

    def add_token(
        self, operator: str, around: ast.AST, remaining: ast.AST, right: ast.AST, old: str, new: Iterable[str]
    ) -> None:
        """Keep the mutations that replace the token `old`, which stands between two nodes."""
        start, stop = self.span(remaining)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[start:stop])
        token = re.search(rb"\s+".join(re.escape(word.encode()) for word in old.split()), gap)
        if token is None:
            return
        for text in new:
            self.add(operator, around, start + token.start(), start + token.end(), text)

    # what has no mutants ------------------------------------------------------------------------------------------

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip errors: which one is raised is mostly its text."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: no correct program meets one that fails."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value only."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit what is assigned, unless it is a list of names."""
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not names & {"__all__", "__slots__"}:
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body only."""
        self.visit_statements(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit defaults and body."""
        if any(_last_name(decorator) == "jit" for decorator in node.decorator_list):
            return
        for default in tuple(node.args.defaults) + tuple(node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.visit_statements(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_statements(self, statements: Sequence[ast.stmt]) -> None:
        """Visit each of them."""
        for statement in statements:
            self.visit(statement)

    # what has -----------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call whose result is not used."""
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            if not _is_speech(value):
                self.add("removed call", node, *self.span(node), "pass")
            self.visit(value)
        elif not isinstance(value, ast.Constant):
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap neighbouring arguments; leave out calls that keep the kind of a value."""
        name = _last_name(node.func)
        if _is_speech(node):
            return
        if name in HARMFUL:
            self.visit(node.func)
            return
        pairs = [] if name in COMMUTATIVE else list(zip(node.args, node.args[1:], strict=False))
        for remaining, right in pairs:
            texts = self.text(remaining), self.text(right)
            if texts[0] == texts[1] or ast.Starred in (type(remaining), type(right)):
                continue
            start, stop = self.span(remaining)[0], self.span(right)[1]
            between = self.source[self.span(remaining)[1] : self.span(right)[0]].decode()
            self.add("swapped argument", node, start, stop, texts[1] + between + texts[0])
        if isinstance(node.func, ast.Attribute) and name in UNWRAPPED_METHODS:
            name_start = self.span(node.func)[1] - len(name)
            self.add("removed call", node, self.source.rindex(b".", 0, name_start), self.span(node)[1], "")
        elif isinstance(node.func, ast.Name) and name in UNWRAPPED_FUNCTIONS and node.args:
            first = node.args[0]
            if not isinstance(first, (ast.Starred, ast.GeneratorExp)):
                self.add("removed call", node, *self.span(node), f"({self.text(first)})")
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in IGNORED_KEYWORDS:
                self.visit(keyword.value)

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        if _last_name(node.test) == "TYPE_CHECKING":
            self.visit_statements(node.orelse)
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Negate the conditions."""
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, condition: ast.expr) -> None:
        """Keep the mutation that negates a condition."""
        # `visit_UnaryOp` and `visit_Compare` make these.
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            return
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], OPPOSITES):
            return
        self.add("negated condition", condition, *self.span(condition), f"not ({self.text(condition)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out `not` and `-`."""
        kinds = {ast.Not: "negated condition", ast.USub: "arithmetic"}
        kind = kinds.get(type(node.op))  # type: ignore[call-overload]
        if kind is not None:
            start, stop = self.span(node)
            self.add(kind, node, start, stop, f"({self.text(node.operand)})")
        self.visit(node.operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange `and` and `or`."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for remaining, right in zip(node.values, node.values[1:], strict=False):
            self.add_token("negated condition", node, remaining, right, old, [new])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Exchange the operators."""
        operands = [node.left] + list(node.comparators)
        for operator, remaining, right in zip(node.ops, operands, operands[1:], strict=False):
            old, new = COMPARISONS[type(operator)]
            self.add_token("comparison", node, remaining, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange the operator, unless texts are joined or types are united."""
        if type(node.op) in ARITHMETIC and not any(_is_text_or_type(side) for side in (node.left, node.right)):
            old, new = ARITHMETIC[type(node.op)]
            self.add_token("arithmetic", node, node.left, node.right, old, [new])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Exchange the operator."""
        if type(node.op) in ARITHMETIC and not _is_text_or_type(node.value):
            old, new = ARITHMETIC[type(node.op)]
            self.add_token("arithmetic", node, node.target, node.value, f"{old}=", [f"{new}="])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change numbers and truth values."""
        value = node.value
        if isinstance(value, bool):
            changed: list[Any] = [not value]
        elif isinstance(value, int):
            changed = [value + 1, value - 1] if value > 0 else [value + 1]
        elif isinstance(value, float):
            changed = [value * 2 if value else 1.0]
        else:
            return
        for new in changed:
            self.add("constant", node, *self.span(node), repr(new))


def _last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, or of what is called; empty for other nodes."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_speech(call: ast.Call) -> bool:
    return _last_name(call.func) in SPEECH


def _is_text_or_type(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
        return True
    if isinstance(node, ast.Constant) and node.value is None:
        return True
    return isinstance(node, ast.Name) and (node.id[:1].isupper() and not node.id.isupper())


def find_mutations(source: bytes) -> list[Mutation]:
    """Return the mutations of a module, in the order of their places."""
    return sorted(MutationFinder(source).mutations, key=lambda each: (each.start, each.stop, each.replacement))


def is_valid(source: bytes, mutation: Mutation) -> bool:
    """Check that a mutant compiles and that its syntax tree differs."""
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def draw(candidates: Sequence[tuple[str, Mutation]], seed: str) -> Iterator[tuple[str, Mutation]]:
    """Yield all (file, mutation) in an order drawn from the seed, in turn over the operators."""
    by_operator: dict[str, list[tuple[str, Mutation]]] = defaultdict(list)
    for file, mutation in candidates:
        by_operator[mutation.operator].append((file, mutation))
    generator = random.Random(seed)
    for operator in OPERATORS:
        generator.shuffle(by_operator[operator])
    while any(by_operator.values()):
        for operator in OPERATORS:
            if by_operator[operator]:
                yield by_operator[operator].pop()


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
