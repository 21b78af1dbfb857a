"""Mutations of Python source: where a module has them, and what they change (scripts/mutate.py).

A mutation changes a comparison, an arithmetic operator or a constant, removes a call, swaps two arguments or negates a
condition.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPERATORS = ("comparison", "arithmetic", "constant", "removed call", "swapped argument", "negated condition")

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # whose mutants negate the comparison
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
# What people read; tests do not compare it word by word.
SPEECH = {"print", "echo", "log", "note", "record_choice", "debug", "info", "warn", "warning", "error", "exception"}
# `strict` of zip checks a fact that holds anyway.
IGNORED_KEYWORDS = {"help", "description", "message", "doc", "strict"}
# A mutant must not end another process or delete another file: arguments of these stay as they are.
HARMFUL = {"kill", "killpg", "pidfd_send_signal", "send_signal", "terminate", "rmtree", "unlink", "remove", "rmdir"}
# Calls that mutants leave out while they keep the receiver, or the first argument.
UNWRAPPED_METHODS = {
    "abs",
    "clamp",
    "clamp_min",
    "clone",
    "copy",
    "detach",
    "lower",
    "resolve",
    "sqrt",
    "square",
    "strip",
}
UNWRAPPED_FUNCTIONS = {"abs", "max", "min", "reversed", "round", "set", "sorted"}
COMMUTATIVE = {"max", "min", "maximum", "minimum", "isclose", "gcd", "lcm", "promote_types"}


@dataclass(frozen=True)
class Mutation:
    """One change of a source file.

    Attributes:
        operator: one of OPERATORS.
        start, stop: the bytes of the file that `replacement` takes the place of.
        line: number of the line where they begin, from 1.
        line_text: that line, without surrounding white space.
        change: the smallest expression around it, before and after: `a < b -> a <= b`.
    """

    operator: str
    start: int
    stop: int
    replacement: bytes
    line: int
    line_text: str
    change: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this change."""
        return source[: self.start] + self.replacement + source[self.stop :]


class MutationFinder(ast.NodeVisitor):
    """Collects the mutations of one module.

    Docstrings, annotations, decorators, assertions, texts for people, `__all__`, blocks for type checkers and GPU
    kernels (functions under `@jit`, which CPU tests do not run) have none.
    """

    def __init__(self, source: bytes) -> None:
        self.source = source
        lines = source.split(b"\n")
        self.lines = [line.decode() for line in lines]
        self.line_starts = [0]
        for line in lines:
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)
        self.mutations: list[Mutation] = []
        self.visit(ast.parse(source))

    # positions --------------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first byte of a node and the one behind its last."""
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, stop

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        start, stop = self.span(node)
        return self.source[start:stop].decode()

    def add(self, operator: str, around: ast.AST, start: int, stop: int, replacement: str) -> None:
        """Keep the mutation that replaces bytes start to stop, which lie in the node `around`."""
        first, last = self.span(around)
        new = replacement.encode()
        before = self.source[first:last].decode()
        after = (self.source[first:start] + new + self.source[stop:last]).decode()
        line = self.source.count(b"\n", 0, start) + 1
        change = f"{' '.join(before.split())} -> {' '.join(after.split())}"
        self.mutations.append(Mutation(operator, start, stop, new, line, self.lines[line - 1].strip(), change))

    def add_token(
        self, operator: str, around: ast.AST, remaining: ast.AST, right: ast.AST, old: str, new: Iterable[str]
    ) -> None:
        """Keep the mutations that replace the token `old`, which stands between two nodes."""
        start, stop = self.span(remaining)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[start:stop])
        token = re.search(rb"\s+".join(re.escape(word.encode()) for word in old.split()), gap)
        if token is None:
            return
        for text in new:
            self.add(operator, around, start + token.start(), start + token.end(), text)

    # what has no mutants ------------------------------------------------------------------------------------------

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip errors: which one is raised is mostly its text."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: no correct program meets one that fails."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value only."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit what is assigned, unless it is a list of names."""
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not names & {"__all__", "__slots__"}:
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body only."""
        self.visit_statements(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit defaults and body."""
        if any(_last_name(decorator) == "jit" for decorator in node.decorator_list):
            return
        for default in tuple(node.args.defaults) + tuple(node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.visit_statements(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_statements(self, statements: Sequence[ast.stmt]) -> None:
        """Visit each of them."""
        for statement in statements:
            self.visit(statement)

    # what has -----------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call whose result is not used."""
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            if not _is_speech(value):
                self.add("removed call", node, *self.span(node), "pass")
            self.visit(value)
        elif not isinstance(value, ast.Constant):
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap neighbouring arguments; leave out calls that keep the kind of a value."""
        name = _last_name(node.func)
        if _is_speech(node):
            return
        if name in HARMFUL:
            self.visit(node.func)
            return
        pairs = [] if name in COMMUTATIVE else list(zip(node.args, node.args[1:], strict=False))
        for remaining, right in pairs:
            texts = self.text(remaining), self.text(right)
            if texts[0] == texts[1] or ast.Starred in (type(remaining), type(right)):
                continue
            start, stop = self.span(remaining)[0], self.span(right)[1]
            between = self.source[self.span(remaining)[1] : self.span(right)[0]].decode()
            self.add("swapped argument", node, start, stop, texts[1] + between + texts[0])
        if isinstance(node.func, ast.Attribute) and name in UNWRAPPED_METHODS:
            name_start = self.span(node.func)[1] - len(name)
            self.add("removed call", node, self.source.rindex(b".", 0, name_start), self.span(node)[1], "")
        elif isinstance(node.func, ast.Name) and name in UNWRAPPED_FUNCTIONS and node.args:
            first = node.args[0]
            if not isinstance(first, (ast.Starred, ast.GeneratorExp)):
                self.add("removed call", node, *self.span(node), f"({self.text(first)})")
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in IGNORED_KEYWORDS:
                self.visit(keyword.value)

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        if _last_name(node.test) == "TYPE_CHECKING":
            self.visit_statements(node.orelse)
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Negate the conditions."""
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, condition: ast.expr) -> None:
        """Keep the mutation that negates a condition."""
        # `visit_UnaryOp` and `visit_Compare` make these.
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            return
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], OPPOSITES):
            return
        self.add("negated condition", condition, *self.span(condition), f"not ({self.text(condition)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out `not` and `-`."""
        kinds = {ast.Not: "negated condition", ast.USub: "arithmetic"}
        kind = kinds.get(type(node.op))  # type: ignore[call-overload]
        if kind is not None:
            start, stop = self.span(node)
            self.add(kind, node, start, stop, f"({self.text(node.operand)})")
        self.visit(node.operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange `and` and `or`."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for remaining, right in zip(node.values, node.values[1:], strict=False):
            self.add_token("negated condition", node, remaining, right, old, [new])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Exchange the operators."""
        operands = [node.left] + list(node.comparators)
        for operator, remaining, right in zip(node.ops, operands, operands[1:], strict=False):
            old, new = COMPARISONS[type(operator)]
            self.add_token("comparison", node, remaining, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange the operator, unless texts are joined or types are united."""
        if type(node.op) in ARITHMETIC and not any(_is_text_or_type(side) for side in (node.left, node.right)):
            old, new = ARITHMETIC[type(node.op)]
            self.add_token("arithmetic", node, node.left, node.right, old, [new])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Exchange the operator."""
        if type(node.op) in ARITHMETIC and not _is_text_or_type(node.value):
            old, new = ARITHMETIC[type(node.op)]
            self.add_token("arithmetic", node, node.target, node.value, f"{old}=", [f"{new}="])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change numbers and truth values."""
        value = node.value
        if isinstance(value, bool):
            changed: list[Any] = [not value]
        elif isinstance(value, int):
            changed = [value + 1, value - 1] if value > 0 else [value + 1]
        elif isinstance(value, float):
            changed = [value * 2 if value else 1.0]
        else:
            return
        for new in changed:
            self.add("constant", node, *self.span(node), repr(new))


def _last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, or of what is called; empty for other nodes."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_speech(call: ast.Call) -> bool:
    return _last_name(call.func) in SPEECH


def _is_text_or_type(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
        return True
    if isinstance(node, ast.Constant) and node.value is None:
        return True
    return isinstance(node, ast.Name) and (node.id[:1].isupper() and not node.id.isupper())


def find_mutations(source: bytes) -> list[Mutation]:
    """Return the mutations of a module, in the order of their places."""
    return sorted(MutationFinder(source).mutations, key=lambda each: (each.start, each.stop, each.replacement))


def is_valid(source: bytes, mutation: Mutation) -> bool:
    """Check that a mutant compiles and that its syntax tree differs."""
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def draw(candidates: Sequence[tuple[str, Mutation]], seed: str) -> Iterator[tuple[str, Mutation]]:
    """Yield all (file, mutation) in an order drawn from the seed, in turn over the operators."""
    by_operator: dict[str, list[tuple[str, Mutation]]] = defaultdict(list)
    for file, mutation in candidates:
        by_operator[mutation.operator].append((file, mutation))
    generator = random.Random(seed)
    for operator in OPERATORS:
        generator.shuffle(by_operator[operator])
    while any(by_operator.values()):
        for operator in OPERATORS:
            if by_operator[operator]:
                yield by_operator[operator].pop()
