"""Documents are read once each and in order from every kind of file, however it is cut; damage is named."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale.core.untrusted_files import LFS_POINTER
from megascale.data.dataset import metered_files, parquet_rows, source_files, sources
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.source_files import cut_pieces, find_files, find_files_and_skipped
from megascale.data.dataset.sources import read_documents, replace_surrogates
from megascale.errors import DataError

TEXTS = [f"text {i} " + "größer ✓\n" * (i % 7) for i in range(200)]


def documents(path: Path, size: int = 1 << 20, key: str = "text") -> list[str]:
    return [
        item.text for piece in cut_pieces(find_files([path]), size) for item in read_documents(piece, key) if item.text
    ]


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
    pieces = cut_pieces(files, size)
    items = [item for piece in pieces for item in read_documents(piece, "text")]
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
        (piece,) = cut_pieces(find_files([tmp_path / name]), 10)
        assert sum(item.size for item in read_documents(piece, "text")) == piece.size


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_cut_off_or_damaged_compression_is_named(tmp_path: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(metered_files, "CHUNK_BYTES", 1000)
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
    pq.write_table(pa.table({"n": range(202), "body": TEXTS + [None, " "]}), path, row_group_size=30)
    for size in (1, 500, 1 << 20):
        assert documents(path, size, "body") == TEXTS
    assert len(cut_pieces(find_files([path]), 1)) == 7
    with pytest.raises(DataError, match=r"no column 'text'.*'body'.*--text-key"):
        documents(path)
    with pytest.raises(
        DataError, match=r"row 1 after the start of row group 0 has a number under 'n', not text; .*--text-key"
    ):
        documents(path, key="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a parquet file"):
        documents(path)


@pytest.mark.parametrize(
    ("line", "output"),
    [
        (b'{"text": "cut o', "line 2 is not JSON"),
        (
            b"\xff\xfe",
            r"line 2 is not UTF-8 text: byte 17 of the file .0xff. is not UTF-8; convert .* `iconv",
        ),
        (
            b'{"text": "caf\xe9"}',
            r"line 2 is not UTF-8 text: byte 30 of the file .0xe9. is .*remove the record",
        ),
        (b'{"txt": "a"}', "line 2 has no text under 'text' .it has 'txt'.*--text-key"),
        (b'{"text": 5}', "line 2 has a number under 'text', not text"),
        (b'{"text": ["a"]}', "line 2 has a list under 'text', not text"),
        (b'["text"]', "line 2 is a list where an object"),
        (b"null", "line 2 is null where an object"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, output: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(DataError, match=output) as caught:
        documents(tmp_path / "a.jsonl")
    assert "a.jsonl" in str(caught.value)


def left_out(path: Path, key: str = "text") -> Counter[str]:
    items = [item for piece in cut_pieces(find_files([path]), 1 << 20) for item in read_documents(piece, key)]
    assert sum(item.size for item in items) == path.stat().st_size
    return Counter(item.skipped for item in items if item.skipped)


def as_list(indent: int | None) -> bytes:
    return json.dumps([{"id": i, "text": t} for i, t in enumerate(TEXTS)], indent=indent).encode()


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.json.gz", "a.Json.GZ", "a.jsonlines.zst", "a.JSON.ZST"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_records_by_any_name(tmp_path: Path, name: str, mark: bytes) -> None:
    """Files of one record per line are read with any case of the suffix, also with a byte order mark."""
    data = mark + jsonl(TEXTS)
    if name.lower().endswith(".gz"):
        data = gzip.compress(data)
    elif name.lower().endswith(".zst"):
        data = pytest.importorskip("zstandard").compress(data)
    (tmp_path / name).write_bytes(data)
    assert documents(tmp_path / name) == documents(tmp_path / name, size=100) == TEXTS
    assert not left_out(tmp_path / name)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        as_list(None),
        as_list(2),
        b" \n[\n" + b",\n".join(jsonl(TEXTS).splitlines()) + b"\n]\n",
        b"\n".join(json.dumps({"text": t}, indent=1, ensure_ascii=False).encode() for t in TEXTS),
        as_list(None) + b"\n[]",
        b"\xef\xbb\xbf" + as_list(None),
    ],
    ids=["list", "indented list", "list of lines", "indented records", "two lists", "byte order mark"],
)
def test_json_that_is_not_one_record_per_line(tmp_path: Path, data: bytes, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(metered_files, "CHUNK_BYTES", chunk)
    for name, contents in (("a.json", data), ("a.json.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(contents)
        assert documents(tmp_path / name) == TEXTS
        assert not left_out(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"name": "settings"}\n', sources.NOT_RECORDS),
        (b'{"data": [{"text": "a"}]}', sources.NOT_RECORDS),
        (b'["a", "b"]', sources.NOT_RECORDS),
        (b"{ // a comment\n}", sources.NOT_JSON),
        (b"\xff\xfe[\x00]\x00", source_files.NOT_UTF8),
        (b"[]", source_files.EMPTY_FILE),
        (b"", source_files.EMPTY_FILE),
    ],
)
def test_json_without_records_is_left_out_and_counted(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert documents(tmp_path / "a.json") == []
    assert left_out(tmp_path / "a.json") == {reason: 1}


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (b'{"body": "a"}\n{"body": "b"}', "line 1 has no text under 'text' .it has 'body'.*--text-key"),
        (b'[{"body": "a"}]', "record 1 has no text under 'text' .it has 'body'.*--text-key"),
        (b'{\n"body": "a"}\n{"body": "b"}', "record 1 has no text under 'text'"),
        (b'[{"text": "a"}, 5]', "record 2 is a number where an object"),
        (b'[{"text": "a"}, {"text": "b"', "record 2 is not JSON"),
        (b'[{"text": "a"} {"text": "b"}]', "record 2 is not JSON"),
        (b'[{"text": "a', "record 1 is not JSON"),
        (b'[{"text": "a"}', "record 2 is not JSON"),
        (b'[{"text": "a"}, ' + b"[" * 100_000, "record 2 is not JSON"),
    ],
)
def test_damaged_or_other_records_are_named(tmp_path: Path, data: bytes, output: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(DataError, match=rf"a\.json, {output}"):
        documents(tmp_path / "a.json")


def test_null_and_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    """JSON and parquet behave alike. Lines without characters are not records."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    data = b'{"text": null}\n\n{"text": "a"}\n  \n{"text": " "}\n{"text": null}\n'
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.json").write_text(json.dumps([json.loads(line) for line in data.splitlines() if line.strip()]))
    pq.write_table(pa.table({"text": [None, "a", " ", None]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.json"):
        assert documents(tmp_path / name) == ["a"]
        assert left_out(tmp_path / name) == {sources.NULL_TEXT: 2, sources.EMPTY_TEXT: 1}
    items = [
        item for piece in cut_pieces(find_files([tmp_path / "a.parquet"]), 1) for item in read_documents(piece, "text")
    ]
    assert Counter(item.skipped for item in items) == {"": 1, sources.NULL_TEXT: 2, sources.EMPTY_TEXT: 1}


@pytest.mark.parametrize("kind", ["binary", "large_binary", "binary_view", "dictionary"])
def test_parquet_text_as_bytes(tmp_path: Path, kind: str) -> None:
    """UTF-8 in a column of bytes is text; a value in another encoding is left out and counted."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values = [text.encode() for text in TEXTS] + [None, b"\xff\xfe"]
    column = pa.array(values, pa.binary() if kind == "dictionary" else getattr(pa, kind)())
    pq.write_table(
        pa.table({"text": column.dictionary_encode() if kind == "dictionary" else column}), tmp_path / "a.PARQUET"
    )
    assert documents(tmp_path / "a.PARQUET") == TEXTS
    (piece,) = cut_pieces(find_files([tmp_path / "a.PARQUET"]), 1 << 20)
    reasons = Counter(item.skipped for item in read_documents(piece, "text"))
    assert reasons == {"": len(TEXTS), sources.NULL_TEXT: 1, sources.RECORD_NOT_UTF8: 1}


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "view"])
def test_parquet_text_that_is_not_utf8_is_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    text = pa.large_string() if kind == "large_string" else pa.string()
    # Latin-1, and half of a surrogate pair.
    values = [*[text.encode() for text in TEXTS], b"caf\xe9", b"\xed\xa0\x80", None]
    column = pa.array(values, pa.binary()).cast(text, safe=False)
    if kind == "view":
        column = column.cast(pa.string_view())
    if kind == "dictionary":
        column = column.dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == TEXTS
    (piece,) = cut_pieces(find_files([tmp_path / "a.parquet"]), 1 << 20)
    reasons = Counter(item.skipped for item in read_documents(piece, "text"))
    assert reasons == {"": len(TEXTS), sources.NULL_TEXT: 1, sources.RECORD_NOT_UTF8: 2}


@pytest.mark.parametrize("beginning", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
def test_a_byte_of_a_list_that_is_not_utf8_is_named(tmp_path: Path, beginning: bytes, monkeypatch) -> None:
    monkeypatch.setattr(metered_files, "CHUNK_BYTES", 16)
    data = beginning + '[{"text": "\u00e9"}, '.encode() + b'{"text": "caf\xe9"}]'
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(DataError, match=rf"a\.json is not UTF-8 text: byte {len(data) - 4} of the file .0xe9. is not"):
        documents(tmp_path / "a.json")


def test_a_byte_of_a_compressed_file_and_of_a_later_piece_has_its_offset(tmp_path: Path) -> None:
    data = jsonl(["a", "b"]) + b'{"text": "\xe9"}\n'
    offset = data.index(b"\xe9")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=rf"line 3 is not UTF-8 text: byte {offset} of the unpacked file"):
        documents(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl").write_bytes(data)
    pieces = cut_pieces(find_files([tmp_path / "b.jsonl"]), len(data) // 2 + 4)
    assert len(pieces) == 2
    with pytest.raises(DataError, match=rf"b\.jsonl, .* is not UTF-8 text: byte {offset} of the file"):
        list(read_documents(pieces[1], "text"))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_padding_with_zeros_is_ignored(tmp_path: Path, kind: str, monkeypatch) -> None:
    """Tapes and block devices pad files; gzip reads on after zeros, and a sound file must not be called damaged."""
    compress = gzip.compress if kind == "gz" else pytest.importorskip("zstandard").compress
    half = len(TEXTS) // 2
    data = compress(jsonl(TEXTS[:half])) + bytes(700) + compress(jsonl(TEXTS[half:])) + bytes(5000)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(data)
    for chunk in (1 << 20, 100):
        monkeypatch.setattr(metered_files, "CHUNK_BYTES", chunk)
        assert documents(path) == TEXTS
        assert not left_out(path)
    path.write_bytes(data + b"x")
    with pytest.raises(DataError, match=r"is (damaged|cut off)"):
        documents(path)
    path.write_bytes(bytes(100) + data)
    with pytest.raises(DataError, match="is damaged"):
        documents(path)


def test_a_zstd_window_of_any_length(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    for log in (27, 28, zstandard.WINDOWLOG_MAX):
        settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=log, enable_ldm=True)
        squeeze = zstandard.ZstdCompressor(compression_params=settings).compressobj()
        (tmp_path / "a.jsonl.zst").write_bytes(squeeze.compress(jsonl(TEXTS)) + squeeze.flush())
        assert documents(tmp_path / "a.jsonl.zst") == TEXTS


LONG = json.dumps({"text": "y" * 900}).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", jsonl(TEXTS) + LONG),
        ("a.jsonl", LONG + b"\n" + jsonl(TEXTS)),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS) + LONG, mtime=0)),
        ("a.json", b"[" + LONG + b"]"),
        ("a.json", b'[{"text": "a"},\n' + LONG + b"]"),
        ("a.json.gz", gzip.compress(LONG, mtime=0)),
        ("a.json", b'{"text": "' + b"y" * 900),
    ],
    ids=range(7),
)
def test_a_record_beyond_the_limit_is_refused(tmp_path: Path, name: str, data: bytes, monkeypatch) -> None:
    """A few kilobytes may unpack to gigabytes without a line's end: what is held in memory has a limit."""
    for module in (sources, source_files):
        monkeypatch.setattr(module, "RECORD_LIMIT", 800)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=r"a\.json.* is longer than 800 bytes, the limit for one record"):
        documents(tmp_path / name)
    for module in (sources, source_files):
        monkeypatch.setattr(module, "RECORD_LIMIT", 1000)
    if data.count(b"}") or name.endswith(".gz"):
        assert "y" * 900 in documents(tmp_path / name)


def test_a_text_in_parquet_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "y" * 900]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_rows, "_PARQUET_BATCH_BYTES", 1)  # rows are read one by one where they are long
    assert documents(tmp_path / "a.parquet") == ["a", "y" * 900]
    monkeypatch.setattr(sources, "RECORD_LIMIT", 800)
    with pytest.raises(DataError, match="row 2 after the start of row group 0 is longer than 800 bytes"):
        documents(tmp_path / "a.parquet")


def test_a_text_file_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "UNPACKED_TEXT_LIMIT", 800)
    monkeypatch.setattr(sources, "TEXT_LIMIT", 900)
    for name, data in (("a.txt.gz", gzip.compress(b"y" * 801)), ("a.txt", b"y" * 901)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=r"a\.txt.* holds more than [89]00 bytes of text, the limit for one doc"):
            documents(tmp_path / name)
    (tmp_path / "a.txt").write_bytes(b"y" * 900)
    assert documents(tmp_path / "a.txt") == ["y" * 900]
    (tmp_path / "a.txt").write_bytes(bytes(2000))  # what is not text is left out, however long it is
    reason = "files (.txt that is not UTF-8: convert it with `iconv -f ENCODING -t UTF-8`)"
    assert left_out(tmp_path / "a.txt") == {reason: 1}


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Each step of decompression yields a bounded chunk, so a line of gigabytes ends at the limit, not at the end."""
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"y" * (8 << 20), 1))
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"y" * (8 << 20)))
    for name in ("a.gz", "a.zst"):
        sizes = [len(chunk) for chunk, _ in metered_files.read_chunks(tmp_path / name)]
        assert sum(sizes) == 8 << 20
        assert name.endswith(".zst") or max(sizes) <= metered_files.CHUNK_BYTES
    monster = zstandard.compress(b"y" * (64 << 20)) * 100
    (tmp_path / "a.zst").write_bytes(monster)
    first = next(chunk for chunk, _ in metered_files.read_chunks(tmp_path / "a.zst") if chunk)
    assert len(first) <= 128 << 20


def test_half_of_a_pair_is_not_text(tmp_path: Path) -> None:
    for name in ("a.bin", "b.BIN", "c.idx"):
        (tmp_path / name).write_text("looks like text")
        assert not is_text(tmp_path / name)
    assert is_text(tmp_path)


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
    assert replace_surrogates("a\ud83d\ude00") == "a\U0001f600"


POINTER = LFS_POINTER + b"v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_not_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(DataError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        documents(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.tsv", "\t"), ("a.CSV.gz", ","), ("b.csv", ";"), ("c.csv", "\t")]
)
def test_a_table_with_the_key_is_refused(tmp_path: Path, name: str, separator: str) -> None:
    table = f'id{separator}"text"\r\n1{separator}"a, b"\r\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(table) if name.endswith("gz") else table)
    with pytest.raises(DataError, match=r"is a table with the column 'text'.*write_table.*rename it to \.txt") as error:
        documents(tmp_path / name)
    assert f"delimiter={separator!r}" in str(error.value)
    assert documents(tmp_path / name, key="body") == [table.decode()]  # a table of other values is text


@pytest.mark.parametrize("heading", ["a\rb,c", "x" * 140_000])
def test_a_table_without_a_heading_is_text(tmp_path: Path, heading: str) -> None:
    (tmp_path / "a.csv").write_bytes(heading.encode() + b"\n1\n")
    assert documents(tmp_path / "a.csv") == [f"{heading}\n1\n"]


def test_links_and_files_that_are_named_twice(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "in" / "sub" / "a.txt").write_text("a")
    (tmp_path / "other" / "b.txt").write_text("b")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "other" / "b.txt")
    (tmp_path / "in" / "again.txt").symlink_to(tmp_path / "other" / "b.txt")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    files, skipped = find_files_and_skipped([tmp_path / "in", tmp_path / "in" / "sub" / "a.txt"])
    assert [file.name for file in files] == ["in/again.txt", "in/empty.jsonl", "in/sub/a.txt"]
    assert skipped == {
        source_files.FOLDER_LINK: 1,
        source_files.NOT_A_FILE: 1,
        source_files.EMPTY_FILE: 1,
        source_files.NAMED_TWICE: 2,
    }
    (tmp_path / "other" / "b.txt").unlink()
    with pytest.raises(DataError, match=r"in/again\.txt is a link to .*b\.txt, which does not exist; restore"):
        find_files([tmp_path / "in"])


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    list_folder = os.scandir

    def scandir(path: str) -> object:  # permissions do not stop root, which may run the tests
        if str(path).endswith("sub"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"input folder .*/sub cannot be listed: Permission denied; check its perm"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.jsonl.bz2", "files (.bz2 is not read: compress it with gzip or zstd instead)"),
        ("a.tar.gz", "files (.tar.gz is not read: unpack it)"),
        ("a.arrow", "files (.arrow is not read: convert it to parquet)"),
        ("a.csv.gz", "files (.csv that is not UTF-8: convert it with `iconv -f ENCODING -t UTF-8`)"),
        ("a.png", source_files.NOT_UTF8),
    ],
)
def test_the_reason_for_leaving_out_a_binary_file_has_the_remedy(tmp_path: Path, name: str, reason: str) -> None:
    data = b"\x00\xff" * 9
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    [file] = find_files([tmp_path / name])
    [record] = read_documents(cut_pieces([file], 100)[0], "text")
    assert record.skipped == reason
    assert source_files.find_binary_reason(file) == ("" if name.endswith("gz") else reason)
    (tmp_path / name).unlink()
    (tmp_path / "a.pt").write_text("português")  # a suffix alone does not make a file binary
    assert documents(tmp_path / "a.pt") == ["português"]


def test_damaged_pages_and_columns_of_one_name_in_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["text", "text"]
    parquet.write_table(arrow.table([["a"], ["b"]], names=names), tmp_path / "two.parquet")
    with pytest.raises(DataError, match=r"two\.parquet has several columns 'text'; rename or remove"):
        documents(tmp_path / "two.parquet")
    file = tmp_path / "damaged.parquet"
    parquet.write_table(arrow.table({"text": [f"{text} {i}" * 9 for i, text in enumerate(TEXTS)]}), file)
    data = bytearray(file.read_bytes())
    data[60:400] = bytes(byte ^ 0x5A for byte in data[60:400])
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"damaged\.parquet is damaged .*; copy it again"):
        documents(file)


def test_a_device_is_named_as_one() -> None:
    with pytest.raises(DataError, match=r"/dev/null is a pipe or a device; save its text to a file"):
        find_files([Path("/dev/null")])


def test_a_key_that_occurs_twice_in_a_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "meta": {"text": "b", "x": {"text": 1}}, "about": "a \\"text\\""}\n')
    assert documents(file) == ["a"]
    file.write_text(file.read_text() + '{"text": "a", "text": null}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 has the key 'text' twice; keep one"):
        documents(file)


@pytest.mark.parametrize("form", ["[%s, %s]", "%s %s"])
def test_a_key_that_occurs_twice_in_a_record_of_a_list_is_refused(tmp_path: Path, form: str) -> None:
    file = tmp_path / "a.json"
    nested = '{"text": "a", "meta": {"text": "b", "x": {"text": 1}}, "about": "a \\"text\\""}'
    file.write_text(form % (nested, nested))
    assert documents(file) == ["a", "a"]
    file.write_text(form % (nested, '{"text": "a", "text": null}'))
    with pytest.raises(DataError, match=r"a\.json, record 2 has the key 'text' twice; keep one"):
        documents(file)


@pytest.mark.parametrize("second", ["größe", r"gr\u00f6\u00dfe"])
def test_a_key_beyond_ascii_that_occurs_twice_is_refused(tmp_path: Path, second: str) -> None:
    """JSON has the key as it is, or with escapes."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"größe": "a", "' + second + '": "b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 has the key 'größe' twice; keep one"):
        documents(file, key="größe")


def test_a_parquet_column_with_a_point_in_its_name_is_not_a_field_of_another(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    fields = [{"body": f"other {i}"} for i in range(len(TEXTS))]
    parquet.write_table(arrow.table({"page": fields, "page.body": TEXTS}), tmp_path / "a.parquet")
    (piece,) = cut_pieces(find_files([tmp_path / "a.parquet"]), 1 << 20)
    assert [record.text for record in read_documents(piece, "page.body")] == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "one.json"])
def test_integers_beyond_the_limit_of_python_are_valid_json(tmp_path: Path, name: str) -> None:
    record = b'{"id": ' + b"9" * 5000 + b', "text": "a"}'
    contents = {
        "a.jsonl": record + b"\n" + record,
        "a.json": b"[" + record + b",\n" + record + b"]",
        "one.json": record,
    }
    (tmp_path / name).write_bytes(contents[name])
    assert set(documents(tmp_path / name)) == {"a"}
    assert not left_out(tmp_path / name)
