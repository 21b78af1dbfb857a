"""A metric sink, a dataset format and a storage of a package outside `src`, which settings alone bring into a run."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from megascale.data.dataset.indexed import IndexedDataset
from tests.conftest import lines
from tests.extend.packaged import install

PACKAGE = '''
"""Metrics as CSV, tokens as NumPy arrays, checkpoints in one flat folder."""

import csv
import os
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from megascale.checkpoint.storage.opening import STORAGES
from megascale.data.dataset.formats import FORMATS
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import DataError
from megascale.observe import metrics


class Csv:
    """A line a step."""

    def __init__(self, at):
        self._file = open(at.run / "losses.csv", "a", newline="")
        self._out = csv.writer(self._file)
        self._out.writerow(["from step", at.step])

    def write(self, record):
        if "loss" in record:
            self._out.writerow([record["step"], record["loss"].hex()])

    def close(self):
        self._file.close()


class Array(TokenFile):
    """A one-dimensional array of integers in NumPy's own format."""

    def __init__(self, entry):
        self.prefix = str(entry)
        try:
            self._tokens = np.load(entry, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{entry} is no array of tokens: {error}; save one with numpy.save") from None
        self.tokens = len(self._tokens)

    @property
    def stream(self):
        return self._tokens

    @classmethod
    def files(cls, entry):
        return [Path(entry)]


class Writer:
    """A file under another name until it is whole."""

    def __init__(self, place):
        self._place, self._new = place, place.with_name(place.name + "~")
        self._file = open(self._new, "wb")

    def write(self, data):
        self._file.write(data)

    def finish(self):
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._new, self._place)

    def abort(self):
        self._file.close()
        self._new.unlink(missing_ok=True)


class Shelf:
    """A storage without folders: each file lies in one place under its quoted path."""

    def __init__(self, url):
        self.url, self._folder = url, Path(url.partition("://")[2])
        self._folder.mkdir(parents=True, exist_ok=True)

    def _place(self, path):
        return self._folder / quote(path, safe="")

    def _under(self, path):
        names = [unquote(name) for name in os.listdir(self._folder) if not name.endswith("~")]
        return [name for name in names if not path or name.startswith(path + "/")]

    def list(self, path=""):
        start = len(path) + 1 if path else 0
        return sorted({name[start:].split("/")[0] for name in self._under(path)})

    def size(self, path):
        place = self._place(path)
        return place.stat().st_size if place.exists() else None

    def read(self, path, offset=0, length=None):
        data = self._place(path).read_bytes()
        return data[offset:] if length is None else data[offset : offset + length]

    def write(self, path, data):
        writer = self.create(path)
        writer.write(data)
        writer.finish()

    def create_exclusively(self, path, data):
        try:
            with open(self._place(path), "xb") as out:
                out.write(data)
        except FileExistsError:
            return False
        return True

    def create(self, path):
        return Writer(self._place(path))

    def remove(self, path):
        for name in [path, *self._under(path)]:
            self._place(name).unlink(missing_ok=True)

    def clear(self, path, names):
        for name in names:
            self._place(f"{path}/{name}").unlink(missing_ok=True)

    def is_link(self, path):
        return False

    def free(self):
        return None


metrics.register("csv", Csv, "a line a step")
FORMATS.register("npy", Array)
STORAGES.register("shelf", Shelf)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site", "theirs", PACKAGE, monkeypatch)


@pytest.fixture
def arrays(tokens: Path, tmp_path: Path) -> Path:
    """The tokens of the small data set in the package's format."""
    for name in ("train", "valid"):
        np.save(tmp_path / f"{name}.npy", IndexedDataset(tokens / name).stream)
    return tmp_path


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in lines(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("services", [False, True])
def test_a_run_goes_to_another_sink_from_another_format_through_another_storage(
    services, package, arrays, megascale, tiny, tmp_path
):
    shelf = tmp_path / "shelf"
    local = [
        f"--data.train={arrays}/train.npy",
        f"--data.valid={arrays}/valid.npy",
        "--train.eval_interval=4",
        "--observe.sinks=csv",
        f"--checkpoint.location=shelf://{shelf}",
        # With services other processes open files and storage, too.
        f"--data.loader={'host' if services else 'local'}",
        f"--checkpoint.background={str(services).lower()}",
        "--checkpoint.linger=5",
    ]
    plain = megascale("train", tiny, "--train.name=plain", "--train.eval_interval=4")
    first = megascale("train", tiny, *local, "--train.steps=8", "--train.stop_after=5")
    second = megascale("train", tiny, *local)
    assert (plain.returncode, first.returncode, second.returncode) == (0, 0, 0), first.stderr + second.stderr
    run = tmp_path / "runs" / "tiny"
    assert losses(run) == losses(tmp_path / "runs" / "plain")
    assert len(losses(run)) == 8
    with open(run / "losses.csv", newline="") as file:
        rows = list(csv.reader(file))
    report = [float.fromhex(loss) for subject, loss in rows if subject != "from step"]
    assert [step for kind, step in rows if kind == "from step"] == ["0", "5"]
    assert report == losses(run)
    assert not (run / "checkpoints").exists() or not any((run / "checkpoints").glob("step-*"))
    assert any("COMMIT" in file.name for file in shelf.iterdir())
    listed = megascale("checkpoint", "verify", run)
    assert listed.returncode == 0, listed.stderr

    # What a format says its files are is watched like ours.
    np.save(arrays / "train.npy", np.load(arrays / "train.npy")[::-1])
    changed = megascale("train", tiny, *local, "--train.steps=9")
    assert changed.returncode == 4
    assert "train.npy was changed" in changed.stderr


def test_what_cannot_be_used_is_said_before_the_first_step(package, arrays, megascale, tiny, tmp_path):
    wrong = megascale("train", tiny, "--observe.sinks=cvs")
    assert wrong.returncode == 2
    assert "observe.sinks='cvs' is not known; did you mean 'csv'?" in wrong.stderr
    (tmp_path / "broken.npy").write_text("no array")
    damaged = megascale("train", tiny, f"--data.train={tmp_path}/broken.npy")
    assert damaged.returncode == 4
    assert "broken.npy is no array of tokens" in damaged.stderr
    unknown = megascale("train", tiny, f"--checkpoint.location=shelv://{tmp_path}/shelf")
    assert unknown.returncode == 2
    assert "shelv" in unknown.stderr
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()
