"""Checkpoints that lie: each a sound one with something changed and its checksums made right again, as a person would
who wants to be read by `inspect`, `verify`, `export` or a load. Tests and `python -m tests.chaos hostile` use them."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megascale.checkpoint.format.archive import crc32

Columns = dict[str, np.ndarray]
# Changes of a step's folder.
Craft = Callable[[Path], None]

BOMB_BYTES = 256 << 20  # of zeros that a compressed column becomes; the file is a thousandth of it


def _commit(location: Path) -> dict[str, Any]:
    return json.loads((location / "COMMIT").read_bytes().partition(b"\n")[0])


def _seal(location: Path, body: bytes) -> None:
    (location / "COMMIT").write_bytes(body + b"\n" + f"{crc32(body):08x}\n".encode())


def edit_commit(location: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what COMMIT says; `change` alters the record or returns another."""
    record = _commit(location)
    second = change(record)
    _seal(location, json.dumps(record if second is None else second).encode())


def put_index(location: Path, data: bytes) -> None:
    """Another file as the index, with a COMMIT that says so."""

    def change(record: dict[str, Any]) -> None:
        name = f"{record['generation']}-index.npz"
        (location / name).write_bytes(data)
        record["files"][name] = [len(data), crc32(data)]

    edit_commit(location, change)


def edit_index(location: Path, change: Callable[[dict[str, Any], Columns], None]) -> None:
    """Change the index's header and columns."""
    with np.load(location / f"{_commit(location)['generation']}-index.npz") as arrays:
        columns = {name: arrays[name].copy() for name in arrays.files}
    header = json.loads(columns.pop("header").tobytes())
    change(header, columns)
    out = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(out, header=text, **columns)  # type: ignore[arg-type]
    put_index(location, out.getvalue())


def bomb(location: Path, size: int = BOMB_BYTES) -> None:
    """An index whose boxes are compressed zeros."""
    with np.load(location / f"{_commit(location)['generation']}-index.npz") as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    out = io.BytesIO()
    rows = size // 48
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                if name != "box":
                    np.lib.format.write_array(member, column)
                    continue
                details = {"descr": "<i8", "fortran_order": False, "shape": (rows, 2, 3)}
                np.lib.format.write_array_header_1_0(member, details)
                for at in range(0, rows * 48, 1 << 20):
                    member.write(bytes(min(1 << 20, rows * 48 - at)))
    put_index(location, out.getvalue())


def _lying_member(location: Path) -> None:
    """A column that says it is of a terabyte."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("header", "tensor", "in_file", "start", "length", "data", "crc", "box"):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40,)}
                )
    put_index(location, out.getvalue())


def _many_members(location: Path) -> None:
    """A list of fifty thousand members of nothing."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(50_000):
            archive.writestr(f"{number}", b"")
    put_index(location, out.getvalue())


def _cut(columns: Columns, rows: slice) -> None:
    for name in columns:
        columns[name] = columns[name][rows]


def _set(column: str, value: Any) -> Craft:
    def change(header: dict[str, Any], columns: Columns) -> None:
        columns[column].flat[0] = value

    return lambda folder: edit_index(folder, change)


def _index(change: Callable[[dict[str, Any], Columns], Any]) -> Craft:
    return lambda folder: edit_index(folder, lambda header, columns: change(header, columns))


def _record(**values: Any) -> Craft:
    return lambda folder: edit_commit(folder, lambda record: {**record, **values})


def _double(header: dict[str, Any], columns: Columns) -> None:
    for name in columns:
        columns[name] = np.concatenate([columns[name], columns[name][:1]])


def _same_bytes(header: dict[str, Any], columns: Columns) -> None:
    """All chunks in the bytes of the largest."""
    at = int(columns["length"].argmax())
    for name in ("in_file", "start", "length", "data", "crc"):
        columns[name][:] = columns[name][at]


def _outside(location: Path) -> None:
    """Data read from a file beside the checkpoints, of which COMMIT tells length and checksum."""
    secret = location.parent.parent / "secret"
    record = _commit(location)
    data = next(name for name in record["files"] if name.endswith(".distcp"))
    secret.write_bytes((location / data).read_bytes())
    record["files"]["../../secret"] = record["files"].pop(data)
    _seal(location, json.dumps(record).encode())
    edit_index(location, lambda header, columns: header.update(files=["../../secret"]))


def _outside_index_only(location: Path) -> None:
    _outside(location)
    edit_commit(location, lambda record: record["files"].pop("../../secret"))


def _pipe(location: Path) -> None:
    """Replace a data file by a pipe without a writer."""
    name = next(name for name in _commit(location)["files"] if name.endswith(".distcp"))
    (location / name).unlink()
    os.mkfifo(location / name)


def _pipe_for_commit(location: Path) -> None:
    (location / "COMMIT").unlink()
    os.mkfifo(location / "COMMIT")


def _sparse_commit(location: Path) -> None:
    """A COMMIT of a terabyte that takes no room."""
    with open(location / "COMMIT", "r+b") as file:
        file.truncate(1 << 40)


def _first(header: dict[str, Any]) -> list[Any]:
    return next(iter(header["tensors"].values()))


def _rename(header: dict[str, Any], name: str) -> None:
    first = next(iter(header["tensors"]))
    header["tensors"] = {name if key == first else key: details for key, details in header["tensors"].items()}


CRAFTED: dict[str, Craft] = {
    "a compressed index": bomb,
    "a column that says a terabyte": _lying_member,
    "fifty thousand members": _many_members,
    "an index of nothing": _index(lambda header, columns: _cut(columns, slice(0, 0))),
    "an index without its last chunk": _index(lambda header, columns: _cut(columns, slice(0, -1))),
    "an index with a chunk twice": _index(_double),
    "all chunks in the same bytes": _index(_same_bytes),
    "a file outside the folder": _outside,
    "a file outside the folder, in the index only": _outside_index_only,
    "files that are a number": _index(lambda header, columns: header.update(files=7)),
    "files that are none": _index(lambda header, columns: header.update(files=[None])),
    "an absolute file": _index(lambda header, columns: header.update(files=["/etc/passwd"])),
    "a tensor that is not there": _set("tensor", 1 << 20),
    "a tensor below 0": _set("tensor", -1),
    "a file that is not there": _set("in_file", 99),
    "a chunk beyond its file": _set("start", 1 << 40),
    "a chunk at the end of numbers": _set("data", (1 << 63) - 1),
    "a box below 0": _set("box", -1),
    "a box beyond its tensor": _set("box", (1 << 63) - 1),
    "columns of floats": _index(lambda header, columns: columns.update(data=columns["data"].astype(float))),
    "a column left out": _index(lambda header, columns: columns.pop("crc")),
    "a column too short": _index(lambda header, columns: columns.update(crc=columns["crc"][:-1])),
    "a header of nothing": _index(lambda header, columns: header.clear()),
    "tensors that are a list": _index(lambda header, columns: header.update(tensors=[])),
    "an unknown type": _index(lambda header, columns: _first(header).__setitem__(1, "object")),
    "a shape below 0": _index(lambda header, columns: _first(header).__setitem__(0, [-3, 4])),
    "a shape of text": _index(lambda header, columns: _first(header).__setitem__(0, ["3"])),
    "a shape beyond numbers": _index(lambda header, columns: _first(header).__setitem__(0, [1 << 40, 1 << 40, 0])),
    "a name that drives a terminal": _index(lambda header, columns: _rename(header, "\x1b]0;owned\x07")),
    "an index that is text": lambda folder: put_index(folder, b"not an index"),
    "an index that is cut": lambda folder: put_index(folder, struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 8, 8, 9, 9, 0)),
    "COMMIT that is no JSON": lambda folder: _seal(folder, b"{"),
    "COMMIT that is a list": lambda folder: _seal(folder, b"[]"),
    "COMMIT a hundred thousand deep": lambda folder: _seal(folder, b"[" * 100_000 + b"]" * 100_000),
    "COMMIT whose state is deep": lambda folder: _seal(
        folder, json.dumps(_commit(folder) | {"state": {}}).replace('"state": {}', '"state": ' + '{"a":' * 900).encode()
        + b"1" + b"}" * 901,
    ),
    "COMMIT of five million tables": lambda folder: _seal(folder, b"[" + b"[]," * 5_000_000 + b"[]]"),
    "COMMIT of a terabyte": _sparse_commit,
    "COMMIT that is a pipe": _pipe_for_commit,
    "COMMIT with bytes that are no text": lambda folder: _seal(folder, b'{"format": 1, "step": "\xff"}'),
    "COMMIT without files": lambda folder: edit_commit(folder, lambda record: record.pop("files") and record),
    "COMMIT of another step": _record(step=7),
    "COMMIT of no step": _record(step="1"),
    "COMMIT of step -1": _record(step=-1),
    "COMMIT with more to say": _record(extra=1),
    "COMMIT whose generation leads out": _record(generation="../../00000001-0"),
    "COMMIT whose files are a list": _record(files=["a"]),
    "COMMIT whose lengths are text": _record(files={"a": ["1", 2]}),
    "COMMIT whose lengths are below 0": _record(files={"a": [-1, 2]}),
    "COMMIT whose state is a list": _record(state=[]),
    "a data file that is a pipe": _pipe,
}  # fmt: skip
