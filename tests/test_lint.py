"""Tests of `make lint`: import contracts and names on a tiny tree, and the style report on a tiny file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / ".importlinter"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make empty packages and modules: all that the contracts name, and those of the first level."""
    folder = tmp_path_factory.mktemp("tree")
    text = CONTRACTS.read_text()
    layers = re.findall(r"^containers =\n    (\S+)\nlayers =\n((?:    .+\n)+)", text, re.MULTILINE)
    assert len(layers) == text.count("type = layers")
    names = {f"{container}.{name}" for container, lines in layers for name in re.findall(r"\w+", lines)}
    for name in names | set(re.findall(r"megascale(?:\.\w+)+", text)):
        package = folder.joinpath(*name.split("."))
        package.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks").mkdir()
    (folder / "tests" / "chaos").mkdir(parents=True)
    for package in [path for path in folder.rglob("*") if path.is_dir()]:
        (package / "__init__.py").touch()
    return folder


def lint_imports(tree: Path) -> tuple[int, str]:
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is not installed (extra: dev)")
    result = subprocess.run(
        [program, "--no-logo", "--no-cache", "--config", CONTRACTS],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def test_a_tree_that_keeps_the_table_passes(tree: Path) -> None:
    (tree / "megascale/train/loop.py").write_text("import megascale.core.grid\n")
    (tree / "megascale/core/grid.py").write_text("import megascale.config\n")
    try:
        code, text = lint_imports(tree)
    finally:
        (tree / "megascale/train/loop.py").unlink()
        (tree / "megascale/core/grid.py").unlink()
    assert code == 0, text
    assert " 0 broken" in text


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({"train/runs.py": "import benchmarks"}, "megascale is not allowed to import benchmarks"),
        ({"bench/runs.py": "import megascale.cli"}, "megascale.bench is not allowed to import megascale.cli"),
        ({"data/feed.py": "import megascale.parallel"}, "megascale.data is not allowed to import megascale.parallel"),
        ({"core/grid.py": "def f():\n    import torch"}, "megascale.core is not allowed to import torch"),
        (
            {"train/a.py": "import megascale.train.b", "train/b.py": "def f():\n    import megascale.train.a"},
            "No cycles are allowed in megascale.train",
        ),
    ],
)
def test_an_import_against_the_table_is_found(tree: Path, files: dict[str, str], finding: str) -> None:
    try:
        for name, text in files.items():
            (tree / "megascale" / name).write_text(text + "\n")
        code, text = lint_imports(tree)
    finally:
        for name in files:
            (tree / "megascale" / name).unlink(missing_ok=True)
    assert code == 1, text
    assert finding in text


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("from package.part import Present, later, VALUE", None),
        ("import package.part, os.nothing", None),
        ("from .part import Present", None),
        ("from package import open_names\nfrom package.open_names import anything", None),
        ("from package.loose import alone\nimport package.loose.alone", None),
        ("def run(monkeypatch):\n    monkeypatch.setattr('package.part.Present.method', 1)", None),
        ("import package.absent", "absent in package"),
        ("from package import absent", "absent in package"),
        ("from package.part import Absent", "Absent in package.part"),
        ("from .part import inner", "inner in package.part"),
        ("def run():\n    from package.loose import absent", "absent in package.loose"),
        ("def run(mock):\n    mock.patch('package.part.absent')", "absent in package.part"),
    ],
)
def test_an_import_of_a_name_that_does_not_exist_is_found(tmp_path: Path, text: str, missing: str | None) -> None:
    package = tmp_path / "package"
    (package / "loose").mkdir(parents=True)
    (package / "loose" / "alone.py").touch()
    (package / "__init__.py").touch()
    (package / "open_names.py").write_text("def __getattr__(name): ...\n")
    (package / "part.py").write_text(
        "class Present:\n    def method(self):\n        inner = 1\nif Present:\n    def later(): ...\nVALUE: int = 1\n"
    )
    (package / "user.py").write_text(text + "\n")
    script = ROOT / "scripts" / "check_imports.py"
    check = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    findings = check.stdout.splitlines()
    assert (check.returncode, check.stderr) == (int(missing is not None), "")
    assert len(findings) == check.returncode
    if missing is not None:
        assert findings[0].startswith(f"{package / 'user.py'}:{text.count(chr(10)) + 1}: ")
        assert findings[0].endswith(f"there is no {missing}")


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("result = 1", None),
        ("found = 1", "name `found`"),
        ("def run(told_active): ...", "part of the name `told_active`"),
        ("class GradLadder: ...", "part of the name `GradLadder`"),
        ("def test_the_one_that_was_told(): ...", None),
        ("def __add__(self, other): ...", None),
        ("left, right = sides", None),
        ("a, b, c = 1, 2, 3", "three or more values assigned in one statement"),
        ('def run():\n    """Of the steps, those that ran."""', "docstring: Of the steps"),
        ('def run():\n    """What a rank did."""', "docstring: What a rank did."),
    ],
)
def test_the_style_report_lists_a_finding(tmp_path: Path, text: str, finding: str | None) -> None:
    (tmp_path / "module.py").write_text(text + "\n")
    script = ROOT / "scripts" / "style_report.py"
    report = subprocess.run([sys.executable, script, tmp_path, "--where", "9"], capture_output=True, text=True)
    assert report.returncode == 0, report.stderr
    findings = [line for line in report.stdout.splitlines() if "module.py:" in line]
    assert len(findings) == (finding is not None), report.stdout
    assert finding is None or finding in findings[0]


def test_files_that_comments_name_are_there() -> None:
    """`(exchange.py)` and `ops/linear.py` in the sources: a reader who follows them finds a file."""
    source = ROOT / "src" / "megascale"
    files = [
        f"/{file.relative_to(ROOT).as_posix()}"
        for file in [p for name in ("src", "benchmarks", "tests", "scripts") for p in (ROOT / name).rglob("*.py")]
    ]
    peers = {"begun.py", "megatron/core/datasets/indexed_dataset.py"}  # a user's and Megatron's
    lost = [
        f"{file.relative_to(source)}: {name}"
        for file in sorted(source.rglob("*.py"))
        for name in re.findall(r"(?<![\w/.{}*-])((?:[\w-]+/)*[\w-]+\.py)\b", file.read_text())
        if name not in peers and not any(present.endswith(f"/{name}") for present in files)
    ]
    assert lost == []


def test_tests_stand_where_their_packages_do() -> None:
    """Check that tests of a package are under its own path, except tests of all packages or of a real cluster."""
    together = {"exact", "extend", "gpu", "kubernetes", "slurm", "chaos"}
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    lost = [
        folder
        for folder in folders
        if not any(
            (base / folder).is_dir()
            for base in (ROOT / "src/megascale", ROOT)
            if base != ROOT or folder.parts[:1] == ("benchmarks",)
        )
    ]
    assert [folder.as_posix() for folder in lost if folder.parts[0] not in together] == []
