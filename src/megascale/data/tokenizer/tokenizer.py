"""Text to token ids and back. Three kinds with one interface (base.py): Hugging Face `tokenizer.json` files and
byte-level BPE trained here (huggingface_file.py), and tiktoken's rank files (tiktoken_file.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megascale.config import DataConfig
from megascale.data.tokenizer import foreign_file, tiktoken_file
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import (
    CONFIG,
    HuggingFaceTokenizer,
    NotATokenizerError,
    configured_end,
)
from megascale.errors import ConfigError, DataError

NAME = "tokenizer.json"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json (ours, Hugging Face's, or one holding tiktoken ranks) or a .tiktoken rank file.

    For a Hugging Face file the end-of-document token may be named by a tokenizer_config.json beside it.
    Raises DataError if there is no such file or it is of another kind.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        remedy = "set data.tokenizer to a tokenizer.json or build a data set"
        if foreign_file.has_other_form(path.parent):
            remedy = foreign_file.conversion(path.parent)
        raise DataError(f"tokenizer {path} does not exist; {remedy}") from None
    except IsADirectoryError:
        if not (path / NAME).exists() and foreign_file.has_other_form(path):
            raise DataError(f"tokenizer {path} is a folder without a {NAME}. {foreign_file.conversion(path)}") from None
        raise DataError(f"tokenizer {path} is a folder; name the {NAME} in it") from None
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error}; check its permissions") from None
    ranks = path.suffix.lower() == ".tiktoken"
    if foreign_file.is_rank_file(data) and not ranks:
        raise DataError(f"tokenizer {path} is not a {NAME}: {foreign_file.explain(path, data)}")
    try:
        text = data.decode()
        if tiktoken_file.is_ours(text):
            return tiktoken_file.from_json(text, str(path))
        if ranks:
            return tiktoken_file.from_ranks(path, text)
        return HuggingFaceTokenizer.from_json(text, configured_end(path.with_name(CONFIG)), str(path))
    except (UnicodeDecodeError, NotATokenizerError) as error:
        raise DataError(
            f"tokenizer {path} is not a {NAME} that can be read ({error}): {foreign_file.explain(path, data)}"
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (as GPT-2) trained on `texts`; id 0 ends a document. Any text can be encoded."""
    return HuggingFaceTokenizer.train_bpe(texts, vocab_size)


def tokenizer_path(data: DataConfig) -> Path:
    """`data.tokenizer`, or the tokenizer.json beside the first training file; ConfigError without either."""
    if data.tokenizer:
        return Path(data.tokenizer)
    if not data.train:
        raise ConfigError("neither data.tokenizer nor data.train is set, so there is no tokenizer; set one of them")
    return Path(data.train[0]).parent / "tokenizer.json"


def load_run_tokenizer(data: DataConfig) -> Tokenizer:
    """The run's tokenizer (see tokenizer_path); DataError if it cannot be read."""
    return load_tokenizer(tokenizer_path(data))
