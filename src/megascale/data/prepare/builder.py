"""Text to a data set: documents, split, tokenizer, token files and manifest in one folder.

The input is cut into pieces; workers turn each into small token files under `.parts`, and these are joined in
order. A build that was killed goes on with the pieces that are missing. The result is the same whatever the
number of workers and however often it was interrupted.
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

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megascale import __version__
from megascale.core.capacity import usable_cores
from megascale.data.dataset import compressors, sources
from megascale.data.dataset.file_hash import fingerprint
from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter, token_dtype
from megascale.data.dataset.manifest import NAME, DataSetPart, Manifest, read_manifest, sha256_file
from megascale.data.dataset.sources import InputPiece
from megascale.data.dataset.tokenizer_agreement import has_other_tokenizer
from megascale.data.prepare import stdlib, worker_pool
from megascale.data.prepare.encode import SIDES, finished, part_prefix
from megascale.data.prepare.split import FEW, Split, hash_text
from megascale.data.prepare.worker import EncodeJob
from megascale.data.tokenizer.base import Tokenizer, check_representation
from megascale.data.tokenizer.huggingface_file import CONFIG, configured_end
from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
PARTS = ".parts"
# A tokenizer learns little from text beyond this; it takes about a second for 4 MB.
TOKENIZER_TEXT = 50_000_000
# Text in which a given tokenizer is tried, where it might not represent all of it.
_SAMPLE = 1_000_000
# Input up to this is read once more beforehand, to split it exactly as asked.
_KNOWN = 64 << 20
_PIECE, _PIECES = 16 << 20, 2048


@dataclass(frozen=True)
class Built:
    """A data set's folder, its manifest, and whether this call made it."""

    folder: Path
    manifest: Manifest
    fresh: bool


@dataclass(frozen=True)
class _Plan:
    """What is to be done, settled before anything is written."""

    recipe: str
    described: list[str]
    pieces: list[InputPiece]
    split: Split
    key: str


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
) -> Built:
    """Make `out/train`, `out/valid` (.bin/.idx), tokenizer.json and dataset.json.

    Args:
        use_stdlib: take the Python standard library's source (see stdlib.py).
        inputs: files and folders, if not the standard library (see sources.py for the kinds).
        vocab_size: of the BPE tokenizer trained on the training part; not used with `tokenizer`.
        tokenizer: an existing tokenizer.json or .tiktoken file to use.
        held_out: share of the text kept from training.
        text_key: where jsonl records and parquet rows have their text.
        workers: processes; default: one a core.
        progress: show bars.

    A folder that already holds the result of the same inputs and settings is left alone; one that holds part of it
    is completed. Raises ConfigError for settings that make no sense, DataError for inputs that cannot be used, an
    `out` that holds another data set, or a full disk.
    """
    out = Path(out)
    if use_stdlib == bool(inputs):
        raise ConfigError("a data set is made either with --stdlib or of --input PATH...; give exactly one of them")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} is not a share between 0 and 1; try 0.05")
    words = load_tokenizer(tokenizer) if tokenizer else None
    with_words = [words.sha256, words.end_of_document, *words.begin_of_document] if words else vocab_size
    settings = [with_words, None if use_stdlib else [held_out, text_key]]
    files = [] if use_stdlib else sources.find_files([Path(p) for p in inputs], without=out)
    recipe = _recipe(settings, files)
    done = _already(out, recipe)
    if done is not None:
        _clear(out)  # a kill may have come between the manifest and the end
        return Built(out, done, fresh=False)
    plan = _plan_stdlib(recipe) if use_stdlib else _plan(recipe, files, [str(p) for p in inputs], held_out, text_key)
    with _bars(progress) as bars, _workplace(out, plan) as parts:
        if not (parts / TOKENIZER).exists():
            if words is None:
                task = bars.add_task("training the tokenizer", total=None)
                words = train_tokenizer(_training_text(plan, TOKENIZER_TEXT), vocab_size)
                bars.update(task, total=1, completed=1)
            (parts / "new").mkdir(exist_ok=True)
            _check_sample(words, plan)
            words.save(parts / "new" / TOKENIZER)
            for file in (parts / "new").iterdir():
                if file.name != TOKENIZER:
                    os.replace(file, parts / file.name)
            os.replace(parts / "new" / TOKENIZER, parts / TOKENIZER)
        todo = [piece for piece in plan.pieces if finished(parts, piece.number) is None]
        task = bars.add_task("encoding", total=sum(piece.size for piece in plan.pieces))
        before = len(plan.pieces) - len(todo)
        if before:
            bars.advance(task, sum(p.size for p in plan.pieces) - sum(p.size for p in todo))
            if progress:
                bars.console.print(f"going on where a build stopped: {before} of {len(plan.pieces)} pieces are done")
        job = EncodeJob(str(parts), str(parts / TOKENIZER), plan.key, plan.split)
        worker_pool.encode_pieces(todo, job, workers or usable_cores(), lambda used: bars.advance(task, used))
        manifest = _join(out, parts, plan, bars)
    return Built(out, manifest, fresh=True)


def _recipe(settings: list, files: Sequence[sources.SourceFile]) -> str:
    """Hash of all that decides the result."""
    if files:
        listing = [f"{f.name} {f.size} {f.path.stat().st_mtime_ns}" for f in files]
    else:
        listing = ["stdlib", platform.python_version(), str(stdlib.LARGEST), str(stdlib.HELD_OUT)]
    return hashlib.sha256(json.dumps([settings, listing]).encode()).hexdigest()


def _already(out: Path, recipe: str) -> Manifest | None:
    """The manifest in `out` if it holds this very data set; DataError if it holds another."""
    manifest = read_manifest(out)
    if manifest is None:
        foreign = [name for side in SIDES for name in (f"{side}.bin", f"{side}.idx") if (out / name).exists()]
        if foreign and not (out / PARTS).exists():
            raise DataError(
                f"{out} holds {', '.join(foreign)} and no {NAME}, so it was not made here, and it is not overwritten; "
                "choose another --out, or move the files away"
            )
        return None
    if manifest.recipe == recipe:
        return manifest if _is_whole(out, manifest) else None
    raise DataError(
        f"{out / NAME} says that the folder holds a data set made of other inputs or settings "
        f"({', '.join(manifest.sources)}); choose another --out, or delete the folder"
    )


def _is_whole(out: Path, manifest: Manifest) -> bool:
    """Return whether all files are there as they were built; of the tokens a sample is looked at."""
    for name, part in manifest.parts.items():
        for kind, size in (("bin", part.bin_bytes), ("idx", part.idx_bytes)):
            path = out / f"{name}.{kind}"
            if not path.exists() or path.stat().st_size != size:
                return False
        if part.bin_fingerprint and fingerprint(out / f"{name}.bin") != part.bin_fingerprint:
            return False
    try:
        return (out / TOKENIZER).exists() and not has_other_tokenizer(out, manifest)
    except DataError:  # it is not even a tokenizer
        return False


def _plan_stdlib(recipe: str) -> _Plan:
    texts = stdlib.read_stdlib()
    apart = stdlib.held_out(texts)
    root = Path(sysconfig.get_path("stdlib"))
    piece = InputPiece(
        0,
        "text",
        [str(root / name) for name in texts],
        size=sum(len(text.encode()) for text in texts.values()),
        sides=["valid" if name in apart else "train" for name in texts],
    )
    described = f"Python {platform.python_version()} standard library, {len(texts)} files"
    return _Plan(recipe, [described], [piece], Split.by_share(stdlib.HELD_OUT, piece.size), "text")


def _plan(recipe: str, files: Sequence[sources.SourceFile], described: list[str], share: float, key: str) -> _Plan:
    total = sum(f.size for f in files)
    pieces = sources.cut_pieces(files, max(_PIECE, total // _PIECES))
    split = Split.by_share(share, total)
    if len(files) < FEW and all(file.kind == "text" for file in files):
        split = Split.by_ends(share)
    if total <= _KNOWN:
        skipped: dict[str, int] = {}
        known: list[tuple[int, int]] = []
        for item in (item for piece in pieces for item in sources.read_documents(piece, key)):
            if item.text:
                known.append((hash_text(item.text), len(item.text.encode())))
            elif item.skipped:
                skipped[item.skipped] = skipped.get(item.skipped, 0) + 1
        if not known:
            raise _no_text(described, skipped)
        split = Split.for_documents(known, share)
    return _Plan(recipe, described, pieces, split, key)


def _no_text(described: list[str], skipped: dict[str, int]) -> DataError:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    return DataError(
        f"{', '.join(described)} has no text to learn from; skipped were {reasons or 'no documents'}. Give files of "
        "UTF-8 text, or name the key of the records' text with --text-key"
    )


@contextlib.contextmanager
def _workplace(out: Path, plan: _Plan) -> Iterator[Path]:
    """`out/.parts`, locked, holding what an earlier build of the same plan left; cleared away at the end.

    A failure leaves the finished pieces for the next time, or nothing if there are none.
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
        # Pieces that another version encoded, or by another split, do not fit those to come.
        pieces = [asdict(piece) for piece in plan.pieces]
        state = json.dumps(
            {"recipe": plan.recipe, "version": __version__, "split": asdict(plan.split), "pieces": pieces}
        )
        record = parts / "plan.json"
        if not record.exists() or record.read_text() != state:
            shutil.rmtree(parts)
            parts.mkdir()
            record.write_text(state)
        for stale in (*parts.glob("*.tmp"), *out.glob("*.tmp")):
            stale.unlink(missing_ok=True)
        try:
            yield parts
        except BaseException as error:
            if not any(finished(parts, piece.number) for piece in plan.pieces):
                _clear(out)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"the disk that holds {out} is full; make room and run the same command again, which goes on where "
                    "it stopped"
                ) from None
            raise
        _clear(out)


def _clear(out: Path) -> None:
    """Remove the work place, and `out` itself if nothing else is in it."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / f"{PARTS}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()


def _training_text(plan: _Plan, most: int) -> Iterator[str]:
    """Yield training text: all of a small data set, the beginnings of evenly spread pieces of one beyond `most`."""
    chosen, each = plan.pieces, most
    if sum(piece.size for piece in plan.pieces) > most:
        chosen = plan.pieces[:: max(1, len(plan.pieces) // 64)]
        each = most // len(chosen)
    for piece in chosen:
        left = each
        for item in sources.read_documents(piece, plan.key):
            for side, text in plan.split.split_document(item):
                if side == "train":
                    yield text[:left]
                    left -= len(text)
            if left <= 0:
                break


def _join(out: Path, parts: Path, plan: _Plan, bars: Progress) -> Manifest:
    """Join the pieces' token files in order and describe the result."""
    words = load_tokenizer(parts / TOKENIZER)
    records = [record for piece in plan.pieces if (record := finished(parts, piece.number))]
    skipped: dict[str, int] = {}
    for record in records:
        for reason, count in record.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    size = {side: sum(record.bytes[side] for record in records) for side in SIDES}
    lost = {side: sum(record.lost[side] for record in records) for side in SIDES}
    if not any(size.values()):
        shutil.rmtree(parts)
        raise _no_text(plan.described, skipped)
    if not all(size.values()):
        raise DataError(
            f"{', '.join(plan.described)}: a held-out share of {plan.split.share} leaves {size['train']} bytes to "
            f"train on and {size['valid']} to evaluate on; give more text or another --held-out"
        )
    check_representation(words, sum(size.values()), sum(lost.values()), ", ".join(plan.described))
    words.save(out / TOKENIZER)
    made = {}
    for side in SIDES:
        task = bars.add_task(f"joining {side}", total=len(plan.pieces))
        with IndexedWriter(out / side, token_dtype(words.vocab_size), hashed=True) as writer:
            for piece in plan.pieces:
                writer.append(IndexedDataset(part_prefix(parts, piece.number, side)))
                bars.advance(task)
        texts = (part_prefix(parts, p.number, side).with_suffix(".txt").read_bytes() for p in plan.pieces)
        idx = out / f"{side}.idx"
        made[side] = DataSetPart(
            documents=writer.documents,
            tokens=writer.tokens,
            bytes=size[side],
            bin_bytes=(out / f"{side}.bin").stat().st_size,
            idx_bytes=idx.stat().st_size,
            idx_sha256=sha256_file(idx),
            compressed=compressors.compress(texts) if side == "valid" else None,
            lost_bytes=lost[side],
            bin_sha256=writer.digest.hexdigest() if writer.digest is not None else "",
            bin_fingerprint=fingerprint(out / f"{side}.bin"),
        )
    tokenizer = {
        "file": TOKENIZER,
        "sha256": words.sha256,
        "vocab_size": words.vocab_size,
        "end_of_document": words.end_of_document,
        "begin_of_document": list(words.begin_of_document),
        "eos_token": configured_end(out / CONFIG),
    }
    dtype = token_dtype(words.vocab_size).name
    notes = [note for note in (_begin_note(words), _loss_note(size, lost), _share_note(size, plan)) if note]
    manifest = Manifest(plan.described, plan.recipe, tokenizer, dtype, made, skipped, __version__, notes=notes)
    manifest.save(out)
    return manifest


def _begin_note(words: Tokenizer) -> str:
    if not words.begin_of_document:
        return ""
    begin = words.decode(words.begin_of_document)
    return f"each document begins with {begin}, as the tokenizer's template begins a prompt"


def _check_sample(words: Tokenizer, plan: _Plan) -> None:
    """Refuse a tokenizer that cannot represent the text before hours are spent on encoding it."""
    if not words.loses_text:
        return
    sample = [text for text in _training_text(plan, _SAMPLE) if text]
    size = sum(len(text.encode()) for text in sample)
    check_representation(words, size, words.count_lost_bytes(sample), ", ".join(plan.described))


def _loss_note(size: dict[str, int], lost: dict[str, int]) -> str:
    if not any(lost.values()):
        return ""
    parts = ", ".join(f"{lost[side]:,} of {size[side]:,} bytes of {side}" for side in SIDES)
    return (
        f"the tokenizer cannot represent {parts}: they became unknown tokens, or were dropped. Bits per byte count "
        "these bytes at 8 bits each"
    )


def _share_note(size: dict[str, int], plan: _Plan) -> str:
    """Return a note if the held-out share is far from what was asked for; documents may be few and long."""
    share = size["valid"] / sum(size.values())
    if any(piece.sides for piece in plan.pieces) or abs(share - plan.split.share) <= plan.split.share / 2:
        return ""
    return f"{share:.2%} of the text is held out, where --held-out={plan.split.share:g} asks for {plan.split.share:.2%}"


def _bars(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
