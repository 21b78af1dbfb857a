"""Builds by worker processes: the bytes do not depend on the workers, and a kill loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.source_files import InputPiece
from megascale.data.prepare import builder as building
from megascale.data.prepare import worker_pool
from megascale.data.prepare.builder import build
from megascale.data.prepare.encode_worker import EncodeJob
from megascale.data.prepare.split import Split
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import DataError, MegascaleError

PIECE = 20_000


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and real workers for little text."""
    monkeypatch.setattr(building, "_MIN_PIECE_BYTES", PIECE)
    monkeypatch.setattr(worker_pool, "MIN_POOL_BYTES", 0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    arguments = [f"word{i}" for i in range(500)]
    draw = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        for i in range(600):
            file.write(json.dumps({"text": f"{i}: " + " ".join(draw.choice(arguments, 40))}) + "\n")
    for i in range(30):
        (folder / f"b{i:02}.txt").write_text(f"{i}: " + " ".join(draw.choice(arguments, 300)))
    train_tokenizer([" ".join(arguments)], 600).save(tmp_path / "tokenizer.json")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_workers_do_not_change_the_result(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    build(tmp_path / "plain", inputs=[corpus], vocab_size=600, progress=False)
    monkeypatch.setattr(building, "_MIN_PIECE_BYTES", PIECE)
    monkeypatch.setattr(worker_pool, "MIN_POOL_BYTES", 0)
    build(tmp_path / "workers", inputs=[corpus], vocab_size=600, workers=3, progress=False)
    assert contents(tmp_path / "plain") == contents(tmp_path / "workers")
    assert set(contents(tmp_path / "plain")) == {
        "dataset.json",
        "tokenizer.json",
        "train.bin",
        "train.idx",
        "valid.bin",
        "valid.idx",
    }
    data = [IndexedDataset(tmp_path / "workers" / side) for side in ("train", "valid")]
    assert sum(d.documents for d in data) == 630


SCRIPT = """
import sys
from megascale.data.prepare import builder as building, worker_pool as pool
building._MIN_PIECE_BYTES, pool.MIN_POOL_BYTES = int(sys.argv[4]), 0
building.build(sys.argv[1], inputs=[sys.argv[2]], tokenizer=sys.argv[3], workers=2, progress=False)
"""


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_killed_build_goes_on_where_it_stopped(tmp_path: Path, corpus: Path, small: None, monkeypatch) -> None:
    argv = tmp_path / "tokenizer.json"
    build(tmp_path / "whole", inputs=[corpus], tokenizer=argv, workers=2, progress=False)
    # A pipe without a writer stops the build in the middle: workers are busy and some pieces are finished.
    os.mkfifo(tmp_path / "gate")
    gate = (
        "import megascale.data.dataset.sources as s, os\n"
        "whole = s.read_documents\n"
        "def read(piece, key):\n"
        f"    open({str(tmp_path / 'gate')!r}).close() if piece.number == 7 else None\n"
        "    yield from whole(piece, key)\n"
        "import megascale.data.prepare.encode_worker as e\n"
        "e.read_documents = read\n"
    )
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(
        "import sys\nif 'megascale.data.prepare.encode_worker' in ' '.join(sys.orig_argv):\n    "
        + gate.replace("\n", "\n    ").rstrip()
        + "\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "patch")] + [path for path in sys.path if path]),
    }
    arguments = [str(tmp_path / "out"), str(corpus), str(argv), str(PIECE)]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT] + arguments, env=environment)
    parts = tmp_path / "out" / ".parts"
    finished = lambda: sorted(int(p.stem) for p in parts.glob("0*.json"))
    try:
        wait_for(lambda: len(finished()) >= 6 and len(children(process.pid)) == 2)
        workers = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "patch" / "sitecustomize.py").unlink()
    gate_end = os.open(tmp_path / "gate", os.O_RDWR)  # lets the waiting worker find its parent gone
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and alive(pid) for pid in workers))
    os.close(gate_end)
    assert not (tmp_path / "out" / "dataset.json").exists()
    before = finished()
    assert len(before) >= 6
    ran: list[int] = []
    real = worker_pool.encode_pieces
    monkeypatch.setattr(
        worker_pool,
        "encode_pieces",
        lambda pieces, *options: (ran.extend(p.number for p in pieces), real(pieces, *options)),
    )
    build(tmp_path / "out", inputs=[corpus], tokenizer=argv, workers=2, progress=False)
    assert ran
    assert set(ran).isdisjoint(before)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_kill_while_joining(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    """Everything that a kill in the last phase can leave is made good by the next build."""
    ask = {"inputs": [corpus], "tokenizer": tmp_path / "tokenizer.json", "progress": False}
    build(tmp_path / "whole", **ask)
    real = building.IndexedWriter

    class Killed(BaseException):
        pass

    class Writer(real):
        def close(self) -> None:
            if self._bin_path.name == "valid.bin" and self._bin_path.parent == tmp_path / "out":
                raise Killed
            super().close()

        def abort(self) -> None:  # a killed process removes nothing
            self._bin.close()

    monkeypatch.setattr(building, "IndexedWriter", Writer)
    with pytest.raises(Killed):
        build(tmp_path / "out", **ask)
    remaining = contents_names(tmp_path / "out")
    assert {"train.bin", "train.idx", ".parts"} < remaining
    assert "dataset.json" not in remaining
    monkeypatch.setattr(building, "IndexedWriter", real)
    monkeypatch.setattr(building, "_remove_parts", lambda out: None)  # and killed again, after the manifest
    build(tmp_path / "out", **ask)
    assert {"dataset.json", ".parts"} < contents_names(tmp_path / "out")
    monkeypatch.undo()
    assert not build(tmp_path / "out", **ask).fresh
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def contents_names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_lost_worker_is_told_and_its_pieces_are_done_later(tmp_path: Path, corpus: Path, small, monkeypatch) -> None:
    real = worker_pool._start_worker

    def doomed(threads: int) -> subprocess.Popen[str]:
        process = real(threads)
        process.send_signal(signal.SIGKILL)
        return process

    monkeypatch.setattr(worker_pool, "_start_worker", doomed)
    ask = {"inputs": [corpus], "tokenizer": tmp_path / "tokenizer.json", "workers": 2, "progress": False}
    with pytest.raises(MegascaleError, match=r"exit code -9.*run the same command again"):
        build(tmp_path / "out", **ask)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(worker_pool, "_start_worker", real)
    assert build(tmp_path / "out", **ask).fresh


def test_an_error_in_a_worker_is_the_builds_error(tmp_path: Path, corpus: Path, small) -> None:
    with open(corpus / "a.jsonl", "a") as file:
        file.write('{"text": "cut')
    # Enough input that it is not read beforehand.
    building_known, building._EXACT_SPLIT_BYTES = building._EXACT_SPLIT_BYTES, 0
    try:
        with pytest.raises(DataError, match=r"a\.jsonl, byte \d+ is not JSON"):
            build(tmp_path / "out", inputs=[corpus], tokenizer=tmp_path / "tokenizer.json", workers=2, progress=False)
    finally:
        building._EXACT_SPLIT_BYTES = building_known


def test_two_builds_of_one_folder(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    ask = {"inputs": [corpus], "tokenizer": tmp_path / "tokenizer.json", "progress": False}

    def meanwhile(*_) -> None:
        with pytest.raises(DataError, match="another process is building"):
            build(tmp_path / "out", **ask)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "encode_pieces", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", **ask)
    monkeypatch.undo()
    assert build(tmp_path / "out", **ask).fresh


def test_full_disk_is_told(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(building, "_join_pieces", full)
    with pytest.raises(DataError, match="full; free some space and run the same command again"):
        build(tmp_path / "out", inputs=[corpus], tokenizer=tmp_path / "tokenizer.json", progress=False)


def test_a_worker_whose_answer_cannot_be_read_ends_the_build(tmp_path: Path) -> None:
    """It may live on and say nothing more: the build must not wait for its end."""
    job = EncodeJob(str(tmp_path), "tokenizer.json", "text", Split(share=0.0, below=0, cut_above=0))
    failures: deque[MegascaleError] = deque()
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", "read a; read b; echo 5; cat"], stdin=pipe, stdout=pipe, text=True) as worker:
        pieces = deque([InputPiece(0, "text", ["a.txt"], 0, 1, 1)])
        worker_pool._serve_worker(worker, job, pieces, failures, lambda used: None)
        assert worker.poll() is None
        worker.kill()
    (failure,) = failures
    assert "cannot be read" in str(failure)
