"""Checks of the arrays that a package's format of token files provides. They read a few elements, and document starts.

NumPy converts many wrong arrays without an error: fractions become integers, and unsorted starts match no document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.core.batch import SampleFields
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import DataError

# Kinds of NumPy's types, as in `dtype.kind`.
_INTEGERS = "iu"
_NUMBERS = "iufb"
_KIND_NAMES = {_INTEGERS: "integers", _NUMBERS: "numbers"}


def check_token_file(file: TokenFile, fields: SampleFields) -> None:
    """Raise DataError if the file's arrays do not fit its number of tokens or the announced fields."""
    tokens = file.tokens
    if not isinstance(tokens, int | np.integer) or tokens < 0:
        raise DataError(f"{file.prefix}: the format's `tokens` is {tokens!r}; set it to the number of tokens")
    if not tokens:
        return
    _check_array(file, "stream", file.stream, _INTEGERS)
    if not hasattr(file.stream[:1], "nbytes"):
        raise DataError(
            f"{file.prefix}: the format's `stream` is of type {type(file.stream).__name__}; return a NumPy array, such "
            "as numpy.asarray(tokens)"
        )
    _check_field(file, "loss_weights", fields.loss_weights, _NUMBERS)
    _check_field(file, "positions", fields.positions, _INTEGERS)
    starts = file.document_starts
    if starts is None and fields.max_documents:
        raise _missing_field(file, "document_starts", "max_documents")
    if starts is not None:
        _check_document_starts(file, np.asarray(starts))


def _check_field(file: TokenFile, name: str, is_announced: bool, kinds: str) -> None:
    """Check an optional field of the format."""
    array = getattr(file, name)
    if is_announced and array is None:
        raise _missing_field(file, name, name)
    if array is None:
        return
    if not is_announced:
        raise DataError(
            f"{file.prefix}: the format has `{name}`, which its method `fields` does not announce, so that they would "
            f"be ignored; let `fields` return SampleFields({name}=True)"
        )
    _check_array(file, name, array, kinds)


def _missing_field(file: TokenFile, name: str, field: str) -> DataError:
    """Return the error for an announced field that the format does not provide."""
    return DataError(
        f"{file.prefix}: the format's method `fields` announces {field}, and its property `{name}` is None; return an "
        f"array, or leave {field} out of `fields`"
    )


def _check_array(file: TokenFile, name: str, array: Any, kinds: str) -> None:
    """Raise DataError unless the array has one element per token, of one of NumPy's kinds of types."""
    tokens = int(file.tokens)
    try:
        first, last, after = [np.asarray(array[i : i + 1]) for i in (0, tokens - 1, tokens)]
    except (StopIteration, LookupError, TypeError, ValueError, EOFError) as error:
        raise DataError(
            f"{file.prefix}: the format's `{name}` has no slices up to its {tokens:,} tokens ({type(error).__name__}: "
            f"{error}); return a NumPy array, [tokens]"
        ) from error
    shape = getattr(array, "shape", None)
    has_length = shape is None or shape[0] == tokens
    if first.shape != (1,) or last.shape != (1,) or len(after) or not has_length:
        if shape is not None:
            fault = f"has the shape {list(shape)}"
        elif len(after):
            fault = "has more elements than tokens"
        else:
            fault = "has fewer elements than tokens, or elements that are arrays"
        raise DataError(
            f"{file.prefix}: the format's `{name}` {fault}, and its `tokens` is {tokens:,}; return one element per "
            "token, [tokens]"
        )
    if first.dtype.kind not in kinds:
        raise DataError(f"{file.prefix}: the format's `{name}` has the type {first.dtype}; return {_KIND_NAMES[kinds]}")


def _check_document_starts(file: TokenFile, starts: np.ndarray) -> None:
    """Raise DataError unless the starts are ascending offsets of tokens."""
    name = f"{file.prefix}: the format's `document_starts`"
    if starts.ndim != 1 or (starts.size and starts.dtype.kind not in _INTEGERS):
        raise DataError(f"{name} has the type {starts.dtype} and the shape {list(starts.shape)}; return integers, [n]")
    if not starts.size:
        return
    is_ascending = starts[1:] > starts[:-1]
    if not is_ascending.all():
        index = int(np.flatnonzero(~is_ascending)[0])
        raise DataError(
            f"{name} has {starts[index]:,} and then {starts[index + 1]:,}; return ascending offsets in `stream`, not "
            "lengths, each once (numpy.unique)"
        )
    if starts[0] < 0 or starts[-1] >= file.tokens:
        raise DataError(f"{name} has the offsets {starts[0]:,} to {starts[-1]:,}; offsets are 0 to {file.tokens - 1:,}")
