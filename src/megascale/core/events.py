"""Names of the events in a run's events.jsonl."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum


class Event(StrEnum):
    """Events of a run: those of the trainer, those of the driver, and the verdicts of the driver's rules."""

    IMPORTED = "imported"
    RUN_STARTED = "run_started"
    RESUMED = "resumed"
    ACTIVE = "active"
    LOADER_RESTARTED = "loader_restarted"
    LOADER_SLOW = "loader_slow"
    FIRST_SNAPSHOT = "first_snapshot"  # rank 0's first snapshot of a start is complete
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    REPLICA_FAILED = "replica_failed"
    EVALUATED = "evaluated"
    STEP_WITHOUT_WEIGHTS = "step_without_weights"  # the loss weights of a step's targets sum to 0
    NONFINITE_LOSS = "nonfinite_loss"
    INTERRUPTED = "interrupted"
    RUN_FAILED = "run_failed"
    RUN_FINISHED = "run_finished"

    # Events of the driver (resilience/driver/).
    DRIVER_STARTED = "driver_started"
    DRIVER_TOOK_OVER = "driver_took_over"
    ADDRESS_OPEN = "address_open"  # other machines can reach the driver
    DRIVER_ENDED = "driver_ended"
    JOURNAL_DAMAGED = "journal_damaged"
    JOURNAL_BEHIND = "journal_behind"
    JOURNAL_WITHOUT_WAL = "journal_without_wal"
    ATTEMPT_ADOPTED = "attempt_adopted"
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    EVICTION_ASKED = "eviction_asked"
    NODE_EVICTED = "node_evicted"
    NODE_CORDONED = "node_cordoned"
    NODE_UNCORDONED = "node_uncordoned"
    NODE_REQUESTED = "node_requested"
    NODE_DIAGNOSED = "node_diagnosed"
    RANKS_FENCED = "ranks_fenced"  # ranks of a lost node can no longer run, so they may start elsewhere
    # Events of the cluster from which the driver requests nodes.
    QUOTA_REACHED = "quota_reached"
    IMAGE_PULL_FAILED = "image_pull_failed"
    ADMISSION_DENIED = "admission_denied"
    UNSCHEDULABLE = "unschedulable"
    POD_FAILED = "pod_failed"
    CLUSTER_UNREACHABLE = "cluster_unreachable"
    CLUSTER_BACK = "cluster_back"
    MESSAGE_REFUSED = "message_refused"
    TRANSITION_REFUSED = "transition_refused"  # an event that the driver's state machine does not allow
    ATTEMPT_STARTED = "attempt_started"
    FIRST_STEP = "first_step"
    REPLICAS_MISSING = "replicas_missing"  # the job continues without the replicas of lost nodes
    REPLICAS_JOINING = "replicas_joining"  # replacements join at the next step boundary
    REPLICAS_OVERDUE = "replicas_overdue"  # replicas were missing for too long, so the job waits for them
    RECOVERED = "recovered"  # details: a RecoveryRecord (core/recovery_record.py)
    PROCESS_EXIT = "process_exit"
    MISSED_HEARTBEAT = "missed_heartbeat"
    AGENT_SILENT = "agent_silent"  # an agent does not answer while its ranks still train
    AGENT_RESTARTED = "agent_restarted"
    START_TOO_SLOW = "start_too_slow"
    RECOVERY_ACTION = "recovery_action"
    FATAL_STEP = "fatal_step"
    PAUSED = "paused"
    CONTINUED = "continued"
    RESTARTED = "restarted"
    UPDATED = "updated"
    UPDATE_UNDONE = "update_undone"
    JOB_DONE = "job_done"
    JOB_FAILED = "job_failed"
    JOB_INTERRUPTED = "job_interrupted"

    # Verdicts of the rules (resilience/rules/).
    SEGMENTATION_FAULT = "segmentation_fault"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PORT_TAKEN = "port_taken"
    CUDA_ERROR = "cuda_error"
    NETWORK_ERROR = "network_error"
    PROCESS_KILLED = "process_killed"
    USER_ERROR = "user_error"
    HANG = "hang"
    LOG_KEYWORD = "log_keyword"
    DEVICE_FAULT = "device_fault"
    DEVICE_WARNING = "device_warning"
    TRAFFIC_STOPPED = "traffic_stopped"
    TRAFFIC_DROPPED = "traffic_dropped"
    LINK_ERRORS = "link_errors"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    LOSS_SPIKE = "loss_spike"
    THROUGHPUT_DROP = "throughput_drop"
    SLOW_NODE = "slow_node"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    REPLAY_MISMATCH = "replay_mismatch"


_MAX_TIME = 1e11  # seconds since 1970; a later time is damaged data


def is_plausible_time(seconds: float) -> bool:
    """Return whether a number can be a time in seconds since 1970: not NaN, not negative, and before the year 5138."""
    return 0.0 <= seconds <= _MAX_TIME


def format_time(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
