"""Wheel of `pip install`: it has all files that the commands read, and works outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "wheel"] + options + ["-w", out, ROOT], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_what_the_source_tree_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src" / "megascale"
    expected = {
        f"megascale/{file.relative_to(source)}"
        for file in source.rglob("*")
        if file.is_file() and file.suffix != ".pyc" and "node_modules" not in file.parts
    }
    assert expected <= names
    assert "megascale/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def test_its_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    result = message_from_string(archive.read(name).decode())
    assert result["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in result.get_all("Classifier")
    needs = [need for need in result.get_all("Requires-Dist") if "extra ==" not in need]
    # Light: what only some runs need is an extra.
    assert not [need for need in needs if need.startswith(("tensorboard", "wandb", "fastapi", "kubernetes", "numba"))]


def test_it_works_outside_the_checkout(wheel, tmp_path):
    folder = tmp_path / "site"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install"] + options + [wheel], check=True)

    program = """
import sys, megascale
from megascale.cli.main import main
print(megascale.__file__)
for words in (["config", "lr"], ["train", "--model.preset=gpt2-124m", "--dry-run"]):
    sys.argv = ["megascale", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder))
    assert "lr.warmup_steps" in done.stdout
    assert "parameters: 124" in done.stdout
