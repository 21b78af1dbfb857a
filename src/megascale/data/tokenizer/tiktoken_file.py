"""tiktoken encodings from local files: a rank file (lines of `TOKEN-in-base64 RANK`) and its pattern.

A rank file alone does not define how text is cut into words, nor the special tokens. For OpenAI's published files,
recognised by name, both are built in. For any other `NAME.tiktoken`, the file `NAME.json` in its folder defines them:
`{"pattern": "...", "special_tokens": {"<|endoftext|>": 1000}, "end_of_document": "<|endoftext|>"}` (the last is
optional). A data set's folder has all of it in one tokenizer.json.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_OF_DOCUMENT, ENDS, Tokenizer
from megascale.errors import DataError, describe_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_KIND = "megascale/tiktoken"
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# White space at the very end is one piece even after a line break, as in today's tiktoken.
_CL100K = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
_O200K = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Published encodings: pattern, and the id of the end of a document.
PUBLISHED = {
    "r50k_base": (_GPT2, 50256),
    "p50k_base": (_GPT2, 50256),
    "cl100k_base": (_CL100K, 100257),
    "o200k_base": (_O200K, 199999),
}


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding; DataError if its parts are inconsistent."""

    def __init__(self, name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int], end: str) -> None:
        try:
            import tiktoken
        except ImportError:
            raise DataError(f"tokenizer {name} needs the package tiktoken; {describe_install('formats')}") from None
        missing = [b for b in range(256) if bytes([b]) not in ranks]
        if missing:
            raise DataError(f"tokenizer {name} has no token for byte {missing[0]}: the rank file is cut off or damaged")
        if end not in special:
            raise DataError(
                f"tokenizer {name} has no special token {end!r} to end a document with; its special tokens are "
                f"{', '.join(special) or 'none'}"
            )
        self._record = {
            "kind": _KIND,
            "name": name,
            "pattern": pattern,
            "special_tokens": special,
            "end_of_document": end,
        }
        self._ranks = ranks
        self._pattern = pattern
        self._special = special
        try:
            self._inner = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except Exception as error:  # a pattern or ranks that the library's core refuses
            raise DataError(f"tokenizer {name} is not an encoding that tiktoken understands: {error}") from None
        self.vocab_size = self._inner.max_token_value + 1
        self.end_of_document = special[end]

    def to_json(self) -> str:
        ranks = {base64.b64encode(token).decode(): rank for token, rank in self._ranks.items()}
        return json.dumps({**self._record, "ranks": ranks}, indent=0)

    def to_tokenizers(self) -> Library:
        """Return the same encoding for the `tokenizers` library, as Hugging Face needs it."""
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        characters = {byte: chr(code) for byte, code in _byte_characters().items()}
        text = {token: "".join(characters[byte] for byte in token) for token in self._ranks}
        special = self._special
        vocabulary = {text[token]: rank for token, rank in self._ranks.items()} | special
        merges = [(text[a], text[b]) for a, b in _merges(self._ranks)]
        # A word that is a token needs no merges, as in tiktoken.
        library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(self._pattern), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return library

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._inner.decode([int(i) for i in ids])

    def _encode(self, texts: list[str]) -> list[Any]:
        return [self._inner.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]


def _byte_characters() -> dict[int, int]:
    """Return GPT-2's printable character for each byte: the byte itself if it is printable, else one from 256 on."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    unprintable = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(unprintable)}


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pair that each longer token merges, in order of rank: its parts after all merges of lower rank."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            i = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[i] >= rank:
                break  # the token has no merges: it only occurs as a complete word
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def is_tiktoken_json(text: str) -> bool:
    """Return whether the contents of a tokenizer.json are a tiktoken encoding that `to_json` wrote."""
    return _KIND in text[:100]


def from_json(text: str, source: str) -> TiktokenTokenizer:
    """Return the tokenizer of contents that `to_json` wrote; DataError if they are damaged."""
    try:
        record = json.loads(text)
        ranks = {base64.b64decode(token): int(rank) for token, rank in record["ranks"].items()}
        return TiktokenTokenizer(
            record["name"], record["pattern"], ranks, record["special_tokens"], record["end_of_document"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"tokenizer {source} is damaged ({error}); build the data set again") from None


def from_ranks(path: Path, text: str) -> TiktokenTokenizer:
    """Return the tokenizer of a rank file, with the built-in pattern of its name or the one in NAME.json."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise DataError(
                    f"tokenizer {path}, line {number}: {line[:60]!r} is not a token in base64 and its rank"
                ) from None
    sibling = path.with_suffix(".json")
    if sibling.exists():
        try:
            record = json.loads(sibling.read_text(encoding="utf-8"))
            pattern, special = record["pattern"], record["special_tokens"]
            known_end = next((name for name in ENDS if name in special), END_OF_DOCUMENT)
            end = record.get("end_of_document") or known_end
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f'{sibling} does not describe {path.name} ({error!r}); it needs {{"pattern": "...", "special_tokens": '
                '{"<|endoftext|>": ID}}'
            ) from None
        return TiktokenTokenizer(path.stem, pattern, ranks, special, end)
    if path.stem not in PUBLISHED:
        raise DataError(
            f"tokenizer {path}: the encoding {path.stem!r} is unknown (known: {', '.join(PUBLISHED)}); put "
            f'{sibling.name} next to it with {{"pattern": "...", "special_tokens": {{"<|endoftext|>": {len(ranks)}}}}}'
        )
    pattern, end_id = PUBLISHED[path.stem]
    return TiktokenTokenizer(path.stem, pattern, ranks, {END_OF_DOCUMENT: end_id}, END_OF_DOCUMENT)
