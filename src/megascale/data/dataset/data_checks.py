"""Checks of a run's data at its start: files, lengths, tokenizers, and changes since the first start. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

from megascale.config import DataConfig
from megascale.core.atomic_files import write_atomically
from megascale.data.dataset import manifest, source_files, sources
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.formats import is_text, list_token_files, open_tokens
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.samples import find_fields
from megascale.data.dataset.token_file import too_short_error
from megascale.data.dataset.tokenizer_agreement import (
    check_run_tokenizer,
    check_token_file,
    check_unchanged_tokenizer,
    identify_run_tokenizer,
    identify_token_file,
    read_identity,
    write_identity,
)
from megascale.data.tokenizer.base import check_representation
from megascale.data.tokenizer.tokenizer import find_tokenizer_path, load_run_tokenizer
from megascale.errors import DataError

SOURCES_FILE = "sources.json"
# Largest sample of text on which a tokenizer is tried: pieces, records per piece, and characters per record.
_SAMPLE_PIECES = 32
_SAMPLE_RECORDS = 16
_SAMPLE_CHARACTERS = 1 << 16


def check_entry(entry: str) -> None:
    """Raise DataError for an entry of data.train that does not exist or is the folder of a built data set."""
    if (Path(entry) / manifest.MANIFEST).exists():
        raise DataError(f"data.train={entry} is the folder of a built data set; name its token file, {entry}/train")
    if is_text(entry) or any(file.exists() for file in list_token_files(entry)):
        return
    folder = Path(entry).parent
    if not folder.is_dir():
        raise DataError(
            f"data.train={entry}: the folder {folder} does not exist (in {Path.cwd()}); check the path, or make a data "
            "set with `megascale data build`"
        )
    names = " nor ".join(str(file) for file in list_token_files(entry))
    raise DataError(
        f"data.train={entry} does not exist: there is neither a file or folder of that name nor {names} (in "
        f"{Path.cwd()}); check the path, or make a data set with `megascale data build`"
    )


def check_data(data: DataConfig, sequence_length: int, *, needs_tokenizer: bool) -> None:
    """Check token files and tokenizer before any process starts. Text that is tokenised on the fly is not read.

    Args:
        needs_tokenizer: whether the run encodes or decodes text, such as a sample prompt.

    Raises:
        DataError: a data set or tokenizer is missing, damaged or too short.
        ConfigError: data.document_mask is true, and an entry of data.train has no documents.
    """
    find_fields(data, sequence_length)
    for entry in data.train:
        if is_text(entry):
            load_run_tokenizer(data)
            continue
        tokens = open_tokens(entry).tokens
        if tokens <= sequence_length:
            raise too_short_error(entry, tokens, sequence_length)
    if data.valid:
        open_tokens(data.valid)
    if data.train and needs_tokenizer:
        load_run_tokenizer(data)


def check_samples(data: DataConfig) -> None:
    """Compare a sample of each token file with its manifest, if it has one. Raises DataError if they differ."""
    for entry in data.train:
        if not is_text(entry):
            manifest.check_sampled_tokens("data.train", entry)
    if data.valid is not None:
        manifest.check_sampled_tokens("data.valid", data.valid)


def fingerprint_sources(data: DataConfig) -> dict[str, str]:
    """Return the fingerprint of each file of data.train by path, and of the tokenizer if text is tokenised on the fly.

    Raises DataError for a missing file.
    """
    files: list[Path] = []
    for entry in data.train:
        if is_text(entry):
            files += [source.path for source in source_files.find_files([Path(entry)])]
        else:
            files += list_token_files(entry)
    if any(map(is_text, data.train)):
        files.append(find_tokenizer_path(data))
    try:
        return {str(file): fingerprint_file(file) for file in files}
    except OSError as error:
        raise DataError(
            f"data.train: {error.filename} cannot be read ({error.strerror}); put it back or name another file"
        ) from None


def check_run_data(
    run: Path,
    data: DataConfig,
    *,
    sequence_length: int,
    vocab_size: int | None,
    consumed: int,
    is_leader: bool,
    accept_changes: bool,
) -> list[str]:
    """Check the data at a start of a run, and return notes on the data.

    Files and tokenizer must be those of the run's first start.

    Args:
        run: folder of the run, with the records of the first start.
        consumed: samples trained before this start.
        is_leader: whether this process writes the records at the first start, and collects notes that need all files.
        accept_changes: whether files may have changed (checkpoint.accept_changes has data.train).

    Raises DataError as the checks of this module do.
    """
    check_samples(data)
    check_tokenizers(data, sequence_length, vocab_size)
    notes = check_text(data)
    if is_leader:  # these open all files once more, and only the leader's notes are printed
        notes += list_skipped_text(data) + find_repeated_data(data) + find_trained_validation(data)
    record = run / "samples" / SOURCES_FILE
    fingerprints = fingerprint_sources(data)
    if consumed:
        if not accept_changes:
            compare_fingerprints(record, fingerprints)
        check_run_tokenizer(run, data)
    is_record_valid = consumed > 0 and record.exists() and not accept_changes
    if is_leader and not is_record_valid:
        write_atomically(record, json.dumps(fingerprints, indent=1) + "\n")
    if is_leader and not (consumed and read_identity(run)):
        write_identity(run, data)
    return notes


def list_skipped_text(data: DataConfig) -> list[str]:
    """Return a note for the files and links of data.train that cannot be trained, or an empty list.

    Text is read during training, so each file is judged by its beginning.
    """
    entries = [Path(entry) for entry in data.train if is_text(entry)]
    if not entries:
        return []
    # Without weights all text is one stream, which reads each file once. With weights each entry is a stream.
    streams = [entries]
    if data.weights is not None:
        streams = [[entry] for entry in entries]
    skipped: Counter[str] = Counter()
    for stream in streams:
        files, skipped_files = source_files.find_files_and_skipped(stream)
        skipped.update(skipped_files)
        skipped.update(reason for file in files if (reason := source_files.find_binary_reason(file)))
    if not skipped:
        return []
    counts = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    return [f"data.train leaves out {counts}"]


def find_repeated_data(data: DataConfig) -> list[str]:
    """Return a note if a token file, or with data.weights a file of text, is in two entries of data.train."""
    entry_by_file: dict[str | Path, str] = {}  # the first entry that has the file
    for entry in data.train:
        files: set[str | Path]
        if not is_text(entry):
            # A copy of a token file is repeated data too.
            files = {fingerprint_file(list_token_files(entry)[0])}
        elif data.weights is not None:
            files = {file.path.resolve() for file in source_files.find_files([Path(entry)])}
        else:
            continue
        for file in files:
            first_entry = entry_by_file.setdefault(file, entry)
            if first_entry != entry or data.train.count(entry) > 1:
                return [
                    f"data.train has text of {first_entry} again in {entry}, so samples are repeated within an epoch; "
                    "remove one of them, or ignore this line if the repetition is intended"
                ]
    return []


def find_trained_validation(data: DataConfig) -> list[str]:
    """Return a note if data.valid has the tokens of a file in data.train, or an empty list."""
    if data.valid is None:
        return []
    valid_fingerprint = fingerprint_file(list_token_files(data.valid)[0])
    for entry in data.train:
        if not is_text(entry) and fingerprint_file(list_token_files(entry)[0]) == valid_fingerprint:
            return [
                f"data.valid={data.valid} has the tokens of {entry} in data.train, so its loss is not that of held-out "
                "text; name a file that is not trained"
            ]
    return []


def compare_fingerprints(record: Path, fingerprints: Mapping[str, str]) -> None:
    """Raise DataError naming the files that are missing, changed or new since `record` was written.

    Paths may differ, because a data set may be moved. Contents and order must be equal. Without a record nothing is
    compared.

    Args:
        record: file with the fingerprints at the first start.
        fingerprints: present fingerprints by path.
    """
    try:
        recorded: dict[str, str] = json.loads(record.read_text())
    except (FileNotFoundError, ValueError):
        return
    if list(recorded.values()) == list(fingerprints.values()):
        return
    faults = []
    for path, fingerprint in fingerprints.items():
        if path in recorded and recorded[path] != fingerprint:
            faults.append(f"{path} was changed")
    faults += [f"{path} is missing" for path in recorded if path not in fingerprints]
    faults += [f"{path} is new" for path in fingerprints if path not in recorded]
    if len(faults) > 3:
        more = f" and {len(faults) - 3} more"
    else:
        more = ""
    raise DataError(
        f"data.train is not the data that this run began with: {'; '.join(faults[:3]) or 'the order of files differs'}"
        f"{more} (recorded in {record}). Samples would be repeated or skipped: restore the files, start a new run "
        "with another --train.name, or accept the change with --checkpoint.accept_changes=data.train"
    )


def check_tokenizers(data: DataConfig, sequence_length: int, vocab_size: int | None) -> None:
    """Raise DataError if token files, the held-out file included, belong to different tokenizers.

    The run's tokenizer is compared too if data.tokenizer names it or text is tokenised on the fly.
    """
    check_unchanged_tokenizer(data)
    entry_by_tokenizer: dict[str, str] = {}  # by the tokenizer's hash, the first entry that belongs to it
    for entry in data.train:
        if is_text(entry):
            identity = None
        else:
            identity = identify_token_file(entry)
        if identity is not None:
            entry_by_tokenizer.setdefault(identity.sha256, entry)
    if entry_by_tokenizer and (data.tokenizer or any(map(is_text, data.train))):
        entry_by_tokenizer.setdefault(load_run_tokenizer(data).sha256, str(find_tokenizer_path(data)))
    if len(entry_by_tokenizer) > 1:
        first, second, *_ = entry_by_tokenizer.values()
        raise DataError(
            f"data.train: {first} and {second} belong to different tokenizers, so equal ids mean different text; build "
            "one of them again with the other's tokenizer.json (`megascale data build --tokenizer`), or name the right "
            "one with --data.tokenizer"
        )
    if data.valid is not None:
        check_token_file("data.valid", data.valid, identify_run_tokenizer(data), vocab_size)
        # Report an unusable file now instead of at the first evaluation.
        max_documents = data.count_max_documents(sequence_length)
        HeldOut(data.valid, sequence_length, vocab_size, max_documents=max_documents).check_vocabulary()


def check_text(data: DataConfig) -> list[str]:
    """Return a note if the tokenizer cannot represent all text that is tokenised on the fly.

    A sample of the text is encoded if the tokenizer may lose text. Raises DataError if most of the sample is lost.
    """
    entries = [Path(entry) for entry in data.train if is_text(entry)]
    tokenizer = load_run_tokenizer(data) if entries else None
    if tokenizer is None or not tokenizer.loses_text:
        return []
    pieces = source_files.cut_pieces(source_files.find_files(entries), _SAMPLE_CHARACTERS)
    size = lost = 0
    for piece in pieces[:: max(1, len(pieces) // _SAMPLE_PIECES)]:
        with closing(sources.read_documents(piece, data.text_key)) as records:
            texts = [record.text[:_SAMPLE_CHARACTERS] for record in islice(records, _SAMPLE_RECORDS)]
        size += sum(len(text.encode()) for text in texts)
        lost += tokenizer.count_lost_bytes(texts)
    check_representation(tokenizer, size, lost, f"data.train={','.join(map(str, entries))}")
    if not lost:
        return []
    return [
        f"the tokenizer cannot represent about {lost / size:.2%} of the text of data.train (in a sample of {size:,} "
        "bytes): this text becomes unknown tokens or is dropped"
    ]
