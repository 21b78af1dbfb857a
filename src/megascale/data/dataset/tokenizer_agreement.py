"""Whose tokens a file holds: the run's own tokenizer's, or it is refused: equal ids of two tokenizers are other text.

What a token file's tokenizer is stands in the manifest beside it (`megascale data build` writes one); a file without
one is taken to belong to the tokenizer.json beside it, if there is one. A run keeps what it began with in
`samples/tokenizer.json`. Where neither is known, the vocabulary's size still decides (see check_ids in samples.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.config import Config, DataConfig
from megascale.core.untrusted_files import read_small_text
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.manifest import Manifest, read_manifest, sha256_file
from megascale.data.tokenizer.huggingface_file import CONFIG, configured_end
from megascale.data.tokenizer.tokenizer import load_tokenizer, tokenizer_path
from megascale.errors import DataError

RECORD = "samples/tokenizer.json"


@dataclass(frozen=True)
class Identity:
    """A tokenizer.

    Attributes:
        sha256: of its tokenizer.json's contents.
        file: where it is, for a person.
        vocab_size: one more than its largest id.
    """

    sha256: str
    file: str
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.file} ({self.vocab_size:,} entries, sha256 {self.sha256[:8]})"


def of_tokens(prefix: str | Path) -> Identity | None:
    """Of a token file; None if nothing says."""
    folder = Path(prefix).parent
    manifest = read_manifest(folder)
    if manifest is not None:
        told = manifest.tokenizer
        try:
            return Identity(str(told["sha256"]), str(folder / str(told["file"])), int(told["vocab_size"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder / 'dataset.json'} names no tokenizer ({error}); build the folder again") from None
    sibling = folder / "tokenizer.json"
    try:
        return _of_file(sibling) if sibling.exists() else None
    except DataError:
        return None  # of another kind: it says nothing of the file


def of_run(config: Config) -> Identity | None:
    """Of a run by its configuration: data.tokenizer or, as everywhere, what is beside its training files.

    DataError if that one is named and cannot be read.
    """
    data = config.data
    if data.tokenizer or any(map(is_text, data.train)):
        return _of_file(tokenizer_path(data))
    return next((found for entry in data.train if (found := of_tokens(entry))), None)


def check_replaced(data: DataConfig) -> None:
    """Refuse a tokenizer.json that was replaced next to the data set it is taken from; DataError naming both.

    Nothing is checked if data.tokenizer names another, or if the data set was not built here.
    """
    if data.tokenizer or not data.train or is_text(data.train[0]):
        return
    folder = Path(data.train[0]).parent
    manifest = read_manifest(folder)
    if manifest is None or not has_other_tokenizer(folder, manifest):
        return
    built = manifest.tokenizer
    raise DataError(
        f"{folder / built['file']} is not the tokenizer that {folder} was built with (sha256 {built['sha256'][:8]}, "
        f"{built['vocab_size']:,} entries): the file, or the end of a document that tokenizer_config.json beside it "
        "names, was changed, so ids would mean other text. Put the files back, name the right tokenizer with "
        "--data.tokenizer, or build the data set again"
    )


def has_other_tokenizer(folder: Path, manifest: Manifest) -> bool:
    """Return whether the tokenizer in a data set's folder is another than the one it was built with.

    A file that is missing is no other one. Raises DataError if the file cannot be read.
    """
    built = manifest.tokenizer
    path = folder / str(built.get("file", "tokenizer.json"))
    if not path.exists() or "sha256" not in built:
        return False
    if "eos_token" in built and built["eos_token"] != configured_end(path.with_name(CONFIG)):
        return True
    # A file as it was written needs no parsing. One that was formatted anew may still hold the same tokenizer.
    return sha256_file(path) != built["sha256"] and load_tokenizer(path).sha256 != built["sha256"]


def _of_file(path: Path) -> Identity:
    words = load_tokenizer(path)
    return Identity(words.sha256, str(path), words.vocab_size)


def remember(run: Path, config: Config) -> None:
    """Write down which tokenizer a run begins with."""
    now, record = of_run(config), run / RECORD
    if now is None:
        record.unlink(missing_ok=True)
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    new = record.with_suffix(".tmp")
    new.write_text(json.dumps(asdict(now), indent=1) + "\n")
    new.replace(record)


def read_identity(run: Path) -> Identity | None:
    """What a run began with; None for one of an older version, or of which nothing is known."""
    try:
        return Identity(**json.loads(read_small_text(run / RECORD)))
    except (OSError, ValueError, TypeError):
        return None


def check_run(run: Path, config: Config) -> Identity | None:
    """The run's tokenizer; DataError if the one there now is not what the run began with."""
    check_replaced(config.data)
    before = read_identity(run)
    try:
        now = of_run(config)
    except DataError:
        return before  # the file is gone; what it was may be known
    if before is not None and now is not None and before.sha256 != now.sha256:
        raise DataError(
            f"the tokenizer {now} is not the one that the run {run} began with, {before}: equal ids mean other text. "
            "Put that one back, or name it with --data.tokenizer"
        )
    return before or now


def check_tokens(what: str, prefix: str, own: Identity | None, vocab_size: int | None) -> None:
    """DataError, naming both, if a token file is of another tokenizer than the run's, or has more ids than the model.

    Args:
        what: the key or option that named the file.
        own: the run's tokenizer, if known.
    """
    theirs = of_tokens(prefix)
    if theirs is None:
        return
    if own is not None and own.sha256 != theirs.sha256:
        raise DataError(
            f"{what}={prefix} holds tokens of another tokenizer, {theirs}, than this run's, {own}: equal ids mean "
            "different text, so its loss would mean nothing. Build it with the run's (`megascale data build "
            f"--tokenizer {own.file}`), or name another file"
        )
    if own is None and vocab_size is not None and theirs.vocab_size > vocab_size:
        raise DataError(
            f"{what}={prefix} holds tokens of {theirs}, and model.vocab_size={vocab_size}: it is of another tokenizer "
            "than the run's; name a file that was built with the run's"
        )
