"""The one list of event names that stand in a run's events.jsonl."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """What happened to a run, in the order in which a calm run meets them."""

    IMPORTED = "imported"
    RUN_STARTED = "run_started"
    RESUMED = "resumed"
    ACTIVE = "active"
    LOADER_RESTARTED = "loader_restarted"
    LOADER_SLOW = "loader_slow"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    REPLICA_FAILED = "replica_failed"
    EVALUATED = "evaluated"
    NONFINITE_LOSS = "nonfinite_loss"
    INTERRUPTED = "interrupted"
    RUN_FAILED = "run_failed"
    RUN_FINISHED = "run_finished"
