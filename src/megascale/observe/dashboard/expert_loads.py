"""Loads of experts by layer at a step, for the heat map of the overview, from the counts in metrics.jsonl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular
from megascale.errors import DataError

_TAIL_BYTES = 16 << 20  # bytes at the end of metrics.jsonl that are searched for counts
_MAX_STEPS = 200  # steps that the page offers
_MAX_CELLS = 1 << 20  # product of layers and experts
_COUNTS_KEY = b'"expert_counts"'


def read_expert_loads(run: Path, step: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return counts of a step by layer and expert, and figures of each layer. Raises DataError for a step without any.

    The answer has no layers if the run has not recorded counts.

    Args:
        step: a recorded step; None: the last recorded step.
        settings: tables of config.toml, which give the number of ranks that the experts are divided among.
    """
    records = _read_records(run / "metrics.jsonl")
    if not records:
        return {"step": None, "steps": [], "counts": [], "layers": []}
    chosen = max(records) if step is None else step
    if chosen not in records:
        raise DataError(f"step {chosen} of {run.name} has no counts of experts; choose one of the listed steps")
    counts_LE = records[chosen]
    parallel = settings.get("parallel", {})
    rank_count = 0  # unknown
    if isinstance(parallel, dict):
        expert_axis = "context" if parallel.get("experts_over") == "context" else "expert"
        sizes = [parallel.get("tensor", 1), parallel.get(expert_axis, 1)]
        if all(type(size) is int and size >= 1 for size in sizes):
            rank_count = sizes[0] * sizes[1]
    return {
        "step": chosen,
        "steps": sorted(records)[-_MAX_STEPS:],
        "counts": counts_LE.astype(int).tolist(),
        "layers": [_describe_layer(counts_E, rank_count) for counts_E in counts_LE],
    }


def _describe_layer(counts_E: np.ndarray[Any, Any], rank_count: int) -> dict[str, Any]:
    """Return the figures of one layer.

    These are the entropy (1 if all loads are equal), the number of experts without tokens, and the largest load of an
    expert and of a rank, relative to the mean. The load of a rank is None if the number of ranks is unknown.
    """
    expert_count = len(counts_E)
    shares_E = counts_E / max(1.0, counts_E.sum())
    positive = shares_E[shares_E > 0]
    entropy = -float((positive * np.log(positive)).sum())
    figures: dict[str, Any] = {
        "entropy": entropy / float(np.log(expert_count)) if expert_count > 1 else 1.0,
        "dead": int((counts_E == 0).sum()),
        "load": float(shares_E.max() * expert_count),
        "rank_load": None,
        "rank": None,
    }
    if rank_count > 1 and expert_count % rank_count == 0:
        rank_shares = shares_E.reshape(rank_count, -1).sum(1)
        figures["rank"] = int(rank_shares.argmax())
        figures["rank_load"] = float(rank_shares.max() * rank_count)
    return figures


def _read_records(file: Path) -> dict[int, np.ndarray[Any, Any]]:
    """Return the counts [layers, experts] of the newest recorded steps; damaged records are left out."""
    try:
        with open(file, "rb", opener=open_regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - _TAIL_BYTES))
            lines = opened.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return {}
    records: dict[int, np.ndarray[Any, Any]] = {}
    for line in lines:
        if _COUNTS_KEY not in line:
            continue
        try:
            record = strict_json.loads(line, len(line))
            step = record["step"]
            counts_LE = np.array(record["expert_counts"], dtype=np.float64)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        is_matrix = counts_LE.ndim == 2 and 0 < counts_LE.size <= _MAX_CELLS
        if type(step) is int and is_matrix and np.isfinite(counts_LE).all() and counts_LE.min() >= 0:
            records[step] = counts_LE
    return records
