"""One piece of input to token files: what a worker does. A piece is finished when its .json is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megascale.data.dataset.compressors import LARGEST
from megascale.data.dataset.indexed import IndexedWriter, token_dtype
from megascale.data.dataset.sources import InputPiece, read_documents
from megascale.data.prepare.split import Split
from megascale.data.tokenizer.base import Tokenizer

SIDES = ("train", "valid")
_BATCH = 1 << 20  # characters handed to the tokenizer at a time


@dataclass
class EncodedPiece:
    """What a finished piece holds.

    Attributes:
        bytes: bytes of text per side.
        lost: of these about as many, per side, that no token of their own stands for.
        skipped: number of files and records left out, by reason.
    """

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    skipped: dict[str, int] = field(default_factory=dict)


def part_prefix(folder: Path, number: int, side: str) -> Path:
    """Token file of one side of a piece; the held-out text lies beside it under .txt."""
    return folder / f"{number:06}-{side}"


def _record(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.json"


def finished(folder: Path, number: int) -> EncodedPiece | None:
    """What is known of a finished piece, None if it is not finished."""
    try:
        return EncodedPiece(**json.loads(_record(folder, number).read_text()))
    except (OSError, ValueError, TypeError):  # not there, or a power cut left it empty
        return None


def encode(
    piece: InputPiece, words: Tokenizer, split: Split, key: str, folder: Path, progress: Callable[[int], None]
) -> None:
    """Read, split, encode and write a piece; `progress` is told the input bytes used up since the last call.

    Interrupted anywhere, it leaves nothing that counts as finished.
    """
    done = EncodedPiece()
    kept_text = 0
    text_path = part_prefix(folder, piece.number, "valid").with_suffix(".txt")
    dtype = token_dtype(words.vocab_size)
    waiting: dict[str, list[str]] = {side: [] for side in SIDES}
    with (
        IndexedWriter(part_prefix(folder, piece.number, "train"), dtype) as train,
        IndexedWriter(part_prefix(folder, piece.number, "valid"), dtype) as valid,
        open(text_path, "wb") as held_text,
    ):
        writers = {"train": train, "valid": valid}
        characters = used = 0

        def flush() -> None:
            for side in SIDES:
                if waiting[side]:
                    writers[side].add_documents(*words.encode_documents(waiting[side]))
                    done.lost[side] += words.count_lost_bytes(waiting[side])
                    waiting[side].clear()

        for item in read_documents(piece, key):
            used += item.size
            if item.skipped:
                done.skipped[item.skipped] = done.skipped.get(item.skipped, 0) + 1
            for side, text in split.split_document(item):
                waiting[side].append(text)
                characters += len(text)
                data = text.encode()
                done.bytes[side] += len(data)
                if side == "valid" and kept_text < LARGEST:
                    kept_text += held_text.write(data[: LARGEST - kept_text])
            if characters >= _BATCH:
                flush()
                progress(used)
                characters = used = 0
        flush()
        progress(used)
    record = _record(folder, piece.number)
    new = record.with_name(f"{record.name}.{os.getpid()}.tmp")
    new.write_text(json.dumps(asdict(done)))
    os.replace(new, record)
