#!/usr/bin/env python3
"""Report how the code and the documents read, next to the same counts for well-known projects.

    scripts/style_report.py                          totals of src, benchmarks, tests and scripts
    scripts/style_report.py --packages               one row per package
    scripts/style_report.py src/megascale/core --where 40 --prose 5
                                                     the first 40 places, and 5 sentences of each kind
    scripts/style_report.py --draw SEED              ten files of src for a reading: ten packages, three large files

The report is a gauge, not a gate: a name or a conditional expression may be right where it stands, and the exit code
is always 0. CONTRIBUTING.md, "How names and sentences are written", has the rules and examples behind each column.

Columns:
    odd names    names that do not say what they hold, per 100,000 names that are bound
    odd parts    names with such a word as a part (`told_active`), per 100,000
    cond. expr.  conditional expressions per 1,000 lines
    3+ assign    assignments of three or more values in one statement, per 1,000 lines
    walrus       assignment expressions per 1,000 lines
    stars        starred expressions per 1,000 lines
    fragment %   docstrings that start with a preposition or a bare `Args:`
    what/who %   docstrings that start with what, who or how
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("src", "benchmarks", "tests", "scripts")

ODD_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    found told one ones place places now whole words about mine kept given left gone wanted asked said say says seen
    known others other both such these those there here its whose who whom what whatever whoever nobody none_such
    again apart beside own same still yet ago since until until_then else_ rest much many few some any_ heard hears
    hear tells tell telling meant means made makes held holds took takes taken brought come came comes goes went
    stands stood lies lay
""",
    )
)
# Old words of this project. The second column is the word of the field.
RETIRED_WORDS = {
    "struck": "injected",
    "ladder": "escalation policy",
    "rung": "recovery action",
    "diary": "audit log",
    "riders": "piggybacked scalars",
    "heed": "handle",
    "mending": "recovery",
    "fruitless": "without progress",
    "multiprocessor": "SM",
    "cards": "gpus",
}

FRAGMENT = re.compile(r"^(Of|As|Those|That|To|By|For|In|With|Whether|Which|From|At|On|Until|Where|When)\b|^Args:")
WHO = re.compile(r"^(What|Who|Whoever|Whatever|How)\b")
PROSE: dict[str, re.Pattern[str]] = {
    "what/who clause as a noun": re.compile(
        r"\b(What|Who|Whoever|Whatever) (is|was|has|had|of|a|an|the|it|they|ends?|starts?|reads?|writes?)\b"
    ),
    "nobody, whoever, whatever, no one": re.compile(r"\b(nobody|whoever|whatever|no one|anybody's)\b", re.IGNORECASE),
    "beside, thereof, of which": re.compile(r"\b(beside|thereof|of which|whereof)\b", re.IGNORECASE),
    "is no X, are none": re.compile(r"(?<!\bthere )\b(is|are|was|were|be) (no|none)\b(?! longer)"),
    "can be had, likes": re.compile(r"\b(can(not)? be had|as \w+ likes?|would like to be)\b", re.IGNORECASE),
    "is told, are said, asked": re.compile(r"\b(is|are|was|were|be) (told|said|asked|heard)\b", re.IGNORECASE),
    "old word of this project": re.compile(r"\b(" + "|".join(RETIRED_WORDS) + r")\b", re.IGNORECASE),
}
LONG_SENTENCE = 25
LONG = f"sentence over {LONG_SENTENCE} words"

# Counts of this script on 2026-11-26, on the wheels of these releases.
COLUMNS = ("odd names", "odd parts", "cond. expr.", "3+ assign", "walrus", "stars", "fragment %", "what/who %")
ANCHORS: dict[str, dict[str, float]] = {
    "torchtitan 0.3.0": dict(zip(COLUMNS, (53, 298, 4.4, 0.1, 0.2, 1.9, 1.3, 0.1), strict=True)),
    "megatron-core 0.16.1": dict(zip(COLUMNS, (12, 165, 4.3, 0.1, 0.1, 2.0, 1.6, 0.0), strict=True)),
    "levanter 1.1": dict(zip(COLUMNS, (99, 258, 1.4, 0.0, 0.0, 3.2, 2.3, 0.0), strict=True)),
}


@dataclass(frozen=True)
class Binding:
    """A name that is bound somewhere.

    Attributes:
        name: the name.
        line: its line.
        function: the name of the innermost function around it, or an empty string.
        siblings: all names bound in that function.
    """

    name: str
    line: int
    function: str
    siblings: frozenset[str]


@dataclass(frozen=True)
class Exemption:
    """A use of an odd word that the report does not count."""

    words: tuple[str, ...]
    reason: str
    applies: Callable[[Binding], bool]


EXEMPTIONS = (
    Exemption(("other",), "the operand of an operator method", lambda b: b.function.startswith("__")),
    Exemption(("since", "until"), "a time range", lambda b: {"since", "until"} <= b.siblings),
    Exemption(("left",), "one of two sides", lambda b: any("right" in name for name in b.siblings)),
    Exemption(("place",), "an in-place operation", lambda b: "in_place" in b.name),
    Exemption(("words",), "the words of a text", lambda b: any("text" in name for name in b.siblings)),
)


@dataclass
class Counts:
    """Counts over some files, and the findings that `--where` lists."""

    values: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[Path, int, str]] = field(default_factory=list)

    def add(self, addend: Counts) -> None:
        """Add the counts and findings of `addend`."""
        self.values += addend.values
        self.findings += addend.findings

    def rates(self) -> dict[str, float]:
        """Return the figure of each column."""
        names = max(self.values["names"], 1) / 100_000
        lines = max(self.values["lines"], 1) / 1_000
        docstrings = max(self.values["docstrings"], 1) / 100
        units = (names, names, lines, lines, lines, lines, docstrings, docstrings)
        return {column: self.values[column] / unit for column, unit in zip(COLUMNS, units, strict=True)}


def iterate_bindings(tree: ast.Module) -> Iterator[Binding]:
    """Yield every name that an assignment, a parameter, a function, a class or an attribute binds."""
    scopes: list[tuple[ast.AST, str]] = [(tree, "")]
    while scopes:
        scope, function = scopes.pop()
        result: list[tuple[str, int]] = []
        nodes = list(ast.iter_child_nodes(scope))
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                result.append((node.id, node.lineno))
            elif isinstance(node, ast.arg):
                result.append((node.arg, node.lineno))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                result.append((node.attr, node.lineno))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                result.append((node.name, node.lineno))
                is_class = isinstance(node, ast.ClassDef)
                scopes.append((node, function if is_class else node.name))
                continue
            nodes.extend(ast.iter_child_nodes(node))
        siblings = frozenset(name for name, _ in result)
        for name, line in result:
            yield Binding(name=name, line=line, function=function, siblings=siblings)


def split_name(name: str) -> set[str]:
    """Return the lower-case words of a snake-case or camel-case name."""
    return {part for part in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if part}


def is_exempt(binding: Binding, word: str) -> bool:
    """Return whether an exemption covers `word` in this binding."""
    return any(word in exemption.words and exemption.applies(binding) for exemption in EXEMPTIONS)


def count_names(path: Path, tree: ast.Module, counts: Counts) -> None:
    """Count names, names that are odd words, and names with odd or retired words as parts."""
    for binding in iterate_bindings(tree):
        counts.values["names"] += 1
        full = binding.name.lower().strip("_")
        if full in ODD_WORDS:
            if not is_exempt(binding, full):
                counts.values["odd names"] += 1
                counts.findings.append((path, binding.line, f"name `{binding.name}`"))
            continue
        if binding.name.startswith("test_"):
            continue  # The name of a test is a sentence.
        parts = {part.lower() for part in split_name(binding.name)}
        odd = {word for word in parts & ODD_WORDS if not is_exempt(binding, word)}
        if odd or parts & RETIRED_WORDS.keys():
            counts.values["odd parts"] += 1
            counts.findings.append((path, binding.line, f"part of the name `{binding.name}`"))


def count_statements(path: Path, tree: ast.Module, counts: Counts) -> None:
    """Count the statements and expressions that pack several steps into one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            counts.values["cond. expr."] += 1
        elif isinstance(node, ast.NamedExpr):
            counts.values["walrus"] += 1
        elif isinstance(node, ast.Starred):
            counts.values["stars"] += 1
        elif isinstance(node, ast.Assign) and is_packed_assignment(node):
            counts.values["3+ assign"] += 1
            counts.findings.append((path, node.lineno, "three or more values assigned in one statement"))


def is_packed_assignment(node: ast.Assign) -> bool:
    """Return whether an assignment binds three or more names to a literal tuple of values."""
    target = node.targets[0]
    return isinstance(target, ast.Tuple) and len(target.elts) >= 3 and isinstance(node.value, ast.Tuple)


def count_docstrings(path: Path, tree: ast.Module, counts: Counts) -> None:
    """Count docstrings and those that start with a fragment or a what/who clause."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        counts.values["docstrings"] += 1
        first_line = docstring.strip().splitlines()[0]
        for column, pattern in (("what/who %", WHO), ("fragment %", FRAGMENT)):
            if pattern.match(first_line):
                counts.values[column] += 1
                line = getattr(node, "lineno", 1)
                counts.findings.append((path, line, f"docstring: {first_line[:90]}"))
                break


def count_file(path: Path) -> Counts:
    """Return the counts of one Python file. A file that does not parse counts as empty."""
    counts = Counts()
    text = path.read_text(errors="replace")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return counts
    counts.values["files"] += 1
    counts.values["lines"] += text.count("\n") + 1
    counts.values["statements"] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    count_names(path, tree, counts)
    count_statements(path, tree, counts)
    count_docstrings(path, tree, counts)
    return counts


def find_prose(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, text) for each odd sentence of a document, or line of a source file."""
    text = path.read_text(errors="replace")
    is_document = path.suffix == ".md"
    inside_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if is_document and line.startswith("```"):
            inside_code = not inside_code
        if inside_code:
            continue
        for kind, pattern in PROSE.items():
            if pattern.search(line):
                yield kind, number, line.strip()[:110]
    if is_document:
        for sentence in iterate_sentences(text):
            if len(sentence.split()) > LONG_SENTENCE:
                yield LONG, 0, sentence[:110]


def iterate_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a document's paragraphs, without code, tables, lists and headings."""
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", without_code):
        is_code = paragraph.startswith("    ")
        if not is_code and not paragraph.lstrip().startswith(("|", "-", "#", "!", "`")):
            yield from re.split(r"(?<=[.!?:])\s+", paragraph.replace("\n", " "))


def list_documents() -> list[Path]:
    """Return the user's documents. The log and the reports in dev/ are history and keep their words."""
    return list(ROOT.glob("*.md")) + list((ROOT / "docs").rglob("*.md"))


def group_files(paths: list[Path], by_package: bool) -> dict[str, list[Path]]:
    """Return the Python files under `paths`, by path or by the package below it."""
    groups: dict[str, list[Path]] = {}
    for root in paths:
        base = root / "megascale" if by_package and root.name == "src" else root
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            relative = file.relative_to(base).parts if root.is_dir() else ()
            label = base if not by_package or len(relative) < 2 else base / relative[0]
            groups.setdefault(relative_name(label), []).append(file)
    return groups


def draw_files(root: Path, seed: str) -> list[tuple[Path, int]]:
    """Draw ten files with their line counts: one per package, three of the largest third of all files.

    Files named `__init__.py`, files of fewer than 40 lines and modules outside a package are not drawn.
    """
    lines = {path: path.read_text().count("\n") for path in sorted(root.rglob("*.py")) if path.name != "__init__.py"}
    lines = {path: count for path, count in lines.items() if count >= 40 and path.parent != root}
    by_size = sorted(lines, key=lambda path: (-lines[path], path))
    large = set(by_size[: len(by_size) // 3])
    by_package: dict[str, list[Path]] = {}
    for path in lines:
        by_package.setdefault(path.relative_to(root).parts[0], []).append(path)
    generator = random.Random(seed)
    selected: list[Path] = []
    packages_of_large = sorted({path.relative_to(root).parts[0] for path in large})
    for package in generator.sample(packages_of_large, 3):
        selected.append(generator.choice([path for path in by_package.pop(package) if path in large]))
    for package in generator.sample(sorted(by_package), 7):
        smaller = [path for path in by_package[package] if path not in large]
        selected.append(generator.choice(smaller or by_package[package]))
    return [(path, lines[path]) for path in selected]


def relative_name(path: Path) -> str:
    """Return a path relative to the repository where it is inside."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def print_row(label: str, values: Counter[str] | None, rates: dict[str, float]) -> None:
    """Print one line of the table."""
    sizes = [f"{values[column]:,}" if values else "" for column in ("files", "lines", "statements")]
    figures = [f"{value:.0f}" if column.startswith("odd") else f"{value:.1f}" for column, value in rates.items()]
    print(f"{label:27}{sizes[0]:>6}{sizes[1]:>9}{sizes[2]:>12}" + "".join(f"{figure:>12}" for figure in figures))


def main() -> None:
    """Print the table, the findings and the counts of sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: src benchmarks tests scripts")
    parser.add_argument("--packages", action="store_true", help="print one row per package")
    parser.add_argument("--where", type=int, default=0, metavar="N", help="list the first N findings")
    parser.add_argument("--prose", type=int, default=0, metavar="N", help="list N sentences of each kind")
    parser.add_argument("--draw", metavar="SEED", help="draw ten files for a reading by this seed, and exit")
    parser.add_argument("--exemptions", action="store_true", help="list the exemptions and exit")
    arguments = parser.parse_args()
    if arguments.exemptions:
        for exemption in EXEMPTIONS:
            print(f"{', '.join(exemption.words):16}{exemption.reason}")
        return
    if arguments.draw is not None:
        print(f"seed {arguments.draw}")
        for path, lines in draw_files(ROOT / "src" / "megascale", seed=arguments.draw):
            print(f"{lines:6}  {relative_name(path)}")
        return
    paths = [path.resolve() for path in arguments.paths] or [ROOT / area for area in AREAS]
    groups = group_files(paths, arguments.packages)
    counts = {label: Counts() for label in groups}
    for label, files in groups.items():
        for file in files:
            counts[label].add(count_file(file))
    print(f"{'':27}{'files':>6}{'lines':>9}{'statements':>12}" + "".join(f"{column:>12}" for column in COLUMNS))
    for label, rates in ANCHORS.items():
        print_row(label, None, rates)
    for label, group in sorted(counts.items()):
        print_row(label, group.values, group.rates())
    findings = [finding for group in counts.values() for finding in group.findings]
    for path, line, text in findings[: arguments.where]:
        print(f"  {relative_name(path)}:{line}  {text}")
    if not arguments.paths:
        groups["documents"] = list_documents()
    print_prose(groups, limit=arguments.prose)


def print_prose(groups: dict[str, list[Path]], limit: int) -> None:
    """Print the sentences of each kind per group of files, and the first `limit` of each kind."""
    script = Path(__file__).resolve()
    areas = list(dict.fromkeys(label.split("/")[0] for label in groups))
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in list(PROSE) + [LONG]}
    examples: dict[str, list[str]] = {kind: [] for kind in counts}
    for label, files in groups.items():
        for file in files:
            if file.resolve() == script:
                continue
            for kind, line, text in find_prose(file):
                counts[kind][label.split("/")[0]] += 1
                examples[kind].append(f"{relative_name(file)}:{line}  {text}")
    print("\nSentences in documents, docstrings, comments and messages. Many may be right.")
    print(f"{'':36}" + "".join(f"{area:>12}" for area in areas))
    for kind, count in counts.items():
        print(f"  {kind:34}" + "".join(f"{count[area]:>12,}" for area in areas))
        for example in examples[kind][:limit]:
            print(f"      {example}")


if __name__ == "__main__":
    main()
