#!/usr/bin/env python3
"""Keeps the field's words: names, messages and documents say what torchtitan's or Kubernetes' readers say.

    scripts/lint_words.py [PATH ...]     (default: src, tests, docs, examples, README.md, CONTRIBUTING.md)

NAMES are parts of identifiers, file names and configuration keys (`round_size` has the parts round and size, and is
itself listed); PROSE are regular expressions over comments, strings and documents. CHANGELOG, docs/log.md and
docs/reports/ tell history in its own words, and `tests/test_lint.py` has old words, since it looks for them.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NAMES: dict[str, str] = {
    "product": "gemm or matmul",
    "products": "gemms or matmuls",
    "beside": "side_stream",
    "settle": "synchronize",
    "unadded": "deferred residual add",
    "reader_sums": "fused_bias_gradient",
    "produces": "recompute_fn",
    "deliver": "accumulate_gradient",
    "credit": "accumulate_gradient",
    "arrive": "pre-forward all-gather hook",
    "grad_unset": "overwrite_main_grad",
    "riders": "piggybacked_scalars",
    "lane": "P2P channel, stream or track",
    "lanes": "P2P channels, streams or tracks",
    "hear": "wait",
    "round_size": "micro_batch_group_size",
    "heed": "handle",
    "telling": "telemetry",
    "news": "events",
    "rung": "recovery_action",
    "rungs": "recovery_actions",
    "ladder": "escalation policy",
    "mending": "recovery",
    "fruitless": "no_progress_limit",
    "stays": "phase_durations",
    "patience": "grace_period",
    "diary": "audit_log",
    "intake": "agent_server",
    "struck": "injected",
    "trouble": "diagnosis",
    "multiprocessor": "SM",
    "multiprocessors": "SMs",
    "cards": "gpus",
    "round_sizes": "group_sizes",
    "find_place": "find_rank_info",
    "split_wide": "split_fused_projection",
    "wide_bias": "fused_bias",
}
# Names of others, which no rule of ours changes.
FOREIGN = re.compile(r"scaled_dot_product\w*|multi_processor_count|ndim_product")
PROSE: dict[str, str] = {
    r"\bmultiprocessors?\b": "SM",
    r"\bnobody watching\b": "unattended",
    r"\bends? quietly\b": "exits cleanly",
    r"\bon the wire\b": "the communication dtype, or in flight",
    r"\bfruitless\b": "without progress",
    r"\brungs?\b": "recovery action",
    r"(?<!Jacob's )(?:(?<!^\")\bladder\b|\bladder\b(?!\"$))": "escalation policy",
    r"\bunadded\b": "deferred residual add",
    r"\briders?\b": "piggybacked scalars",
    r"\bstruck\b": "injected",
    r"\b(?:matrix |wide |weight |independent |first |tensor-parallel )products?\b": "GEMM or matmul",
    r"\bproducts? (?:that|of a layer|pipelined|beside|on two streams)\b": "GEMM or matmul",
    r"(?<!network )(?<!sound )\bcards?\b": "GPU",
    r"\bround size\b": "micro-batch group size",
    r"\bdiary\b": "audit log",
    r"\bsecond stream\b": "side stream",
    r"\bgrad_unset\b": "overwrite_main_grad",
    r"\bwire format\b": "protocol",
    r"\bin office\b|\btook office\b": "the current driver, its epoch",
    r"\bplain products?\b|\bsustained products?\b": "plain or sustained GEMM",
}
HISTORY = (
    "CHANGELOG.md",
    "docs/log.md",
    "docs/reports/",
    "scripts/lint_words.py",
    "tests/test_lint.py",
)


def parts(name: str) -> Iterator[str]:
    """The name and each run of its underscore-separated words, camel case split, all lower case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            yield "_".join(words[start:stop])


def of_name(name: str) -> str | None:
    """What a name should say instead of a word it has, or None."""
    rest = FOREIGN.sub("", name)
    return next((f"{name}: {part} -> {NAMES[part]}" for part in parts(rest) if part in NAMES), None)


def of_text(text: str) -> Iterator[tuple[int, str]]:
    """(line within the text, finding) for each old word in prose."""
    for number, line in enumerate(text.splitlines()):
        for pattern, better in PROSE.items():
            for found in re.finditer(pattern, line):
                yield number, f'"{found[0]}" -> {better}'


def check(path: Path) -> Iterator[str]:
    """Findings of one file, as `path:line: finding`."""
    if (bad := of_name(path.stem)) is not None:
        yield f"{path}:1: {bad}"
    text = path.read_text()
    if path.suffix != ".py":
        yield from (f"{path}:{number + 1}: {finding}" for number, finding in of_text(text))
        return
    borrowed = {"product"} if re.search(r"itertools\.product|from itertools import .*\bproduct\b", text) else set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in borrowed:
            if (bad := of_name(token.string)) is not None:
                yield f"{path}:{token.start[0]}: {bad}"
        elif token.type in (tokenize.STRING, tokenize.COMMENT) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for number, finding in of_text(token.string):
                yield f"{path}:{token.start[0] + number}: {finding}"


def main(words: list[str]) -> int:
    """Print findings; 1 if there are any."""
    places = [Path(w) for w in words] or [
        Path(w) for w in ("src", "tests", "docs", "examples", "README.md", "CONTRIBUTING.md")
    ]
    files = sorted(
        file
        for place in places
        for file in ([place] if place.is_file() else place.rglob("*"))
        if file.suffix in (".py", ".md", ".toml") and not any(word in file.as_posix() for word in HISTORY)
    )
    found = [finding for file in files for finding in check(file)]
    print("\n".join(found) or f"words: {len(files)} files speak the field's words")
    if found:
        print(f"{len(found)} old words; scripts/lint_words.py has the table")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
