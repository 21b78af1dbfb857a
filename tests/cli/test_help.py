"""`megascale --help`: read at once, since no command's packages are loaded for it; the list of benches is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from megascale import bench
from megascale.cli.bench import BENCHES
from megascale.cli.main import COMMANDS, app, command_line

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
    """For a command that the table lacks, all others are made too."""
    made = {
        command: module for module in set(COMMANDS.values()) for command in get_command(command_line([module])).commands
    }
    assert made == COMMANDS


def test_a_command_makes_no_module_but_its_own():
    code = (
        "import json, sys\n"
        "from megascale.cli.main import main\n"
        "sys.argv[1:] = ['decline', '--help']\n"
        "try:\n    main()\n"
        "finally:\n    json.dump(list(sys.modules), sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    made = {f"megascale.cli.{module}" for module in COMMANDS.values()} & set(json.loads(done.stderr))
    assert made == {"megascale.cli.decline"}
    assert "Usage: megascale decline" in done.stdout or "megascale decline" in done.stdout


def test_every_bench_is_in_the_list():
    folder = Path(bench.__file__).parent
    with_commands = {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if "\ndef register(" in file.read_text()
    }
    assert with_commands == set(BENCHES.values())
    shown = CliRunner().invoke(app, ["bench", "--help"]).output.split()
    group = get_command(app).commands["bench"]
    assert group.list_commands(None) == list(BENCHES)
    for name, module in BENCHES.items():
        assert (
            get_command(app).commands["bench"].get_command(None, name).callback.__module__
            == f"megascale.bench.{module}"
        )
    assert set(group.list_commands(None)) <= set(shown)


def leaf_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that takes no further command, with the words that call it."""
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        yield from leaf_commands(command.get_command(None, name), (*words, name))


def test_help_shows_words_in_brackets(monkeypatch):
    """Rich takes `[word]` for markup and drops it, so that help texts of benches must escape the bracket."""
    monkeypatch.setenv("COLUMNS", "200")
    bracketed = re.compile(r"\\?(\[[a-z][^\[\]]*\])")
    checked = 0
    for words, command in leaf_commands(get_command(app)):
        help_texts = [getattr(parameter, "help", None) or "" for parameter in command.params]
        expected = [text for help_text in help_texts for text in bracketed.findall(help_text)]
        if not expected:
            continue
        output = CliRunner().invoke(app, [*words, "--help"]).output
        shown = "".join(re.sub("[│╭╮╰╯─]", "", output).split())
        for text in expected:
            assert "".join(text.split()) in shown, f"{' '.join(words)}: {text} is not shown"
            checked += 1
    assert checked
