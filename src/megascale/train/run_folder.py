"""The run folder: one folder that holds the complete record of a run, running or ended."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from megascale.config import Config, load_written
from megascale.core import json_lines, strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.events import Event, format_time
from megascale.core.file_flush import FileFlush
from megascale.core.json_lines import RecordReader, parse_record, read_bounded_lines
from megascale.core.untrusted_files import is_small_file, read_small_text
from megascale.errors import DataError

_START_EVENTS = (Event.RUN_STARTED.value, Event.RESUMED.value)  # an accepted start writes one of them
_EVENTS_OF_UNACCEPTED_STARTS = (Event.IMPORTED.value, Event.RUN_FAILED.value)  # others may write these too


class RunFolder:
    """Paths in the run folder `runs/NAME/`, and its small files: events, identity and configuration.

    Attributes:
        attempt: number of this start of the run, which is written into its events.
    """

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
        self.attempt = 0
        self._event_flush = FileFlush(self.events)

    def create(self) -> None:
        """Make the folder and its subfolders."""
        for folder in (self.path, self.samples.parent, self.checkpoints, self.status, self.logs, self.plots):
            folder.mkdir(parents=True, exist_ok=True)

    def append_event(self, event: Event, *, awaits_disk: bool = True, **details: Any) -> None:
        """Append a line to events.jsonl. All processes see it when this returns, and it outlives this process.

        Args:
            awaits_disk: whether the line outlives a power cut when this returns. Otherwise a thread flushes the file,
                and a busy disk delays nothing.
        """
        now = time.time()
        record = {"time": now, "date": format_time(now), "event": event.value, "attempt": self.attempt, "rank": 0}
        line = strict_json.dumps(record | details).encode() + b"\n"
        # Only this user may read messages and evidence. The driver's journal has the same mode.
        descriptor = os.open(self.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            json_lines.append_lines(descriptor, line)
            if awaits_disk:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not awaits_disk:
            self._event_flush.request()

    def find_next_attempt(self) -> int:
        """Return the number of this start: MEGASCALE_ATTEMPT if a launcher sets it, else one above all earlier starts.

        A crash may lose the event of a start, so the numbers in other events of accepted starts count too.
        """
        with contextlib.suppress(KeyError, ValueError):
            return max(0, int(os.environ["MEGASCALE_ATTEMPT"]))
        start_count, highest_attempt = 0, -1
        for record in self.read_events():
            event, attempt = record.get("event"), record.get("attempt")
            if event in _START_EVENTS:
                start_count += 1
            is_from_accepted_start = record.get("by") != "driver" and event not in _EVENTS_OF_UNACCEPTED_STARTS
            if isinstance(attempt, int) and is_from_accepted_start:
                highest_attempt = max(highest_attempt, attempt)
        return max(start_count, highest_attempt + 1)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the records of events.jsonl in order, without damaged lines; an empty list without the file."""
        try:
            return list(RecordReader(self.events))
        except OSError:
            return []

    def read_identity(self) -> str | None:
        """Return the random identity that the run got at its first start, None before the first start.

        Raises DataError if the file exists and cannot be read.
        """
        try:
            return read_small_text(self.identity).strip() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.identity} cannot be read: {error}; restore it, or give another --train.name"
            ) from None

    def write_accepted_start(self, config: Config, identity: str) -> None:
        """Write identity and settings of a start that all ranks have accepted, each file atomically."""
        # checkpoint.accept_changes is valid for one start only, so it is not written.
        section = config.checkpoint.model_copy(update={"accept_changes": []})
        config = config.model_copy(update={"checkpoint": section})
        write_atomically(self.identity, identity + "\n")
        write_atomically(self.config, config.to_toml())

    def find_last_saved_step(self) -> int | None:
        """Return the step of the last CHECKPOINT_SAVED event since the run last started at step 0; None without one.

        A run that has resumed from an earlier step counts as saved at that step.
        """
        step = None
        for record in self.read_events():
            event, event_step = record.get("event"), record.get("step")
            if event == Event.RUN_STARTED.value:
                step = None
            elif event == Event.CHECKPOINT_SAVED.value:
                step = event_step
            elif event == Event.RESUMED.value and step is not None and event_step is not None:
                step = min(step, event_step)
        return step

    def drop_steps_after(self, step: int) -> None:
        """Remove lines of steps after `step` from metrics and ledger: the resumed run writes these steps again.

        A file without such lines and without damage stays, so that no line of another writer can be lost.
        """
        for file in (self.metrics, self.samples):
            if file.exists():
                lines = []
                for record in read_records(file):
                    if strict_json.to_float(record.get("step", 0)) <= step:
                        lines.append(strict_json.dumps(record) + "\n")
                text = "".join(lines)
                if file.stat().st_size != len(text.encode()) or file.read_text(encoding="utf-8") != text:
                    write_atomically(file, text)


def load_run_config(run: Path) -> Config:
    """Return the resolved configuration in a run folder, for commands that read the run.

    Relative paths are resolved as in `resolve_paths`. Names of callbacks and of other parts that users register may be
    unknown in this process. Raises DataError if `run` is not a run folder, or if its config.toml is damaged.
    """
    file = run / "config.toml"
    if not is_small_file(file):
        raise DataError(
            f"{run} is not a run folder: it has no config.toml that can be read; runs are folders such as runs/stdlib"
        )
    return resolve_paths(load_written(file), run)


def resolve_paths(config: Config, run: Path) -> Config:
    """Return `config` with relative paths of data, tokenizer and checkpoints resolved.

    They are relative to the working directory in which the run was started. That directory follows from `run` and the
    relative path in train.runs; otherwise the paths are returned unchanged.
    """
    start_folder = _find_start_folder(config, run)
    if start_folder is None or start_folder == Path.cwd():
        return config

    def resolve(path: str) -> str:
        file = start_folder / path
        if "://" not in path and file.parent.exists():
            return str(file)
        return path

    data, location = config.data, config.checkpoint.location
    # A setting that is None stays None.
    data_paths = {
        "train": [resolve(path) for path in data.train],
        "valid": data.valid and resolve(data.valid),
        "tokenizer": data.tokenizer and resolve(data.tokenizer),
    }
    start_from = config.checkpoint.start_from
    checkpoint_paths = {
        "location": location and resolve(location),
        "start_from": start_from and resolve(start_from),
    }
    checkpoint = config.checkpoint.model_copy(update=checkpoint_paths)
    return config.model_copy(update={"data": data.model_copy(update=data_paths), "checkpoint": checkpoint})


def _find_start_folder(config: Config, run: Path) -> Path | None:
    """Return the working directory from which the relative path train.runs/train.name leads to `run`, else None."""
    relative = config.run_folder.parts
    parts = Path(os.path.abspath(run)).parts  # unlike `resolve`, this does not follow the user's links
    if config.run_folder.is_absolute() or ".." in relative or parts[-len(relative) :] != relative:
        return None
    return Path(*parts[: -len(relative)])


def find_checkpoints(run: Path, config: Config) -> Path | str:
    """Return the folder or URL of a run's checkpoints: checkpoint.location, or else a folder in the run folder."""
    return config.checkpoint.location or run / "checkpoints"


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file. A damaged last line is dropped, since a crash may have cut it.

    Raises DataError for any other damage, for a line longer than a record can be, and if `file` cannot be read.
    """
    records: list[dict[str, Any]] = []
    damaged_line = 0  # number of the line, from 1; 0 if no line is damaged
    try:
        for number, line in enumerate(read_bounded_lines(file), 1):
            if damaged_line:  # only the last line may be damaged, and another line follows
                raise DataError(
                    f"{file} line {damaged_line} is not a record; the file was edited or the disk is damaged. "
                    "Move it away to resume without its history"
                )
            record = parse_record(line)
            if record is None:
                damaged_line = number
            else:
                records.append(record)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    return records
