"""The bench counts the same tokens as the library and fills in its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.data.tokenize import write_jsonl
from megascale.data.prepare import stdlib


def test_bench_tokenize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The text of one package, and not that of the whole standard library, of which a tokenizer is trained in seconds.
    texts = {str(file): file.read_text() for file in Path(stdlib.__file__).parents[1].rglob("*.py")}
    monkeypatch.setattr(stdlib, "read_stdlib", lambda: texts)
    out = tmp_path / "t.json"
    ask = ["tokenize", "--megabytes", "1", "--vocab-size", "300", "--folder", str(tmp_path), "--out", str(out)]
    done = CliRunner().invoke(app, ask)
    assert done.exit_code == 0, done.output
    assert "target 80% of encode_batch" in done.output
    result = json.loads(out.read_text())
    assert [row["what"] for row in result["rows"]] == ["encode_batch", "encode_batch_fast", "data build"]
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in result["rows"])
    assert result["text_bytes"] / 4 < result["tokens"] < result["text_bytes"] + result["documents"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_text_is_the_same_every_time(tmp_path: Path) -> None:
    texts = ["".join(f"line {i} of text {t} which is long enough\n" for i in range(300)) for t in range(3)]
    counts = [write_jsonl(tmp_path / name, texts, 50_000) for name in ("a", "b")]
    assert counts[0] == counts[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len(lines) == counts[0][0]
    assert sum(len(line["text"].encode()) for line in lines) == counts[0][1]
