"""The wheel: it has all files that the commands read, and works outside the checkout."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
URL = "https://code.example/owner/megascale"
SYSTEM_PACKAGES = "sudo scripts/system-packages"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"PROJECT_URL": URL + "/"}
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "wheel"] + options + ["-w", out, ROOT], check=True, env=environment)
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
    assert {f"megascale/examples/{file.name}" for file in (ROOT / "examples").iterdir()} <= names
    assert "megascale/observe/prometheus/rules.yml" in names
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


def test_its_address_comes_from_one_variable(wheel):
    """Check that a package index's README has neither relative links nor placeholders, and only the project's URLs."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = message_from_string(archive.read(name).decode())
    urls = [url.partition(", ")[2] for url in metadata.get_all("Project-URL")]
    assert len(urls) == 5
    assert all(url.startswith(URL) for url in urls)
    text = metadata.get_payload()
    assert "PROJECT_URL" not in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_of_a_readme_become_absolute():
    pytest.importorskip("hatchling")
    names = runpy.run_path(str(ROOT / "scripts" / "package_metadata.py"))
    text = (
        "[![ci](docs/ci.svg)](docs/ci.md) [home](PROJECT_URL) [here](#limits) [away](https://a.example/b)\n"
        '<source srcset="docs/dark.svg"><img src="docs/light.svg"><a href="docs/x.md">'
    )
    assert names["make_links_absolute"](text, "https://u", "v1") == (
        "[![ci](https://u/raw/v1/docs/ci.svg)](https://u/blob/v1/docs/ci.md) [home](https://u) [here](#limits) [away](https://a.example/b)\n"
        '<source srcset="https://u/raw/v1/docs/dark.svg"><img src="https://u/raw/v1/docs/light.svg"><a href="https://u/blob/v1/docs/x.md">'
    )


@pytest.mark.parametrize(
    ("variable", "expected"), [(None, "https://a"), ("", "https://a"), ("https://b/", "https://b")]
)
def test_an_empty_variable_keeps_the_configured_address(tmp_path, monkeypatch, variable, expected):
    pytest.importorskip("hatchling")
    names = runpy.run_path(str(ROOT / "scripts" / "package_metadata.py"))
    (tmp_path / "pyproject.toml").write_text('[tool.megascale]\nproject-url = "https://a"\n')
    monkeypatch.delenv("PROJECT_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("PROJECT_URL", variable)
    assert names["read_project_url"](tmp_path) == expected


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            called |= {command.removeprefix("make ") for command in commands}
            # A runner's user is not root, so `make test` alone would skip the tests of Redis and others.
            if {"make test", "make test-oldest"} & set(commands):
                assert commands[0] == SYSTEM_PACKAGES
    called.discard(SYSTEM_PACKAGES)
    assert {"lint", "test", "wheel"} <= called <= targets


def test_it_works_outside_the_checkout(wheel, tmp_path):
    folder = tmp_path / "site"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install"] + options + [wheel], check=True)

    program = """
import sys, megascale
from megascale.cli.main import main
print(megascale.__file__)
calls = ("config lr", "examples", "examples copied", "train --model.preset=gpt2-124m --dry-run")
for words in map(str.split, calls):
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
    assert re.search(r"stdlib.toml +A small GPT", done.stdout)
    copied = tmp_path / "copied"
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == {
        file.name: file.read_bytes() for file in (ROOT / "examples").iterdir()
    }
    assert "parameters: 124" in done.stdout
