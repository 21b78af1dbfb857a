"""Completion: settings, their values, presets and clusters, in a real bash with the script that typer installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megascale.cli import completion
from megascale.cli.common import OVERRIDES
from megascale.cli.main import app, list_options
from megascale.config import list_presets
from megascale.simulate.cluster import list_shipped_clusters

BASH = shutil.which("bash")
# Prints COMPREPLY after calling the function that `complete` names, as bash does for a tab.
PROGRAM = "import sys\nsys.argv[0] = 'megascale'\nfrom megascale.cli.main import main\nmain()\n"
CALL = r"""
source "$SCRIPT"
COMP_WORDS=(megascale "$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
function=$(complete -p megascale | sed 's/.*-F \([^ ]*\).*/\1/')
"$function" megascale
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("arguments", "word", "expected"),
    [
        (["train"], "--train.glo", ["--train.global_batch"]),
        (["train", "--model.preset"], "llama3", ["llama3.1-405b", "llama3.1-70b", "llama3.1-8b"]),
        (["train", "--model.preset", "="], "tin", ["tiny"]),
        (["plan", "--model.preset"], "=", list_presets()),
        (["plan"], "--model.preset=tin", ["--model.preset=tiny"]),
        (["simulate", "step", "--cluster"], "h100", ["h100-dgx", "h100-host"]),
        (["simulate", "step", "--cluster", "="], "a8", ["a800"]),
        (["plan", "--device"], "H2", ["H200"]),
        (["train", "--checkpoint.background"], "t", ["true"]),
        (["train", "--parallel.recompute"], "se", ["selective"]),
        (["train", "--data.train"], "", []),  # the shell completes files
        (["config"], "parallel.ten", ["parallel.tensor"]),
        (["config"], "ker", ["kernels"]),
        (["simulate"], "", None),
        (["plan"], "exam", None),
        (["jobs"], "--mod", None),
        ([], "tr", None),
    ],
)
def test_matches(arguments, word, expected):
    matches = completion.list_matches(arguments, word, list_options)
    if expected == ["kernels"]:
        assert matches[0] == "kernels"
        assert all(match.startswith("kernels") for match in matches)
    else:
        assert matches == expected


def test_own_options_join_the_settings():
    assert "--days" in completion.list_matches(["simulate", "search"], "--da", list_options)
    assert "--data.train" in completion.list_matches(["simulate", "search"], "--da", list_options)


def test_commands_with_settings_are_those_that_accept_them():
    def walk(command, path):
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*path, name))
        if OVERRIDES.items() <= command.context_settings.items():
            yield path

    assert set(walk(typer.main.get_command(app), ())) == completion.SETTINGS_COMMANDS


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Return a function that completes the last of its arguments in bash, with the script of --show-completion."""
    if BASH is None:
        pytest.skip("bash is not installed")
    folder = tmp_path_factory.mktemp("bash")
    program = folder / "megascale"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SCRIPT": str(folder / "script")}
    source = environment | {"_MEGASCALE_COMPLETE": "source_bash"}
    script = subprocess.run(["megascale"], env=source, capture_output=True, text=True, check=True)
    Path(environment["SCRIPT"]).write_text(script.stdout)

    def complete(*arguments: str) -> list[str]:
        done = subprocess.run(
            [BASH, "--norc", "-c", CALL, "bash", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(("word", "code"), [("--model.pre", 0), ("--data.train=", 1)])
def test_fish_completes_files_where_there_are_no_matches(word, code):
    request = {
        "_MEGASCALE_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "is-args",
        "_TYPER_COMPLETE_ARGS": f"megascale train {word}",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | request, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")


def test_in_a_real_bash(bash):
    assert bash("train", "--model.preset", "=", "qwen3-0") == ["qwen3-0.6b"]
    assert bash("simulate", "step", "--cluster", "") == list_shipped_clusters()
    assert bash("pla") == ["plan"]  # typer's own
