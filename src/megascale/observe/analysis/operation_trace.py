"""A recorded job as a table: one row an operation, in the column layout of ByteDance's StragglerAnalysis (OSDI 2025).

    dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc

Times are seconds, `start_ts` from any origin that all ranks of a step share. One column more, which others need not
have: `waited`, the seconds of `duration` in which a rank waited for its tensor peers. Files are Parquet, read and
written by DuckDB. trace_graph.py makes the dependency graph of it, and whatif.py asks of that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megascale.errors import DataError

Array = np.ndarray[Any, Any]

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTE = (FORWARD, BACKWARD)
# Point-to-point kinds: (the compute at this end, whether it is made here, which stage is at the other end).
TRANSFERS = {
    "forward-send": (FORWARD, True, 1),
    "forward-recv": (FORWARD, False, -1),
    "backward-send": (BACKWARD, True, -1),
    "backward-recv": (BACKWARD, False, 1),
}
GATHER, REDUCE, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
NORMS, EMBEDDING, CLIP = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
GARBAGE, OPTIMIZER = "gc", "optimizer"
DATA_PARALLEL = (GATHER, REDUCE, SEPARATE)
# After a step's last compute, in this order.
TAIL = (GARBAGE, NORMS, EMBEDDING, REDUCE, SEPARATE, CLIP, OPTIMIZER)
KINDS = (*COMPUTE, *TRANSFERS, GATHER, *TAIL)

# Column of the file -> attribute and DuckDB's type.
_COLUMNS = {
    "dp_rank": ("replica", "INTEGER"),
    "stage": ("stage", "INTEGER"),
    "rank": ("rank", "INTEGER"),
    "step": ("step", "BIGINT"),
    "optype": ("kind", "VARCHAR"),
    "start_ts": ("start", "DOUBLE"),
    "duration": ("duration", "DOUBLE"),
    "seq_id": ("sequence", "INTEGER"),
    "mc": ("chunk", "INTEGER"),
    "mb_id": ("microbatch", "INTEGER"),
    "gmc": ("global_chunk", "INTEGER"),
}
_MOST = 1 << 20  # replicas, stages, ranks, chunks, micro-batches and operations of a kind


@dataclass(frozen=True, eq=False)
class OperationTrace:
    """Operations of a job, arrays [rows].

    Attributes:
        replica, stage, rank, step: where and when. Ranks that share replica and stage are tensor peers.
        kind: names as in KINDS; others are kept, but nothing waits for them.
        sequence: order among a rank's operations of its kind in its step.
        chunk, microbatch, global_chunk: -1 where they mean nothing.
        start, duration: seconds, waits for the other side of a transfer included.
        waited: of the duration, waiting for tensor peers.
    """

    replica: Array
    stage: Array
    rank: Array
    step: Array
    kind: Array
    sequence: Array
    chunk: Array
    microbatch: Array
    global_chunk: Array
    start: Array
    duration: Array
    waited: Array

    def __len__(self) -> int:
        return len(self.start)

    def select_rows(self, mask: Array) -> OperationTrace:
        """Those rows."""
        return OperationTrace(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def tensor(self) -> Array:
        """[rows]: which of the ranks that share replica and stage, in order of rank."""
        sizes = [int(values.max()) + 1 for values in (self.replica, self.stage, self.rank)]
        key = np.ravel_multi_index((self.replica, self.stage, self.rank), sizes)
        places, inverse = np.unique(key, return_inverse=True)
        cell = np.r_[True, np.diff(places // sizes[2]) != 0]
        position = np.arange(len(cell))
        first: Array = np.maximum.accumulate(np.where(cell, position, 0))
        return (position - first)[inverse.ravel()]  # type: ignore[no-any-return]

    def coded(self) -> tuple[list[str], Array]:
        """Names of the kinds, and [rows] which of them each is; sorting a million names would take a second."""
        names = list(KINDS)
        codes = np.full(len(self), -1)
        for number, name in enumerate(names):
            codes[self.kind == name] = number
        others, which = np.unique(self.kind[codes < 0], return_inverse=True)
        codes[codes < 0] = len(names) + which.ravel()
        return [*names, *others.tolist()], codes


def trace_of(columns: dict[str, Any]) -> OperationTrace:
    """A trace of arrays by attribute; `waited` may lack. DataError names what makes no sense."""
    given = {name: np.asarray(columns[name]) for name, _ in _COLUMNS.values()}
    given["waited"] = np.asarray(columns.get("waited", np.zeros(len(given["start"]))), dtype=float)
    given |= {name: given[name].astype(float) for name in ("start", "duration")}
    given["kind"] = given["kind"].astype(str)
    for name in ("replica", "stage", "rank", "step", "sequence", "chunk", "microbatch", "global_chunk"):
        given[name] = given[name].astype(np.int64)
    trace = OperationTrace(**given)
    if not len(trace):
        raise DataError("the trace has no operations")
    for name in ("start", "duration", "waited"):
        bad = np.flatnonzero(~np.isfinite(given[name]) | ((name != "start") & (given[name] < 0)))
        if len(bad):
            raise DataError(
                f"row {bad[0]} of the trace has {name}={given[name][bad[0]]}; it must be seconds, and not negative"
            )
    for name in ("replica", "stage", "rank", "sequence", "chunk", "microbatch", "global_chunk"):
        low = 0 if name in ("replica", "stage", "rank", "sequence") else -1
        bad = np.flatnonzero((given[name] < low) | (given[name] > _MOST))
        if len(bad):
            raise DataError(
                f"row {bad[0]} of the trace has {name}={given[name][bad[0]]}; it must be from {low} to {_MOST}"
            )
    return trace


def read_trace(path: Path) -> OperationTrace:
    """The operations of a Parquet file. DataError names the column or row that is wrong."""
    import duckdb

    if not path.is_file():
        raise DataError(f"{path} is no file; name a trace in Parquet, or a run folder")
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": False}) as database:
            described = database.execute("DESCRIBE SELECT * FROM read_parquet(?)", [str(path)]).fetchall()
            names = {str(row[0]) for row in described}
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise DataError(
                    f"{path} lacks the columns {', '.join(missing)}; a trace has {', '.join(_COLUMNS)}, see "
                    "docs/observe.md"
                )
            listed = [f"CAST({column} AS {kind}) AS {name}" for column, (name, kind) in _COLUMNS.items()]
            listed += ["CAST(waited AS DOUBLE) AS waited"] if "waited" in names else []
            found = database.execute(f"SELECT {', '.join(listed)} FROM read_parquet(?)", [str(path)]).fetchnumpy()
    except duckdb.Error as error:
        raise DataError(f"{path} cannot be read as a trace in Parquet: {error}") from None
    for name, values in found.items():
        if np.ma.is_masked(values):
            row = int(np.flatnonzero(np.ma.getmaskarray(values))[0])
            raise DataError(f"{path} has no {name} in row {row}; write -1 where a column means nothing")
    return trace_of({name: np.ma.getdata(values) for name, values in found.items()})


def write_trace(trace: OperationTrace, path: Path) -> int:
    """Write a Parquet file that `read_trace` and ByteDance's tools read; rows written."""
    import duckdb

    rows = {column: getattr(trace, name) for column, (name, _) in _COLUMNS.items()}
    rows["optype"] = rows["optype"].astype(object)
    rows["waited"] = trace.waited
    listed = [f"CAST({column} AS {kind}) AS {column}" for column, (_, kind) in _COLUMNS.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    quoted = "'" + str(path).replace("'", "''") + "'"
    with duckdb.connect() as database:
        database.register("operations", rows)
        database.execute(
            f"COPY (SELECT {', '.join(listed)}, waited FROM operations ORDER BY step, rank, optype, seq_id) "
            f"TO {quoted} (FORMAT parquet, COMPRESSION zstd)"
        )
    return len(trace)
