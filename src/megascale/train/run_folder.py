"""The run folder: one place that tells the whole story of a run, dead or alive."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from megascale.config import Config, load
from megascale.core import json_lines, strict_json
from megascale.core.bounded_lines import RecordReader, parse_record, read_bounded_lines
from megascale.core.events import Event, format_time
from megascale.core.untrusted_files import is_small_file, read_small_text
from megascale.errors import DataError


class RunFolder:
    """Paths of `runs/NAME/` and the files that grow line by line. Only rank 0 writes lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.samples = path / "samples" / "ledger.jsonl"
        self.checkpoints = path / "checkpoints"
        self.status = path / "status"
        self.logs = path / "logs"
        self.flight = path / "flight"
        self.faults = path / "faults"
        self.plots = path / "plots"
        self.identity = path / "identity"
        self.started = 0  # number of this start, which events carry

    def create(self) -> None:
        """Make the folder and its rooms."""
        for folder in (self.path, self.samples.parent, self.checkpoints, self.status, self.logs, self.plots):
            folder.mkdir(parents=True, exist_ok=True)

    def append_event(self, name: Event, **details: Any) -> None:
        """Append a line to events.jsonl, on disk before returning."""
        now = time.time()
        record = {
            "time": now,
            "date": format_time(now),
            "event": name.value,
            "attempt": self.started,
            "rank": 0,
            **details,
        }
        # Messages and evidence are for this user, as the driver's journal is.
        handle = os.open(self.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            about = os.fstat(handle)
            if about.st_mode & 0o077 and about.st_uid == os.geteuid():
                os.fchmod(handle, 0o600)  # of an older version
            json_lines.append_lines(handle, strict_json.dumps(record).encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def attempt(self) -> int:
        """Number of this start of the run: the launcher's, or above those of all starts before.

        The event of a start may be lost to a crash, so the numbers on other events of accepted starts count too.
        """
        with contextlib.suppress(KeyError, ValueError):
            return max(0, int(os.environ["MEGASCALE_ATTEMPT"]))
        starts = (Event.RUN_STARTED.value, Event.RESUMED.value)
        not_of_starts = (Event.IMPORTED.value, Event.RUN_FAILED.value)
        count, highest = 0, -1
        for record in self.read_events():
            count += record.get("event") in starts
            number = record.get("attempt")
            if isinstance(number, int) and record.get("event") not in not_of_starts and record.get("by") != "driver":
                highest = max(highest, number)
        return max(count, highest + 1)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the records of events.jsonl in order, an empty list if there is none; damaged lines are left out."""
        try:
            return list(RecordReader(self.events))
        except OSError:
            return []

    def read_identity(self) -> str | None:
        """The random name that the run got at its first start, None before it (or in a folder of an older version)."""
        try:
            return read_small_text(self.identity).strip() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.identity} cannot be read: {error}; restore it, or give another --train.name"
            ) from None

    def accept(self, config: Config, identity: str) -> None:
        """A start was accepted: keep whose folder this is and with which settings it goes on, each in one piece."""
        # What was accepted was so for this start alone.
        section = config.checkpoint.model_copy(update={"accept_changes": []})
        config = config.model_copy(update={"checkpoint": section})
        for file, text in ((self.identity, identity + "\n"), (self.config, config.to_toml())):
            temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, file)

    def saved_before(self) -> int | None:
        """Step of the last checkpoint that this run committed since it last began at step 0, as its events tell."""
        step = None
        for line in self.read_events():
            if line.get("event") == Event.RUN_STARTED.value:
                step = None
            elif line.get("event") == Event.CHECKPOINT_SAVED.value:
                step = line.get("step")
        return step

    def rewind(self, step: int) -> None:
        """Drop metric and ledger lines of steps after `step`: a resumed run writes them again."""
        for file in (self.metrics, self.samples):
            if not file.exists():
                continue
            kept = [line for line in read_lines(file) if strict_json.to_float(line.get("step", 0)) <= step]
            temporary = file.with_suffix(".tmp")
            temporary.write_text("".join(strict_json.dumps(line) + "\n" for line in kept))
            os.replace(temporary, file)


def run_config(run: Path) -> Config:
    """Return the resolved configuration that a run folder keeps, for readers of the run.

    Relative paths are those of the folder that the run was started in, where `run` shows which one that was. Callbacks
    and other parts of training need not be known here.
    Raises DataError if it is no run folder.
    """
    file = run / "config.toml"
    if not is_small_file(file):
        raise DataError(
            f"{run} is not a run folder: it has no config.toml that can be read; runs are folders such as runs/stdlib"
        )
    return find_paths(load(file, keep_unknown_parts=True), run)


def find_paths(config: Config, run: Path) -> Config:
    """Return `config` with relative paths of data, tokenizer and checkpoints taken from where the run was started."""
    start = _starting_folder(config, run)
    if start is None or start == Path.cwd():
        return config

    def find(path: str) -> str:
        there = start / path
        return str(there) if "://" not in path and there.parent.exists() else path

    data, location = config.data, config.checkpoint.location
    changes = {
        "train": [find(entry) for entry in data.train],
        "valid": data.valid and find(data.valid),
        "tokenizer": data.tokenizer and find(data.tokenizer),
    }
    checkpoint = config.checkpoint.model_copy(update={"location": location and find(location)})
    return config.model_copy(update={"data": data.model_copy(update=changes), "checkpoint": checkpoint})


def _starting_folder(config: Config, run: Path) -> Path | None:
    """Return the folder in which train.runs/train.name is `run`; None if train.runs does not tell."""
    end = config.run_folder.parts
    here = Path(os.path.abspath(run))  # as it is called: links on the way are the user's
    if config.run_folder.is_absolute() or ".." in end or here.parts[-len(end) :] != end:
        return None
    return Path(*here.parts[: -len(end)])


def checkpoint_folder(run: Path, config: Config) -> Path | str:
    """Where a run's checkpoints are: checkpoint.location, else a folder in the run folder."""
    return config.checkpoint.location or run / "checkpoints"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file; a last line cut by a crash is dropped.

    DataError for any other damage, a line longer than a record can be included, and for what is not a file.
    """
    records: list[dict[str, Any]] = []
    damaged = 0
    try:
        for number, line in enumerate(read_bounded_lines(file), 1):
            if damaged:
                break
            record = parse_record(line)
            if record is None:
                damaged = number
            else:
                records.append(record)
        else:
            return records  # only the last line may be damaged
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    raise DataError(
        f"{file} line {damaged} is not a record; the file was edited or the disk is damaged. "
        f"Move it away to go on without its history"
    )
