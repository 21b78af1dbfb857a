"""Text to a data set: documents, split, tokenizer, token files and manifest in one folder."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megascale import __version__
from megascale.data import baselines, sources, stdlib
from megascale.data.indexed import IndexedWriter, token_dtype
from megascale.data.manifest import NAME, Manifest, Part, read_manifest, sha256_file
from megascale.data.tokenizer import Tokenizer
from megascale.errors import ConfigError, DataError

TOKENIZER = "tokenizer.json"
# Fewer documents than this are each cut in two instead of being dealt to one side or the other.
FEW = 20
# A tokenizer learns no more from text beyond this; it takes about a second for 4 MB.
TOKENIZER_TEXT = 50_000_000


@dataclass(frozen=True)
class Built:
    """A data set's folder, its manifest, and whether this call made it."""

    folder: Path
    manifest: Manifest
    fresh: bool


def build(
    out: str | Path,
    *,
    use_stdlib: bool = False,
    inputs: Sequence[str | Path] = (),
    vocab_size: int = 4096,
    tokenizer: str | Path | None = None,
    held_out: float = 0.05,
    progress: bool = True,
) -> Built:
    """Make `out/train`, `out/valid` (.bin/.idx), tokenizer.json and dataset.json.

    Args:
        use_stdlib: take the Python standard library's source (see stdlib.py).
        inputs: files and folders of text, if not the standard library.
        vocab_size: of the BPE tokenizer trained on the training part; not used with `tokenizer`.
        tokenizer: an existing tokenizer.json to use.
        held_out: share of the documents kept from training.
        progress: show a bar.

    A folder that already holds the result of the same inputs and settings is left alone. Raises ConfigError for
    settings that make no sense, DataError for inputs without text or an `out` that holds another data set.
    """
    out = Path(out)
    if use_stdlib == bool(inputs):
        raise ConfigError("a data set is made either with --stdlib or of --input PATH...; give exactly one of them")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} is not a share between 0 and 1; try 0.05")
    paths = [Path(p) for p in inputs]
    settings = {
        "vocab_size": None if tokenizer else vocab_size,
        "tokenizer": sha256_file(_existing(Path(tokenizer))) if tokenizer else None,
        "held_out": None if use_stdlib else held_out,
    }
    if use_stdlib:
        listing = [f"python {platform.python_version()}", str(stdlib.LARGEST), str(stdlib.HELD_OUT)]
    else:
        files = sources.find_files(paths)
        listing = [f"{f.name} {f.size} {f.path.stat().st_mtime_ns}" for f in files]
    recipe = hashlib.sha256(json.dumps([settings, listing], sort_keys=True).encode()).hexdigest()
    done = _already(out, recipe)
    if done is not None:
        return Built(out, done, fresh=False)

    skipped: dict[str, int] = {}
    if use_stdlib:
        texts = stdlib.read_stdlib()
        apart = stdlib.held_out(texts)
        train = [text for name, text in texts.items() if name not in apart]
        valid = [text for name, text in texts.items() if name in apart]
        described = [f"Python {platform.python_version()} standard library, {len(texts)} files"]
    else:
        train, valid = _read(files, held_out, skipped)
        described = [str(p) for p in paths]
    with _bar(progress) as bar:
        if tokenizer:
            words = Tokenizer.load(tokenizer)
        else:
            task = bar.add_task("training the tokenizer", total=None)
            words = Tokenizer.train(_first(train, TOKENIZER_TEXT), vocab_size)
            bar.update(task, total=1, completed=1)
        out.mkdir(parents=True, exist_ok=True)
        words.save(out / TOKENIZER)
        parts = {name: _write(out / name, part, words, bar) for name, part in (("train", train), ("valid", valid))}
    manifest = Manifest(
        sources=described,
        recipe=recipe,
        tokenizer={
            "file": TOKENIZER,
            "sha256": words.sha256,
            "vocab_size": words.vocab_size,
            "end_of_document": words.end_of_document,
        },
        dtype=token_dtype(words.vocab_size).name,
        parts=parts,
        skipped=skipped,
        version=__version__,
    )
    manifest.save(out)
    return Built(out, manifest, fresh=True)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"tokenizer {path} does not exist or is no file; name a tokenizer.json")
    return path


def _already(out: Path, recipe: str) -> Manifest | None:
    """The manifest in `out` if it holds this very data set; DataError if it holds another."""
    manifest = read_manifest(out)
    if manifest is None:
        return None
    whole = all(
        (out / f"{name}.{kind}").exists() and (out / f"{name}.{kind}").stat().st_size == size
        for name, part in manifest.parts.items()
        for kind, size in (("bin", part.bin_bytes), ("idx", part.idx_bytes))
    )
    if manifest.recipe == recipe:
        return manifest if whole and (out / TOKENIZER).exists() else None
    raise DataError(
        f"{out / NAME} says that the folder holds a data set made of other inputs or settings "
        f"({', '.join(manifest.sources)}); choose another --out, or delete the folder"
    )


def _read(files: Sequence[sources.SourceFile], share: float, skipped: dict[str, int]) -> tuple[list[str], list[str]]:
    """All documents of the files, split in two."""
    texts = []
    for file in files:
        text = sources.read_text(file.path)
        if text is None:
            skipped["not UTF-8 text"] = skipped.get("not UTF-8 text", 0) + 1
        elif not text.strip():
            skipped["empty"] = skipped.get("empty", 0) + 1
        else:
            texts.append(text)
    where = f"{files[0].path}" + (f" and {len(files) - 1} other files" if len(files) > 1 else "")
    if not texts:
        found = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise DataError(f"{where}: no text to learn from ({found}); give files of UTF-8 text")
    if len(texts) < FEW:
        pairs = [sources.split_tail(text, share) for text in texts]
        train, valid = [a for a, _ in pairs if a.strip()], [b for _, b in pairs if b.strip()]
    else:
        train = [text for text in texts if not sources.is_held_out(text, share)]
        valid = [text for text in texts if sources.is_held_out(text, share)]
    if not train or not valid:
        raise DataError(
            f"{where}: a held-out share of {share} leaves {len(train)} documents to train on and {len(valid)} to "
            "evaluate on; give more text or another --held-out"
        )
    return train, valid


def _first(texts: list[str], characters: int) -> list[str]:
    """As many texts as hold about `characters` characters, spread evenly over all of them."""
    step = max(1, round(sum(map(len, texts)) / characters))
    return texts[::step]


def _write(prefix: Path, texts: list[str], words: Tokenizer, bar: Progress) -> Part:
    """Encode documents into a token file."""
    size = sum(len(text.encode()) for text in texts)
    task = bar.add_task(f"writing {prefix.name}", total=size)
    with IndexedWriter(prefix, token_dtype(words.vocab_size)) as writer:
        for batch in sources.batches(iter(texts)):
            writer.add_documents(*words.encode_documents(batch))
            bar.advance(task, sum(len(text.encode()) for text in batch))
    bin_path, idx_path = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    return Part(
        documents=len(texts),
        tokens=writer.tokens,
        bytes=size,
        bin_bytes=bin_path.stat().st_size,
        idx_bytes=idx_path.stat().st_size,
        idx_sha256=sha256_file(idx_path),
        compressed=baselines.compress(texts) if prefix.name == "valid" else None,
    )


def _bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
