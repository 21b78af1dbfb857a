"""Documents are read once each and in order from every kind of file, however it is cut; damage is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.data.build.split import Split, place
from megascale.data.dataset import sources
from megascale.data.dataset.sources import clean, cut, find_files, read
from megascale.errors import DataError

TEXTS = [f"text {i} " + "größer ✓\n" * (i % 7) for i in range(200)]


def documents(path: Path, size: int = 1 << 20, key: str = "text") -> list[str]:
    return [item.text for piece in cut(find_files([path]), size) for item in read(piece, key) if item.text]


def jsonl(texts: list[str], ending: str = "\n") -> bytes:
    return "".join(json.dumps({"id": i, "text": t}) + ending for i, t in enumerate(texts)).encode()


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=30),
    size=st.integers(1, 200),
    last=st.booleans(),
    ending=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_jsonl_cut_anywhere(tmp_path: Path, texts: list[str], size: int, last: bool, ending: str) -> None:
    data = jsonl(texts, ending)
    (tmp_path / "a.jsonl").write_bytes(data if last else data.rstrip())
    files = find_files([tmp_path / "a.jsonl"])
    pieces = cut(files, size)
    items = [item for piece in pieces for item in read(piece, "text")]
    assert [item.text for item in items if item.text] == [t for t in texts if t.strip()]
    assert sum(item.size for item in items) == files[0].size


def test_compressed_files_of_several_members(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = len(TEXTS) // 2
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS[:half])) + gzip.compress(jsonl(TEXTS[half:])))
    squeeze = zstandard.ZstdCompressor().compress
    (tmp_path / "z.jsonl.zst").write_bytes(squeeze(jsonl(TEXTS[:half])) + squeeze(jsonl(TEXTS[half:])))
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"one document"))
    assert documents(tmp_path / "g.jsonl.gz") == documents(tmp_path / "z.jsonl.zst") == TEXTS
    assert documents(tmp_path / "t.txt.gz") == ["one document"]
    for name in ("g.jsonl.gz", "z.jsonl.zst"):
        (piece,) = cut(find_files([tmp_path / name]), 10)
        assert sum(item.size for item in read(piece, "text")) == piece.size


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_cut_off_or_damaged_compression_is_named(tmp_path: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 1000)
    if kind == "gz":
        data = gzip.compress(jsonl(TEXTS))
    else:
        data = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(jsonl(TEXTS))
    path = tmp_path / f"a.jsonl.{kind}"
    for broken in (data[:-1], data[: len(data) // 2], data[:200] + b"xxxx" + data[204:], data + b"junk"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"a\.jsonl\.{kind} is (damaged|cut off)|not JSON"):
            documents(path)
    path.write_bytes(data)
    assert documents(path) == TEXTS


def test_parquet_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(202), "body": [*TEXTS, None, " "]}), path, row_group_size=30)
    for size in (1, 500, 1 << 20):
        assert documents(path, size, "body") == TEXTS
    assert len(cut(find_files([path]), 1)) == 7
    with pytest.raises(DataError, match=r"no column 'text'.*'body'.*--text-key"):
        documents(path)
    with pytest.raises(DataError, match="no text under 'n'"):
        documents(path, key="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a parquet file"):
        documents(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut o', "line 2 is not JSON"),
        (b"\xff\xfe", "line 2 is not JSON"),
        (b'{"txt": "a"}', "line 2 has no text under 'text' .it has 'txt'.*--text-key"),
        (b'{"text": 5}', "no text under"),
        (b'["text"]', "it has list"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(DataError, match=says) as caught:
        documents(tmp_path / "a.jsonl")
    assert "a.jsonl" in str(caught.value)


def test_text_files_and_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "sub" / "b.md").write_text("b")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "z.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "c.jsonl").write_text('{"text": "c"}')
    (tmp_path / "link").symlink_to(tmp_path)
    assert documents(tmp_path) == ["marked", "c", "b"]
    assert documents(tmp_path, size=1) == ["marked", "c", "b"]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud800b \ud83d\ude00"}')
    assert documents(tmp_path / "a.jsonl") == ["a�b \U0001f600"]
    assert clean("a\ud83d\ude00") == "a\U0001f600"


@given(sizes=st.lists(st.integers(1, 1000), min_size=20, max_size=60), share=st.floats(0.01, 0.5))
@settings(max_examples=60, deadline=None)
def test_known_documents_are_split_by_bytes(sizes: list[int], share: float) -> None:
    texts = [f"{i}:" + "x" * size for i, size in enumerate(sizes)]
    split = Split.of([(place(t), len(t)) for t in texts], share)
    sides = [split.parts(sources.TextRecord(t, 0))[0][0] for t in texts]
    held = sum(len(t) for t, side in zip(texts, sides, strict=True) if side == "valid")
    assert 0 < held < sum(map(len, texts))
    assert held < share * sum(map(len, texts)) + max(map(len, texts))


def test_equal_documents_stand_on_one_side() -> None:
    split = Split.by_share(0.3)
    for text in TEXTS:
        assert split.parts(sources.TextRecord(text, 0)) == split.parts(sources.TextRecord(text, 99))
    sides = [split.parts(sources.TextRecord(text, 0))[0][0] for text in TEXTS]
    assert 0.2 < sides.count("valid") / len(sides) < 0.4
