"""tiktoken encodings, read from local files.

A rank file `NAME.tiktoken` has lines of `TOKEN-in-base64 RANK`. It does not define the pattern that cuts text into
words, nor the special tokens. For OpenAI's published files, recognised by name, both are built in. For other files,
`NAME.json` in the same folder defines them, where end_of_document is optional:
`{"pattern": "...", "special_tokens": {"<|endoftext|>": 1000}, "end_of_document": "<|endoftext|>"}`

A data set's folder has ranks, pattern and special tokens in one tokenizer.json.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from megascale.data.tokenizer.base import END_NAMES, END_OF_DOCUMENT, Tokenizer
from megascale.errors import DataError, describe_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_KIND = "megascale/tiktoken"
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# With \s+\z, white space at the end of a text is one word even after a line break, as in present versions of tiktoken.
_CL100K_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
_O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Published encodings by name: (pattern, id of the end-of-document token).
PUBLISHED = {
    "r50k_base": (_GPT2_PATTERN, 50256),
    "p50k_base": (_GPT2_PATTERN, 50256),
    "cl100k_base": (_CL100K_PATTERN, 100257),
    "o200k_base": (_O200K_PATTERN, 199999),
}


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding.

    Args:
        name: name of the encoding, for messages.
        pattern: regular expression that cuts text into words.
        ranks: ids of the tokens by their bytes.
        special_tokens: ids of the special tokens by name.
        end: name of the special token that ends a document.

    Raises DataError if tiktoken is not installed, a byte has no token, two tokens have the same id, or `end` is not a
    special token.
    """

    def __init__(
        self, name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int], end: str
    ) -> None:
        try:
            import tiktoken
        except ImportError:
            raise DataError(f"tokenizer {name} needs the package tiktoken; {describe_install('formats')}") from None
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise DataError(
                f"tokenizer {name} has no token for byte {missing[0]}: the rank file is cut off or damaged; copy it "
                "again"
            )
        if not isinstance(special_tokens, dict) or not isinstance(pattern, str):
            raise DataError(
                f"tokenizer {name}: pattern must be a text and special_tokens an object of names and ids; correct both "
                f"in {name}.json"
            )
        _check_ids(name, ranks, special_tokens)
        if not isinstance(end, str) or end not in special_tokens:
            raise DataError(
                f"tokenizer {name} has no special token {end!r} to end a document with; its special tokens are "
                f"{', '.join(special_tokens) or 'none'}; name one of them in end_of_document"
            )
        self._record = {
            "kind": _KIND,
            "name": name,
            "pattern": pattern,
            "special_tokens": special_tokens,
            "end_of_document": end,
        }
        self._ranks = ranks
        self._pattern = pattern
        self._special_tokens = special_tokens
        try:
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except Exception as error:  # a pattern or ranks that the library's core refuses
            raise DataError(
                f"tokenizer {name} is not an encoding that tiktoken understands: {error}; correct the pattern and the "
                f"special_tokens of {name}.json, or copy the rank file again"
            ) from None
        self.vocab_size = self._encoding.max_token_value + 1
        self.end_of_document = special_tokens[end]
        # A pattern that is not published may skip characters, and tiktoken drops what a pattern skips.
        self.loses_text = all(pattern != published_pattern for published_pattern, _ in PUBLISHED.values())
        self._token_ids = frozenset(ranks.values()) | frozenset(special_tokens.values())

    def to_json(self) -> str:
        ranks = {base64.b64encode(token).decode(): rank for token, rank in self._ranks.items()}
        return json.dumps({**self._record, "ranks": ranks}, indent=0)

    def to_tokenizers(self) -> Library:
        """Return the same encoding as a tokenizer of the package `tokenizers`, for export to Hugging Face."""
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        characters = {byte: chr(code) for byte, code in _byte_characters().items()}
        names = {token: "".join(characters[byte] for byte in token) for token in self._ranks}
        vocabulary = {names[token]: rank for token, rank in self._ranks.items()} | self._special_tokens
        merges = [(names[first], names[second]) for first, second in _find_merges(self._ranks)]
        # As in tiktoken, a word that is a token is not built by merges.
        library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
        # As in tiktoken, text that the pattern skips is dropped.
        split = pre_tokenizers.Split(Regex(self._pattern), "removed", invert=True)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._special_tokens]
        )
        return library

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        # A padded vocabulary has ids without a token. They have no text, as in Hugging Face tokenizers.
        return self._encoding.decode([int(token_id) for token_id in ids if int(token_id) in self._token_ids])

    def _count_lost_bytes(self, texts: list[str]) -> int:
        lost = 0
        for text, ids in zip(texts, self._encode(texts), strict=True):
            lost += max(0, _count_visible_bytes(text) - _count_visible_bytes(self.decode(ids)))
        return lost

    def _encode(self, texts: list[str]) -> list[Any]:
        return [self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]


def _check_ids(name: str, ranks: dict[bytes, int], special_tokens: dict[str, Any]) -> None:
    """Raise DataError unless all ordinary and special tokens have ids of their own."""
    tokens_by_id: dict[int, str] = {}
    entries = [(token.decode(errors="backslashreplace"), rank) for token, rank in ranks.items()]
    entries += special_tokens.items()
    for token, token_id in entries:
        if type(token_id) is not int or token_id < 0:
            raise DataError(f"tokenizer {name}: the id of {token!r} is {token_id!r}; write an integer of at least 0")
        if token_id in tokens_by_id:
            remedy = "copy the rank file again"
            if token in special_tokens:
                remedy = f"take an id in special_tokens of {name}.json that no other token has"
            raise DataError(
                f"tokenizer {name}: {tokens_by_id[token_id]!r} and {token!r} have the same id {token_id}; {remedy}"
            )
        tokens_by_id[token_id] = token


def _count_visible_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8, without white space."""
    return len("".join(text.split()).encode())


def _byte_characters() -> dict[int, int]:
    """Return the code point of GPT-2's character for each byte: the byte itself if printable, else one from 256 on."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    unprintable = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(unprintable)}


def _find_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pair of tokens that BPE merges into each longer token, in order of rank.

    The pair is what remains of the token's bytes after all merges of lower rank.
    """
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        pieces = [token[i : i + 1] for i in range(len(token))]
        while len(pieces) > 2:
            pair_ranks = [ranks.get(first + second, rank) for first, second in pairwise(pieces)]
            lowest = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            if pair_ranks[lowest] >= rank:
                break  # no pair merges into the token, which only occurs as a complete word
            pieces[lowest : lowest + 2] = [pieces[lowest] + pieces[lowest + 1]]
        if len(pieces) == 2:
            yield pieces[0], pieces[1]


def is_tiktoken_json(text: str) -> bool:
    """Return whether the contents of a tokenizer.json are a tiktoken encoding that `to_json` wrote."""
    return _KIND in text[:100]


def load_json(text: str, source: str) -> TiktokenTokenizer:
    """Return the tokenizer of contents that `to_json` wrote. Raises DataError if they are damaged."""
    try:
        record = json.loads(text)
        ranks = {base64.b64decode(token): int(rank) for token, rank in record["ranks"].items()}
        return TiktokenTokenizer(
            record["name"],
            record["pattern"],
            ranks,
            special_tokens=record["special_tokens"],
            end=record["end_of_document"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"tokenizer {source} is damaged ({error}); build the data set again") from None


def load_ranks(path: Path, text: str) -> TiktokenTokenizer:
    """Return the tokenizer of a rank file, with pattern and special tokens of NAME.json or of the published encoding.

    Args:
        path: the rank file NAME.tiktoken.
        text: contents of the file.

    Raises DataError for a malformed file, and for an unknown name without NAME.json.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                encoded_token, rank = line.split()
                token = base64.b64decode(encoded_token, validate=True)
                token_id = int(rank)
            except ValueError:
                raise DataError(
                    f"tokenizer {path}, line {number}: {line[:60]!r} is not a token in base64 and its rank; "
                    "copy the file again"
                ) from None
            if token in ranks:
                raise DataError(
                    f"tokenizer {path}, line {number}: the token has the ranks {ranks[token]} and {token_id}; copy the "
                    "file again"
                )
            ranks[token] = token_id
    sibling = path.with_suffix(".json")
    if sibling.exists():
        try:
            record = json.loads(sibling.read_text(encoding="utf-8-sig"))
            pattern, special_tokens = record["pattern"], record["special_tokens"]
            known_ends = [name for name in END_NAMES if name in special_tokens]
            default_end = known_ends[0] if known_ends else END_OF_DOCUMENT
            end = record.get("end_of_document") or default_end
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f'{sibling} does not describe {path.name} ({error!r}); it needs {{"pattern": "...", "special_tokens": '
                '{"<|endoftext|>": ID}}'
            ) from None
        return TiktokenTokenizer(path.stem, pattern, ranks, special_tokens=special_tokens, end=end)
    if path.stem not in PUBLISHED:
        raise DataError(
            f"tokenizer {path}: the encoding {path.stem!r} is unknown (known: {', '.join(PUBLISHED)}); put "
            f'{sibling.name} next to it with {{"pattern": "...", "special_tokens": {{"<|endoftext|>": {len(ranks)}}}}}'
        )
    pattern, end_id = PUBLISHED[path.stem]
    special_tokens = {END_OF_DOCUMENT: end_id}
    return TiktokenTokenizer(path.stem, pattern, ranks, special_tokens=special_tokens, end=END_OF_DOCUMENT)
