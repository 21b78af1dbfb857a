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

    # What the rules conclude (resilience/rules/).
    SEGMENTATION_FAULT = "segmentation_fault"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
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
    REPEAT_OFFENDER = "repeat_offender"
