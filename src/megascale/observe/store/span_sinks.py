"""Where segments of spans go in the end: `observe.span_sinks`, NAME or NAME=ADDRESS. Another package adds one with
`register`.

The first is asked by the commands; others get the same segments beside it. A segment is kept until all have it, so that
one that is down for an hour gets what it missed, and what another has is not sent to it twice.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megascale.config.parts import SPAN_SINKS, SinkFacts
from megascale.config.registry import Registry
from megascale.errors import missing_extra
from megascale.observe.store.spool import Segment

log = logging.getLogger("megascale.observe.spans")


class SegmentSink(Protocol):
    """Keeps segments (store/spool.py); columns.py makes columns of their frames. Used by one thread."""

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Keep it; rows of each table. OSError if that cannot be done now: it is asked again later."""

    def close(self) -> None:
        """Let go."""


MakeSpanSink = Callable[[Path, str], SegmentSink]  # given the folder of the host's spans, and the address or ""


def _parquet(folder: Path, address: str) -> SegmentSink:
    from megascale.observe.store.parquet import ParquetWriter

    return ParquetWriter(folder)


def _clickhouse(folder: Path, address: str) -> SegmentSink:
    from megascale.observe.store.clickhouse_sink import ClickHouseSink

    return ClickHouseSink(folder, address)


def _kafka(folder: Path, address: str) -> SegmentSink:
    from megascale.observe.store.kafka_sink import KafkaSink

    return KafkaSink(folder, address)


KINDS: Registry[MakeSpanSink] = Registry(
    SPAN_SINKS.key, {"parquet": _parquet, "clickhouse": _clickhouse, "kafka": _kafka}
)


def register(name: str, made: MakeSpanSink, about: str = "") -> None:
    """Let `observe.span_sinks` name `name`; made(folder, address) is called in each host's span service at its first
    segment."""
    SPAN_SINKS.register(name, SinkFacts(about))
    KINDS.register(name, made)


def open_span_sinks(names: Sequence[str]) -> Callable[[Path], SegmentSink]:
    """What makes all sinks of these names, some with =ADDRESS behind them, as one."""
    return lambda folder: _Several(names, folder)


class _Several:
    """Sinks of which each gets each segment once."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names, self._folder = names, folder
        self._sinks: dict[str, SegmentSink] = {}
        self._missing: set[str] = set()  # sinks whose package is not installed
        self._have: dict[str, int] = {}  # the newest segment that a sink has

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """See SegmentSink; OSError of the first that cannot, once all were tried."""
        failed: OSError | None = None
        rows: dict[str, int] = {}
        for given in self._names:
            if self._have.get(given, -1) >= number:
                continue
            name, _, address = given.partition("=")
            try:
                if given not in self._sinks:
                    SPAN_SINKS.validate_name(name)  # imports what registers it
                    self._sinks[given] = KINDS[name](self._folder, address)
                told = self._sinks[given].write_segment(number, segment)
                self._have[given] = number
                rows = rows or told
            except OSError as error:
                failed = failed or OSError(error.errno, f"{name}: {error.strerror or error}")
            except ModuleNotFoundError as error:
                problem = missing_extra(error) or error
                if given not in self._missing:
                    self._missing.add(given)
                    log.warning("the span sink %s waits, and its frames stay in the spool: %s", name, problem)
                failed = failed or OSError(errno.ENOSYS, f"{name}: {problem}")
            except Exception as error:  # a sink of others must not end the service
                log.exception("the span sink %s failed", name)
                failed = failed or OSError(5, f"{name}: {type(error).__name__}: {error}")
        if failed is not None:
            raise failed
        return rows

    def first_has(self, number: int) -> bool:
        """Whether the first sink, which commands read, has a segment."""
        return self._have.get(self._names[0], -1) >= number

    def close(self) -> None:
        """See SegmentSink."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception:
                log.exception("the span sink %s could not be closed", name)
