"""Build of a data set from text: documents, split, tokenizer, token files and manifest in one folder.

The input is cut into pieces. Workers turn each piece into small token files under `.parts`, and these are joined in
order. A build that was killed goes on with the missing pieces. The result does not depend on the number of workers or
of interruptions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megascale import __version__
from megascale.core.capacity import usable_cores
from megascale.data.dataset import sources
from megascale.data.dataset.file_hash import fingerprint_file, sha256_file
from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter, token_dtype, weights_path
from megascale.data.dataset.manifest import MANIFEST, DataSetPart, Manifest, compress, read_manifest
from megascale.data.dataset.sources import InputPiece
from megascale.data.dataset.tokenizer_agreement import has_other_tokenizer
from megascale.data.prepare import stdlib, worker_pool
from megascale.data.prepare.encode_worker import SPLITS, EncodeJob, part_prefix, read_finished
from megascale.data.prepare.split import MIN_DOCUMENTS, Split, hash_text
from megascale.data.tokenizer.base import Tokenizer, check_representation
from megascale.data.tokenizer.huggingface_file import CONFIG, configured_end
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

PARTS = ".parts"
# A tokenizer learns little from text beyond this; it takes about a second for 4 MB.
TOKENIZER_TEXT = 50_000_000
# Characters in which a given tokenizer is tried if it may not represent all text.
_SAMPLE = 1_000_000
# Input up to this many bytes is read once beforehand, to split it exactly as requested.
_EXACT_SPLIT = 64 << 20
_PIECE = 16 << 20  # bytes; larger where there would be more than _PIECES
_PIECES = 2048


@dataclass(frozen=True)
class BuildResult:
    """A data set's folder and manifest; `fresh` if this call built it."""

    folder: Path
    manifest: Manifest
    fresh: bool


@dataclass(frozen=True)
class _Plan:
    """All decisions of a build, made before anything is written.

    Attributes:
        recipe: hash of everything that decides the result.
        inputs: the sources, for messages and the manifest.
    """

    recipe: str
    inputs: list[str]
    pieces: list[InputPiece]
    split: Split
    key: str

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.size for piece in self.pieces)

    def name(self) -> str:
        """Return the sources as messages name them."""
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

    A folder that already holds the result of the same inputs and settings is left alone; one that holds part of it
    is completed.

    Args:
        use_stdlib: take the Python standard library's source (see stdlib.py).
        inputs: files and folders, if not the standard library (see sources.py for the kinds).
        vocab_size: vocabulary size of the BPE tokenizer that is trained on the training text; unused with `tokenizer`.
        tokenizer: an existing tokenizer.json or .tiktoken file.
        held_out: share of the text excluded from training.
        text_key: key of the text in jsonl records and parquet rows.
        workers: processes; default: one per core.
        progress: show progress bars.

    Raises:
        ConfigError: settings that contradict each other or are out of range.
        DataError: unusable inputs, an `out` that holds another data set, or a full disk.
    """
    out = Path(out)
    if use_stdlib == bool(inputs):
        raise ConfigError("a data set is made either with --stdlib or from --input PATH...; give exactly one of them")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} is not a share between 0 and 1; try 0.05")
    vocabulary: list[Any] | int = vocab_size
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    else:
        loaded = None
    if loaded is not None:
        vocabulary = [loaded.sha256, loaded.end_of_document] + list(loaded.begin_of_document)
    settings: list[Any] = [vocabulary, None]
    files: list[sources.SourceFile] = []
    if not use_stdlib:
        settings[1] = [held_out, text_key]
        files = sources.find_files([Path(path) for path in inputs], without=out)
    recipe = _hash_inputs(settings, files)
    manifest = find_result(out, recipe)
    if manifest is not None:
        _clear(out)  # the process may have been killed between writing the manifest and removing the parts
        return BuildResult(out, manifest, fresh=False)
    if use_stdlib:
        plan = _plan_stdlib(recipe)
    else:
        plan = _plan_files(recipe, files, [str(path) for path in inputs], share=held_out, key=text_key)
    with _progress_bars(progress) as bars, _parts_folder(out, plan) as parts:
        if not (parts / TOKENIZER).exists():
            _add_tokenizer(parts, plan, loaded, vocab_size, bars)
        missing = [piece for piece in plan.pieces if read_finished(parts, piece.number) is None]
        task = bars.add_task("encoding", total=plan.size)
        finished = len(plan.pieces) - len(missing)
        if finished:
            bars.advance(task, plan.size - sum(piece.size for piece in missing))
            if progress:
                bars.console.print(f"resuming a build: {finished} of {len(plan.pieces)} pieces are finished")
        job = EncodeJob(str(parts), str(parts / TOKENIZER), plan.key, plan.split)
        worker_pool.encode_pieces(missing, job, workers or usable_cores(), lambda used: bars.advance(task, used))
        manifest = _join(out, parts, plan, bars)
    return BuildResult(out, manifest, fresh=True)


def _hash_inputs(settings: list, files: Sequence[sources.SourceFile]) -> str:
    """Return a hash of everything that decides the result."""
    if files:
        listing = [f"{file.name} {file.size} {file.path.stat().st_mtime_ns}" for file in files]
    else:
        listing = ["stdlib", platform.python_version(), str(stdlib.LARGEST), str(stdlib.HELD_OUT)]
    return hashlib.sha256(json.dumps([settings, listing]).encode()).hexdigest()


def find_result(out: Path, recipe: str) -> Manifest | None:
    """Return the manifest in `out` if it holds the complete result of `recipe`; DataError for another data set."""
    manifest = read_manifest(out)
    if manifest is None:
        foreign = [
            name
            for split_name in SPLITS
            for name in (f"{split_name}.bin", f"{split_name}.idx")
            if (out / name).exists()
        ]
        if foreign and not (out / PARTS).exists():
            raise DataError(
                f"{out} holds {', '.join(foreign)} and no {MANIFEST}, so it was not made here, and it is not "
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
    """Return whether all files are as they were built; a sample of the tokens is compared."""
    for name, part in manifest.parts.items():
        tokens, index = out / f"{name}.bin", out / f"{name}.idx"
        for path, size in ((tokens, part.bin_bytes), (index, part.idx_bytes)):
            if not path.exists() or path.stat().st_size != size:
                return False
        if part.bin_fingerprint and fingerprint_file(tokens) != part.bin_fingerprint:
            return False
        weights = weights_path(tokens)
        if part.counted_tokens is not None and not (weights.exists() and weights.stat().st_size == part.tokens):
            return False
    try:
        return (out / TOKENIZER).exists() and not has_other_tokenizer(out, manifest)
    except DataError:  # the file is not a tokenizer
        return False


def _plan_stdlib(recipe: str) -> _Plan:
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
    return _Plan(recipe, [description], [piece], Split.by_share(stdlib.HELD_OUT, piece.size), "text")


def _plan_files(
    recipe: str, files: Sequence[sources.SourceFile], inputs: list[str], *, share: float, key: str
) -> _Plan:
    total = sum(file.size for file in files)
    pieces = sources.cut_pieces(files, max(_PIECE, total // _PIECES))
    split = Split.by_share(share, total)
    if len(files) < MIN_DOCUMENTS and all(file.kind == "text" for file in files):
        split = Split.by_ends(share)
    if total <= _EXACT_SPLIT:
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
    return _Plan(recipe, inputs, pieces, split, key)


def _no_text_error(name: str, skipped: dict[str, int]) -> DataError:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    return DataError(
        f"{name} has no text to learn from; skipped were {reasons or 'no documents'}. Give files of "
        "UTF-8 text, or name the key of the records' text with --text-key"
    )


@contextlib.contextmanager
def _parts_folder(out: Path, plan: _Plan) -> Iterator[Path]:
    """Yield `out/.parts`, locked, with the finished pieces of an earlier build of the same plan.

    The folder is removed at the end. A failure leaves the finished pieces for the next build.
    """
    parts = out / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    with open(out / f"{PARTS}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another process is building in {out}; wait for it, end it, or choose another --out"
            ) from None
        _remove_stale(out, parts, plan)
        try:
            yield parts
        except BaseException as error:
            if not any(read_finished(parts, piece.number) for piece in plan.pieces):
                _clear(out)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"the disk that holds {out} is full; make room and run the same command again, which goes on where "
                    "it stopped"
                ) from None
            raise
        _clear(out)


def _remove_stale(out: Path, parts: Path, plan: _Plan) -> None:
    """Remove temporary files, and pieces that another version or another split has encoded."""
    pieces = [asdict(piece) for piece in plan.pieces]
    state = {"recipe": plan.recipe, "version": __version__, "split": asdict(plan.split), "pieces": pieces}
    text = json.dumps(state)
    record = parts / "plan.json"
    if not record.exists() or record.read_text() != text:
        shutil.rmtree(parts)
        parts.mkdir()
        record.write_text(text)
    for folder in (parts, out):
        for file in folder.glob("*.tmp"):
            file.unlink(missing_ok=True)


def _clear(out: Path) -> None:
    """Remove the parts, and `out` itself if it is empty."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / f"{PARTS}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()


def _add_tokenizer(parts: Path, plan: _Plan, tokenizer: Tokenizer | None, vocab_size: int, bars: Progress) -> None:
    """Save the given tokenizer, or one trained on the training text, in `parts`; tokenizer.json appears last."""
    if tokenizer is None:
        task = bars.add_task("training the tokenizer", total=None)
        tokenizer = train_tokenizer(_training_text(plan, TOKENIZER_TEXT), vocab_size)
        bars.update(task, total=1, completed=1)
    temporary = parts / "new"
    temporary.mkdir(exist_ok=True)
    _check_sample(tokenizer, plan)
    tokenizer.save(temporary / TOKENIZER)
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == TOKENIZER):
        os.replace(file, parts / file.name)


def _training_text(plan: _Plan, limit: int) -> Iterator[str]:
    """Yield training text: all of it, or about `limit` characters from evenly spread pieces of a larger data set."""
    pieces = plan.pieces
    piece_limit = limit
    if plan.size > limit:
        pieces = plan.pieces[:: max(1, len(plan.pieces) // 64)]
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


def _join(out: Path, parts: Path, plan: _Plan, bars: Progress) -> Manifest:
    """Join the pieces' token files in order, and write the manifest."""
    tokenizer = load_tokenizer(parts / TOKENIZER)
    pieces = [read_finished(parts, piece.number) for piece in plan.pieces]
    finished = [piece for piece in pieces if piece is not None]
    skipped: dict[str, int] = {}
    for piece in finished:
        for reason, count in piece.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    sizes = {split_name: sum(piece.bytes[split_name] for piece in finished) for split_name in SPLITS}
    lost = {split_name: sum(piece.lost[split_name] for piece in finished) for split_name in SPLITS}
    if not any(sizes.values()):
        shutil.rmtree(parts)
        raise _no_text_error(plan.name(), skipped)
    if not all(sizes.values()):
        raise DataError(
            f"{plan.name()}: a held-out share of {plan.split.share} leaves {sizes['train']} bytes to train on and "
            f"{sizes['valid']} to evaluate on; give more text or another --held-out"
        )
    check_representation(tokenizer, sum(sizes.values()), sum(lost.values()), plan.name())
    tokenizer.save(out / TOKENIZER)
    dtype = token_dtype(tokenizer.vocab_size)
    notes = (_begin_note(tokenizer), _loss_note(sizes, lost), _share_note(sizes, plan))
    manifest = Manifest(
        plan.inputs,
        plan.recipe,
        tokenizer=describe_tokenizer(tokenizer, out),
        dtype=dtype.name,
        parts={
            split_name: _join_split(
                out,
                parts,
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
    """Return the manifest's record of the tokenizer that lies in the data set's folder `out`."""
    return {
        "file": TOKENIZER,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "begin_of_document": list(tokenizer.begin_of_document),
        "eos_token": configured_end(out / CONFIG),
    }


def _join_split(
    out: Path,
    parts: Path,
    plan: _Plan,
    split_name: str,
    *,
    dtype: np.dtype,
    text_bytes: int,
    lost_bytes: int,
    bars: Progress,
) -> DataSetPart:
    """Join the pieces' token files of one split."""
    task = bars.add_task(f"joining {split_name}", total=len(plan.pieces))
    with IndexedWriter(out / split_name, dtype, hashed=True) as writer:
        for piece in plan.pieces:
            writer.append(IndexedDataset(part_prefix(parts, piece.number, split_name)))
            bars.advance(task)
    texts = (part_prefix(parts, piece.number, split_name).with_suffix(".txt").read_bytes() for piece in plan.pieces)
    tokens, index = out / f"{split_name}.bin", out / f"{split_name}.idx"
    return DataSetPart(
        documents=writer.documents,
        tokens=writer.tokens,
        bytes=text_bytes,
        bin_bytes=tokens.stat().st_size,
        idx_bytes=index.stat().st_size,
        idx_sha256=sha256_file(index),
        compressed=compress(texts) if split_name == "valid" else None,
        lost_bytes=lost_bytes,
        bin_sha256=writer.digest.hexdigest() if writer.digest is not None else "",
        bin_fingerprint=fingerprint_file(tokens),
    )


def _begin_note(tokenizer: Tokenizer) -> str:
    if not tokenizer.begin_of_document:
        return ""
    begin = tokenizer.decode(tokenizer.begin_of_document)
    return f"each document begins with {begin}, as the tokenizer's template begins a prompt"


def _check_sample(tokenizer: Tokenizer, plan: _Plan) -> None:
    """Refuse a tokenizer that cannot represent the text before hours are spent on encoding it."""
    if not tokenizer.loses_text:
        return
    sample = [text for text in _training_text(plan, _SAMPLE) if text]
    size = sum(len(text.encode()) for text in sample)
    check_representation(tokenizer, size, tokenizer.count_lost_bytes(sample), plan.name())


def _loss_note(sizes: dict[str, int], lost: dict[str, int]) -> str:
    if not any(lost.values()):
        return ""
    shares = ", ".join(f"{lost[split_name]:,} of {sizes[split_name]:,} bytes of {split_name}" for split_name in SPLITS)
    return (
        f"the tokenizer cannot represent {shares}: they became unknown tokens, or were dropped. Bits per byte count "
        "these bytes at 8 bits each"
    )


def _share_note(sizes: dict[str, int], plan: _Plan) -> str:
    """Return a note if the held-out share is far from the requested one, as few long documents may make it."""
    share = sizes["valid"] / sum(sizes.values())
    requested = plan.split.share
    if any(piece.sides for piece in plan.pieces) or abs(share - requested) <= requested / 2:
        return ""
    return f"{share:.2%} of the text is held out, where --held-out={requested:g} requests {requested:.2%}"


def _progress_bars(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
