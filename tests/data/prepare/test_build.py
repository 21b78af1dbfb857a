"""Building a data set from text, by functions and by the command line."""

from __future__ import annotations

import errno
import json
import lzma
import os
import random
import signal
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import DataConfig
from megascale.data.dataset.description import describe_token_file
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.manifest import find_part, read_manifest
from megascale.data.prepare import stdlib
from megascale.data.prepare.builder import build
from megascale.data.prepare.encode_worker import describe_write_error
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_run_tokenizer, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError
from tests.forked import Forked


def documents(folder: Path, count: int = 60) -> list[str]:
    folder.mkdir()
    texts = [f"Document {i}.\n" + f"The number {i * i} is the square of {i}; größer ✓\n" * 5 for i in range(count)]
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return texts


def decoded(prefix: Path, arguments: Tokenizer) -> list[str]:
    data = IndexedDataset(prefix)
    out = []
    for d in range(data.documents):
        ids = data.read_document(d).tolist()
        assert ids[-1] == arguments.end_of_document
        assert arguments.end_of_document not in ids[:-1]
        out.append(arguments.decode(ids[:-1]))
    return out


def test_folder_becomes_a_data_set(tmp_path: Path) -> None:
    texts = documents(tmp_path / "in")
    built = build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=300, held_out=0.2, progress=False)
    arguments = load_run_tokenizer(DataConfig(train=[str(tmp_path / "out" / "train")]))
    train, valid = decoded(tmp_path / "out/train", arguments), decoded(tmp_path / "out/valid", arguments)
    assert sorted(train + valid) == sorted(texts)
    assert 3 <= len(valid) <= 25
    assert built.fresh
    assert built.manifest == read_manifest(tmp_path / "out")
    part = find_part(tmp_path / "out/valid")
    assert part is not None
    assert part.compressed is not None
    joined = "".join(valid).encode()
    assert part.bytes == part.compressed.bytes == len(joined)
    assert part.compressed.zlib == len(zlib.compress(joined, 9))
    assert part.compressed.xz == len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME))
    assert part.tokens == IndexedDataset(tmp_path / "out/valid").tokens
    assert describe_token_file(tmp_path / "out/train").documents == len(train)


def test_second_build_does_nothing_and_another_is_refused(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    ask = {"inputs": [tmp_path / "in"], "vocab_size": 300, "progress": False}
    build(tmp_path / "out", **ask)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert not build(tmp_path / "out", **ask).fresh
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    with pytest.raises(DataError, match="other inputs or settings"):
        build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=301, progress=False)
    (tmp_path / "out" / "train.bin").write_bytes(b"")
    assert build(tmp_path / "out", **ask).fresh
    assert describe_token_file(tmp_path / "out/train").tokens


def test_builds_are_equal_byte_for_byte(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    for out in ("a", "b"):
        build(tmp_path / out, inputs=[tmp_path / "in"], vocab_size=320, progress=False)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["dataset.json", "tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_files_of_another_maker_are_not_overwritten(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.idx").write_bytes(b"precious")
    with pytest.raises(DataError, match=r"holds train\.idx and no dataset\.json"):
        build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=300, progress=False)
    assert (tmp_path / "out" / "train.idx").read_bytes() == b"precious"


def test_a_data_set_inside_its_input_is_no_input(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    ask = {"inputs": [tmp_path / "in"], "vocab_size": 300, "progress": False}
    built = build(tmp_path / "in" / "out", **ask)
    assert sum(part.documents for part in built.manifest.parts.values()) == 60
    assert not build(tmp_path / "in" / "out", **ask).fresh


def test_one_file_is_cut_at_its_tail(tmp_path: Path) -> None:
    text = "".join(f"line {i} of the only book\n" for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    build(tmp_path / "out", inputs=[tmp_path / "book.txt"], vocab_size=300, held_out=0.1, progress=False)
    arguments = load_tokenizer(tmp_path / "out/tokenizer.json")
    (train,), (valid,) = decoded(tmp_path / "out/train", arguments), decoded(tmp_path / "out/valid", arguments)
    assert train + valid == text
    assert train.endswith("\n")
    assert 0.08 < len(valid) / len(text) < 0.12


def test_unusable_inputs(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.mkdir()
    binary.mkdir()
    (binary / "a.bin").write_bytes(bytes(range(256)) * 10)
    (binary / "b.txt").write_bytes(b"\xff\xfe\xfa not utf-8")
    (binary / "c.txt").write_text(" \n")
    for where, output in [
        (empty, "no files in"),
        (
            binary,
            r"files \(not UTF-8 text\): 1, files \(\.txt that is not UTF-8: convert it .*\): 1, files \(empty\): 1",
        ),
        (tmp_path / "no", "not exist"),
    ]:
        with pytest.raises(DataError, match=output):
            build(tmp_path / "out", inputs=[where], progress=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="exactly one"):
        build(tmp_path / "out", progress=False)
    with pytest.raises(DataError, match="does not exist"):
        build(tmp_path / "out", inputs=[binary], tokenizer=tmp_path / "no.json", progress=False)


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/out cannot be written: Not a directory; choose another --out"):
        build(tmp_path / "file" / "out", inputs=[tmp_path / "in"], progress=False)


def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path) -> None:
    full = describe_write_error(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert f"the disk that holds {tmp_path} is full; free some space" in full


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_build_without_leftovers(tmp_path: Path, number: signal.Signals) -> None:
    """The tokenizer of a few megabytes of different words takes long to train."""
    (tmp_path / "in").mkdir()
    text = random.Random(0).randbytes(2_000_000).hex(" ", 8)
    for i in range(20):
        (tmp_path / "in" / f"{i}.txt").write_text(text[200_000 * i : 200_000 * (i + 1)])
    process = Forked(["data", "build", "--input", tmp_path / "in", "--out", tmp_path / "out"])
    plan = tmp_path / "out" / ".parts" / "plan.json"
    while not plan.exists():
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(number)
    assert process.wait(timeout=120) == 130
    assert process.communicate()[0].splitlines()[-1] == "interrupted"
    assert not (tmp_path / "out").exists()


def test_existing_tokenizer_is_kept(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    train_tokenizer(["some other text"], 280).save(tmp_path / "mine.json")
    build(tmp_path / "out", inputs=[tmp_path / "in"], tokenizer=tmp_path / "mine.json", progress=False)
    assert load_tokenizer(tmp_path / "out/tokenizer.json").sha256 == load_tokenizer(tmp_path / "mine.json").sha256


def test_stdlib_split_keeps_relatives_together() -> None:
    texts = stdlib.read_stdlib()
    separate = stdlib.choose_held_out(texts)
    size = sum(len(t.encode()) for t in texts.values())
    assert size <= stdlib.MAX_BYTES
    assert 0.05 <= sum(len(texts[n].encode()) for n in separate) / size <= 0.08
    assert not any("test" in name.split("/") or "site-packages" in name for name in texts)
    groups = stdlib.group_near_duplicates(texts)
    assert {groups[n] for n in separate}.isdisjoint(groups[n] for n in texts if n not in separate)
    assert len({groups[n] for n in texts if n.startswith("encodings/")}) == 1
    assert groups["bz2.py"] == groups["lzma.py"] != groups["heapq.py"]


def test_stdlib_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Python source"):
        stdlib.read_stdlib(tmp_path)


def test_command_line(tmp_path: Path) -> None:
    documents(tmp_path / "in")
    run = CliRunner()
    ask = ["data", "build", "--input", str(tmp_path / "in"), "--vocab-size", "300", "--out", str(tmp_path / "out")]
    first = run.invoke(app, ask)
    assert first.exit_code == 0, first.output
    assert "--data.train=" in first.output
    assert "nothing to do" in run.invoke(app, ask).output
    shown = run.invoke(app, ["data", "inspect", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert "is the square of" in shown.output
    lines = run.invoke(app, ["data", "inspect", str(tmp_path / "out"), "--json"]).output.splitlines()
    assert [json.loads(line)["largest_id"] < 300 for line in lines] == [True, True]
    (tmp_path / "out" / "train.bin").write_bytes(b"cut")
    assert isinstance(run.invoke(app, ["data", "inspect", str(tmp_path / "out")]).exception, DataError)
