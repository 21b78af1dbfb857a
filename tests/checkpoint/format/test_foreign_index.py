"""Indexes of foreign torch distributed checkpoints: real ones are read, and no pickle gets anything done."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from megascale.checkpoint.conversion import read_foreign_tensors
from megascale.checkpoint.format import foreign_index
from megascale.checkpoint.format.foreign_index import read_torch_index
from megascale.core.tensors import Box
from megascale.errors import DataError

METADATA = "torch.distributed.checkpoint.metadata"


def _by_name(module: str, name: str) -> bytes:
    """Operations of protocol 4 that push what a module holds under a (dotted) name."""
    push = lambda text: b"X" + struct.pack("<I", len(text)) + text
    return push(module.encode("utf-8", "surrogatepass")) + push(name.encode("utf-8", "surrogatepass")) + b"\x93"


def _folder(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (METADATA, "os.system"),
        (METADATA, "os"),
        (METADATA, "Metadata.__init__.__globals__"),
        (METADATA, "TensorProperties.create_from_tensor"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("pathlib", "os.system"),
        ("pathlib", "Path"),
        ("torch", "load"),
        ("torch", "Size.__class__"),
        ("os", "system"),
        ("builtins", "eval"),
    ],
)
def test_a_function_is_never_called(module: str, name: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    command = f"touch {touched}".encode()
    call = b"\x80\x04" + _by_name(module, name) + b"X" + struct.pack("<I", len(command)) + command + b"\x85R."
    with pytest.raises(DataError, match=f"names {module}.{name.replace('.', '[.]')}, which"):
        read_foreign_tensors(_folder(tmp_path / "dcp", call), "")
    old = f"c{module}\n{name}\n(S'touch {touched}'\ntR.".encode()
    with pytest.raises(DataError, match="names"):
        read_foreign_tensors(_folder(tmp_path / "dcp", old), "")
    assert not touched.exists()


_NAMES = st.one_of(
    st.sampled_from(foreign_index._RECORDS),
    st.tuples(
        st.one_of(st.sampled_from([METADATA, "torch", "pathlib", "builtins", "os", "collections"]), st.text()),
        st.one_of(st.text(), st.lists(st.sampled_from(["os", "system", "Metadata", "__init__", "x"])).map(".".join)),
    ),
)


@given(_NAMES)
def test_nothing_outside_the_list_is_resolved(pair: tuple[str, str]) -> None:
    classes = foreign_index._make_classes()
    try:
        data = b"\x80\x04" + _by_name(*pair) + b"."
        loaded = foreign_index._Unpickler(data).load()
    except (DataError, pickle.UnpicklingError, UnicodeDecodeError):
        assert pair not in classes
        return
    assert pair in classes
    # A record of ours, a type of numbers, or a container: no function, and no class that anything else uses.
    harmless = isinstance(loaded, torch.dtype) or loaded in (tuple, foreign_index.OrderedDict)
    assert harmless or issubclass(loaded, foreign_index._Record)


def test_a_class_cannot_be_changed(tmp_path: Path) -> None:
    """BUILD with attributes on a class itself would change that class for the whole process."""
    before = dict(vars(Metadata))
    data = b"\x80\x04" + _by_name(METADATA, "Metadata") + b"N}X\x04\x00\x00\x00nameK\x01s\x86b."
    with pytest.raises(DataError, match="not a torch distributed checkpoint's index"):
        read_foreign_tensors(_folder(tmp_path / "dcp", data), "")
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("operation", [b"r" + struct.pack("<I", 20_000_000), b"p20000000\n"])
def test_a_few_bytes_ask_for_no_memory(operation: bytes, tmp_path: Path) -> None:
    """The unpickler's table of remembered objects is as large as the pickle says: of these 160 MB and more."""
    with pytest.raises(DataError, match="memo has 20,000,000 objects"):
        read_foreign_tensors(_folder(tmp_path / "dcp", b"\x80\x02N" + operation + b"."), "")


def _tensors() -> dict[str, Any]:
    return {
        "a": torch.randn(5, 3),
        "b": {"c": torch.arange(4), "d": [torch.ones(2, dtype=torch.bfloat16)]},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "step": 7,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in torch's format that has a number without a tensor."""
    folder = tmp_path_factory.mktemp("saved") / "dcp"
    torch.manual_seed(0)
    dcp.save(_tensors(), checkpoint_id=str(folder), no_dist=True)
    return folder


def test_the_index_is_torchs(saved: Path) -> None:
    ours, theirs = read_torch_index(saved / ".metadata"), pickle.loads((saved / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_an_index_by_an_early_python_3_11_is_read(saved: Path, tmp_path: Path) -> None:
    """It has members of enums as getattr(class, name), which gets nothing here."""

    class Early(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

    original = pickle.loads((saved / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as file:
        Early(file).dump(original)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    ours = read_torch_index(tmp_path / ".metadata")
    assert ours.state_dict_metadata == original.state_dict_metadata
    assert ours.storage_data == original.storage_data


def test_a_checkpoint_of_torch_is_read(saved: Path) -> None:
    torch.manual_seed(0)
    expected = _tensors()
    infos, read = read_foreign_tensors(saved, "x.")
    assert set(infos) == {"x.a", "x.b.c", "x.b.d.0", "x.scalar"}
    read_whole = lambda name: read(name, Box((0,) * len(infos[name].shape), infos[name].shape))
    assert torch.equal(read_whole("x.a"), expected["a"])
    assert torch.equal(read_whole("x.b.d.0"), expected["b"]["d"][0])
    assert torch.equal(read_whole("x.scalar"), expected["scalar"])


def _changed(saved: Path, target: Path, change: Callable[[Metadata], object]) -> Path:
    index = pickle.loads((saved / ".metadata").read_bytes())
    changed_index = change(index)
    return _folder(target, pickle.dumps(index if changed_index is None else changed_index))


def _outside(index: Any) -> None:
    next(iter(index.storage_data.values())).relative_path = "../other"


def _no_list(index: Any) -> None:
    index.state_dict_metadata["a"].chunks = 3


def _below_zero(index: Any) -> None:
    index.state_dict_metadata["a"].size = (-5, 3)


def _hole(index: Any) -> None:
    index.state_dict_metadata["a"].chunks.clear()


def _no_table(index: Any) -> None:
    index.storage_data = ["a"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda index: {"a": 1}, "of type dict where Metadata"),
        (lambda index: [index], "of type list where Metadata"),
        (lambda index: torch.Size([1]), "of type tuple where Metadata"),
        (_outside, "not inside the checkpoint's folder"),
        (_no_list, "a has no list of chunks"),
        (_below_zero, "not integers from 0"),
        (_hole, "leave a part of it out"),
        (_no_table, "storage_data is of type list"),
    ],
)
def test_what_is_no_index_is_a_data_error(saved: Path, tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        read_foreign_tensors(_changed(saved, tmp_path / "dcp", change), "")


@settings(deadline=None)  # a damaged pickle may ask for a table of gigabytes before it is refused
@given(data=st.data())
def test_damage_is_a_data_error_or_the_same_index(data: st.DataObject, saved: Path) -> None:
    full = bytearray((saved / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        full[data.draw(st.integers(0, len(full) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(full)), st.integers(0, len(full))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".metadata"
        path.write_bytes(full[:cut])
        try:
            assert isinstance(read_torch_index(path), Metadata)
        except DataError as error:
            assert str(path) in str(error)


def test_data_files_that_are_missing_are_a_data_error(saved: Path, tmp_path: Path) -> None:
    infos, read = read_foreign_tensors(_folder(tmp_path / "dcp", (saved / ".metadata").read_bytes()), "")
    with pytest.raises(DataError, match="a cannot be read"):
        read("a", Box((0, 0), infos["a"].shape))


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_data_files_run_nothing(saved: Path, tmp_path: Path) -> None:
    def evil(index: Any) -> None:
        for info in index.storage_data.values():
            info.offset, info.length = 0, len(data)

    torch.save(_Evil(tmp_path / "touched"), tmp_path / "evil")
    data = (tmp_path / "evil").read_bytes()
    folder = _changed(saved, tmp_path / "dcp", evil)
    (folder / "__0_0.distcp").write_bytes(data)
    infos, read = read_foreign_tensors(folder, "")
    with pytest.raises(DataError, match="a cannot be read"):
        read("a", Box((0, 0), infos["a"].shape))
    assert not (tmp_path / "touched").exists()


def test_a_torch_file_of_tables_without_end_is_a_data_error(tmp_path: Path) -> None:
    table: dict[str, Any] = {}
    table["again"] = table
    torch.save(table, tmp_path / "x.pt")
    with pytest.raises(DataError, match="without end"):
        read_foreign_tensors(tmp_path / "x.pt", "")
