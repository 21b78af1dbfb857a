"""JSON that every reader takes: numbers that are none are written as text.

Python writes a bare NaN, which is no JSON. Here nan, inf and -inf become "NaN", "Infinity" and "-Infinity", which
Python's `float` and JavaScript's `Number` read as what they were; `loads` gives floats again.
"""

from __future__ import annotations

import json
import math
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """As `json.dumps`, always valid JSON; `options` are its own."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_plain(value), allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """As `json.loads`, with numbers that `dumps` wrote as text (or older versions bare) as floats again."""
    found = json.loads(text)
    line = text.decode() if isinstance(text, bytes) else text
    return _floats(found) if '"NaN"' in line or 'Infinity"' in line else found


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
