"""The one list of event names that stand in a run's events.jsonl."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """What happened to a run, in the order in which a calm run meets them."""

    IMPORTED = "imported"
    RUN_STARTED = "run_started"
    RESUMED = "resumed"
    ACTIVE = "active"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    EVALUATED = "evaluated"
    NONFINITE_LOSS = "nonfinite_loss"
    INTERRUPTED = "interrupted"
    RUN_FAILED = "run_failed"
    RUN_FINISHED = "run_finished"

    # What the driver and its rules tell (resilience/).
    DRIVER_STARTED = "driver_started"
    DRIVER_TOOK_OVER = "driver_took_over"
    DRIVER_ENDED = "driver_ended"
    JOURNAL_DAMAGED = "journal_damaged"
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    EVICTION_ASKED = "eviction_asked"
    NODE_EVICTED = "node_evicted"
    NODE_CORDONED = "node_cordoned"
    NODE_UNCORDONED = "node_uncordoned"
    NODE_REQUESTED = "node_requested"
    NODE_DIAGNOSED = "node_diagnosed"
    MESSAGE_REFUSED = "message_refused"
    ATTEMPT_STARTED = "attempt_started"
    FIRST_STEP = "first_step"
    PROCESS_EXIT = "process_exit"
    MISSED_HEARTBEAT = "missed_heartbeat"
    AGENT_RESTARTED = "agent_restarted"
    START_TOO_SLOW = "start_too_slow"
    LADDER = "ladder"
    PAUSED = "paused"
    CONTINUED = "continued"
    RESTARTED = "restarted"
    JOB_DONE = "job_done"
    JOB_FAILED = "job_failed"
    JOB_INTERRUPTED = "job_interrupted"
