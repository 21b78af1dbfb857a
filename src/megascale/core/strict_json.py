"""JSON that every parser accepts: NaN and infinities are written as strings.

Python's json module writes a bare NaN, which is not JSON. `dumps` writes the strings "NaN", "Infinity" and "-Infinity"
instead, and `loads` turns them into floats again. Python's `float` and JavaScript's `Number` also convert these
strings. `loads` can limit size and depth of text from other users.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100  # levels of nested tables; the files of this package have less than ten
MAX_VALUES = 500_000  # values in text of limited size; enough for lists of a hundred thousand files or tensors
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """Serialise like `json.dumps`, with its `options`, but always to valid JSON."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_encode_floats(value), allow_nan=False, **options)


def loads(text: str | bytes, max_bytes: int | None = None) -> Any:
    """Parse like `json.loads`, but return NaN and infinities as floats.

    Raises ValueError for damaged JSON, and for tables nested deeper than MAX_DEPTH. With `max_bytes` it also raises
    ValueError for longer text and for more than MAX_VALUES values. The number of values is limited because an empty
    table takes two bytes of text, but sixty bytes of memory.
    """
    if max_bytes is not None:
        _check_size(text, max_bytes)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"tables are nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    if isinstance(text, bytes):
        string = text.decode(errors="replace")
    else:
        string = text
    if '"NaN"' in string or 'Infinity"' in string:
        return _decode_floats(value)
    return value


def to_float(value: Any) -> float:
    """Return a value as a float; NaN if it is not a number or is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _check_size(text: str | bytes, max_bytes: int) -> None:
    if len(text) > max_bytes:
        raise ValueError(f"{len(text):,} bytes of JSON, at most {max_bytes:,} are allowed")
    if isinstance(text, str):
        data = text.encode()
    else:
        data = text
    # Each value but the first of its table follows a comma, and each table begins with a bracket.
    value_count = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if value_count > MAX_VALUES:
        raise ValueError(f"JSON of {value_count:,} values, at most {MAX_VALUES:,} are allowed")


def _check_depth(value: Any) -> None:
    """Raise ValueError for more than MAX_DEPTH nested tables. The walk goes level by level instead of by recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        tables = [item for item in level if type(item) in (dict, list)]
        if not tables:
            return
        level = []
        for table in tables:
            level.extend(table.values() if type(table) is dict else table)
    raise ValueError(f"tables are nested more than {MAX_DEPTH} deep")


def _encode_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {_encode_floats(key): _encode_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_floats(item) for item in value]
    return value


def _decode_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    return value
