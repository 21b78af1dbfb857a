"""`scripts/redundant_tests.py`: which lines a function executes, and what a mutant changes in this process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megascale.core.head_exchange import share_heads

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "redundant_tests.py"
FILE = "src/megascale/core/head_exchange.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("redundant_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["redundant_tests"] = module
    spec.loader.exec_module(module)
    return module


def record(script: ModuleType, *arguments: int) -> list[int]:
    _, lines = script.run_recorded(0, 1, lambda rank, world: share_heads(*arguments))
    return lines[FILE]


def test_lines_are_those_that_a_call_executes(script: ModuleType) -> None:
    exchanged, gathered = record(script, 8, 8, 4), record(script, 6, 2, 4)
    first = share_heads.__code__.co_firstlineno
    assert first in exchanged
    assert first in gathered
    assert exchanged != gathered
    assert record(script, 8, 8, 4) == exchanged


def test_a_mutant_changes_a_function_until_it_is_restored(script: ModuleType) -> None:
    expected = share_heads(8, 8, 4)
    source = (script.ROOT / FILE).read_text()
    assert source.count("heads % ranks") >= 1
    mutant = script.Mutant(FILE, source.replace("heads % ranks", "heads * ranks"), 1, "% -> *")
    replaced = script.apply_mutant(mutant)
    assert share_heads(8, 8, 4) != expected
    script._restore(replaced)
    assert share_heads(8, 8, 4) == expected


def test_a_mutant_of_no_function_is_refused(script: ModuleType) -> None:
    source = (script.ROOT / FILE).read_text()
    with pytest.raises(ValueError, match="changes no function"):
        script.apply_mutant(script.Mutant(FILE, source, 1, "nothing"))
