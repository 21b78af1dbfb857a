"""Worker process of a data build: reads, splits and encodes pieces of the input into token files.

`python -m megascale.data.prepare.encode_worker` reads lines of JSON: first the job (EncodeJob), then one piece per
line. It answers `{"used": bytes of input}` while it encodes a piece and `{"done": number of the piece}` at the end, or
`{"error": text}` before it exits. It exits when its input ends, or when it cannot answer because its parent has ended.
A piece is finished when its .json file exists.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from megascale.core.atomic_files import write_atomically
from megascale.data.dataset.indexed import IndexedWriter, choose_token_dtype
from megascale.data.dataset.manifest import MAX_COMPRESSED_BYTES
from megascale.data.dataset.source_files import InputPiece
from megascale.data.dataset.sources import read_documents
from megascale.data.prepare.split import Split
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import MegascaleError

SPLITS = ("train", "valid")
_BATCH_CHARACTERS = 1 << 20  # characters passed to the tokenizer at a time


@dataclass(frozen=True)
class EncodeJob:
    """Settings of all pieces of a build.

    Attributes:
        folder: folder of the finished pieces.
        tokenizer: path of the tokenizer.json.
        key: name of the text in jsonl and parquet.
        split: the rule that assigns documents to training and held-out text.
    """

    folder: str
    tokenizer: str
    key: str
    split: Split

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> EncodeJob:
        """Return the job of a line from `to_json`."""
        record = json.loads(line)
        return cls(**{**record, "split": Split(**record["split"])})


@dataclass
class EncodedPiece:
    """Record of a finished piece.

    Attributes:
        bytes: bytes of text, by split.
        lost: approximate number of these bytes that became unknown tokens or were dropped, by split.
        skipped: number of files and records left out, by reason.
    """

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    skipped: dict[str, int] = field(default_factory=dict)


def get_part_prefix(folder: Path, number: int, split_name: str) -> Path:
    """Return the prefix of a piece's token files of one split. The piece's held-out text is in the prefix with .txt."""
    return folder / f"{number:06}-{split_name}"


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.json"


def read_finished(folder: Path, number: int) -> EncodedPiece | None:
    """Return the record of a finished piece, or None if the piece is not finished."""
    try:
        return EncodedPiece(**json.loads(_record_path(folder, number).read_text()))
    except (OSError, ValueError, TypeError):  # the file is missing, or a power cut left it empty
        return None


class _PieceEncoder:
    """Encodes the documents of one piece, split by split, in batches."""

    def __init__(self, tokenizer: Tokenizer, writers: dict[str, IndexedWriter], text_file: BinaryIO) -> None:
        self.result = EncodedPiece()
        self._tokenizer = tokenizer
        self._writers = writers
        self._text_file = text_file
        self._remaining_text_bytes = MAX_COMPRESSED_BYTES  # the manifest's compressors read no more
        self._pending: dict[str, list[str]] = {split_name: [] for split_name in SPLITS}
        self.pending_characters = 0

    def add(self, split_name: str, text: str) -> None:
        data = text.encode()
        self._pending[split_name].append(text)
        self.pending_characters += len(text)
        self.result.bytes[split_name] += len(data)
        if split_name == "valid" and self._remaining_text_bytes:
            self._remaining_text_bytes -= self._text_file.write(data[: self._remaining_text_bytes])

    def flush(self) -> None:
        for split_name, texts in self._pending.items():
            if texts:
                tokens, lengths = self._tokenizer.encode_documents(texts)
                self._writers[split_name].add_documents(tokens, lengths)
                self.result.lost[split_name] += self._tokenizer.count_lost_bytes(texts)
                texts.clear()
        self.pending_characters = 0


def encode_piece(piece: InputPiece, tokenizer: Tokenizer, job: EncodeJob, progress: Callable[[int], None]) -> None:
    """Read, split, encode and write a piece. If it is interrupted, the piece does not count as finished.

    Args:
        progress: function that receives the bytes of input read since its last call.
    """
    folder = Path(job.folder)
    dtype = choose_token_dtype(tokenizer.vocab_size)
    with (
        IndexedWriter(get_part_prefix(folder, piece.number, "train"), dtype) as train,
        IndexedWriter(get_part_prefix(folder, piece.number, "valid"), dtype) as valid,
        open(get_part_prefix(folder, piece.number, "valid").with_suffix(".txt"), "wb") as text_file,
    ):
        encoder = _PieceEncoder(tokenizer, {"train": train, "valid": valid}, text_file)
        input_bytes = 0  # since the last call of `progress`
        for record in read_documents(piece, job.key):
            input_bytes += record.size
            if record.skipped:
                skipped = encoder.result.skipped
                skipped[record.skipped] = skipped.get(record.skipped, 0) + 1
            for split_name, text in job.split.split_document(record):
                encoder.add(split_name, text)
            if encoder.pending_characters >= _BATCH_CHARACTERS:
                encoder.flush()
                progress(input_bytes)
                input_bytes = 0
        encoder.flush()
        progress(input_bytes)
    write_atomically(_record_path(folder, piece.number), json.dumps(asdict(encoder.result)))


def is_disk_full(error: OSError) -> bool:
    """Return whether a write failed because the disk, or the user's quota of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_write_error(out: Path, error: OSError) -> str:
    """Return why a build cannot write into its folder, and the remedy."""
    if is_disk_full(error):
        return (
            f"the disk that holds {out} is full; free some space and run the same command again, which "
            "continues with the missing pieces"
        )
    return f"{out} cannot be written: {error.strerror or error}; choose another --out"


def _send(**record: object) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Encode pieces until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives the signal too, and ends its workers
    try:
        job = EncodeJob.from_json(sys.stdin.readline())
        tokenizer = load_tokenizer(job.tokenizer)
        for line in sys.stdin:
            piece = InputPiece(**json.loads(line))
            encode_piece(piece, tokenizer, job, lambda input_bytes: _send(used=input_bytes))
            _send(done=piece.number)
    except BrokenPipeError:
        os._exit(1)  # the parent has ended; a normal exit would flush its pipe and raise again
    except MegascaleError as error:
        _send(error=str(error))
    except OSError as error:
        _send(error=describe_write_error(Path(job.folder).parent, error))


if __name__ == "__main__":
    main()
