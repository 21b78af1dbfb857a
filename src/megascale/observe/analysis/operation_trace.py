"""Traces: tables of a job's operations, in the column layout of ByteDance's StragglerAnalysis (OSDI 2025).

    dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc

`optype` is the kind of operation, `seq_id` its number among a rank's operations of that kind in the step. `mc` is the
model chunk on its stage, `mb_id` the micro-batch, `gmc` the chunk's position in the model ("global chunk"). Times are
seconds. The origin of `start_ts` is arbitrary but common to all ranks of a step. The additional, optional column
`waited` holds the seconds of `duration` in which a rank waited for its tensor peers. DuckDB reads and writes
traces as Parquet files. run_trace.py converts a run's spans to a trace, trace_graph.py builds the dependency graph of a
trace, and whatif.py analyses the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.errors import DataError
from megascale.observe.store.parquet import quote_sql

Array = np.ndarray[Any, Any]

FORWARD = "forward-compute"
BACKWARD = "backward-compute"
# The gradients of weights, if a schedule splits a backward into two actions. The gradients of inputs are BACKWARD.
WEIGHT = "weight-gradient-compute"
COMPUTE = (FORWARD, BACKWARD, WEIGHT)


class TransferKind(NamedTuple):
    """Kind of point-to-point operations.

    Attributes:
        compute: kind of the compute before a send or after a receive.
        is_send: whether the operations are sends; otherwise receives.
        offset: distance in the model from the compute's chunk to the chunk at the other end.
    """

    compute: str
    is_send: bool
    offset: int


TRANSFERS = {
    "forward-send": TransferKind(FORWARD, True, 1),
    "forward-recv": TransferKind(FORWARD, False, -1),
    "backward-send": TransferKind(BACKWARD, True, -1),
    "backward-recv": TransferKind(BACKWARD, False, 1),
}
GATHER = "params-all-gather"
REDUCE = "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"  # only in traces whose reductions overlap with compute
NORMS = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
GARBAGE = "gc"
OPTIMIZER = "optimizer"
DATA_PARALLEL = (GATHER, REDUCE, SEPARATE)
# Kinds after a step's last compute, in this order.
TAIL = (GARBAGE, NORMS, EMBEDDING, REDUCE, SEPARATE, CLIP, OPTIMIZER)
KINDS = COMPUTE + tuple(TRANSFERS) + (GATHER,) + TAIL

# Attribute and DuckDB type of each column of the file.
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
# Range of integer attributes; -1 means "not applicable".
_SMALLEST_VALUES = {
    "replica": 0, "stage": 0, "rank": 0, "sequence": 0, "chunk": -1, "microbatch": -1, "global_chunk": -1,
}  # fmt: skip
_LARGEST_VALUE = 1 << 20


@dataclass(frozen=True, eq=False)
class OperationTrace:
    """Operations of a job, arrays [rows].

    Attributes:
        replica, stage, rank, step: location. Ranks with the same replica and stage are tensor peers.
        kind: names as in KINDS. Other names are allowed; no operation waits for one of them.
        sequence: number among a rank's operations of the same kind in the same step.
        chunk, microbatch, global_chunk: -1 if not applicable.
        start, duration: seconds, including waits for the other side of a transfer.
        waited: seconds of `duration` in which a rank waited for its tensor peers.
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
        """Return the rows that `mask`, bool [rows], selects."""
        return OperationTrace(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})

    def index_tensor_peers(self) -> Array:
        """Return the index of each row's rank among the ranks of its replica and stage, [rows]."""
        sizes = [int(values.max()) + 1 for values in (self.replica, self.stage, self.rank)]
        keys = np.ravel_multi_index((self.replica, self.stage, self.rank), sizes)
        unique_keys, inverse = np.unique(keys, return_inverse=True)
        # `unique_keys` has the ranks of each stage of each replica next to each other. A rank's index is its position
        # there, minus the position of the first rank of its stage and replica.
        is_first_of_stage = np.r_[True, np.diff(unique_keys // sizes[2]) != 0]
        position = np.arange(len(is_first_of_stage))
        first_position: Array = np.maximum.accumulate(np.where(is_first_of_stage, position, 0))
        return (position - first_position)[inverse.ravel()]  # type: ignore[no-any-return]

    def encode_kinds(self) -> tuple[list[str], Array]:
        """Return the names of the kinds and each row's index into them, [rows]."""
        # Sorting a million names would take a second, so compare with the usual names first.
        names = list(KINDS)
        codes = np.full(len(self), -1)
        for code, name in enumerate(names):
            codes[self.kind == name] = code
        additional, inverse = np.unique(self.kind[codes < 0], return_inverse=True)
        codes[codes < 0] = len(names) + inverse.ravel()
        return names + additional.tolist(), codes


def make_trace(columns: dict[str, Any]) -> OperationTrace:
    """Make a trace from arrays [rows] by attribute name; `waited` is optional.

    Raises DataError if there are no operations or a value is invalid.
    """
    arrays = {name: np.asarray(columns[name]) for name, _ in _COLUMNS.values()}
    arrays["waited"] = np.asarray(columns.get("waited", np.zeros(len(arrays["start"]))))
    for name, values in arrays.items():
        if name == "kind":
            arrays[name] = values.astype(str)
        elif name in ("start", "duration", "waited"):
            arrays[name] = values.astype(float)
        else:
            arrays[name] = values.astype(np.int64)
    trace = OperationTrace(**arrays)
    if not len(trace):
        raise DataError("the trace has no operations")
    for name in ("start", "duration", "waited"):
        invalid = np.flatnonzero(~np.isfinite(arrays[name]) | ((name != "start") & (arrays[name] < 0)))
        if len(invalid):
            raise DataError(
                f"row {invalid[0]} of the trace has {name}={arrays[name][invalid[0]]}; it must be seconds and not "
                "negative"
            )
    for name, smallest_value in _SMALLEST_VALUES.items():
        invalid = np.flatnonzero((arrays[name] < smallest_value) | (arrays[name] > _LARGEST_VALUE))
        if len(invalid):
            raise DataError(
                f"row {invalid[0]} of the trace has {name}={arrays[name][invalid[0]]}; it must be from "
                f"{smallest_value} to "
                f"{_LARGEST_VALUE}"
            )
    return trace


def read_trace(path: Path) -> OperationTrace:
    """Read a trace from a Parquet file. Raises DataError if the file, a column or a value is missing or invalid."""
    import duckdb

    if not path.is_file():
        raise DataError(f"{path} is not a file; name a trace in Parquet, or a run folder")
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": False}) as database:
            description = database.execute("DESCRIBE SELECT * FROM read_parquet(?)", [str(path)]).fetchall()
            names = {str(row[0]) for row in description}
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise DataError(
                    f"{path} lacks the columns {', '.join(missing)}; a trace has {', '.join(_COLUMNS)}, see "
                    "docs/lower-mfu.md"
                )
            expressions = [f"CAST({column} AS {sql_type}) AS {name}" for column, (name, sql_type) in _COLUMNS.items()]
            if "waited" in names:
                expressions.append("CAST(waited AS DOUBLE) AS waited")
            query = f"SELECT {', '.join(expressions)} FROM read_parquet(?)"
            columns = database.execute(query, [str(path)]).fetchnumpy()
    except duckdb.Error as error:
        raise DataError(f"{path} cannot be read as a trace in Parquet: {error}") from None
    for name, values in columns.items():
        if np.ma.is_masked(values):
            row = int(np.flatnonzero(np.ma.getmaskarray(values))[0])
            raise DataError(f"{path} has no {name} in row {row}; write -1 where a column is not applicable")
    return make_trace({name: np.ma.getdata(values) for name, values in columns.items()})


def write_trace(trace: OperationTrace, path: Path) -> int:
    """Write a Parquet file that `read_trace` and ByteDance's tools read; return the number of rows."""
    import duckdb

    columns = {column: getattr(trace, name) for column, (name, _) in _COLUMNS.items()}
    columns["optype"] = columns["optype"].astype(object)
    columns["waited"] = trace.waited
    expressions = [f"CAST({column} AS {sql_type}) AS {column}" for column, (_, sql_type) in _COLUMNS.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as database:
        database.register("operations", columns)
        database.execute(
            f"COPY (SELECT {', '.join(expressions)}, waited FROM operations ORDER BY step, rank, optype, seq_id) "
            f"TO {quote_sql(str(path))} (FORMAT parquet, COMPRESSION zstd)"
        )
    return len(trace)
