"""Kinds of fault of `python -m tests.chaos faults`, and what is right after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class FaultCase:
    """One kind of fault and what is right.

    Attributes:
        verdicts: event names of which one must stand in the journal after the fault.
        ends: recover: trainers start again; ride: training goes on without; stop: the job ends for a person.
        same: whether the final weights must equal an undisturbed run's.
        options: of the injector.
        words: more settings.
        steps: of the run.
        spare: wait until the spare has passed its self-checks before striking.
        own_network, redis: what the job needs.
    """

    verdicts: tuple[str, ...]
    ends: Literal["recover", "ride", "stop"] = "recover"
    same: bool = True
    options: tuple[tuple[str, Any], ...] = (("rank", 1),)
    words: tuple[str, ...] = ()
    steps: int = 240
    spare: bool = False
    own_network: bool = False
    redis: bool = False
    kind: str = ""


_LOST = ("missed_heartbeat", "process_exit", "node_lost")
CASES: dict[str, FaultCase] = {
    "kill-rank": FaultCase(("process_killed",)),
    "stop-rank": FaultCase(("hang",)),
    "kill-agent": FaultCase(_LOST + ("agent_restarted",), options=(("node", "n1"),)),
    "kill-node": FaultCase(_LOST, options=(("node", "n1"),), steps=900, spare=True),
    "kill-driver": FaultCase(("driver_took_over",), "ride", options=()),
    "segfault": FaultCase(("segmentation_fault",)),
    "exception": FaultCase(("user_error",)),
    "persistent-exception": FaultCase(
        ("user_error",), "stop", options=(("rank", 1), ("persistent", True)), kind="exception"
    ),
    "out-of-memory": FaultCase(("out_of_memory",)),
    "full-disk": FaultCase(("disk_full",), options=()),
    "nan-gradient": FaultCase(("nonfinite_gradient",), "ride", same=False),
    "flip-weight": FaultCase(("checksum_mismatch",), words=("--resilience.checksum_interval=1",)),
    "slow-rank": FaultCase(
        ("slow_node",), options=(("node", "n1"), ("seconds", 0.3), ("persistent", True)), steps=900, spare=True
    ),
    "slow-link": FaultCase(("throughput_drop",), "ride", options=(("node", "n1"),), steps=900, own_network=True),
    # Only the agent's address is cut off. Its ranks train on, so the driver reports it and replaces nothing; the cut of
    # a whole machine is `link-cut` of the site "machines".
    "partition": FaultCase(
        ("agent_silent",), "ride", options=(("node", "n1"), ("seconds", 12.0)), steps=900, own_network=True
    ),
    "redis-loss": FaultCase((), "ride", options=(), redis=True),
    "half-checkpoint": FaultCase(
        ("process_killed",),
        words=("--checkpoint.background=false", "--checkpoint.memory_interval=0", "--checkpoint.replicas=false"),
    ),
    "flapping-node": FaultCase(("node_evicted",), options=(("node", "n1"), ("seconds", 6.0)), steps=900, spare=True),
    # Faults of `driver_faults.py`.
    "garbled-journal": FaultCase(("driver_took_over",), "ride", options=(), steps=900),
    "two-faults": FaultCase(_LOST + ("process_killed",), options=(), steps=900),
    "driver-killed-twice": FaultCase(_LOST, options=(), steps=900),
}
