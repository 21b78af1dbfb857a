"""`megascale --help`: no heavy import; complete lists of commands, benchmarks and campaigns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import BENCHMARKS
from megascale.cli.bench import BENCHES, MOVED
from megascale.cli.main import COMMANDS, PANELS, app, make_command_line
from tests.chaos import __main__ as chaos
from tests.chaos.__main__ import CAMPAIGNS
from tests.test_commands import parse

ROOT = Path(__file__).parents[2]

# Each takes longer to load than all that --help needs (asyncio and multiprocessing are loaded by benches).
HEAVY = {"torch", "numpy", "pydantic", "matplotlib", "tokenizers", "asyncio", "multiprocessing", "megascale.bench"}


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import json, sys\n"
        "from megascale.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "json.dump(list(sys.modules), sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(json.loads(done.stderr))
    assert set(COMMANDS) <= set(done.stdout.split())


def test_a_command_is_made_by_the_module_that_the_table_names():
    """A command that the table lacks makes all others, too."""
    built = {
        command: module
        for module in set(COMMANDS.values())
        for command in get_command(make_command_line([module])).commands
    }
    assert built == COMMANDS


def test_a_command_makes_no_module_but_its_own():
    code = (
        "import json, sys\n"
        "from megascale.cli.main import main\n"
        "sys.argv[1:] = ['decline', '--help']\n"
        "try:\n    main()\n"
        "finally:\n    json.dump(list(sys.modules), sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    built = {f"megascale.cli.{module}" for module in COMMANDS.values()} & set(json.loads(done.stderr))
    assert built == {"megascale.cli.decline"}
    assert "Usage: megascale decline" in done.stdout or "megascale decline" in done.stdout


@pytest.mark.parametrize(
    ("folder", "command", "modules"),
    [
        (ROOT / "src/megascale/bench", get_command(app).commands["bench"], BENCHES),
        (ROOT / "benchmarks", get_command(benchmarks.app), BENCHMARKS),
        (ROOT / "tests/chaos", get_command(chaos.app), CAMPAIGNS),
    ],
    ids=["bench", "benchmarks", "chaos"],
)
def test_every_measurement_is_in_its_list(folder, command, modules):
    with_commands = {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if "\ndef register(" in file.read_text()
    }
    package = {"bench": "megascale.bench"}.get(folder.name, ".".join(folder.relative_to(ROOT).parts))
    assert {f"{package}.{name}" for name in with_commands} == {m for m in modules.values() if m.startswith(package)}
    assert command.list_commands(None) == list(modules)
    for name, module in modules.items():
        assert command.get_command(None, name).callback.__module__ == module


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_bench_that_left_the_package_names_its_new_command(name):
    result = CliRunner().invoke(app, ["bench", name, "--help"])
    program, word = MOVED[name].removeprefix("python -m ").split()[:2]
    assert MOVED[name] in str(result.exception)
    assert word in {"benchmarks": BENCHMARKS, "tests.chaos": CAMPAIGNS}[program]


def leaf_commands(command: Any, arguments: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that takes no further command, with the words that call it."""
    if not hasattr(command, "list_commands"):
        yield arguments, command
        return
    for name in command.list_commands(None):
        yield from leaf_commands(command.get_command(None, name), arguments + (name,))


@pytest.mark.parametrize("app", [app, benchmarks.app], ids=["megascale", "benchmarks"])
def test_help_shows_words_in_brackets(app, monkeypatch):
    """Rich takes `[word]` for markup and drops it, so that help texts of benches must escape the bracket."""
    monkeypatch.setenv("COLUMNS", "200")
    bracketed = re.compile(r"\\?(\[[a-z][^\[\]]*\])")
    checked = 0
    for arguments, command in leaf_commands(get_command(app)):
        help_texts = [getattr(parameter, "help", None) or "" for parameter in command.params]
        expected = [text for help_text in help_texts for text in bracketed.findall(help_text)]
        if not expected:
            continue
        output = CliRunner().invoke(app, list(arguments) + ["--help"]).output
        shown = "".join(re.sub("[│╭╮╰╯─]", "", output).split())
        for text in expected:
            assert "".join(text.split()) in shown, f"{' '.join(arguments)}: {text} is not shown"
            checked += 1
    assert checked


def test_arguments_are_in_capitals_and_flags_have_no_type():
    checked = 0
    for arguments, _ in leaf_commands(get_command(app)):
        output = CliRunner().invoke(app, [*arguments, "--help"]).output
        usage = re.search(rf"{' '.join(arguments)} \[OPTIONS\](.*)", output)
        assert usage is not None, arguments
        assert not re.search(r"[{}]|\[\[|\b[a-z]+\b(?<!toml)", usage[1]), usage[0]
        assert "<bool>" not in output, arguments
        checked += 1
    assert checked > 50
    assert "Missing argument 'RUN'" in CliRunner().invoke(app, ["generate"]).output


def test_examples_of_help_pages_parse():
    """Examples stand on lines of their own, behind "Example:", or as code in a list."""
    examples = []
    for _, command in leaf_commands(get_command(app)):
        text = re.sub(r"\s+\\?\n\s+(?=--|-)", " ", command.help or "")
        examples += re.findall(r"(?:^ *|Example: |`)(megascale [a-z]+ [^`\n]*)", text, re.M)
    assert len(examples) > 80
    for example in examples:
        words = re.split(r" (?:-- |[|>] )|,? and ", example)[0].rstrip(".")
        try:
            parse(words)
        except Exception as error:
            if type(error).__name__ != "MissingParameter" or "-" in words:  # such as a sentence on `megascale plan`
                pytest.fail(f"{words}: {type(error).__name__}: {error}")


def test_each_command_has_one_panel():
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["checkpoint", "list"], ["inspect", "verify", "prune", "reshard"]),
        (["data", "list"], ["build"]),
        (["bench", "disk"], ["train", "kernels"]),
        (["trainn"], ["Did you mean 'train'?"]),
    ],
)
def test_an_unknown_command_is_an_error_that_names_the_commands(arguments, names):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert done.exit_code == 2
    assert f"No such command '{arguments[-1]}'" in done.output
    assert all(name in done.output for name in names)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["data", "build", "--stdlib", "--out", ""], "Invalid value for '--out'"),
        (["data", "build", "--input=", "--out", "data"], "Invalid value for '--input'"),
        (["data", "build", "--input", "", "--out", "."], "Invalid value: "),
        (["monitoring", ""], "Invalid value for 'FOLDER'"),
    ],
)
def test_an_empty_path_is_not_the_working_directory(arguments, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 100)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert done.exit_code == 2
    assert error in done.output
    assert "the path is empty; name a file or a folder, or . for the working directory" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
