"""The escalation policy: the mildest recovery action that still has a budget, and why. Pure functions of plain data.

    retry      fork the processes again in place, from what is already imported
    respawn    start the node's agent and fork server again on the same machine
    spare      a warm node takes the place of the bad one
    replenish  ask the cluster for a new node and wait for it
    shrink     go on with fewer data-parallel copies
    stop       no action is left: a person is needed

Each use of an action counts against its budget for `resilience.budget_seconds`; a used-up budget escalates to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megascale.config import Config, ResilienceConfig

RecoveryAction = Literal["retry", "respawn", "spare", "replenish", "shrink", "stop"]
RECOVERY_ACTIONS: tuple[RecoveryAction, ...] = ("retry", "respawn", "spare", "replenish", "shrink", "stop")


@dataclass(frozen=True)
class Use:
    """An action was taken for a node ("" for no node in particular). time: seconds on the driver's monotonic clock."""

    time: float
    action: RecoveryAction
    node: str


@dataclass(frozen=True)
class Situation:
    """What the choice depends on.

    Attributes:
        node: the node to recover, "" if none is to blame.
        evict: it must not be used again.
        reachable: its agent answers.
        alive: an agent could be started on it.
        running: the cluster says that its agent runs; if it is not reachable too, nothing comes from it.
        spares: warm nodes that are free.
        slow_start: a spare takes over sooner than an agent comes that is started again.
        tested: how many of them passed the self-checks.
        now: seconds, on the clock of the uses.
    """

    node: str
    evict: bool
    reachable: bool
    alive: bool
    spares: int
    time: float
    running: bool = False
    tested: int = 0
    slow_start: bool = False


@dataclass(frozen=True)
class Choice:
    """The recovery action, and the sentences that explain it."""

    action: RecoveryAction
    reasons: tuple[str, ...]


def choose(config: ResilienceConfig, at: Situation, uses: Sequence[Use]) -> Choice:
    """The mildest recovery action with a budget left, for one node."""
    recent = [use for use in uses if at.time - use.time < config.budget_seconds]
    why: list[str] = []

    def budget(action: RecoveryAction, limit: int, node: str | None) -> bool:
        used = sum(use.action == action and node in (None, use.node) for use in recent)
        whose = "" if node is None else f" for {node}" if node else " without a node to blame"
        period = f"in {config.budget_seconds:g} s"
        if used < limit:
            why.append(f"{action}: use {used + 1} of {limit}{whose} {period}")
            return True
        why.append(f"{action}: all {limit} uses{whose} {period} are spent")
        return False

    if not at.evict:
        if not at.reachable:
            why.append(f"retry: not possible, the agent of {at.node} does not answer")
        elif budget("retry", config.retries, at.node):
            return Choice("retry", tuple(why))
        if at.node and not at.alive:
            why.append(f"respawn: not possible, {at.node} is down")
        elif at.node and at.running and not at.reachable and at.spares:
            why.append(f"respawn: left out, the agent of {at.node} runs but sends nothing: its network, or its machine")
        elif at.node and at.slow_start and not at.reachable and at.spares:
            why.append(f"respawn: left out, a spare is sooner there than {at.node} again")
        elif budget("respawn", config.respawns, at.node):
            return Choice("respawn", tuple(why))
    else:
        why.append(f"retry and respawn: left out, {at.node} is to be evicted")
    if not at.node:
        why.append("spare: no node is to blame, so replacing one would be a guess")
        return Choice("stop", tuple(why))
    replaced = sum(use.action in ("spare", "replenish") for use in recent)
    if replaced >= config.replacements:
        why.append(
            f"spare and replenish: all {config.replacements} replacements in {config.budget_seconds:g} s are spent"
        )
        return Choice("shrink", tuple(why))
    count = f"replacement {replaced + 1} of {config.replacements} in {config.budget_seconds:g} s"
    if at.spares:
        why.append(f"spare: {at.spares} warm, {at.tested} passed the self-checks; {count}")
        return Choice("spare", tuple(why))
    why.append("spare: none is free")
    if config.replenish_wait:
        why.append(f"replenish: waiting up to {config.replenish_wait:g} s for a new node; {count}")
        return Choice("replenish", tuple(why))
    why.append("replenish: resilience.replenish_wait=0 asks for no new nodes")
    return Choice("shrink", tuple(why))


def refund_last_blameless_use(uses: list[Use]) -> None:
    """Remove the last start that blamed no node from `uses`, in place: its cause has been found since.

    Only `retry` and `respawn` are chosen for want of a node to blame; a `shrink` names none either, but is spent.
    """
    for i in range(len(uses) - 1, -1, -1):
        if not uses[i].node and uses[i].action in ("retry", "respawn"):
            del uses[i]
            return


def data_sizes(config: Config, ranks_per_node: int, nodes: int) -> list[tuple[int, int]]:
    """(data-parallel size, nodes it takes) that `nodes` nodes can run, largest first, down to resilience.min_data."""
    parallel, train = config.parallel, config.train
    model = parallel.tensor * parallel.pipeline
    found = []
    for data in range(nodes * ranks_per_node // model, config.resilience.min_data - 1, -1):
        if (data * model) % ranks_per_node == 0 and train.global_batch % (train.micro_batch * data) == 0:
            found.append((data, data * model // ranks_per_node))
    return found
