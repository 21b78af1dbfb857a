"""No Python that this package starts imports modules from the working directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megascale
from megascale.core.python_process import drop_own_variables, module_command, protect_children, sleep_at_barriers

PACKAGE = Path(megascale.__file__).parent
# Benches run in a process whose children are protected (cli/bench.py).
SOURCES = [file for file in PACKAGE.rglob("*.py") if PACKAGE / "bench" not in file.parents]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A working directory whose modules leave a file when they run."""
    for name in ("queue", "typer", "pickle", "selectors", "tokenizers"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command", [module_command("megascale", "--version"), [sys.executable, "-m", "megascale", "--version"]]
)
def test_a_module_in_the_working_directory_is_not_imported(hostile, command):
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert not (hostile / "ran").exists()


def test_folders_of_pythonpath_stay(tmp_path):
    (tmp_path / "chosen.py").write_text("print('imported')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        module_command("chosen"), env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert result.stdout == "imported\n"


def test_what_libraries_start_is_protected_too(hostile, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("MEGASCALE_SET_VARIABLES", "")
    command = [sys.executable, "-c", "import queue"]
    subprocess.run(command, check=True)
    assert (hostile / "ran").exists()
    (hostile / "ran").unlink()
    protect_children()
    subprocess.run(command, check=True)
    assert not (hostile / "ran").exists()


def test_every_start_of_python_in_the_package_leaves_the_working_directory_out():
    unsafe = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in SOURCES
        if file.name != "python_process.py"
        for line in file.read_text().splitlines()
        if re.search(r"sys\.executable.*-[mc]\b|\"-m\",|\{python\} -m", line)
    ]
    assert unsafe == []


def test_a_program_of_the_user_gets_the_users_own_variables(monkeypatch):
    for name in ("PYTHONSAFEPATH", "MEGASCALE_SET_VARIABLES"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    before = dict(os.environ)
    protect_children()
    sleep_at_barriers()
    assert os.environ["PYTHONSAFEPATH"] == "1"
    drop_own_variables()
    assert dict(os.environ) == before
