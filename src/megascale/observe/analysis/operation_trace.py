"""Traces: tables of a job's operations, in the column layout of ByteDance's StragglerAnalysis (OSDI 2025).

    dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc

Times are seconds. The origin of `start_ts` is arbitrary but common to all ranks of a step. The additional, optional
column `waited` holds the seconds of `duration` in which a rank waited for its tensor peers. DuckDB reads and writes
traces as Parquet files. trace_graph.py builds the dependency graph of a trace, and whatif.py analyses the graph.

`read_run_trace` converts a run's spans:

- forward-compute, backward-compute: from the arrival of the compute's input to its end. The time includes the wait for
  samples and exchanges with tensor peers; waits for these peers are in `waited`.
- sends and receives: from the moment at which the rank posted the operation to the arrival of the message. A busy
  receiver observes a message late. Its transfer therefore counts at most the median of the transfers that a receiver
  waited for.
- grads-reduce-scatter: only the wait after the backwards, because buckets are sent during backwards.
- params-all-gather: from its start to the end of the wait for it.
- optimizer-clip-main-grad: the all-reduce of the gradients' norm. optimizer: the remaining update.
- gc, layernorm-grads-all-reduce: zero seconds, because StragglerAnalysis requires them and this engine lacks them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.core.chunk_map import Placement, make_chunk_map
from megascale.errors import DataError
from megascale.observe.analysis.run_steps import ActionSpan, RankStep, read_placement, read_rank_steps
from megascale.observe.store.parquet import quote_sql
from megascale.observe.store.tables import SpanTables

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
_SMALLEST = {
    "replica": 0, "stage": 0, "rank": 0, "sequence": 0, "chunk": -1, "microbatch": -1, "global_chunk": -1,
}  # fmt: skip
_LARGEST = 1 << 20

# A wait below this was for a message that had already arrived.
_NO_WAIT_NS = 100_000
_COMPUTE_KINDS = {"forward": FORWARD, "backward": BACKWARD, "backward_input": BACKWARD, "backward_weight": WEIGHT}
_MESSAGE_KINDS = {
    "send_forward": "forward-send",
    "recv_forward": "forward-recv",
    "send_backward": "backward-send",
    "recv_backward": "backward-recv",
}


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
        # `unique_keys` has the ranks of each stage of each replica next to each other. Subtract each stage's first.
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
    """Make a trace from arrays by attribute name; `waited` is optional.

    Raises DataError without operations, or with the row of an invalid value.
    """
    arrays = {name: np.asarray(columns[name]) for name, _ in _COLUMNS.values()}
    arrays["waited"] = np.asarray(columns.get("waited", np.zeros(len(arrays["start"]))))
    for name, values in arrays.items():
        if name == "kind":
            arrays[name] = values.astype(str)
        else:
            arrays[name] = values.astype(float if name in ("start", "duration", "waited") else np.int64)
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
    for name, low in _SMALLEST.items():
        invalid = np.flatnonzero((arrays[name] < low) | (arrays[name] > _LARGEST))
        if len(invalid):
            raise DataError(
                f"row {invalid[0]} of the trace has {name}={arrays[name][invalid[0]]}; it must be from {low} to "
                f"{_LARGEST}"
            )
    return trace


def read_trace(path: Path) -> OperationTrace:
    """Read a trace from a Parquet file. Raises DataError, which names an invalid column or row."""
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


def read_run_trace(tables: SpanTables, steps: list[int]) -> OperationTrace:
    """Convert the spans of these steps of a run to a trace. Raises DataError if they contain no operation."""
    builder = _TraceBuilder(read_placement(tables))
    for _, ranks in groupby(read_rank_steps(tables, steps), key=lambda rank_step: rank_step.step):
        builder.add_step(list(ranks))
    return builder.make_trace()


@dataclass
class _Row:
    """An operation of a trace under construction. Times are nanoseconds."""

    replica: int
    stage: int
    rank: int
    step: int
    kind: str
    sequence: int
    chunk: int
    microbatch: int
    global_chunk: int
    begin: int
    end: int
    waited: int


# A send or a receive: replica, tensor coordinate, kind, global chunk of the rank's compute, micro-batch.
_OperationKey = tuple[int, int, str, int, int]


@dataclass(frozen=True)
class _Transfer:
    """A message.

    Attributes:
        kind: kind of the send.
        duration: nanoseconds from the later of send and receive to the arrival.
        was_awaited: whether the receiver waited for the message.
        rows: rows of the send and of the receive.
    """

    kind: str
    duration: int
    was_awaited: bool
    rows: tuple[_Row, _Row]


class _TraceBuilder:
    """Converts the spans of one step after another into rows."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows: list[_Row] = []
        self._transfers: list[_Transfer] = []
        # State of the step that `add_step` converts.
        self._chunk_map = make_chunk_map(1, 1)
        self._messages: dict[_OperationKey, _Row] = {}  # rows of sends and receives
        # By receive: time of the message's arrival, and nanoseconds that the receiver waited for it.
        self._arrivals: dict[_OperationKey, tuple[int, int]] = {}
        self._sequences: Counter[str] = Counter()

    def add_step(self, ranks: list[RankStep]) -> None:
        """Add all ranks of one step."""
        stages = max(rank_step.coordinates[1] for rank_step in ranks) + 1
        chunks = [act.chunk for rank_step in ranks for act in rank_step.actions if act.action in _COMPUTE_KINDS]
        self._chunk_map = make_chunk_map(stages, max(chunks, default=0) + 1, self._placement)
        self._messages = {}
        self._arrivals = {}
        for rank_step in ranks:
            self._add_rank(rank_step)
        for (replica, tensor, kind, global_chunk, microbatch), send in self._messages.items():
            transfer_kind = TRANSFERS[kind]
            receive_chunk = global_chunk + transfer_kind.offset
            receive_key = (replica, tensor, kind.replace("send", "recv"), receive_chunk, microbatch)
            if not transfer_kind.is_send or receive_key not in self._messages or receive_key not in self._arrivals:
                continue
            receive = self._messages[receive_key]
            end, wait_ns = self._arrivals[receive_key]
            duration = max(0, end - max(send.begin, receive.begin))
            self._transfers.append(_Transfer(kind, duration, wait_ns > _NO_WAIT_NS, (send, receive)))

    def _add_row(
        self,
        rank_step: RankStep,
        kind: str,
        begin: int,
        end: int,
        chunk: int = -1,
        microbatch: int = -1,
        waited: int = 0,
    ) -> _Row:
        _, stage, replica = rank_step.coordinates
        row = _Row(
            replica=replica,
            stage=stage,
            rank=rank_step.rank,
            step=rank_step.step,
            kind=kind,
            sequence=self._sequences[kind],
            chunk=chunk,
            microbatch=microbatch,
            global_chunk=self._find_global_chunk(stage, chunk) if kind in COMPUTE else -1,
            begin=begin,
            end=max(begin, end),
            waited=waited,
        )
        self._rows.append(row)
        self._sequences[kind] += 1
        return row

    def _find_global_chunk(self, stage: int, chunk: int) -> int:
        """Return the position in the model of a stage's chunk; -1 for a damaged number."""
        if not 0 <= chunk < self._chunk_map.virtual_stages:
            return -1
        return int(self._chunk_map.positions[stage, chunk])

    def _add_rank(self, rank_step: RankStep) -> None:
        tensor, stage, replica = rank_step.coordinates
        self._sequences = Counter()
        last_compute_end = rank_step.begin
        tail: dict[str, tuple[int, int]] = {}
        for act in rank_step.actions:
            if act.action in _COMPUTE_KINDS:
                self._add_compute(rank_step, act)
                last_compute_end = act.end
            elif act.action in _MESSAGE_KINDS:
                # StragglerAnalysis finds the compute of a message by the sequence, so chunk and micro-batch are -1.
                kind = _MESSAGE_KINDS[act.action]
                key = (replica, tensor, kind, self._find_global_chunk(stage, act.chunk), act.microbatch)
                self._messages[key] = self._add_row(rank_step, kind, act.begin, act.end)
            elif act.action == "gather_params":
                gathers = act.select_transfers("data")
                if gathers:
                    end = max(gather.end for gather in gathers)
                    self._add_row(rank_step, GATHER, gathers[0].begin, end, act.chunk)
            elif act.action == "finish_reductions":
                reductions = act.select_transfers("embedding")
                if reductions:
                    tail[EMBEDDING] = (reductions[0].begin, max(reduction.end for reduction in reductions))
                waits = act.select_waits("data")
                if waits:
                    tail[REDUCE] = (act.begin, max(wait.end for wait in waits))
            elif act.action == "optimizer":
                norms = act.select_transfers("world")
                tail[CLIP] = (norms[0].begin, norms[0].end) if norms else (act.begin, act.begin)
                tail[OPTIMIZER] = (tail[CLIP][1], act.end)
        self._add_tail(rank_step, tail, last_compute_end)

    def _add_compute(self, rank_step: RankStep, act: ActionSpan) -> None:
        tensor, stage, replica = rank_step.coordinates
        kind = _COMPUTE_KINDS[act.action]
        input_axes = ("pipeline", "data") if act.action == "forward" else ("pipeline",)
        begin = max([act.begin] + [wait.end for wait in act.select_waits(*input_axes)])
        waited = sum(wait.end - wait.begin for wait in act.select_waits("tensor"))
        self._add_row(rank_step, kind, begin, act.end, act.chunk, act.microbatch, waited)
        if kind == WEIGHT:
            return
        global_chunk = self._find_global_chunk(stage, act.chunk)
        if global_chunk < 0:
            return  # a damaged number has no neighbour
        neighbour = self._chunk_map.neighbour(stage, act.chunk, -1 if kind == FORWARD else 1)
        if neighbour is None:
            return
        neighbour_stage, _ = neighbour
        if neighbour_stage == stage:
            return  # the input came without a message
        waits = act.select_waits("pipeline")
        if waits:
            arrival = (waits[0].end, waits[0].end - waits[0].begin)
        else:
            arrival = (act.begin, 0)
        receive = "forward-recv" if kind == FORWARD else "backward-recv"
        self._arrivals[replica, tensor, receive, global_chunk, act.microbatch] = arrival

    def _add_tail(self, rank_step: RankStep, tail: dict[str, tuple[int, int]], last_compute_end: int) -> None:
        """Add the operations after the last compute.

        Args:
            tail: begin and end of the recorded operations by kind; other kinds take zero seconds.
        """
        self._add_row(rank_step, GARBAGE, last_compute_end, last_compute_end)
        previous_end = last_compute_end
        for kind in (NORMS, EMBEDDING, REDUCE, CLIP, OPTIMIZER):
            if kind == EMBEDDING and rank_step.coordinates[1] not in self._chunk_map.end_stages:
                continue
            if kind == REDUCE and kind not in tail:
                continue
            begin, end = tail.get(kind, (previous_end, previous_end))
            self._add_row(rank_step, kind, begin, end, chunk=0 if kind == REDUCE else -1)
            previous_end = max(previous_end, end)

    def make_trace(self) -> OperationTrace:
        """Return the trace of all added steps. Raises DataError if there are none."""
        if not self._rows:
            raise DataError("the steps have no spans; request some with megascale spans RUN --steps 5")
        awaited_durations: dict[str, list[int]] = defaultdict(list)
        for transfer in self._transfers:
            if transfer.was_awaited:
                awaited_durations[transfer.kind].append(transfer.duration)
        typical_durations = {kind: int(np.median(durations)) for kind, durations in awaited_durations.items()}
        for transfer in self._transfers:
            duration = transfer.duration
            if not transfer.was_awaited:
                duration = min(duration, typical_durations.get(transfer.kind, duration))
            end = max(row.begin for row in transfer.rows) + duration
            for row in transfer.rows:
                row.end = end
        columns = {field.name: np.array([getattr(row, field.name) for row in self._rows]) for field in fields(_Row)}
        begin = columns.pop("begin")
        columns["duration"] = (columns.pop("end") - begin) / 1e9
        # Start times are seconds since each step's first operation.
        _, step_index = np.unique(columns["step"], return_inverse=True)
        step_begins = np.full(step_index.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(step_begins, step_index.ravel(), begin)
        columns["start"] = (begin - step_begins[step_index.ravel()]) / 1e9
        columns["waited"] = np.minimum(columns["waited"] / 1e9, columns["duration"])
        return make_trace(columns)
