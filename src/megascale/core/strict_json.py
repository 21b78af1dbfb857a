"""JSON that every reader takes: numbers that are none are written as text.

Python writes a bare NaN, which is no JSON. Here nan, inf and -inf become "NaN", "Infinity" and "-Infinity", which
Python's `float` and JavaScript's `Number` read as what they were; `loads` gives floats again. Text of strangers is
bounded in bytes and in depth before anything walks through it.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH = 100  # tables in each other: what is read here has less than ten
VALUES = 500_000  # of text that is bounded: the lists of a hundred thousand files or tensors
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """As `json.dumps`, always valid JSON; `options` are its own."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_plain(value), allow_nan=False, **options)


def loads(text: str | bytes, max_bytes: int | None = None) -> Any:
    """As `json.loads`, with numbers that `dumps` wrote as text (or older versions bare) as floats again.

    ValueError also for what is nested deeper than DEPTH; with `most`, for what is longer than that many characters or
    bytes or holds more than VALUES values, since an empty table is of two bytes here and of sixty in memory.
    """
    if max_bytes is not None:
        if len(text) > max_bytes:
            raise ValueError(f"{len(text):,} bytes of JSON where at most {max_bytes:,} are expected")
        data = text.encode() if isinstance(text, str) else text
        count = sum(data.count(mark) for mark in (b",", b"[", b"{"))
        if count > VALUES:
            raise ValueError(f"JSON of {count:,} values where at most {VALUES:,} are expected")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"tables in each other more than {DEPTH} deep") from None
    _check_depth(found)
    line = text.decode(errors="replace") if isinstance(text, bytes) else text
    return _floats(found) if '"NaN"' in line or 'Infinity"' in line else found


def to_float(value: Any) -> float:
    """Return a value of a record as a float, NaN for what is not a number or larger than any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _check_depth(value: Any) -> None:
    """ValueError for more than DEPTH tables in each other; level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(DEPTH + 1):
        tables = [item for item in level if type(item) in (dict, list)]
        if not tables:
            return
        level = [item for table in tables for item in (table.values() if type(table) is dict else table)]
    raise ValueError(f"tables in each other more than {DEPTH} deep")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _floats(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value
