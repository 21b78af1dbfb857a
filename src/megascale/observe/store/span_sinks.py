"""Sinks of span segments: `observe.span_sinks`, NAME or NAME=ADDRESS. Another package adds one with `register`.

Commands read the first sink; the others receive the same segments. A segment is kept until every sink has it: a sink
that is down for an hour receives what it missed, and no sink receives a segment twice.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from megascale.config.parts import SPAN_SINKS, SinkFacts
from megascale.config.registry import Registry
from megascale.errors import ConfigError, describe_install, missing_extra
from megascale.observe.store.parquet import ParquetWriter, quote_sql
from megascale.observe.store.spool import Segment

log = logging.getLogger("megascale.observe.spans")

# Packages of each plugin's extra, which has the sink's name.
_PACKAGES = {"clickhouse": ("duckdb",), "kafka": ("confluent_kafka", "duckdb")}
# Columns that a sink with rows of several runs puts before those of the run folder's tables, with SQL types.
IDENTITY_COLUMNS = {
    "job": "VARCHAR",
    "run": "VARCHAR",
    "host": "INTEGER",
    "hostname": "VARCHAR",
    "segment": "UINTEGER",
    "row": "UINTEGER",
}


class SegmentSink(Protocol):
    """Stores segments (store/spool.py); columns.py makes columns of their frames. Used by one thread."""

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Store a segment and return the rows of each table; OSError if the caller must retry later."""

    def close(self) -> None:
        """Release files and connections."""


MakeSpanSink = Callable[[Path, str], SegmentSink]  # called with the folder of the host's spans and the address or ""


def _make_parquet(folder: Path, address: str) -> SegmentSink:
    return ParquetWriter(folder)


KINDS: Registry[MakeSpanSink] = Registry(SPAN_SINKS.key, {"parquet": _make_parquet}, home="megascale.plugins")


def register(name: str, make_sink: MakeSpanSink, description: str = "") -> None:
    """Let `observe.span_sinks` name `name`.

    Each host's span service calls `make_sink(folder, address)` at its first segment.
    """
    SPAN_SINKS.register(name, SinkFacts(description))
    KINDS.register(name, make_sink)


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of all sinks but parquet are installed; ConfigError naming the extra of the first.

    Frames for parquet stay in the spool until a process that has duckdb reads them, so training does not need it.
    """
    for name in (setting.partition("=")[0] for setting in names):
        for package in _PACKAGES.get(name, ()):
            if find_spec(package) is None:
                raise ConfigError(
                    f"observe.span_sinks={name} needs the package {package}, which is not installed; "
                    f"{describe_install(name)}, or leave the sink out"
                )


def identity_select(run: str, number: int, metadata: Mapping[str, Any], first_row: int) -> str:
    """Return the SQL expressions of IDENTITY_COLUMNS for rows of segment `number`, counted from `first_row`."""
    values = {
        "job": quote_sql(str(metadata.get("job", ""))),
        "run": quote_sql(run),
        "host": str(int(metadata.get("host", -1))),
        "hostname": quote_sql(str(metadata.get("hostname", ""))),
        "segment": str(number),
        "row": f"row_number() OVER () + {first_row - 1}",
    }
    return ", ".join(f"{value} AS {name}" for name, value in values.items())


def open_span_sinks(names: Sequence[str]) -> Callable[[Path], SegmentSink]:
    """Return a function that opens all sinks of these names, NAME or NAME=ADDRESS, as one."""
    return lambda folder: _SinkGroup(names, folder)


class _SinkGroup:
    """Sinks that each receive each segment once."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._sinks: dict[str, SegmentSink] = {}
        self._missing: set[str] = set()  # sinks whose package is not installed
        self._newest: dict[str, int] = {}  # the newest segment of each sink

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Write a segment to every sink that lacks it; raises the first sink's OSError after all were tried."""
        failure: OSError | None = None
        rows: dict[str, int] = {}
        for setting in self._names:
            if self._newest.get(setting, -1) >= number:
                continue
            try:
                written = self._sink(setting).write_segment(number, segment)
                self._newest[setting] = number
                rows = rows or written
            except Exception as error:  # a plugin's sink must not end the service
                failure = failure or self._explain(setting, error)
        if failure is not None:
            raise failure
        return rows

    def _sink(self, setting: str) -> SegmentSink:
        if setting not in self._sinks:
            name, _, address = setting.partition("=")
            SPAN_SINKS.validate_name(name)  # imports the package that registers it
            self._sinks[setting] = KINDS[name](self._folder, address)
        return self._sinks[setting]

    def _explain(self, setting: str, error: Exception) -> OSError:
        """Return the failure of a sink as an OSError with its name, and log what a retry cannot repair."""
        name = setting.partition("=")[0]
        if isinstance(error, OSError):
            return OSError(error.errno, f"{name}: {error.strerror or error}")
        if isinstance(error, ModuleNotFoundError):
            problem = missing_extra(error) or error
            if setting not in self._missing:
                self._missing.add(setting)
                log.warning("the span sink %s waits, and its frames stay in the spool: %s", name, problem)
            return OSError(errno.ENOSYS, f"{name}: {problem}")
        log.error("the span sink %s failed", name, exc_info=error)
        return OSError(errno.EIO, f"{name}: {type(error).__name__}: {error}")

    def first_has(self, number: int) -> bool:
        """Return whether the first sink, which commands read, has a segment."""
        return self._newest.get(self._names[0], -1) >= number

    def close(self) -> None:
        """Close all sinks; failures are logged."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception:
                log.exception("the span sink %s could not be closed", name)
