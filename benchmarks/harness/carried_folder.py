"""A folder in a few files, for machines that lose their disks between calls."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

PIECE = "part-{:02d}.tar"


class PieceWriter(io.RawIOBase):
    """Binary stream that is cut into files of at most `size` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.count = 0
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write all of `data`, and begin new files where one is full."""
        view = memoryview(data)
        while view:
            if self._file is None or self._file.tell() >= self.size:
                self._begin_file()
            assert self._file is not None
            part = view[: self.size - self._file.tell()]
            self._file.write(part)
            view = view[len(part) :]
        return len(data)

    def _begin_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = open(self.folder / PIECE.format(self.count), "wb")  # noqa: SIM115 - closed by `close`
        self.count += 1

    def close(self) -> None:
        """Close the last file."""
        if self._file is not None:
            self._file.close()
        super().close()


class PieceReader(io.RawIOBase):
    """Binary stream of several files, one after another."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [open(file, "rb") for file in files]  # noqa: SIM115 - closed by `close`

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from the first file that has bytes left."""
        while self._files:
            data = self._files[0].read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            self._files.pop(0).close()
        return 0

    def close(self) -> None:
        """Close the remaining files."""
        for file in self._files:
            file.close()
        super().close()


def list_pieces(carried: Path) -> list[Path]:
    """Return the files of a packed folder in order."""
    return sorted(carried.glob("part-*.tar"))


def pack_folder(folder: Path, names: Sequence[str], carried: Path, pieces: int) -> int:
    """Pack files and folders of `folder` into at most `pieces` files in `carried`, and return their bytes.

    Args:
        names: relative to `folder`; missing ones are left out.
    """
    carried.mkdir(parents=True, exist_ok=True)
    for file in list_pieces(carried):
        file.unlink()
    files = [file for name in names for file in sorted((folder / name).rglob("*")) if file.is_file()]
    files += [folder / name for name in names if (folder / name).is_file()]
    # An archive has a header of at most 1,536 bytes per file, blocks of 512 bytes, and 10 KiB at its end.
    total = sum(file.stat().st_size + 3 * 1024 for file in files) + 10240
    writer = PieceWriter(carried, -(-total // pieces))
    with writer, tarfile.open(fileobj=writer, mode="w|") as archive:
        for file in files:
            archive.add(file, arcname=str(file.relative_to(folder)), recursive=False)
    return sum(file.stat().st_size for file in list_pieces(carried))


def unpack_folder(carried: Path, folder: Path) -> None:
    """Extract a packed folder into `folder`."""
    with (
        PieceReader(list_pieces(carried)) as reader,
        io.BufferedReader(reader, 1 << 20) as buffered,
        tarfile.open(fileobj=buffered, mode="r|") as archive,
    ):
        archive.extractall(folder, filter="data")
