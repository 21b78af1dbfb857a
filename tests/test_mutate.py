"""`scripts/mutate.py`: where mutants are, what they change, and what becomes of them on a tiny tree."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate.py"
OPERATORS = ("comparison", "arithmetic", "constant", "removed call", "swapped argument", "negated condition")


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))  # for its import of mutations.py
    return importlib.import_module("mutate")


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a  # a < b\n", set()),
        ("x = (a + # +\n (b))", {"x = (a - # +\n (b))"}),
        ("x += y", {"x -= y"}),
        ("x = 'ä' + y", set()),
        ("x = ('ä', a * b)", {"x = ('ä', a / b)"}),
        ("x = -3", {"x = (3)", "x = -4", "x = -2"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x.f(y)", {"pass"}),
        ("await x.f()", {"pass"}),
        ("x = (a / b).clamp(max=c)", {"x = (a / b)", "x = (a * b).clamp(max=c)"}),
        ("x = sorted(y)", {"x = (y)"}),
        ("x = f(a, *b, c)", set()),
        ("x = f(a, b)", {"x = f(b, a)"}),
        ("x = max(a, b)", {"x = (a)"}),
        ("if a: b", {"if not (a): b"}),
        ("if not a: b", {"if (a): b"}),
        ("x = a and b or c", {"x = a or b or c", "x = a and b and c"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if not (a)]"}),
        ("x = a if b else c", {"x = a if not (b) else c"}),
    ],
)
def test_each_operator(mutate, source, mutants):
    result = mutate.find_mutations(source.encode())
    assert {mutation.apply(source.encode()).decode() for mutation in result} == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""Text 1 < 2."""',
        "x: list[1]",
        "def f(x: 'a < b') -> g(1): ...",
        "raise ValueError(a + b, 3)",
        "assert a < b, 3",
        "print(a + b, 3)",
        "log.warning('x', a + b)",
        "x = f'{a + b}'",
        "__all__ = ['a' * 3]",
        "if TYPE_CHECKING:\n    import a\n    x = 3",
        "@jit\ndef f(x):\n    return x + 1",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = os.kill(pid, 0)",
        "x = Field(default, description='a' if b < c else d)",
        "x = int | None",
    ],
)
def test_what_has_no_mutants(mutate, source):
    assert mutate.find_mutations(source.encode()) == []


def test_all_mutants_of_a_file_compile_and_keep_the_rest(mutate):
    source = SCRIPT.read_bytes()
    mutations = mutate.find_mutations(source)
    assert {mutation.operator for mutation in mutations} == set(OPERATORS)
    for mutation in mutations[::25]:
        assert mutate.is_valid(source, mutation)
        changed = mutation.apply(source)
        assert changed.startswith(source[: mutation.start])
        assert changed.endswith(source[mutation.stop :])
        assert mutation.line_text == source.decode().splitlines()[mutation.line - 1].strip()


def test_a_draw_depends_on_the_seed_and_takes_operators_in_turn(mutate):
    candidates = [("a.py", mutation) for mutation in mutate.find_mutations(SCRIPT.read_bytes())]
    first = list(mutate.draw(candidates, "1/a"))
    assert first == list(mutate.draw(candidates, "1/a"))
    assert first != list(mutate.draw(candidates, "2/a"))
    assert len(first) == len(candidates)
    assert [mutation.operator for _, mutation in first[:12]] == list(OPERATORS) * 2


def test_the_tables_name_files_functions_and_lines_that_exist(mutate):
    areas = mutate.read_areas(ROOT)
    assert {"optimizer", "checkpoint", "resume"} <= set(areas)
    equivalents = mutate.Equivalents(ROOT)
    for file, line, _ in equivalents.mutants:
        lines = [text.strip() for text in (ROOT / file).read_text().splitlines()]
        assert line in lines, f"{mutate.EQUIVALENT}: {file} has no line {line!r}; remove the entry"


def test_quick_killers_run_first(mutate):
    seconds = mutate.durations_by_file(
        "1.50s call     tests/a.py::b\n0.50s setup    tests/a.py::b\n0.10s call     tests/b.py::c\n"
    )
    assert seconds == {"tests/a.py": 2.0, "tests/b.py": 0.1}
    order = mutate.order_tests(["tests/a.py::b", "tests/b.py"], seconds, mutate.Counter())
    assert order == ["tests/b.py", "tests/a.py::b"]
    assert mutate.order_tests(order, seconds, mutate.Counter({"tests/a.py": 9})) == ["tests/a.py::b", "tests/b.py"]


SOURCE = """\
import time

LIMIT = int("3")


def has_enough(number):
    return number > LIMIT


def wait(is_done):
    while not is_done():
        time.sleep(LIMIT)
"""
TESTS = """\
from enough import has_enough, wait


def test_it():
    wait(lambda: True)
    assert has_enough(9)
    assert not has_enough(0)
"""
EQUIVALENT = """\
[[mutant]]
file = "src/enough.py"
line = "time.sleep(LIMIT)"
mutation = "time.sleep(LIMIT) -> pass"
reason = "never runs"
"""


def test_a_campaign(mutate, tmp_path):
    """Check mutants that are killed, survive, are equivalent or hang. The checkout does not change."""
    for folder in ("scripts", "src", "tests"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "scripts" / "mutate.py"
    # Little time is lost with the mutant that hangs.
    text, limit = SCRIPT.read_text(), "limit = 30 + 4 * baseline.seconds"
    assert limit in text
    script.write_text(text.replace(limit, "limit = 1 + 2 * baseline.seconds"))
    shutil.copy(SCRIPT.with_name("mutations.py"), script.parent)
    (tmp_path / "src" / "enough.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_enough.py").write_text(TESTS)
    area = '[numbers]\nsources = ["src/enough.py"]\ntests = ["tests/test_enough.py"]\n'
    (tmp_path / "scripts" / "mutation_areas.toml").write_text(area)
    (tmp_path / "scripts" / "mutants_equivalent.toml").write_text(EQUIVALENT)
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    results = [mutate.Result(**row) for row in json.loads((tmp_path / "out.json").read_text())["mutants"]]
    assert {result.mutation: (result.outcome, result.by) for result in results} == {
        "number > LIMIT -> number >= LIMIT": ("survived", ""),
        "number > LIMIT -> number <= LIMIT": ("killed", "tests/test_enough.py::test_it"),
        "not is_done() -> (is_done())": ("killed", "time limit"),
        "time.sleep(LIMIT) -> pass": ("equivalent", "never runs"),
    }
    [survivor] = [result for result in results if result.outcome == "survived"]
    assert "-    return number > LIMIT\n+    return number >= LIMIT\n" in survivor.diff
    assert (tmp_path / "src" / "enough.py").read_text() == SOURCE
    [(file, mutation)] = mutate.find_again(tmp_path, [survivor])
    assert file == "src/enough.py"
    assert mutation.apply(SOURCE.encode()) == SOURCE.replace("number > LIMIT", "number >= LIMIT").encode()
    (tmp_path / "src" / "enough.py").write_text(SOURCE.replace("number > LIMIT", "LIMIT < number"))
    assert list(mutate.find_again(tmp_path, [survivor])) == []
