"""The comparison of precisions under tensor parallelism: relative to which run each figure is."""

from __future__ import annotations

from benchmarks.training.tensor_precision import PrecisionRun, compare


def test_steps_are_relative_to_tensor_wise_float8_and_losses_to_one_process():
    runs = [
        PrecisionRun("float8", 1, step_seconds=2.0, losses=[8.0, 4.0], memory_gib=None),
        PrecisionRun("float8", 2, step_seconds=1.0, losses=[8.0, 4.2], memory_gib=None),
        PrecisionRun("float8_rowwise", 1, step_seconds=2.4, losses=[6.0, 5.0], memory_gib=None),
        PrecisionRun("float8_rowwise", 2, step_seconds=1.1, losses=[6.06, 5.0], memory_gib=None),
    ]
    rows = compare(runs)
    assert [round(row["relative_step"], 9) for row in rows] == [1.0, 1.0, 1.2, 1.1]
    errors = [[round(error, 9) for error in row["loss_errors"]] for row in rows]
    assert errors == [[0.0, 0.0], [0.0, 0.025], [0.0, 0.0], [0.01, 0.0]]


def test_without_the_baseline_steps_are_not_compared():
    [row] = compare([PrecisionRun("default", 1, step_seconds=2.0, losses=[8.0, 4.0], memory_gib=None)])
    assert row["relative_step"] is None
