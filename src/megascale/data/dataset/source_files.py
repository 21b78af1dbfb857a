"""Files of a text input: their kinds, and pieces of them for workers.

The suffix decides the kind of a file, in upper or lower case:

- .jsonl, .ndjson and .jsonlines: one record per line.
- .json: one record per line, a list of records, or one record.
- .parquet: one row per document.
- .csv and .tsv whose first line names the key: refused, since each row would be a document.
- Any other file that is UTF-8 without zero bytes is text.

Pointers of Git LFS, and links whose target is missing, are refused: they stand for text that is elsewhere.

All but parquet files may be compressed, with .gz or .zst after the suffix. Plain JSON lines are cut into byte ranges
and parquet into row groups, so that one large file occupies all workers. A compressed file or a list of records is one
piece.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.untrusted_files import is_lfs_pointer
from megascale.data.dataset.json_values import TooLongError, parse_record
from megascale.data.dataset.line_ranges import RECORD_LIMIT, split_lines
from megascale.data.dataset.metered_files import find_compression, read_chunks
from megascale.data.dataset.parquet_rows import split_row_groups
from megascale.errors import DataError

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
# Suffixes of binary formats that may hold text and are not read, with the remedy.
_UNREAD_FORMATS = {
    **dict.fromkeys((".bz2", ".xz", ".lzma", ".lz4", ".br", ".z", ".snappy"), "compress it with gzip or zstd instead"),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tar.gz", ".tar.zst"), "unpack it"),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), "convert it to parquet"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".npy", ".npz", ".h5"), "convert it to parquet or JSON lines"),
    **dict.fromkeys((".xlsx", ".xls", ".docx", ".pdf", ".epub"), "convert it to text"),
}
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".csv", ".tsv")  # of files that are meant to be text
_PROBE_BYTES = 1 << 12  # beginning of a file that shows whether it is binary
# Reasons for skipping a file or a link, as reports name them.
NOT_UTF8 = "files (not UTF-8 text)"
EMPTY_FILE = "files (empty)"
NAMED_TWICE = "files (named twice)"
FOLDER_LINK = "links to folders"
NOT_A_FILE = "pipes, sockets and devices"


@dataclass(frozen=True)
class SourceFile:
    """A file of the input.

    Attributes:
        name: path relative to the parent of the input folder.
        path: the file.
        size: bytes.
        kind: text, lines (a JSON record per line), json (other JSON) or parquet.
    """

    name: str
    path: Path
    size: int
    kind: str


@dataclass(frozen=True)
class InputPiece:
    """Part of the input that one worker encodes at a time.

    Attributes:
        number: position in the order of all pieces; documents keep this order.
        kind: text, lines (a JSON record per line), json (other JSON) or parquet.
        paths: the files; only text has more than one.
        start, stop: byte range of a plain jsonl file (lines that begin in it), or row groups of parquet.
        size: bytes of input, for progress.
        sides: split of each file, `train` or `valid`, for text files whose split is known beforehand.
    """

    number: int
    kind: str
    paths: list[str]
    start: int = 0
    stop: int = 0
    size: int = 0
    sides: list[str] = field(default_factory=list)


def find_files(inputs: Sequence[Path], excluded_folder: Path | None = None) -> list[SourceFile]:
    """Return the files of `inputs` and below, in a stable order. Raises DataError if there are none.

    Hidden files and links to folders are left out, and so are files below `excluded_folder`, which a build writes. A
    file that is reached twice, through a link or through two inputs, is returned once. Raises DataError for a link
    whose target is missing, for a pointer of Git LFS, and for a folder that cannot be listed.
    """
    files, _ = find_files_and_skipped(inputs, excluded_folder)
    return files


def find_files_and_skipped(
    inputs: Sequence[Path], excluded_folder: Path | None = None
) -> tuple[list[SourceFile], dict[str, int]]:
    """Return the result of `find_files`, and the numbers of files and links that were left out, by reason."""
    excluded = None if excluded_folder is None else excluded_folder.resolve()
    files: list[SourceFile] = []
    skipped: dict[str, int] = {}
    for entry in inputs:
        if entry.is_file():
            files.append(_describe_file(entry.name, entry))
        elif entry.is_dir():
            for name, path in _list_visible(entry):
                if path.is_file():
                    if excluded not in path.resolve().parents:
                        files.append(_describe_file(f"{entry.name}/{name}", path))
                elif path.is_symlink() and path.is_dir():
                    skipped[FOLDER_LINK] = skipped.get(FOLDER_LINK, 0) + 1
                elif path.is_symlink() and not path.exists():
                    raise DataError(
                        f"input {path} is a link to {path.readlink()}, which does not exist; restore the "
                        "file, or remove the link"
                    )
                elif not path.is_dir():
                    skipped[NOT_A_FILE] = skipped.get(NOT_A_FILE, 0) + 1
        elif entry.exists():
            raise DataError(f"input {entry} is a pipe or a device; save its text to a file, and give the file")
        else:
            raise DataError(f"input {entry} does not exist; give files or folders of text")
    if not files:
        raise DataError(f"no files in {', '.join(map(str, inputs))}; give a folder that holds text")
    # An empty file of records has no pieces, so no worker counts it.
    if empty_count := sum(1 for file in files if file.kind == "lines" and not file.size):
        skipped[EMPTY_FILE] = empty_count
    files_by_target: dict[Path, SourceFile] = {}
    for file in files:
        files_by_target.setdefault(file.path.resolve(), file)
    if len(files_by_target) < len(files):
        skipped[NAMED_TWICE] = len(files) - len(files_by_target)
    return list(files_by_target.values()), skipped


def _list_visible(folder: Path) -> list[tuple[str, Path]]:
    """Return the entries below a folder that are not hidden, each with its name relative to the folder, in order.

    Raises DataError for a folder that cannot be listed, whose text would be missing without a message.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"input folder {error.filename} cannot be listed: {error.strerror}; check its permissions, or move it away"
        )

    entries: list[tuple[str, Path]] = []
    for parent, folder_names, file_names in os.walk(folder, onerror=refuse):
        folder_names[:] = [name for name in folder_names if not name.startswith(".")]
        for name in folder_names + file_names:
            if not name.startswith("."):
                path = Path(parent, name)
                entries.append((path.relative_to(folder).as_posix(), path))
    return sorted(entries)


def _describe_file(name: str, path: Path) -> SourceFile:
    plain_name = path.name.lower()
    if find_compression(path):
        plain_name = plain_name.rpartition(".")[0]
    kind = "text"
    if is_lfs_pointer(path):
        raise DataError(f"input {path} is a pointer of Git LFS, not the file itself; get the file with `git lfs pull`")
    if plain_name.endswith(_JSON_LINES_SUFFIXES):
        kind = "lines"
    elif plain_name.endswith(".json"):
        with raise_data_errors(path):
            kind = _find_json_kind(path)
    elif path.suffix.lower() == ".parquet":
        kind = "parquet"
    return SourceFile(name, path, path.stat().st_size, kind)


def explain_binary(path: Path) -> str:
    """Return the reason for skipping a file that is not UTF-8 text, with the remedy if its suffix shows one."""
    name = path.name.lower()
    for suffix, remedy in _UNREAD_FORMATS.items():
        if name.endswith(suffix):
            return f"files ({suffix} is not read: {remedy})"
    plain_name = name.rpartition(".")[0] if find_compression(path) else name
    for suffix in _TEXT_SUFFIXES:
        if plain_name.endswith(suffix):
            return f"files ({suffix} that is not UTF-8: convert it with `iconv -f ENCODING -t UTF-8`)"
    return NOT_UTF8


def find_binary_reason(file: SourceFile) -> str:
    """Return the reason for which a plain text file will be skipped, judged by its beginning, or an empty string."""
    if file.kind != "text" or find_compression(file.path):
        return ""
    with raise_data_errors(file.path), open(file.path, "rb") as opened:
        return explain_binary(file.path) if b"\x00" in opened.read(_PROBE_BYTES) else ""


def _find_json_kind(path: Path) -> str:
    """Return `lines` for a .json file with one record per line, `json` for any other .json file."""
    with closing(read_chunks(path)) as chunks, closing(split_lines(chunks, RECORD_LIMIT)) as lines:
        try:
            first = next(line for line, _, _ in lines if line.strip())
            begins_with_brace = first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
            if not begins_with_brace or not isinstance(parse_record(first), dict):
                return "json"
            has_second_line = any(line.strip() for line, _, _ in lines)
            return "lines" if has_second_line else "json"
        except (StopIteration, TooLongError, ValueError, RecursionError):
            return "json"


def cut_pieces(files: Iterable[SourceFile], size: int) -> list[InputPiece]:
    """Return pieces of about `size` bytes of input each, in the order of the files.

    Consecutive text files share a piece.
    """
    pieces: list[InputPiece] = []
    text_paths: list[str] = []  # of the next piece of text files
    text_bytes = 0

    def add_text_piece() -> None:
        nonlocal text_bytes
        if text_paths:
            pieces.append(InputPiece(len(pieces), "text", text_paths.copy(), size=text_bytes))
            text_paths.clear()
            text_bytes = 0

    for file in files:
        if file.kind == "text":
            text_paths.append(str(file.path))
            text_bytes += file.size
            if text_bytes >= size:
                add_text_piece()
            continue
        add_text_piece()
        path = str(file.path)
        if file.kind == "parquet":
            for start, stop, range_bytes in split_row_groups(file.path, size):
                pieces.append(InputPiece(len(pieces), "parquet", [path], start, stop, range_bytes))
        elif file.kind == "json" or find_compression(file.path):
            pieces.append(InputPiece(len(pieces), file.kind, [path], size=file.size))
        else:
            for start in range(0, file.size, size):
                stop = min(start + size, file.size)
                pieces.append(InputPiece(len(pieces), "lines", [path], start, stop, stop - start))
    add_text_piece()
    return pieces


@contextmanager
def raise_data_errors(*paths: str | Path) -> Iterator[None]:
    """Turn an OSError inside the context into a DataError that names the files."""
    try:
        yield
    except OSError as error:
        names = ", ".join(map(str, paths[:3]))
        raise DataError(f"input {names} cannot be read: {error}; check its permissions or leave it out") from None
