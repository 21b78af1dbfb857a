"""Text and TOML files that people edit."""

from __future__ import annotations

import codecs
import tomllib
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_text(data: bytes) -> str:
    r"""Decode UTF-16 with a byte order mark, or UTF-8 with or without one.

    Remove the mark, and convert line ends to \n. Raises UnicodeDecodeError.
    """
    text = data.decode("utf-16" if data.startswith(_UTF16) else "utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path) -> str:
    """Return a file's text as `decode_text` decodes it. Raises OSError and UnicodeDecodeError."""
    return decode_text(path.read_bytes())


def read_toml(path: Path, description: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError if it cannot be read or parsed.

    Args:
        description: noun for the file in error messages, such as "cluster file".
    """
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{description} {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a plain ValueError
        raise ConfigError(f"{description} {str(path)!r} is not valid TOML: {error}") from None
