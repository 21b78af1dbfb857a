#!/usr/bin/env python3
"""Checks that each import of a module or name of this repository exists: a renamed name fails here, not in a test run.

    scripts/check_imports.py                    src, benchmarks, tests, scripts and examples of this checkout
    scripts/check_imports.py FOLDER...          the Python files of these folders; absolute names start at the first

Imports inside functions count too, and so do dotted texts (`"megascale.core.grid.Grid"`) given to `patch`, `setattr`
and `delattr`. Nothing is imported: modules are parsed, so it takes about three seconds and needs no dependency. The
exit code is 1 if a name is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "benchmarks", "tests", "scripts", "examples")
PATCHES = {"patch", "setattr", "delattr"}


class Checkout:
    """The modules below some folders, by dotted name; a package is its `__init__.py`, or a folder without one."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self.packages = {path.name for root in roots for path in root.iterdir() if (path / "__init__.py").exists()}
        self.find_file = cache(self._find_file)
        self.list_names = cache(self._list_names)

    def _find_file(self, module: str) -> Path | None:
        """Return the file of a module, the folder of a package without `__init__.py`, or None if it is missing."""
        parts = module.split(".")
        for root in self._roots:
            base = root.joinpath(*parts)
            for file in (base / "__init__.py", base.with_suffix(".py"), base):
                if file.exists():
                    return file
        return None

    def _list_names(self, module: str) -> frozenset[str]:
        """Return the names that a module defines at its top level."""
        file = self.find_file(module)
        if file is None or file.is_dir():
            return frozenset()
        names: set[str] = set()
        for node in _walk_module(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
        return frozenset(names | {"__file__", "__name__", "__doc__"})

    def has(self, module: str, name: str) -> bool:
        """Return whether a module has a name or a submodule."""
        names = self.list_names(module)
        return name in names or "__getattr__" in names or self.find_file(f"{module}.{name}") is not None

    def find_missing(self, name: str) -> str:
        """Return what a dotted name lacks, as `name in module`, or an empty string; attributes of classes count."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            module = ".".join(parts[:count])
            if not self.has(module, parts[count]):
                return f"{parts[count]} in {module}"
            if self.find_file(f"{module}.{parts[count]}") is None:
                break
        return ""


def _walk_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: all outside functions and classes, and these themselves."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _walk_module(child)


def _list_references(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import and patched name of a module in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            module = list(base) + list(filter(None, [node.module]))
            for alias in node.names:
                yield node.lineno, ".".join(list(module) + [alias.name]).removesuffix(".*")
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = getattr(function, "attr", None) or getattr(function, "id", None)
            target = node.args[0]
            if name in PATCHES and isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def check_folder(folder: Path, root: Path, checkout: Checkout) -> list[str]:
    """Return a line for each missing name in the files of a folder; packages are named from `root`."""
    findings = []
    for file in sorted(folder.rglob("*.py")):
        if any(part.startswith(".") or part == "node_modules" for part in file.relative_to(folder).parts):
            continue
        package = ".".join(file.relative_to(root).parent.parts)
        for line, name in _list_references(ast.parse(file.read_bytes()), package):
            if name.partition(".")[0] not in checkout.packages:
                continue
            missing = checkout.find_missing(name)
            if missing:
                findings.append(f"{file}:{line}: {name} does not exist: there is no {missing}")
    return findings


def main() -> int:
    """Check the folders; return 1 if a name is missing."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    if folders:
        roots = folders
    else:
        roots = [ROOT / "src", ROOT]
        folders = [ROOT / name for name in FOLDERS]
    checkout = Checkout(roots)
    findings = []
    for folder in folders:
        root = folder if folder in roots else folder.parent
        findings += check_folder(folder, root, checkout)
    for finding in findings:
        print(finding)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
