"""Strategies of hypothesis for damaged records, and a memory limit for functions that read them."""

from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

_NUMBERS = (0, -1, 1, 1 << 31, 1 << 53, 1 << 63, -(1 << 63), 10**400, 1e308, -1e308, 5e-324, -0.0)
_NOT_FINITE = (math.nan, math.inf, -math.inf, "NaN", "Infinity", "-Infinity")

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(_NUMBERS + _NOT_FINITE),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(("x" * 5000, "\udcff", "\0", "", "1e400", "step")),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_lines(draw: st.DrawFn, sound: list[dict[str, Any]]) -> bytes:
    """Draw a file of JSON lines. Some records lack keys, have other values or are cut. The end may be cut too."""
    lines = []
    for record in sound:
        damage = draw(st.integers(0, 5))
        changed: Any = dict(record)
        if damage == 1 and changed:
            changed[draw(st.sampled_from(sorted(changed)))] = draw(json_values)
        elif damage == 2 and changed:
            del changed[draw(st.sampled_from(sorted(changed)))]
        elif damage == 3:
            changed = draw(json_values)
        line = json.dumps(changed).encode()
        if damage == 4:
            line = line[: draw(st.integers(0, len(line)))]
        lines.append(line)
    text = b"\n".join(lines) + b"\n"
    if draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))]
    return text + draw(st.sampled_from((b"", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"a"', b"\0" * 100)))


@contextlib.contextmanager
def limited_memory(most: int) -> Iterator[None]:
    """Raise MemoryError in this process where it takes `most` bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
