"""Checks that token files and a run have the same tokenizer, because equal ids of two tokenizers mean different text.

The manifest in a token file's folder names the file's tokenizer. A file without a manifest is assumed to belong to the
tokenizer.json in its folder, if there is one. A run records its first tokenizer in `samples/tokenizer.json`. If a
tokenizer is unknown, token ids are still compared with the size of the vocabulary (check_token_ids in token_file.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.config import DataConfig
from megascale.core.atomic_files import write_atomically
from megascale.core.untrusted_files import read_small_text
from megascale.data.dataset.file_hash import sha256_file
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.manifest import MANIFEST, Manifest, read_manifest
from megascale.data.tokenizer.huggingface_file import CONFIG, read_configured_end
from megascale.data.tokenizer.tokenizer import TOKENIZER, find_tokenizer_path, load_tokenizer
from megascale.errors import DataError

RECORD = "samples/tokenizer.json"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Identity of a tokenizer.

    Attributes:
        sha256: hash of the contents of the tokenizer.json.
        file: path of the file, for messages.
        vocab_size: one more than the largest id.
    """

    sha256: str
    file: str
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.file} ({self.vocab_size:,} entries, sha256 {self.sha256[:8]})"


def identify_token_file(prefix: str | Path) -> TokenizerIdentity | None:
    """Return the tokenizer of a token file; None if its folder has neither a manifest nor a readable tokenizer.json."""
    folder = Path(prefix).parent
    manifest = read_manifest(folder)
    if manifest is not None:
        record = manifest.tokenizer
        try:
            return TokenizerIdentity(
                str(record["sha256"]), str(folder / str(record["file"])), int(record["vocab_size"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder / MANIFEST} names no tokenizer ({error}); build the folder again") from None
    path = folder / TOKENIZER
    try:
        return _identify(path) if path.exists() else None
    except DataError:
        return None  # the file may be of any tokenizer


def identify_run_tokenizer(data: DataConfig) -> TokenizerIdentity | None:
    """Return a run's tokenizer: data.tokenizer, or the tokenizer of its training files.

    Raises DataError if data.tokenizer is set and cannot be read.
    """
    if data.tokenizer or any(map(is_text, data.train)):
        return _identify(find_tokenizer_path(data))
    identities = (identify_token_file(entry) for entry in data.train)
    return next((identity for identity in identities if identity), None)


def check_unchanged_tokenizer(data: DataConfig) -> None:
    """Raise DataError if the tokenizer.json in the first data set's folder was replaced after the build.

    Nothing is checked if data.tokenizer names another file, or if the folder has no manifest.
    """
    if data.tokenizer or not data.train or is_text(data.train[0]):
        return
    folder = Path(data.train[0]).parent
    manifest = read_manifest(folder)
    if manifest is None or not has_other_tokenizer(folder, manifest):
        return
    record = manifest.tokenizer
    raise DataError(
        f"{folder / record['file']} is not the tokenizer that {folder} was built with (sha256 {record['sha256'][:8]}, "
        f"{record['vocab_size']:,} entries): the file, or the end of a document in its tokenizer_config.json, was "
        "changed, so ids would mean other text. Restore the files, name the right tokenizer with --data.tokenizer, "
        "or build the data set again"
    )


def has_other_tokenizer(folder: Path, manifest: Manifest) -> bool:
    """Return whether the tokenizer in a data set's folder differs from the tokenizer of the build.

    A missing file counts as equal. Raises DataError if the file cannot be read.
    """
    record = manifest.tokenizer
    path = folder / str(record.get("file", TOKENIZER))
    if not path.exists() or "sha256" not in record:
        return False
    if "eos_token" in record and record["eos_token"] != read_configured_end(path.with_name(CONFIG)):
        return True
    # An unchanged file needs no parsing. A reformatted file may still hold the same tokenizer.
    return sha256_file(path) != record["sha256"] and load_tokenizer(path).sha256 != record["sha256"]


def _identify(path: Path) -> TokenizerIdentity:
    tokenizer = load_tokenizer(path)
    return TokenizerIdentity(tokenizer.sha256, str(path), tokenizer.vocab_size)


def write_identity(run: Path, data: DataConfig) -> None:
    """Record the tokenizer with which a run begins; remove the record if the tokenizer is unknown."""
    identity = identify_run_tokenizer(data)
    record = run / RECORD
    if identity is None:
        record.unlink(missing_ok=True)
        return
    write_atomically(record, json.dumps(asdict(identity), indent=1) + "\n")


def read_identity(run: Path) -> TokenizerIdentity | None:
    """Return the tokenizer with which a run began, or None if it is not recorded."""
    try:
        return TokenizerIdentity(**json.loads(read_small_text(run / RECORD)))
    except (OSError, ValueError, TypeError):
        return None


def check_run_tokenizer(run: Path, data: DataConfig) -> TokenizerIdentity | None:
    """Return the run's tokenizer. Raises DataError if the present tokenizer is not that of the first start."""
    check_unchanged_tokenizer(data)
    recorded = read_identity(run)
    try:
        present = identify_run_tokenizer(data)
    except DataError:
        return recorded  # the file is missing; the record may still identify it
    if recorded is not None and present is not None and recorded.sha256 != present.sha256:
        raise DataError(
            f"the tokenizer {present} is not the tokenizer with which the run {run} began, {recorded}: equal ids "
            "mean other text. Restore that tokenizer, or name it with --data.tokenizer"
        )
    return recorded or present


def check_token_file(
    setting: str, prefix: str, run_tokenizer: TokenizerIdentity | None, vocab_size: int | None
) -> None:
    """Raise DataError if a token file belongs to another tokenizer than the run's, or has more ids than the model.

    Args:
        setting: the key or option that named the file.
        prefix: the token file.
        run_tokenizer: the run's tokenizer; None if unknown.
        vocab_size: model.vocab_size; None if it is not set.
    """
    identity = identify_token_file(prefix)
    if identity is None:
        return
    if run_tokenizer is not None and run_tokenizer.sha256 != identity.sha256:
        raise DataError(
            f"{setting}={prefix} holds tokens of another tokenizer, {identity}, than this run's, {run_tokenizer}: "
            "equal ids mean different text, so its loss would mean nothing. Build the file with the run's tokenizer "
            f"(`megascale data build --tokenizer {run_tokenizer.file}`), or name another file"
        )
    if run_tokenizer is None and vocab_size is not None and identity.vocab_size > vocab_size:
        raise DataError(
            f"{setting}={prefix} holds tokens of {identity}, and model.vocab_size={vocab_size}: the file belongs "
            "to another tokenizer than the run's; name a file that was built with the run's tokenizer"
        )
