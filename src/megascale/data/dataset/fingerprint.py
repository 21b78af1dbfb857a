"""Whether data files are still those that a run began with: sizes and samples of their contents. No torch."""

from __future__ import annotations

import json
import os
from contextlib import closing
from itertools import islice
from pathlib import Path

from megascale.config import Config
from megascale.data.dataset import integrity, sources, tokenizer_agreement
from megascale.data.dataset.file_hash import fingerprint, is_same_file
from megascale.data.dataset.formats import files_of, is_text
from megascale.data.dataset.samples import HeldOut
from megascale.data.tokenizer.base import check_representation
from megascale.data.tokenizer.tokenizer import tokenizer_for, tokenizer_path
from megascale.errors import DataError

NAME = "sources.json"
# A sample of text that is tokenised on the fly: pieces, the records at the beginning of each, and their characters.
_SAMPLE_PIECES, _SAMPLE_RECORDS, _SAMPLE_PIECE = 32, 16, 1 << 16


def fingerprints(config: Config) -> dict[str, str]:
    """Of all files of data.train, and of the tokenizer's where text is tokenised on the fly; by path as given.

    Raises DataError for a file that is missing.
    """
    files: list[Path] = []
    for entry in config.data.train:
        files += [s.path for s in sources.find_files([Path(entry)])] if is_text(entry) else files_of(entry)
    if any(map(is_text, config.data.train)):
        files.append(tokenizer_path(config.data))
    try:
        return {str(file): fingerprint(file) for file in files}
    except OSError as error:
        raise DataError(
            f"data.train: {error.filename} cannot be read ({error.strerror}); put it back or name another file"
        ) from None


def keep(record: Path, now: dict[str, str]) -> None:
    """Write fingerprints down, whole or not at all."""
    record.parent.mkdir(parents=True, exist_ok=True)
    new = record.with_name(f"{record.name}.{os.getpid()}.tmp")
    new.write_text(json.dumps(now, indent=1) + "\n")
    os.replace(new, record)


def check_run_data(config: Config, consumed: int, leader: bool) -> list[str]:
    """Check the data at a start that goes on after `consumed` samples, and return notes on it.

    Files and tokenizer must be those of the run's first start, the files unless checkpoint.accept_changes has
    data.train. Raises DataError as `fingerprints`, `compare`, `check_samples`, `check_tokenizers`, `check_text` and
    `check_run` do.
    """
    integrity.check_samples(config)
    check_tokenizers(config)
    notes = check_text(config)
    run = config.run_folder
    record, now = run / "samples" / NAME, fingerprints(config)
    accepted = "data.train" in config.checkpoint.accept_changes
    if consumed:
        if not accepted:
            compare_fingerprints(record, now)
        tokenizer_agreement.check_run(run, config)
    if leader and not (consumed and record.exists() and not accepted):
        keep(record, now)
    if leader and not (consumed and tokenizer_agreement.read_identity(run)):
        tokenizer_agreement.remember(run, config)
    return notes


def compare_fingerprints(record: Path, now: dict[str, str]) -> None:
    """DataError naming what is missing, changed or new since `record` was kept; nothing without a record.

    Paths may differ (a data set may be moved), contents and order may not.
    """
    try:
        before: dict[str, str] = json.loads(record.read_text())
    except (FileNotFoundError, ValueError):
        return
    if len(before) == len(now) and all(map(is_same_file, before.values(), now.values())):
        return
    faults = [f"{path} was changed" for path in now if path in before and not is_same_file(before[path], now[path])]
    faults += [f"{path} is missing" for path in before if path not in now]
    faults += [f"{path} is new" for path in now if path not in before]
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise DataError(
        f"data.train is not what this run began with: {'; '.join(faults[:3]) or 'the order of files differs'}{more} "
        f"({record} has what was there). Samples would be repeated or skipped: put the files back, begin anew with "
        "another --train.name, or accept it with --checkpoint.accept_changes=data.train"
    )


def check_tokenizers(config: Config) -> None:
    """DataError if token files are of different tokenizers, or not of the run's; also the held-out file.

    The run's tokenizer counts where data.tokenizer names one, and where text is tokenised on the fly.
    """
    tokenizer_agreement.check_replaced(config.data)
    texts = [is_text(entry) for entry in config.data.train]
    known: dict[str, str] = {}
    for entry, text in zip(config.data.train, texts, strict=True):
        made_with = None if text else tokenizer_agreement.of_tokens(entry)
        if made_with is not None:
            known.setdefault(made_with.sha256, entry)
    if known and (config.data.tokenizer or any(texts)):
        known.setdefault(tokenizer_for(config.data).sha256, str(tokenizer_path(config.data)))
    if len(known) > 1:
        first, second, *_ = known.values()
        raise DataError(
            f"data.train: {first} and {second} belong to different tokenizers, so equal ids mean different text; build "
            "one of them again with the other's tokenizer.json (`megascale data build --tokenizer`), or name the right "
            "one with --data.tokenizer"
        )
    if config.data.valid is not None:
        own = tokenizer_agreement.of_run(config)
        tokenizer_agreement.check_tokens("data.valid", config.data.valid, own, config.model.vocab_size)
        # What cannot be opened or used is said at the start, not at the first evaluation.
        HeldOut(config.data.valid, config.model.sequence_length, config.model.vocab_size).check()


def check_text(config: Config) -> list[str]:
    """Return a note if the tokenizer cannot represent all text that is tokenised on the fly; DataError if most of it.

    A sample of the text is judged, and only for tokenizers that may lose text.
    """
    entries = [Path(entry) for entry in config.data.train if is_text(entry)]
    words = tokenizer_for(config.data) if entries else None
    if words is None or not words.loses_text:
        return []
    pieces = sources.cut_pieces(sources.find_files(entries), _SAMPLE_PIECE)
    size = lost = 0
    for piece in pieces[:: max(1, len(pieces) // _SAMPLE_PIECES)]:
        with closing(sources.read_documents(piece, config.data.text_key)) as records:
            texts = [record.text[:_SAMPLE_PIECE] for record in islice(records, _SAMPLE_RECORDS)]
        size += sum(len(text.encode()) for text in texts)
        lost += words.count_lost_bytes(texts)
    check_representation(words, size, lost, f"data.train={','.join(map(str, entries))}")
    if not lost:
        return []
    return [
        f"the tokenizer cannot represent about {lost / size:.2%} of the text of data.train (of a sample of {size:,} "
        "bytes): it becomes unknown tokens or is dropped"
    ]
