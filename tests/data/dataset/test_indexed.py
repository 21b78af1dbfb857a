"""Token files: what is written is read again, layouts of other writers are understood, damage is a DataError."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter, choose_token_dtype, pair_paths
from megascale.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [4], list(range(50))]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return tmp_path / "set"


def test_layout_is_megatrons_byte_for_byte(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add([7, 8, 9])
        writer.add_document([[1], [2, 3]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<3q", 0, 1, 3)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 7, 8, 9, 1, 2, 3)


@given(
    documents=st.lists(st.lists(st.lists(st.integers(-128, 127), max_size=9), max_size=4), max_size=6),
    dtype=st.sampled_from(["int8", "int16", "int32", "int64"]),
    modes=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_round_trip(tmp_path: Path, documents: list[list[list[int]]], dtype: str, modes: bool) -> None:
    with IndexedWriter(tmp_path / "r", dtype) as writer:
        for d, document in enumerate(documents):
            writer.add_document(document, [d] * len(document) if modes else None)
    data = IndexedDataset(tmp_path / "r")
    sequences = [sequence for document in documents for sequence in document]
    assert data.dtype == np.dtype(dtype)
    assert [data.read_sequence(i).tolist() for i in range(len(data))] == sequences
    assert data.documents == writer.documents == len(documents)
    assert [data.read_document(d).tolist() for d in range(data.documents)] == [
        list(chain(*document)) for document in documents
    ]
    assert data.tokens == len(data.stream) == sum(map(len, sequences))
    expected = [d for d, document in enumerate(documents) for _ in document] if modes else []
    assert (data.modes.tolist() if data.modes is not None else []) == expected


def test_many_documents_at_once_equal_one_by_one(tmp_path: Path, prefix: Path) -> None:
    with IndexedWriter(tmp_path / "b", "uint16") as writer:
        writer.add_documents(np.array(list(chain(*DOCUMENTS))), [len(d) for d in DOCUMENTS])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"b{suffix}").read_bytes() == prefix.with_suffix(suffix).read_bytes()


@given(
    parts=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=5), max_size=4),
    modes=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_appending_equals_writing_at_once(tmp_path: Path, parts: list[list[list[int]]], modes: bool) -> None:
    with IndexedWriter(tmp_path / "whole", "uint16") as full:
        for part in parts:
            for document in part:
                full.add(document, 1 if modes else None)
    with IndexedWriter(tmp_path / "joined", "uint16") as joined:
        for part in parts:
            with IndexedWriter(tmp_path / "part", "uint16") as writer:
                for document in part:
                    writer.add(document, 1 if modes else None)
            joined.append(IndexedDataset(tmp_path / "part"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (tmp_path / f"joined{suffix}").read_bytes()
    if parts:
        with (
            IndexedWriter(tmp_path / "wide", "int32") as wide,
            pytest.raises(DataError, match="holds tokens of type uint16"),
        ):
            wide.append(IndexedDataset(tmp_path / "part"))


def test_the_digest_is_that_of_the_stored_tokens(tmp_path: Path, prefix: Path) -> None:
    """By whatever method tokens are written; a writer that is not asked to hash has none."""
    with IndexedWriter(tmp_path / "hashed", "int32", hashed=True) as writer:
        writer.add([70000, 2])
        writer.add_document([[3], [4, 5]])
        writer.add_documents(np.array([6, 7, 8]), [1, 2])
    assert writer.digest is not None
    assert writer.digest.hexdigest() == hashlib.sha256((tmp_path / "hashed.bin").read_bytes()).hexdigest()
    with IndexedWriter(tmp_path / "joined", "uint16", hashed=True) as joined:
        joined.append(IndexedDataset(prefix))
    assert joined.digest is not None
    assert joined.digest.hexdigest() == hashlib.sha256(prefix.with_suffix(".bin").read_bytes()).hexdigest()
    with IndexedWriter(tmp_path / "plain", "uint16") as plain:
        plain.add([1])
    assert plain.digest is None


def test_get_parts_and_bounds(prefix: Path) -> None:
    data = IndexedDataset(prefix)
    assert data.read_sequence(3, 10, 5).tolist() == [10, 11, 12, 13, 14]
    assert data.read_sequence(3, 45).tolist() == [45, 46, 47, 48, 49]
    assert data.stream[2:5].tolist() == [3, 4, 0]
    for bad in [(4,), (-1,), (0, 2, 2), (0, -1, 1), (0, 0, -1)]:
        with pytest.raises(IndexError):
            data.read_sequence(*bad)
    with pytest.raises(IndexError):
        data.read_document(4)
    assert pickle.loads(pickle.dumps(data)).read_document(0).tolist() == [1, 2, 3]


def test_nothing_appears_before_the_end_and_an_error_keeps_the_old_file(prefix: Path) -> None:
    def broken() -> None:
        with IndexedWriter(prefix, "int32") as writer:
            writer.add([1])
            raise KeyError

    before = prefix.with_suffix(".bin").read_bytes()
    with pytest.raises(KeyError):
        broken()
    assert prefix.with_suffix(".bin").read_bytes() == before
    assert sorted(os.listdir(prefix.parent)) == ["set.bin", "set.idx"]


def test_both_files_are_on_disk_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine leaves no pair whose name promises more than the disk has."""
    synced: list[int] = []
    fsync = os.fsync

    def note_size(descriptor: int) -> None:
        assert not list(tmp_path.glob("*.idx"))
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_size)
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        writer.add([1, 2, 3])
    assert synced == [(tmp_path / name).stat().st_size for name in ("set.bin", "set.idx")]


@pytest.mark.parametrize(("dtype", "token"), [("uint8", 256), ("uint8", -1), ("uint16", 65536), ("int32", 1 << 31)])
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, dtype: str, token: int) -> None:
    writer = IndexedWriter(tmp_path / "w", dtype)
    with pytest.raises(DataError, match=f"{token}.*{dtype}"):
        writer.add([0, token])
    writer.abort()
    assert os.listdir(tmp_path) == []


def test_token_dtype_is_megatrons_choice() -> None:
    assert choose_token_dtype(65499) == np.uint16
    assert choose_token_dtype(65500) == np.int32


def damaged(prefix: Path, suffix: str, change) -> pytest.ExceptionInfo[DataError]:
    path = prefix.with_suffix(suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix).verify()
    assert str(path.parent) in str(caught.value)
    return caught


@pytest.mark.parametrize(
    ("suffix", "change", "output"),
    [
        (".idx", lambda b: b[:20], "at least 34"),
        (".idx", lambda b: b[:-1], "cut off"),
        (".idx", lambda b: b"PK" + b[2:], "another kind of file"),
        (".idx", lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2"),
        (".idx", lambda b: b[:17] + b"\x07" + b[18:], "type code 7"),
        (".idx", lambda b: b[:18] + struct.pack("<Q", 1 << 60) + b[26:], str(1 << 60)),
        (".idx", lambda b: b[:-8] + struct.pack("<q", 9), "0 to 4"),
        (".idx", lambda b: b[:34] + struct.pack("<i", -3) + b[38:], "-3 tokens"),
        (".idx", lambda b: b[:50] + struct.pack("<q", 2) + b[58:], "sequence 0 at byte 2"),
        (".idx", lambda b: b"", "at least 34"),
        (".bin", lambda b: b[:-1], "describes 54 tokens of 2 bytes"),
        (".bin", lambda b: b + b"xx", "describes 54 tokens"),
        (".bin", lambda b: b"", "has 0 bytes"),
    ],
)
def test_damage_is_named(prefix: Path, suffix: str, change, output: str) -> None:
    assert output in str(damaged(prefix, suffix, change).value)


def test_missing_files_are_named(tmp_path: Path, prefix: Path) -> None:
    with pytest.raises(DataError, match="neither file"):
        IndexedDataset(tmp_path / "none")
    prefix.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"set\.bin exists without it"):
        IndexedDataset(prefix)


@given(
    edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 12),
    longer=st.binary(max_size=12),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400, deadline=2000)
def test_fuzzed_index_is_read_rightly_or_refused(
    prefix: Path, edits: list[tuple[int, int]], cut: int, longer: bytes
) -> None:
    """Any bytes give a DataError or reads inside the file. Verified indices give all tokens exactly once."""
    path = prefix.with_suffix(".idx")
    original = path.read_bytes()
    changed = bytearray(original)
    for at, value in edits:
        changed[at % len(changed)] = value
    mutated = bytes(changed[: len(changed) - cut]) + longer
    target = prefix.with_name("fuzz")
    target.with_suffix(".idx").write_bytes(mutated)
    target.with_suffix(".bin").write_bytes(prefix.with_suffix(".bin").read_bytes())
    try:
        data = IndexedDataset(target)
    except DataError:
        assert mutated != original
        return
    size = len(prefix.with_suffix(".bin").read_bytes())
    assert data.stream.nbytes == data.tokens * data.dtype.itemsize == size
    low, high = data.stream.ctypes.data, data.stream.ctypes.data + size
    for read, count in ((data.read_sequence, len(data)), (data.read_document, data.documents)):
        for i in range(count):
            try:
                piece = read(i)
            except DataError:
                continue
            assert low <= piece.ctypes.data <= piece.ctypes.data + piece.nbytes <= high
    try:
        data.verify()
    except DataError:
        return
    assert sum(len(data.read_sequence(i)) for i in range(len(data))) == data.tokens
    assert sum(len(data.read_document(d)) for d in range(data.documents)) == data.tokens


@given(noise=st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=2000)
def test_noise_after_the_magic_is_refused(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "n.bin").write_bytes(b"\x01\x00" * 8)
    (tmp_path / "n.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + noise)
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "n")


def write_index(
    prefix: Path,
    lengths: list[int],
    pointers: list[int],
    documents: list[int],
    *,
    code: int = 4,
    size: int | None = None,
) -> IndexedDataset:
    """Write a pair from its tables as they are, and open it; `size` is that of the .bin in bytes."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    tables = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    prefix.with_suffix(".idx").write_bytes(header + tables + struct.pack(f"<{len(documents)}q", *documents))
    prefix.with_suffix(".bin").write_bytes(bytes(range(4 * sum(lengths) if size is None else size)))
    return IndexedDataset(prefix)


def test_an_index_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no document indices where 0 to 0 "):
        write_index(tmp_path / "a", [], [], [])
    assert write_index(tmp_path / "a", [], [], [0]).documents == 0


@pytest.mark.parametrize("documents", [[1, 2], [0, 1], [0, 3]])
def test_documents_reach_from_the_first_to_the_last_sequence(tmp_path: Path, documents: list[int]) -> None:
    with pytest.raises(DataError, match=f"from {documents[0]} to {documents[1]} where 0 to 2 "):
        write_index(tmp_path / "a", [1, 1], [0, 4], documents)


def test_half_a_token_at_the_end_is_refused(tmp_path: Path) -> None:
    """The last sequence begins at an odd byte, and the file ends where it says."""
    with pytest.raises(DataError, match="7 bytes, not a multiple of 4"):
        write_index(tmp_path / "a", [1, 1], [0, 3], [0, 2], size=7)


@pytest.mark.parametrize("code", [0, 6, 7, 9])
def test_only_integers_are_tokens(tmp_path: Path, code: int) -> None:
    with pytest.raises(DataError, match=rf"type code {code}; integer types are 1 \(uint8\).*5 \(int64\), 8 \(uint16\)"):
        write_index(tmp_path / "a", [], [], [0], code=code)


@pytest.mark.parametrize(
    ("lengths", "pointers", "documents", "output"),
    [
        ([1, 2, 1], [0, 4, 12], [0, 2, 1, 3], "not ascending"),
        ([1, 2, 1], [0, 4, 12], [0, -1, 3], "not ascending"),
        ([1, 2, 1], [0, 4, 12], [0, 4, 3], "not ascending"),
        ([1, 2, 1], [0, 8, 12], [0, 3], "sequence 1 at byte 8 of the .bin where the lengths before it give 4"),
        ([1, -1, 4], [0, 4, 0], [0, 3], "sequence of -1 tokens"),
    ],
)
def test_a_complete_check_sees_every_entry(
    tmp_path: Path, lengths: list[int], pointers: list[int], documents: list[int], output: str
) -> None:
    data = write_index(tmp_path / "a", lengths, pointers, documents, size=16)
    with pytest.raises(DataError, match=output):
        data.verify()


@pytest.mark.parametrize("documents", [[0, 0, 3], [0, 3, 3], [0, 1, 2, 3]])
def test_a_complete_check_accepts_empty_documents_and_sequences(tmp_path: Path, documents: list[int]) -> None:
    data = write_index(tmp_path / "a", [1, 0, 3], [0, 4, 4], documents)
    data.verify()
    assert sum(len(data.read_document(d)) for d in range(data.documents)) == data.tokens == 4


def test_reads_at_the_borders_of_a_sequence(tmp_path: Path) -> None:
    data = write_index(tmp_path / "a", [2, 3], [0, 8], [0, 1, 2])
    full = data.stream.tolist()
    assert [data.read_sequence(1, offset).tolist() for offset in (0, 1, 3)] == [full[2:], full[3:], []]
    assert data.read_sequence(1, 0, 3).tolist() == full[2:]
    assert data.read_sequence(1, 3, 0).tolist() == []
    assert [data.find_start(i) for i in range(3)] == [0, 2, 5]
    for arguments in ((1, 4), (1, 3, 1), (1, -1), (2,), (-1,)):
        with pytest.raises(IndexError, match=r"outside (sequence 1 of 3 tokens|0\.\.1)"):
            data.read_sequence(*arguments)
    assert [data.read_document(d).tolist() for d in range(2)] == [full[:2], full[2:]]
    for d in (-1, 2):
        with pytest.raises(IndexError, match=f"document {d} is outside 0..1"):
            data.read_document(d)


def test_a_sequence_outside_of_the_file_is_not_read(tmp_path: Path) -> None:
    """Each entry is checked at its use; the last one is checked at the opening."""
    for pointer in (-4, 1, 20, 24):
        data = write_index(tmp_path / "a", [1, 3, 1], [0, pointer, 16], [0, 1, 2, 3], size=20)
        with pytest.raises(DataError, match=f"sequence 1 of 3 tokens at byte {pointer} of a .bin of 20 bytes"):
            data.read_sequence(1)
        assert len(data.read_sequence(0)) == len(data.read_sequence(2)) == 1
    data = write_index(tmp_path / "a", [1, 3, 1], [0, 8, 16], [0, 1, 2, 3], size=20)
    assert len(data.read_sequence(1)) == 3  # it reaches the end of the file
    data = write_index(tmp_path / "a", [1, 3, 1], [8, 4, 16], [0, 1, 2, 3], size=20)
    with pytest.raises(DataError, match="sequence 0 of 1 tokens at byte 8"):
        data.read_document(0)  # its end lies before its beginning
    data = write_index(tmp_path / "a", [1, 3], [0, 4], [0, 2, 1, 2])
    with pytest.raises(DataError, match=r"gives document 1 the sequences 2\.\.1"):
        data.read_document(1)


@pytest.mark.parametrize("name", ["set", "set.bin", "set.idx", "set.BIN", "set.IDX"])
def test_a_pair_is_named_by_its_prefix_or_either_file(tmp_path: Path, name: str) -> None:
    assert pair_paths(tmp_path / name) == (tmp_path / "set.bin", tmp_path / "set.idx")
    assert IndexedDataset.files(str(tmp_path / name)) == [tmp_path / "set.bin", tmp_path / "set.idx"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "uint64"])
def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(DataError, match=f"tokens of type {dtype} cannot be stored"):
        IndexedWriter(tmp_path / "new" / "w", dtype)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("dtype", "limits"), [("uint8", (0, 255)), ("int8", (-128, 127)), ("uint16", (0, 65535))])
def test_the_limits_of_a_type_fit_it(tmp_path: Path, dtype: str, limits: tuple[int, int]) -> None:
    with IndexedWriter(tmp_path / "w", dtype) as writer:
        writer.add(limits)
    assert IndexedDataset(tmp_path / "w").stream.tolist() == list(limits)


def test_writers_refuse_lengths_that_do_not_fit(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "w", "uint16")
    for lengths, total in (([1, 1], 2), ([4], 4), ([4, -1], 3)):
        with pytest.raises(ValueError, match=f"add up to {total}, not to the 3 tokens"):
            writer.add_documents(np.arange(3), lengths)
    writer._add_lengths(np.array([(1 << 31) - 1]))
    with pytest.raises(DataError, match="2147483648 tokens is longer than the format allows"):
        writer._add_lengths(np.array([1, 1 << 31]))
    writer.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("modes", [[[1], None], [None, [1]], [[1, 2]], [[]]])
def test_each_sequence_has_one_mode_or_none_has(tmp_path: Path, modes: list[list[int] | None]) -> None:
    with IndexedWriter(tmp_path / "w", "uint16") as writer:
        for first in modes[:-1]:
            writer.add_document([[1]], first)
        if modes[-1] is None:
            writer.add_document([[1]])
            return  # documents without modes may follow; the reader refuses a table that is too short
        with pytest.raises(DataError, match="1 sequences with another number of modes"):
            writer.add_document([[1]], modes[-1])


def test_a_file_that_cannot_be_completed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"), IndexedWriter(tmp_path / "w", "uint16") as writer:
        writer.add([1])
    assert os.listdir(tmp_path) == []


def test_a_folder_in_place_of_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.idx").mkdir()
    with pytest.raises(DataError, match=r"a\.idx cannot be read: .*check the path and its permissions"):
        IndexedDataset(tmp_path / "a")
