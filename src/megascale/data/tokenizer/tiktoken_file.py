"""tiktoken encodings from local files, no network: a rank file (`TOKEN-in-base64 RANK` a line) and its pattern.

A rank file alone does not say how text is cut into words or what the special tokens are. For OpenAI's published
files, known by name, both are built in; for any other, `NAME.json` beside `NAME.tiktoken` gives them:
`{"pattern": "...", "special_tokens": {"<|endoftext|>": 1000}, "end_of_document": "<|endoftext|>"}` (the last may be
left out). A data set's folder keeps all of it in one tokenizer.json.
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
KNOWN = {
    "r50k_base": (_GPT2, 50256),
    "p50k_base": (_GPT2, 50256),
    "cl100k_base": (_CL100K, 100257),
    "o200k_base": (_O200K, 199999),
}


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding; DataError if its parts do not make one."""

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
        self._ranks, self._pattern, self._special = ranks, pattern, special
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
        """The same encoding for the `tokenizers` library, as Hugging Face wants it."""
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        shown = {b: chr(c) for b, c in _byte_characters().items()}
        text = {token: "".join(shown[b] for b in token) for token in self._ranks}
        special = self._special
        vocabulary = {text[token]: rank for token, rank in self._ranks.items()} | special
        merges = [(text[a], text[b]) for a, b in _merges(self._ranks)]
        # A word that is a token needs no merges, as in tiktoken.
        library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
        words = pre_tokenizers.Split(Regex(self._pattern), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return library

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return self._inner.decode([int(i) for i in ids])

    def _encode(self, texts: list[str]) -> list[Any]:
        none: frozenset[str] = frozenset()
        return [self._inner.encode_to_numpy(text, allowed_special=set(), disallowed_special=none) for text in texts]


def _byte_characters() -> dict[int, int]:
    """GPT-2's printable character for each byte: itself where it prints, else one from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in plain)
    return {b: b for b in plain} | {b: 256 + i for i, b in enumerate(others)}


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each longer token is made of, in order of rank: what merging below its own rank leaves of it."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[at] >= rank:
                break  # not made of merges: only ever met as a whole word
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def is_ours(text: str) -> bool:
    """Whether a tokenizer.json's contents are this module's."""
    return _KIND in text[:100]


def from_json(text: str, source: str) -> TiktokenTokenizer:
    """Of contents that to_json gave; DataError if they are damaged."""
    try:
        record = json.loads(text)
        ranks = {base64.b64decode(token): int(rank) for token, rank in record["ranks"].items()}
        return TiktokenTokenizer(
            record["name"], record["pattern"], ranks, record["special_tokens"], record["end_of_document"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"tokenizer {source} is damaged ({error}); build the data set again") from None


def from_ranks(path: Path, text: str) -> TiktokenTokenizer:
    """Of a rank file's contents, with what is known of its name or stands in the .json beside it."""
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
            end = record.get("end_of_document") or next((name for name in ENDS if name in special), END_OF_DOCUMENT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f'{sibling} does not describe {path.name} ({error!r}); it needs {{"pattern": "...", "special_tokens": '
                '{"<|endoftext|>": ID}}'
            ) from None
        return TiktokenTokenizer(path.stem, pattern, ranks, special, end)
    if path.stem not in KNOWN:
        raise DataError(
            f"tokenizer {path}: nothing is known of an encoding called {path.stem!r} (known: {', '.join(KNOWN)}); put "
            f'{sibling.name} beside it with {{"pattern": "...", "special_tokens": {{"<|endoftext|>": {len(ranks)}}}}}'
        )
    pattern, end_id = KNOWN[path.stem]
    return TiktokenTokenizer(path.stem, pattern, ranks, {END_OF_DOCUMENT: end_id}, END_OF_DOCUMENT)
