"""Build of a data set from conversations, one document each; loss weights are 1 on the assistant's tokens, else 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

from megascale import __version__
from megascale.core.atomic_files import name_temporary
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.indexed import IndexedWriter, choose_token_dtype, get_weights_path, pair_paths
from megascale.data.dataset.manifest import DataSetPart, Manifest
from megascale.data.prepare.builder import TOKENIZER_CHARACTERS, describe_tokenizer, find_result
from megascale.data.prepare.conversations import EncodedConversation, encode_lines, parse_conversation, read_lines
from megascale.data.prepare.encode_worker import SPLITS, describe_write_error, is_disk_full
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.chat_template import (
    CHATML,
    CHATML_BEGIN,
    CHATML_END,
    TEMPLATE,
    ChatTemplate,
    check_special_tokens,
    find_template,
    load_chat_template,
    read_template,
)
from megascale.data.tokenizer.convert_tokenizer import copy_companions
from megascale.data.tokenizer.huggingface_file import CONFIG
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

# Special tokens of a tokenizer that this build trains.
_SPECIAL_TOKENS = {"eos_token": "<|endoftext|>"}
_MIN_CONVERSATIONS = 2  # one to train on, and one to evaluate on


@dataclass
class SplitStatistics:
    """Numbers of conversations, tokens and bytes in one split (train or valid).

    Attributes:
        loss_tokens: number of tokens with loss weight 1.
        max_length: tokens of the longest stored conversation.
        truncated: number of conversations truncated to --max-tokens.
        dropped: number of conversations without a token of the loss within --max-tokens.
    """

    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    bytes: int = 0
    max_length: int = 0
    truncated: int = 0
    dropped: int = 0


class TextRun(NamedTuple):
    """A run of a conversation's text whose tokens have the same loss weight."""

    text: str
    is_in_loss: bool


@dataclass
class ChatBuild:
    """Result of a build.

    Attributes:
        fresh: whether this call built the data set.
        sample: text of the first training conversation; empty if nothing was built.
        statistics: statistics by split; empty if nothing was built.
    """

    folder: Path
    manifest: Manifest
    fresh: bool
    sample: list[TextRun] = field(default_factory=list)
    statistics: dict[str, SplitStatistics] = field(default_factory=dict)


class _WeightedWriter:
    """Writes a token file and its loss weights; both appear when the context ends without an error."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.tokens = IndexedWriter(prefix, dtype, hashed=True)
        self._path = get_weights_path(prefix)
        self._temporary = name_temporary(self._path)
        self._weights: BinaryIO = open(self._temporary, "wb")  # noqa: SIM115 - closed at the end of the context

    def add(self, conversation: EncodedConversation) -> None:
        self.tokens.add(conversation.tokens)
        self._weights.write(conversation.weights.tobytes())

    def __enter__(self) -> _WeightedWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights.close()
        if error_type is None:
            # The index is written last: as long as it is missing, the data set counts as incomplete.
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)
        self.tokens.__exit__(error_type, error, trace)


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
        template: Jinja file to use instead of the tokenizer's own template. Default for a trained tokenizer: ChatML.
        vocab_size: vocabulary size of a tokenizer that is trained.
        held_out: share of the conversations excluded from training.
        max_tokens: length to which longer conversations are truncated; None: no truncation.

    Raises:
        ConfigError: a setting is out of range.
        DataError: a record (named by file, line and key), the tokenizer or the template is unusable, or `out` has
            another data set.
    """
    out = Path(out)
    paths = [Path(file) for file in files]
    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out={held_out} is not a share between 0 and 1; try 0.05")
    tokenizer_folder: Path | None = None
    given_tokenizer: Tokenizer | None = None
    if tokenizer is not None:
        file = Path(tokenizer)
        if file.is_dir():
            file = file / TOKENIZER
        tokenizer_folder = file.parent
        given_tokenizer = load_tokenizer(file)
    chat_template = _find_chat_template(tokenizer_folder, None if template is None else Path(template))
    threshold = _find_held_out_threshold(paths, held_out)
    recipe = _hash_inputs(paths, given_tokenizer, chat_template, [vocab_size, held_out, max_tokens])
    manifest = find_result(out, recipe)
    if manifest is not None:
        return ChatBuild(out, manifest, fresh=False)
    used_tokenizer = given_tokenizer
    if used_tokenizer is None:
        used_tokenizer = train_tokenizer(_read_texts(paths), vocab_size, [CHATML_BEGIN, CHATML_END])
    template_notes: list[str] = []
    if chat_template is not None and tokenizer_folder is not None:
        template_notes = check_special_tokens(chat_template, tokenizer_folder, used_tokenizer)
    try:
        result = _encode(out, paths, used_tokenizer, chat_template, threshold, max_tokens)
        _save_tokenizer(out, used_tokenizer, tokenizer_folder, chat_template)
        dates: dict[str, str] = {}
        if chat_template is not None:
            dates = dict(chat_template.dates)
            template_notes += _list_name_notes(chat_template)
        notes = [*template_notes, *_list_date_notes(dates), *_list_notes(result.statistics)]
        result.manifest = _make_manifest(
            out, paths, recipe, used_tokenizer, result.statistics, notes=notes, template_dates=dates
        )
        result.manifest.save(out)
    except DataError:
        # The folder is removed only if it is empty: rmdir fails if it holds other files.
        with suppress(OSError):
            out.rmdir()
        raise
    except OSError as error:
        if is_disk_full(error):
            raise DataError(describe_write_error(out, error)) from None
        raise
    return result


def _find_chat_template(tokenizer_folder: Path | None, file: Path | None) -> ChatTemplate | None:
    """Return the template in `file`, else the tokenizer's own template, else None.

    Without a folder this build trains the tokenizer, whose default template is ChatML.
    """
    if tokenizer_folder is None:
        source, name = CHATML, "ChatML"
        if file is not None:
            source, name = read_template(file), str(file)
        return ChatTemplate(source, _SPECIAL_TOKENS, name)
    if file is None and find_template(tokenizer_folder) is None:
        return None
    return load_chat_template(tokenizer_folder, file)


def _hash_line(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data.strip(), digest_size=8).digest(), "big")


def _find_held_out_threshold(files: Sequence[Path], share: float) -> int:
    """Return the hash below which lines are held out, so that equal lines always fall into the same split."""
    hashes = sorted({_hash_line(line.data) for line in read_lines(files)})
    if len(hashes) < _MIN_CONVERSATIONS:
        names = ", ".join(map(str, files))
        raise DataError(
            f"--chat={names} has {len(hashes)} different conversations, and training and evaluation need one each; "
            "give more conversations"
        )
    held_out_count = min(len(hashes) - 1, max(1, round(share * len(hashes))))
    return hashes[held_out_count]


def _hash_inputs(
    files: Sequence[Path], tokenizer: Tokenizer | None, template: ChatTemplate | None, settings: list[object]
) -> str:
    """Return a hash of all inputs and settings."""
    contents = [sha256_file(file) for file in files]
    identity = None if tokenizer is None else tokenizer.sha256
    source: list[object] | None = None
    if template is not None:
        source = [template.source, template.special_tokens]
    return hashlib.sha256(json.dumps(["chat", contents, identity, source, settings]).encode()).hexdigest()


def _read_texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of conversations for a tokenizer, up to a limit. Unusable records are reported later."""
    remaining = TOKENIZER_CHARACTERS
    for line in read_lines(files):
        with suppress(DataError):
            for text in parse_conversation(line).list_texts():
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
    """Write the token files of both splits. The caller adds the manifest to the result."""
    statistics = {split: SplitStatistics() for split in SPLITS}
    sample: list[TextRun] = []
    dtype = choose_token_dtype(tokenizer.vocab_size)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(describe_write_error(out, error)) from None
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_WeightedWriter(out / split, dtype)) for split in SPLITS}
        for line, conversation, encoded in encode_lines(read_lines(files), tokenizer, template):
            split = "valid" if _hash_line(line.data) < threshold else "train"
            truncated = _truncate(encoded, max_tokens, statistics[split])
            if truncated is None:
                continue
            writers[split].add(truncated)
            statistics[split].bytes += sum(len(text.encode()) for text in conversation.list_texts())
            if split == "train" and not sample:
                sample = split_by_loss_weight(truncated, tokenizer)
        for split, split_statistics in statistics.items():
            if not split_statistics.conversations:
                raise DataError(
                    f"--max-tokens={max_tokens} leaves no conversation with a token of the loss in {split}; raise "
                    "--max-tokens"
                )
    return ChatBuild(out, manifest=None, fresh=True, sample=sample, statistics=statistics)  # type: ignore[arg-type]


def _truncate(
    encoded: EncodedConversation, max_tokens: int | None, statistics: SplitStatistics
) -> EncodedConversation | None:
    """Truncate a conversation to `max_tokens` and add it to `statistics`.

    Returns None for a conversation that is dropped, because truncation leaves it without a token of the loss.
    """
    length = len(encoded.tokens)
    if max_tokens is not None and length > max_tokens:
        encoded = EncodedConversation(encoded.tokens[:max_tokens], encoded.weights[:max_tokens])
        if not encoded.weights.any():
            statistics.dropped += 1
            return None
        statistics.truncated += 1
    statistics.conversations += 1
    statistics.tokens += len(encoded.tokens)
    statistics.loss_tokens += int(encoded.weights.sum())
    statistics.max_length = max(statistics.max_length, len(encoded.tokens))
    return encoded


def split_by_loss_weight(encoded: EncodedConversation, tokenizer: Tokenizer) -> list[TextRun]:
    """Return a conversation's text, split where the loss weight changes."""
    boundaries = np.flatnonzero(np.diff(encoded.weights)) + 1
    token_runs = np.split(encoded.tokens, boundaries)
    weight_runs = np.split(encoded.weights, boundaries)
    runs: list[TextRun] = []
    for tokens, weights in zip(token_runs, weight_runs, strict=True):
        runs.append(TextRun(tokenizer.decode(tokens), is_in_loss=bool(weights[0])))
    return runs


def _save_tokenizer(out: Path, tokenizer: Tokenizer, source: Path | None, template: ChatTemplate | None) -> None:
    """Save the tokenizer, the chat template, and the other tokenizer files of the folder `source`."""
    tokenizer.save(out / TOKENIZER)
    if source is not None:
        copy_companions(source, out)
    else:
        (out / CONFIG).write_text(json.dumps(_SPECIAL_TOKENS) + "\n", encoding="utf-8")
    if template is not None:
        (out / TEMPLATE).write_text(template.source, encoding="utf-8")


def _make_manifest(
    out: Path,
    files: Sequence[Path],
    recipe: str,
    tokenizer: Tokenizer,
    statistics: dict[str, SplitStatistics],
    *,
    notes: list[str],
    template_dates: dict[str, str],
) -> Manifest:
    parts = {}
    for split, split_statistics in statistics.items():
        bin_path, idx_path = pair_paths(out / split)
        parts[split] = DataSetPart(
            documents=split_statistics.conversations,
            tokens=split_statistics.tokens,
            bytes=split_statistics.bytes,
            bin_bytes=bin_path.stat().st_size,
            idx_bytes=idx_path.stat().st_size,
            idx_sha256=sha256_file(idx_path),
            bin_sha256=sha256_file(bin_path),
            bin_fingerprint=fingerprint_file(bin_path),
            counted_tokens=split_statistics.loss_tokens,
        )
    return Manifest(
        [str(file) for file in files],
        recipe,
        tokenizer=describe_tokenizer(tokenizer, out),
        dtype=choose_token_dtype(tokenizer.vocab_size).name,
        parts=parts,
        version=__version__,
        notes=notes,
        template_dates=template_dates,
    )


def _list_name_notes(template: ChatTemplate) -> Iterable[str]:
    """Yield a note if the template has left out names of messages."""
    if template.dropped_names:
        counts = ", ".join(f"{count:,} of role {role}" for role, count in sorted(template.dropped_names.items()))
        yield (
            f"the template {template.name} leaves out the name of {template.dropped_names.total():,} messages "
            f"({counts}); name a template that writes names with --chat-template if the model needs them"
        )


def _list_date_notes(dates: Mapping[str, str]) -> Iterable[str]:
    """Yield a note if the template has written dates, which a build on another day would not repeat."""
    if dates:
        yield (
            f"the chat template calls strftime_now and wrote the date of this build ({', '.join(dates.values())}) "
            "into conversations; write a fixed date into the template for a build that other days repeat"
        )


def _list_notes(statistics: dict[str, SplitStatistics]) -> Iterable[str]:
    for split, split_statistics in statistics.items():
        if split_statistics.truncated:
            yield f"{split}: {split_statistics.truncated:,} conversations were cut to --max-tokens"
        if split_statistics.dropped:
            dropped = f"{split_statistics.dropped:,} conversations were left out"
            yield f"{split}: {dropped}: no token of the loss is within --max-tokens"
