"""Sinks of span segments, configured by `observe.span_sinks` as NAME or NAME=ADDRESS.

Another package adds a sink with `register`. Commands read the first sink; further sinks receive the same segments. A
segment is kept until every sink has it. A sink that is down for an hour receives the missed segments later, and no sink
receives a segment twice.
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

# Packages that each plugin needs. They are in the extra with the sink's name.
_PACKAGES = {"clickhouse": ("duckdb",), "kafka": ("confluent_kafka", "duckdb")}
# Columns with SQL types that a sink for rows of several runs adds in front of a table's columns.
IDENTITY_COLUMNS = {
    "job": "VARCHAR",
    "run": "VARCHAR",
    "host": "INTEGER",
    "hostname": "VARCHAR",
    "segment": "UINTEGER",
    "row": "UINTEGER",
}


class SegmentSink(Protocol):
    """A destination of segments (store/spool.py), used by one thread. columns.py converts frames to columns."""

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Store a segment and return the number of rows by table. Raises OSError if the caller must retry later."""

    def close(self) -> None:
        """Release files and connections."""


MakeSpanSink = Callable[[Path, str], SegmentSink]  # arguments: folder of the host's spans, and ADDRESS or ""


def _make_parquet(folder: Path, address: str) -> SegmentSink:
    return ParquetWriter(folder)


SINK_FACTORIES: Registry[MakeSpanSink] = Registry(SPAN_SINKS.key, {"parquet": _make_parquet}, home="megascale.plugins")


def register(name: str, make_sink: MakeSpanSink, description: str = "") -> None:
    """Register a sink under a name for `observe.span_sinks`.

    Each host's span service calls `make_sink(folder, address)` when its first segment ends.
    """
    SPAN_SINKS.register(name, SinkFacts(description))
    SINK_FACTORIES.register(name, make_sink)


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of the sinks are installed. Raises ConfigError, which names the missing extra.

    The sink "parquet" needs no package: its frames stay in the spool until a process with duckdb reads them.
    """
    for name in (setting.partition("=")[0] for setting in names):
        for package in _PACKAGES.get(name, ()):
            if find_spec(package) is None:
                raise ConfigError(
                    f"observe.span_sinks={name} needs the package {package}, which is not installed; "
                    f"{describe_install(name)}, or leave the sink out"
                )


def make_identity_query(run: str, number: int, metadata: Mapping[str, Any], first_row: int) -> str:
    """Return SQL expressions of IDENTITY_COLUMNS for the rows of a segment.

    Args:
        metadata: header of the segment.
        first_row: number of the first row.
    """
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
    """Return a function of the folder that opens the sinks (NAME or NAME=ADDRESS) as one sink."""
    return lambda folder: _SinkGroup(names, folder)


class _SinkGroup:
    """A sink that passes each segment once to each of several sinks."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._sinks: dict[str, SegmentSink] = {}
        self._uninstalled: set[str] = set()  # sinks for which a missing package was logged
        self._newest: dict[str, int] = {}  # number of the newest segment that each sink has

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Write a segment to every sink that lacks it. Raises the first OSError after all sinks were tried."""
        failure: OSError | None = None
        rows: dict[str, int] = {}
        for setting in self._names:
            if self._newest.get(setting, -1) >= number:
                continue
            try:
                written_rows = self._get_sink(setting).write_segment(number, segment)
                self._newest[setting] = number
                if not rows:
                    rows = written_rows
            except Exception as error:  # a plugin's sink must not end the service
                sink_failure = self._convert_error(setting, error)
                if failure is None:
                    failure = sink_failure
        if failure is not None:
            raise failure
        return rows

    def _get_sink(self, setting: str) -> SegmentSink:
        if setting not in self._sinks:
            name, _, address = setting.partition("=")
            SPAN_SINKS.validate_name(name)  # imports the package that registers the sink
            self._sinks[setting] = SINK_FACTORIES[name](self._folder, address)
        return self._sinks[setting]

    def _convert_error(self, setting: str, error: Exception) -> OSError:
        """Return an error of a sink as an OSError with the sink's name. Log errors that a retry cannot repair."""
        name = setting.partition("=")[0]
        if isinstance(error, OSError):
            return OSError(error.errno, f"{name}: {error.strerror or error}")
        if isinstance(error, ModuleNotFoundError):
            problem = missing_extra(error) or error
            if setting not in self._uninstalled:
                self._uninstalled.add(setting)
                log.warning("the span sink %s waits, and its frames stay in the spool: %s", name, problem)
            return OSError(errno.ENOSYS, f"{name}: {problem}")
        log.error("the span sink %s failed", name, exc_info=error)
        return OSError(errno.EIO, f"{name}: {type(error).__name__}: {error}")

    def has_first_sink_stored(self, number: int) -> bool:
        """Return whether the first sink, which commands read, has the segment `number`."""
        return self._newest.get(self._names[0], -1) >= number

    def close(self) -> None:
        """Close all sinks; failures are logged."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception:
                log.exception("the span sink %s could not be closed", name)
