"""Bytes that are not UTF-8, in messages about input files."""

from __future__ import annotations

_REMEDY = "convert the file with `iconv -f ENCODING -t UTF-8`, where ENCODING is its own, such as ISO-8859-1 or UTF-16"


class NotUtf8Error(ValueError):
    """A file has a byte that is not UTF-8. The text names the byte, its offset and the remedy."""


def describe_invalid_utf8(data: bytes, offset: int = 0, position: str = "of the file") -> str:
    """Return a clause about the first byte that is not UTF-8, with the remedy, or "" if there is none.

    Args:
        offset: offset of `data` in what `position` names.
        position: phrase that follows the offset.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {offset + error.start:,} {position} (0x{data[error.start]:02x}) is not UTF-8; {_REMEDY}"
    return ""
