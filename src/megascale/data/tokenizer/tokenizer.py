"""Text to token ids and back. Three kinds with one interface (base.py): Hugging Face `tokenizer.json` files and
byte-level BPE trained here (huggingface_file.py), and tiktoken's rank files (tiktoken_file.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megascale.config import DataConfig
from megascale.data.tokenizer import tiktoken_file
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import CONFIG, HuggingFaceTokenizer, configured_end
from megascale.errors import ConfigError, DataError


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json (ours, Hugging Face's, or one holding tiktoken ranks) or a .tiktoken rank file.

    For a Hugging Face file the end-of-document token may be named by a tokenizer_config.json beside it.
    Raises DataError if there is no such file or it is of another kind.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"tokenizer {path} does not exist; set data.tokenizer to a tokenizer.json or build a data set"
        ) from None
    except IsADirectoryError:
        raise DataError(f"tokenizer {path} is a folder; name the tokenizer.json in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer {path} is not a tokenizer.json that can be read: {error}") from None
    if tiktoken_file.is_ours(text):
        return tiktoken_file.from_json(text, str(path))
    if path.suffix == ".tiktoken":
        return tiktoken_file.from_ranks(path, text)
    return HuggingFaceTokenizer.from_json(text, configured_end(path.with_name(CONFIG)), str(path))


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


def tokenizer_for(data: DataConfig) -> Tokenizer:
    """The run's tokenizer (see tokenizer_path); DataError if it cannot be read."""
    return load_tokenizer(tokenizer_path(data))
