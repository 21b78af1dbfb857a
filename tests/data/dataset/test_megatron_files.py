"""Token files between this project and megatron-core's own reader and builder, both ways, byte for byte."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.data.dataset.indexed import DTYPES, IndexedDataset, IndexedWriter, choose_token_dtype
from megascale.data.prepare.builder import build

torch = pytest.importorskip("torch")

# One process for all of these: importing megatron-core takes seconds.
pytestmark = [
    pytest.mark.xdist_group("megatron"),
    pytest.mark.filterwarnings("ignore"),
]

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=9), max_size=4), max_size=6)
KINDS = st.sampled_from(["uint8", "int8", "uint16", "int16", "int32", "int64"])
SHARED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


def theirs(megatron, prefix: Path, documents: list[list[list[int]]], kind: str, modes: bool) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, kind), multimodal=modes)
    for document in documents:
        for i, sequence in enumerate(document):
            builder.add_item(torch.tensor(sequence), i)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def ours(prefix: Path, documents: list[list[list[int]]], kind: str, modes: bool) -> None:
    with IndexedWriter(prefix, kind) as writer:
        for document in documents:
            writer.add_document(document, range(len(document)) if modes else None)


@given(documents=DOCUMENTS, kind=KINDS, modes=st.booleans())
@SHARED
def test_both_write_the_same_bytes(megatron, tmp_path: Path, documents, kind: str, modes: bool) -> None:
    theirs(megatron, tmp_path / "theirs", documents, kind, modes)
    ours(tmp_path / "ours", documents, kind, modes)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@given(documents=DOCUMENTS.filter(lambda ds: any(map(len, ds))), kind=KINDS, modes=st.booleans(), data=st.data())
@SHARED
def test_theirs_is_read_here(megatron, tmp_path: Path, documents, kind: str, modes: bool, data) -> None:
    theirs(megatron, tmp_path / "t", documents, kind, modes)
    file = IndexedDataset(tmp_path / "t")
    file.verify()
    assert file.dtype == np.dtype(kind)
    assert (file.modes is not None) == modes
    assert [[file.read_sequence(i).tolist() for i in range(a, b)] for a, b in spans(file.document_indices)] == documents
    i = data.draw(st.integers(0, len(file) - 1))
    offset = data.draw(st.integers(0, int(file.lengths[i]) - 1))
    reader = megatron.IndexedDataset(str(tmp_path / "t"), multimodal=modes)
    expected = reader.get(i, offset=offset)
    assert file.read_sequence(i, offset).tolist() == (expected[0] if modes else expected).tolist()


@given(documents=DOCUMENTS.filter(lambda ds: any(map(len, ds))), kind=KINDS, modes=st.booleans())
@SHARED
def test_ours_is_read_there(megatron, tmp_path: Path, documents, kind: str, modes: bool) -> None:
    ours(tmp_path / "o", documents, kind, modes)
    reader = megatron.IndexedDataset(str(tmp_path / "o"), multimodal=modes)
    read = [[tokens(reader[i], modes) for i in range(a, b)] for a, b in spans(reader.document_indices)]
    assert read == documents


def tokens(item, modes: bool) -> list[int]:
    return (item[0] if modes else item).tolist()


def spans(indices) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in pairwise(indices)]


def test_a_built_data_set_is_read_there(megatron, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.txt").write_text(f"document {i}\n" * (i + 1))
    build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=300, progress=False)
    for side in ("train", "valid"):
        file, reader = IndexedDataset(tmp_path / "out" / side), megatron.IndexedDataset(str(tmp_path / "out" / side))
        assert len(reader) == len(file) == file.documents == len(reader.document_indices) - 1
        assert [reader[i].tolist() for i in range(len(reader))] == [
            file.read_sequence(i).tolist() for i in range(len(file))
        ]


@pytest.mark.parametrize("vocabulary", [257, 50257, 65499, 65500, 128256])
def test_the_type_of_tokens_is_chosen_alike(megatron, vocabulary: int) -> None:
    assert choose_token_dtype(vocabulary) == np.dtype(megatron.DType.optimal_dtype(vocabulary))


def test_type_codes_are_the_same(megatron) -> None:
    assert {code: np.dtype(megatron.DType.dtype_from_code(code)) for code in DTYPES} == DTYPES


def test_a_merge_of_theirs_equals_an_append_of_ours(megatron, tmp_path: Path) -> None:
    parts = [[[[1, 2], [3]], [[4]]], [[[5, 6, 7]], [[8]]]]
    for i, documents in enumerate(parts):
        ours(tmp_path / f"p{i}", documents, "int32", False)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    with IndexedWriter(tmp_path / "ours", "int32") as writer:
        for i in range(len(parts)):
            builder.add_index(str(tmp_path / f"p{i}"))
            writer.append(IndexedDataset(tmp_path / f"p{i}"))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
