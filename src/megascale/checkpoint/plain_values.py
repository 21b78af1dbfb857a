"""Values that processes of a group tell each other as plain data: nothing of what is received is run. No torch.

Both ends name the type; numbers, texts, bytes, lists, tuples, tables, dataclasses of these, arrays of numbers travel.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from megascale.errors import TrainingError

_Array = tuple[str, tuple[int, ...], bytes]


def dump(value: Any) -> bytes:
    """As bytes; TypeError for what is no plain data."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_value(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """The value, of type `kind`; TrainingError if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_made)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise TrainingError(f"what another process of the group sent is not what was due: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data")


def _made(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"no {kind.__name__} is made of plain data")
    name, shape, data = msgspec.convert(value, _Array)
    dtype = np.dtype(name)
    if dtype.kind not in "biuf" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {name}{list(shape)} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()
