"""Conversations to a data set: a document each, with loss weights 1 on the assistant's tokens and 0 elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megascale import __version__
from megascale.core.atomic_files import name_temporary
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.indexed import IndexedWriter, pair_paths, token_dtype, weights_path
from megascale.data.dataset.manifest import DataSetPart, Manifest
from megascale.data.prepare.builder import TOKENIZER_TEXT, describe_tokenizer, find_result
from megascale.data.prepare.conversations import EncodedConversation, encode_lines, parse_conversation, read_lines
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.chat_template import (
    CHATML,
    CHATML_BEGIN,
    CHATML_END,
    TEMPLATE,
    ChatTemplate,
    find_template,
    load_chat_template,
    read_template,
)
from megascale.data.tokenizer.convert_tokenizer import copy_companions
from megascale.data.tokenizer.huggingface_file import CONFIG
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

SIDES = ("train", "valid")
_TRAINED_SPECIAL_TOKENS = {"eos_token": "<|endoftext|>"}  # of a tokenizer that is trained here
_LEAST_CONVERSATIONS = 2  # one to train on, and one to evaluate on


@dataclass
class ChatSide:
    """Counts of one side of a data set.

    Attributes:
        counted: tokens that count in the loss.
        longest: tokens of the longest conversation as it is stored.
        cut: conversations that were cut to --max-tokens.
        dropped: conversations that had no counted token within --max-tokens.
    """

    conversations: int = 0
    tokens: int = 0
    counted: int = 0
    bytes: int = 0
    longest: int = 0
    cut: int = 0
    dropped: int = 0


@dataclass
class ChatBuild:
    """Result of a build.

    Attributes:
        fresh: whether this call built it.
        sample: the first training conversation, as (text, counts in the loss) in order; empty if nothing was built.
        sides: counts by side; empty if nothing was built.
    """

    folder: Path
    manifest: Manifest
    fresh: bool
    sample: list[tuple[str, bool]] = field(default_factory=list)
    sides: dict[str, ChatSide] = field(default_factory=dict)


class _WeightedWriter:
    """Writes a token file and its loss weights; both appear when the context ends without an error."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.tokens = IndexedWriter(prefix, dtype, hashed=True)
        self._path = weights_path(prefix)
        self._temporary = name_temporary(self._path)
        self._weights: BinaryIO = open(self._temporary, "wb")  # noqa: SIM115 - closed at the end of the context

    def add(self, conversation: EncodedConversation) -> None:
        self.tokens.add(conversation.tokens)
        self._weights.write(conversation.weights.tobytes())

    def __enter__(self) -> _WeightedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights.close()
        if kind is None:
            self._temporary.replace(self._path)  # before the index, without which the data set is incomplete
        else:
            self._temporary.unlink(missing_ok=True)
        self.tokens.__exit__(kind, error, trace)


def build_chat(
    out: str | Path,
    files: Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    template: str | Path | None = None,
    vocab_size: int = 4096,
    held_out: float = 0.05,
    max_tokens: int | None = None,
) -> ChatBuild:
    """Make `out/train` and `out/valid` (.bin, .idx, .weights), the tokenizer with its chat template, and dataset.json.

    A folder that already holds the result of the same inputs and settings is left alone.

    Args:
        files: JSON lines (conversations.py).
        tokenizer: folder of a Hugging Face tokenizer, or its tokenizer.json; None trains one on the conversations.
        template: Jinja file to use instead of the tokenizer's own template; a trained tokenizer has ChatML.
        held_out: share of the conversations excluded from training.
        max_tokens: longer conversations are cut to this; None keeps them whole.

    Raises:
        ConfigError: settings out of range.
        DataError: unusable records (with file, line and key), tokenizers or templates, and an `out` that holds another
            data set.
    """
    out = Path(out)
    paths = [Path(file) for file in files]
    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out={held_out} is not a share between 0 and 1; try 0.05")
    folder: Path | None = None
    loaded: Tokenizer | None = None
    if tokenizer is not None:
        file = Path(tokenizer)
        if file.is_dir():
            file = file / TOKENIZER
        folder = file.parent
        loaded = load_tokenizer(file)
    chat_template = _find_chat_template(folder, None if template is None else Path(template))
    threshold = _find_threshold(paths, held_out)
    recipe = _make_recipe(paths, loaded, chat_template, [vocab_size, held_out, max_tokens])
    manifest = find_result(out, recipe)
    if manifest is not None:
        return ChatBuild(out, manifest, fresh=False)
    if loaded is None:
        loaded = train_tokenizer(_read_texts(paths), vocab_size, [CHATML_BEGIN, CHATML_END])
    try:
        result = _encode(out, paths, loaded, chat_template, threshold, max_tokens)
    except DataError:
        with suppress(OSError):  # the folder has other files
            out.rmdir()
        raise
    _save_tokenizer(out, loaded, folder, chat_template)
    result.manifest = _make_manifest(out, paths, recipe, loaded, result.sides)
    result.manifest.save(out)
    return result


def _find_chat_template(folder: Path | None, file: Path | None) -> ChatTemplate | None:
    """Return the template that is named, else the tokenizer's, else ChatML for a tokenizer trained here; or None."""
    if folder is None:
        source, name = CHATML, "ChatML"
        if file is not None:
            source, name = read_template(file), str(file)
        return ChatTemplate(source, _TRAINED_SPECIAL_TOKENS, name)
    if file is None and find_template(folder) is None:
        return None
    return load_chat_template(folder, file)


def _hash_line(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data.strip(), digest_size=8).digest(), "big")


def _find_threshold(files: Sequence[Path], share: float) -> int:
    """Return the hash below which lines are held out. Equal lines are on one side."""
    distinct = sorted({_hash_line(line.data) for line in read_lines(files)})
    if len(distinct) < _LEAST_CONVERSATIONS:
        names = ", ".join(map(str, files))
        raise DataError(
            f"--chat={names} has {len(distinct)} different conversations, and training and evaluation need one each; "
            "give more conversations"
        )
    held_out = min(len(distinct) - 1, max(1, round(share * len(distinct))))
    return distinct[held_out]


def _make_recipe(
    files: Sequence[Path], tokenizer: Tokenizer | None, template: ChatTemplate | None, settings: list[object]
) -> str:
    """Return a hash of everything that decides the result."""
    contents = [sha256_file(file) for file in files]
    identity = None if tokenizer is None else tokenizer.sha256
    source: list[object] | None = None
    if template is not None:
        source = [template.source, template.special_tokens]
    return hashlib.sha256(json.dumps(["chat", contents, identity, source, settings]).encode()).hexdigest()


def _read_texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of conversations for a tokenizer, up to a limit. Unusable records are reported later."""
    remaining = TOKENIZER_TEXT
    for line in read_lines(files):
        with suppress(DataError):
            for text in parse_conversation(line).texts():
                yield text[:remaining]
                remaining -= len(text)
        if remaining <= 0:
            return


def _encode(
    out: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    threshold: int,
    max_tokens: int | None,
) -> ChatBuild:
    """Write the token files of both sides; the result has no manifest yet."""
    sides = {side: ChatSide() for side in SIDES}
    sample: list[tuple[str, bool]] = []
    dtype = token_dtype(tokenizer.vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = {side: stack.enter_context(_WeightedWriter(out / side, dtype)) for side in SIDES}
        for line, conversation, encoded in encode_lines(read_lines(files), tokenizer, template):
            side = "valid" if _hash_line(line.data) < threshold else "train"
            counts = sides[side]
            shortened = _cut(encoded, max_tokens, counts)
            if shortened is None:
                continue
            writers[side].add(shortened)
            counts.bytes += sum(len(text.encode()) for text in conversation.texts())
            if side == "train" and not sample:
                sample = mark_counted(shortened, tokenizer)
        for side, counts in sides.items():
            if not counts.conversations:
                raise DataError(
                    f"--max-tokens={max_tokens} leaves no conversation with a counted token in {side}; allow more"
                )
    return ChatBuild(out, manifest=None, fresh=True, sample=sample, sides=sides)  # type: ignore[arg-type]


def _cut(encoded: EncodedConversation, max_tokens: int | None, counts: ChatSide) -> EncodedConversation | None:
    """Return the beginning of a conversation within `max_tokens` and count it; None if none of its tokens counts."""
    length = len(encoded.tokens)
    if max_tokens is not None and length > max_tokens:
        encoded = EncodedConversation(encoded.tokens[:max_tokens], encoded.weights[:max_tokens])
        if not encoded.weights.any():
            counts.dropped += 1
            return None
        counts.cut += 1
    counts.conversations += 1
    counts.tokens += len(encoded.tokens)
    counts.counted += int(encoded.weights.sum())
    counts.longest = max(counts.longest, len(encoded.tokens))
    return encoded


def mark_counted(encoded: EncodedConversation, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return a conversation's text in parts, each with whether its tokens count in the loss."""
    borders = np.flatnonzero(np.diff(encoded.weights)) + 1
    parts: list[tuple[str, bool]] = []
    for tokens, weights in zip(np.split(encoded.tokens, borders), np.split(encoded.weights, borders), strict=True):
        parts.append((tokenizer.decode(tokens), bool(weights[0])))
    return parts


def _save_tokenizer(out: Path, tokenizer: Tokenizer, folder: Path | None, template: ChatTemplate | None) -> None:
    """Save the tokenizer with its companions and the template that was used."""
    tokenizer.save(out / TOKENIZER)
    if folder is not None:
        copy_companions(folder, out)
    else:
        (out / CONFIG).write_text(json.dumps(_TRAINED_SPECIAL_TOKENS) + "\n", encoding="utf-8")
    if template is not None:
        (out / TEMPLATE).write_text(template.source, encoding="utf-8")


def _make_manifest(
    out: Path, files: Sequence[Path], recipe: str, tokenizer: Tokenizer, sides: dict[str, ChatSide]
) -> Manifest:
    parts = {}
    for side, counts in sides.items():
        tokens, index = pair_paths(out / side)
        parts[side] = DataSetPart(
            documents=counts.conversations,
            tokens=counts.tokens,
            bytes=counts.bytes,
            bin_bytes=tokens.stat().st_size,
            idx_bytes=index.stat().st_size,
            idx_sha256=sha256_file(index),
            bin_sha256=sha256_file(tokens),
            bin_fingerprint=fingerprint_file(tokens),
            counted_tokens=counts.counted,
        )
    return Manifest(
        [str(file) for file in files],
        recipe,
        tokenizer=describe_tokenizer(tokenizer, out),
        dtype=token_dtype(tokenizer.vocab_size).name,
        parts=parts,
        version=__version__,
        notes=list(_list_notes(sides)),
    )


def _list_notes(sides: dict[str, ChatSide]) -> Iterable[str]:
    for side, counts in sides.items():
        if counts.cut:
            yield f"{side}: {counts.cut:,} conversations were cut to --max-tokens"
        if counts.dropped:
            yield f"{side}: {counts.dropped:,} conversations were left out: no counted token is within --max-tokens"
