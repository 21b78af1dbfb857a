"""Build of a data set from text: split, tokenizer, token files and manifest in one folder.

The input is cut into pieces. Workers encode each piece into small token files under `.parts`, which are then joined in
order. After an interruption, the next build encodes only the missing pieces. Neither the number of workers nor
interruptions change the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megascale import __version__
from megascale.core.capacity import usable_cores
from megascale.data.dataset import source_files, sources
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter, choose_token_dtype, get_weights_path
from megascale.data.dataset.manifest import MANIFEST, DataSetPart, Manifest, measure_compression, read_manifest
from megascale.data.dataset.source_files import InputPiece
from megascale.data.dataset.tokenizer_agreement import has_other_tokenizer
from megascale.data.prepare import stdlib, worker_pool
from megascale.data.prepare.encode_worker import (
    SPLITS,
    EncodeJob,
    describe_write_error,
    get_part_prefix,
    is_disk_full,
    read_finished,
)
from megascale.data.prepare.split import MIN_DOCUMENTS, Split, hash_text
from megascale.data.tokenizer.base import Tokenizer, check_representation
from megascale.data.tokenizer.huggingface_file import CONFIG, read_configured_end
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

# Folder of the encoded pieces in the data set's folder. A part is what one piece adds to one split.
PARTS = ".parts"
# Text on which a tokenizer is trained. More improves it little, and training takes about a second per 4 MB.
TOKENIZER_CHARACTERS = 50_000_000
# Text on which a given tokenizer is tried before the build, if it may lose text.
_SAMPLE_CHARACTERS = 1_000_000
# Input up to this size is read once in advance, to hold out exactly the requested share.
_EXACT_SPLIT_BYTES = 64 << 20
_MIN_PIECE_BYTES = 16 << 20  # larger if there would be more than _MAX_PIECES
_MAX_PIECES = 2048


@dataclass(frozen=True)
class BuildResult:
    """Result of a build.

    Attributes:
        folder: folder of the data set.
        manifest: contents of the folder.
        fresh: whether this call built the data set, instead of finding it.
    """

    folder: Path
    manifest: Manifest
    fresh: bool


@dataclass(frozen=True)
class _BuildPlan:
    """All decisions of a build, made before the first file is written.

    Attributes:
        recipe: hash of all inputs and settings.
        inputs: inputs as the user named them, for messages and the manifest.
        pieces: pieces of the input.
        split: rule that assigns documents to training and held-out text.
        key: key of the text in jsonl records and parquet rows.
        skipped: numbers of files and links that have no piece, by reason.
        vocab_size: requested size of a tokenizer that is trained; 0: a tokenizer is given.
    """

    recipe: str
    inputs: list[str]
    pieces: list[InputPiece]
    split: Split
    key: str
    skipped: dict[str, int] = field(default_factory=dict)
    vocab_size: int = 0

    @property
    def size(self) -> int:
        """Bytes of all input."""
        return sum(piece.size for piece in self.pieces)

    def format_inputs(self) -> str:
        """Return the inputs as messages name them."""
        return ", ".join(self.inputs)


def build(
    out: str | Path,
    *,
    use_stdlib: bool = False,
    inputs: Sequence[str | Path] = (),
    vocab_size: int = 4096,
    tokenizer: str | Path | None = None,
    held_out: float = 0.05,
    text_key: str = "text",
    workers: int | None = None,
    progress: bool = True,
) -> BuildResult:
    """Make `out/train`, `out/valid` (.bin/.idx), tokenizer.json and dataset.json.

    If the folder already has the result of the same inputs and settings, nothing is done. If it has a part of the
    result, the rest is added.

    Args:
        out: folder of the data set.
        use_stdlib: build from the source of Python's standard library (stdlib.py).
        inputs: files and folders (source_files.py describes the kinds); empty with `use_stdlib`.
        vocab_size: vocabulary size of the BPE tokenizer that is trained on the training text; unused with `tokenizer`.
        tokenizer: an existing tokenizer.json or .tiktoken file; None trains a tokenizer.
        held_out: share of the text excluded from training.
        text_key: key of the text in jsonl records and parquet rows.
        workers: number of processes; None: one per core.
        progress: whether to show progress bars.

    Raises:
        ConfigError: settings contradict each other or are out of range.
        DataError: inputs are unusable, `out` has another data set, or the disk is full.
    """
    out = Path(out)
    if use_stdlib == bool(inputs):
        raise ConfigError("a data set is made either with --stdlib or from --input PATH...; give exactly one option")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} is not a share between 0 and 1; try 0.05")
    tokenizer_settings: list[Any] | int = vocab_size
    if tokenizer:
        given_tokenizer = load_tokenizer(tokenizer)
    else:
        given_tokenizer = None
    if given_tokenizer is not None:
        tokenizer_settings = [given_tokenizer.sha256, given_tokenizer.end_of_document]
        tokenizer_settings += given_tokenizer.begin_of_document
    files: list[source_files.SourceFile] = []
    skipped: dict[str, int] = {}
    if use_stdlib:
        settings: list[Any] = [tokenizer_settings, None]
    else:
        settings = [tokenizer_settings, [held_out, text_key]]
        files, skipped = source_files.find_files_and_skipped([Path(path) for path in inputs], excluded_folder=out)
    recipe = _hash_inputs(settings, files)
    manifest = find_result(out, recipe)
    if manifest is not None:
        _remove_parts(out)  # an earlier build may have been killed between writing the manifest and removing the parts
        return BuildResult(out, manifest, fresh=False)
    if use_stdlib:
        plan = _plan_stdlib(recipe)
    else:
        plan = _plan_files(recipe, files, [str(path) for path in inputs], share=held_out, key=text_key)
        plan = replace(plan, skipped=skipped)
    if given_tokenizer is None:
        plan = replace(plan, vocab_size=vocab_size)
    with _make_progress_bars(progress) as bars, _lock_parts_folder(out, plan) as parts_folder:
        if not (parts_folder / TOKENIZER).exists():
            _add_tokenizer(parts_folder, plan, given_tokenizer, vocab_size, bars)
        missing = [piece for piece in plan.pieces if read_finished(parts_folder, piece.number) is None]
        task = bars.add_task("encoding", total=plan.size)
        finished = len(plan.pieces) - len(missing)
        if finished:
            bars.advance(task, plan.size - sum(piece.size for piece in missing))
            if progress:
                bars.console.print(f"resuming a build: {finished} of {len(plan.pieces)} pieces are finished")
        job = EncodeJob(str(parts_folder), str(parts_folder / TOKENIZER), plan.key, plan.split)
        worker_pool.encode_pieces(missing, job, workers or usable_cores(), lambda size: bars.advance(task, size))
        manifest = _join_pieces(out, parts_folder, plan, bars)
    return BuildResult(out, manifest, fresh=True)


def _hash_inputs(settings: list, files: Sequence[source_files.SourceFile]) -> str:
    """Return a hash of all inputs and settings."""
    if files:
        listing = [f"{file.name} {file.size} {file.path.stat().st_mtime_ns}" for file in files]
    else:
        listing = ["stdlib", platform.python_version(), str(stdlib.MAX_BYTES), str(stdlib.HELD_OUT_SHARE)]
    return hashlib.sha256(json.dumps([settings, listing]).encode()).hexdigest()


def find_result(out: Path, recipe: str) -> Manifest | None:
    """Return the manifest in `out` if the folder has the complete result of a build, else None.

    Args:
        recipe: hash of the inputs and settings of the build.

    Raises DataError if the folder has another data set.
    """
    manifest = read_manifest(out)
    if manifest is None:
        names = [f"{split_name}{suffix}" for split_name in SPLITS for suffix in (".bin", ".idx")]
        foreign_files = [name for name in names if (out / name).exists()]
        if foreign_files and not (out / PARTS).exists():
            raise DataError(
                f"{out} holds {', '.join(foreign_files)} and no {MANIFEST}, so it was not made here, and it is not "
                "overwritten; choose another --out, or move the files away"
            )
        return None
    if manifest.recipe == recipe:
        if _is_complete(out, manifest):
            return manifest
        return None
    raise DataError(
        f"{out / MANIFEST} says that the folder holds a data set made from other inputs or settings "
        f"({', '.join(manifest.sources)}); choose another --out, or delete the folder"
    )


def _is_complete(out: Path, manifest: Manifest) -> bool:
    """Return whether all files are as the build has left them, comparing a sample of the tokens."""
    for name, part in manifest.parts.items():
        tokens, index = out / f"{name}.bin", out / f"{name}.idx"
        for path, size in ((tokens, part.bin_bytes), (index, part.idx_bytes)):
            if not path.exists() or path.stat().st_size != size:
                return False
        if part.bin_fingerprint and fingerprint_file(tokens) != part.bin_fingerprint:
            return False
        weights = get_weights_path(tokens)
        if part.counted_tokens is not None and not (weights.exists() and weights.stat().st_size == part.tokens):
            return False
    try:
        return (out / TOKENIZER).exists() and not has_other_tokenizer(out, manifest)
    except DataError:  # the file is not a tokenizer
        return False


def _plan_stdlib(recipe: str) -> _BuildPlan:
    """Return the plan for the standard library: one piece, with files split by `choose_held_out`."""
    texts = stdlib.read_stdlib()
    held_out = stdlib.choose_held_out(texts)
    root = Path(sysconfig.get_path("stdlib"))
    piece = InputPiece(
        0,
        "text",
        [str(root / name) for name in texts],
        size=sum(len(text.encode()) for text in texts.values()),
        sides=["valid" if name in held_out else "train" for name in texts],
    )
    description = f"Python {platform.python_version()} standard library, {len(texts)} files"
    return _BuildPlan(recipe, [description], [piece], Split.by_share(stdlib.HELD_OUT_SHARE, piece.size), "text")


def _plan_files(
    recipe: str, files: Sequence[source_files.SourceFile], inputs: list[str], *, share: float, key: str
) -> _BuildPlan:
    total = sum(file.size for file in files)
    pieces = source_files.cut_pieces(files, max(_MIN_PIECE_BYTES, total // _MAX_PIECES))
    split = Split.by_share(share, total)
    # A text file is one document, and so few documents cannot be split as wholes.
    if len(files) < MIN_DOCUMENTS and all(file.kind == "text" for file in files):
        split = Split.by_ends(share)
    if total <= _EXACT_SPLIT_BYTES:
        skipped: dict[str, int] = {}
        documents: list[tuple[int, int]] = []
        for record in (record for piece in pieces for record in sources.read_documents(piece, key)):
            if record.text:
                documents.append((hash_text(record.text), len(record.text.encode())))
            elif record.skipped:
                skipped[record.skipped] = skipped.get(record.skipped, 0) + 1
        if not documents:
            raise _no_text_error(", ".join(inputs), skipped)
        split = Split.for_documents(documents, share)
    return _BuildPlan(recipe, inputs, pieces, split, key)


def _no_text_error(name: str, skipped: dict[str, int]) -> DataError:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    return DataError(
        f"{name} has no text to learn from (skipped: {reasons or 'no documents'}); give files of "
        "UTF-8 text, or name the key of the records' text with --text-key"
    )


@contextlib.contextmanager
def _lock_parts_folder(out: Path, plan: _BuildPlan) -> Iterator[Path]:
    """Yield the folder `out/.parts` under a lock, with the finished pieces of an earlier build of the same plan.

    The folder is removed at the end of the context. After a failure, finished pieces stay for the next build.
    """
    parts_folder = out / PARTS
    try:
        parts_folder.mkdir(parents=True, exist_ok=True)
        lock_file = open(out / f"{PARTS}.lock", "w")  # noqa: SIM115 - closed by the next statement
    except OSError as error:
        raise DataError(describe_write_error(out, error)) from None
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another process is building in {out}; wait for it, end it, or choose another --out"
            ) from None
        try:
            _remove_stale(out, parts_folder, plan)
            yield parts_folder
        except BaseException as error:
            if not any(read_finished(parts_folder, piece.number) for piece in plan.pieces):
                _remove_parts(out)
            if isinstance(error, OSError) and is_disk_full(error):
                raise DataError(describe_write_error(out, error)) from None
            raise
        _remove_parts(out)


def _remove_stale(out: Path, parts_folder: Path, plan: _BuildPlan) -> None:
    """Remove temporary files, and all pieces if another plan or another version of megascale has encoded them."""
    pieces = [asdict(piece) for piece in plan.pieces]
    plan_record = {"recipe": plan.recipe, "version": __version__, "split": asdict(plan.split), "pieces": pieces}
    text = json.dumps(plan_record)
    plan_file = parts_folder / "plan.json"
    if not plan_file.exists() or plan_file.read_text() != text:
        shutil.rmtree(parts_folder)
        parts_folder.mkdir()
        plan_file.write_text(text)
    for folder in (parts_folder, out):
        for file in folder.glob("*.tmp"):
            file.unlink(missing_ok=True)


def _remove_parts(out: Path) -> None:
    """Remove the folder of parts and its lock, and `out` itself if it is then empty."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / f"{PARTS}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()


def _add_tokenizer(
    parts_folder: Path, plan: _BuildPlan, tokenizer: Tokenizer | None, vocab_size: int, bars: Progress
) -> None:
    """Save the given tokenizer, or a tokenizer trained on the training text, in `parts_folder`."""
    if tokenizer is None:
        task = bars.add_task("training the tokenizer", total=None)
        tokenizer = train_tokenizer(_read_training_text(plan, TOKENIZER_CHARACTERS), vocab_size)
        bars.update(task, total=1, completed=1)
    temporary = parts_folder / "new"
    temporary.mkdir(exist_ok=True)
    _check_tokenizer(tokenizer, plan)
    tokenizer.save(temporary / TOKENIZER)
    # tokenizer.json comes last, since the next build takes it as a sign that the tokenizer is complete.
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == TOKENIZER):
        os.replace(file, parts_folder / file.name)


def _read_training_text(plan: _BuildPlan, limit: int) -> Iterator[str]:
    """Yield the training text, or about `limit` characters from evenly spread pieces of a larger data set."""
    pieces = plan.pieces
    piece_limit = limit
    if plan.size > limit:
        pieces = plan.pieces[:: max(1, len(plan.pieces) // 64)]  # 64 to 127 pieces
        piece_limit = limit // len(pieces)
    for piece in pieces:
        remaining = piece_limit
        for record in sources.read_documents(piece, plan.key):
            for split_name, text in plan.split.split_document(record):
                if split_name == "train":
                    yield text[:remaining]
                    remaining -= len(text)
            if remaining <= 0:
                break


def _join_pieces(out: Path, parts_folder: Path, plan: _BuildPlan, bars: Progress) -> Manifest:
    """Join the pieces' token files in order, and write the manifest."""
    tokenizer = load_tokenizer(parts_folder / TOKENIZER)
    records = [read_finished(parts_folder, piece.number) for piece in plan.pieces]
    encoded_pieces = [record for record in records if record is not None]
    skipped = dict(plan.skipped)
    for piece in encoded_pieces:
        for reason, count in piece.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    sizes = {split_name: sum(piece.bytes[split_name] for piece in encoded_pieces) for split_name in SPLITS}
    lost = {split_name: sum(piece.lost[split_name] for piece in encoded_pieces) for split_name in SPLITS}
    if not any(sizes.values()):
        shutil.rmtree(parts_folder)
        raise _no_text_error(plan.format_inputs(), skipped)
    if not all(sizes.values()):
        raise DataError(
            f"{plan.format_inputs()}: a held-out share of {plan.split.share} leaves {sizes['train']} bytes to train on "
            f"and {sizes['valid']} to evaluate on; give more text or another --held-out"
        )
    check_representation(tokenizer, sum(sizes.values()), sum(lost.values()), plan.format_inputs())
    tokenizer.save(out / TOKENIZER)
    dtype = choose_token_dtype(tokenizer.vocab_size)
    notes = (
        _make_begin_note(tokenizer),
        _make_loss_note(sizes, lost),
        _make_share_note(sizes, plan),
        _make_vocabulary_note(tokenizer, plan),
    )
    manifest = Manifest(
        plan.inputs,
        plan.recipe,
        tokenizer=describe_tokenizer(tokenizer, out),
        dtype=dtype.name,
        parts={
            split_name: _join_split(
                out,
                parts_folder,
                plan,
                split_name,
                dtype=dtype,
                text_bytes=sizes[split_name],
                lost_bytes=lost[split_name],
                bars=bars,
            )
            for split_name in SPLITS
        },
        skipped=skipped,
        version=__version__,
        notes=[note for note in notes if note],
    )
    manifest.save(out)
    return manifest


def describe_tokenizer(tokenizer: Tokenizer, out: Path) -> dict[str, Any]:
    """Return the manifest's record of the tokenizer in the data set's folder `out`."""
    return {
        "file": TOKENIZER,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "begin_of_document": list(tokenizer.begin_of_document),
        "eos_token": read_configured_end(out / CONFIG),
    }


def _join_split(
    out: Path,
    parts_folder: Path,
    plan: _BuildPlan,
    split_name: str,
    *,
    dtype: np.dtype,
    text_bytes: int,
    lost_bytes: int,
    bars: Progress,
) -> DataSetPart:
    """Join the pieces' token files of one split, and return the record for the manifest."""
    task = bars.add_task(f"joining {split_name}", total=len(plan.pieces))
    with IndexedWriter(out / split_name, dtype, hashed=True) as writer:
        for piece in plan.pieces:
            writer.append(IndexedDataset(get_part_prefix(parts_folder, piece.number, split_name)))
            bars.advance(task)
    texts = (
        get_part_prefix(parts_folder, piece.number, split_name).with_suffix(".txt").read_bytes()
        for piece in plan.pieces
    )
    tokens, index = out / f"{split_name}.bin", out / f"{split_name}.idx"
    return DataSetPart(
        documents=writer.documents,
        tokens=writer.tokens,
        bytes=text_bytes,
        bin_bytes=tokens.stat().st_size,
        idx_bytes=index.stat().st_size,
        idx_sha256=sha256_file(index),
        compressed=measure_compression(texts) if split_name == "valid" else None,
        lost_bytes=lost_bytes,
        bin_sha256=writer.digest.hexdigest() if writer.digest is not None else "",
        bin_fingerprint=fingerprint_file(tokens),
    )


def _make_begin_note(tokenizer: Tokenizer) -> str:
    if not tokenizer.begin_of_document:
        return ""
    begin = tokenizer.decode(tokenizer.begin_of_document)
    return f"each document begins with {begin}, as the tokenizer's template begins a prompt"


def _check_tokenizer(tokenizer: Tokenizer, plan: _BuildPlan) -> None:
    """Raise DataError for a tokenizer that cannot represent a sample of the text, before all text is encoded."""
    if not tokenizer.loses_text:
        return
    sample = [text for text in _read_training_text(plan, _SAMPLE_CHARACTERS) if text]
    size = sum(len(text.encode()) for text in sample)
    check_representation(tokenizer, size, tokenizer.count_lost_bytes(sample), plan.format_inputs())


def _make_loss_note(sizes: dict[str, int], lost: dict[str, int]) -> str:
    if not any(lost.values()):
        return ""
    shares = ", ".join(f"{lost[split_name]:,} of {sizes[split_name]:,} bytes of {split_name}" for split_name in SPLITS)
    return (
        f"the tokenizer cannot represent {shares}: these bytes became unknown tokens, or were dropped. Bits per byte "
        "count each of them as 8 bits"
    )


def _make_share_note(sizes: dict[str, int], plan: _BuildPlan) -> str:
    """Return a note if the held-out share is far from the requested share, which a few long documents can cause."""
    share = sizes["valid"] / sum(sizes.values())
    requested = plan.split.share
    if any(piece.sides for piece in plan.pieces) or abs(share - requested) <= requested / 2:
        return ""
    return f"{share:.2%} of the text is held out, where --held-out={requested:g} requests {requested:.2%}"


def _make_vocabulary_note(tokenizer: Tokenizer, plan: _BuildPlan) -> str:
    """Return a note if a trained tokenizer has fewer entries than requested, because the text has no more merges."""
    if tokenizer.vocab_size >= plan.vocab_size:
        return ""
    return (
        f"the tokenizer has {tokenizer.vocab_size:,} entries, where --vocab-size={plan.vocab_size} requests more: the "
        "text has too few different words"
    )


def _make_progress_bars(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
