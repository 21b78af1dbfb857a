"""The escalation policy: the mildest recovery action that still has a budget, and when starting again is hopeless.

    retry      fork the processes again in place, from what is already imported
    respawn    start the node's agent and fork server again on the same machine
    spare      a warm node takes the place of the bad one
    replenish  request a new node from the cluster and wait for it
    shrink     continue with fewer data-parallel copies
    stop       no action remains: a person is needed

Each use of an action counts against its budget for `resilience.budget_seconds`. If a budget is spent, the policy takes
the next action. Starts that end without a new step are counted for any cause. After
`resilience.no_progress_limit` such starts the job ends. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from megascale.config import Config, ResilienceConfig
from megascale.core.events import Event
from megascale.core.status import FAILED_IN_STEP
from megascale.resilience.driver.state.job_state import JobState
from megascale.resilience.driver.state.journal_reader import Entry
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.view import Verdict

RecoveryAction = Literal["retry", "respawn", "spare", "replenish", "shrink", "stop"]
RECOVERY_ACTIONS: tuple[RecoveryAction, ...] = ("retry", "respawn", "spare", "replenish", "shrink", "stop")
REMEMBERED_ENDS = 50  # last starts whose final step `JobState.ends` keeps


@dataclass(frozen=True)
class Use:
    """One use of a recovery action, which counts against the action's budget.

    Attributes:
        time: seconds on the driver's monotonic clock.
        node: name of the recovered node, "" if none was to blame.
    """

    time: float
    action: RecoveryAction
    node: str


@dataclass(frozen=True)
class Situation:
    """The facts that determine the choice of an action.

    Attributes:
        node: the node to recover, "" if none is to blame.
        must_evict: the node must not be used again.
        is_reachable: the node's agent answers.
        can_start: an agent can be started on the node.
        spare_count: number of free warm nodes.
        time: seconds on the clock of the uses.
        is_running: according to the cluster the node's agent runs, so an unreachable one is cut off.
        tested_count: number of spares that passed the self-checks.
        has_slow_start: a spare takes over sooner than an agent that is started again.
    """

    node: str
    must_evict: bool
    is_reachable: bool
    can_start: bool
    spare_count: int
    time: float
    is_running: bool = False
    tested_count: int = 0
    has_slow_start: bool = False


@dataclass(frozen=True)
class Choice:
    """A recovery action, and a sentence for each action that was considered."""

    action: RecoveryAction
    reasons: tuple[str, ...]


class _Budgets:
    """Compares the uses within the budget period with their limits, and explains the results.

    Attributes:
        reasons: one sentence per action that was considered.
    """

    def __init__(self, config: ResilienceConfig, situation: Situation, uses: Sequence[Use]) -> None:
        self._recent = [use for use in uses if situation.time - use.time < config.budget_seconds]
        self._node = situation.node
        self._period = f"in {config.budget_seconds:g} s"
        self.reasons: list[str] = []

    def allows(self, action: RecoveryAction, limit: int) -> bool:
        """Return True if the node has uses of `action` left; add a sentence to `reasons`."""
        used = sum(use.action == action and use.node == self._node for use in self._recent)
        subject = f" for {self._node}" if self._node else " without a node to blame"
        if used < limit:
            self.reasons.append(f"{action}: use {used + 1} of {limit}{subject} {self._period}")
            return True
        self.reasons.append(f"{action}: all {limit} uses{subject} {self._period} are spent")
        return False

    def count_replacements(self) -> int:
        """Return the number of nodes that were replaced."""
        return sum(use.action in ("spare", "replenish") for use in self._recent)


def choose_action(config: ResilienceConfig, situation: Situation, uses: Sequence[Use]) -> Choice:
    """Choose the mildest recovery action whose budget is not spent, for one node."""
    budgets = _Budgets(config, situation, uses)
    reasons = budgets.reasons
    # In this order: keep the node (retry, respawn), replace it (spare, replenish), do without it (shrink).
    in_place = None if situation.must_evict else _choose_in_place(config, situation, budgets)
    if in_place is not None:
        return Choice(in_place, tuple(reasons))
    if situation.must_evict:
        reasons.append(f"retry and respawn: skipped, {situation.node} is to be evicted")
    if not situation.node:
        reasons.append("spare: no node is to blame, so replacing one would be a guess")
        return Choice("stop", tuple(reasons))
    period = f"in {config.budget_seconds:g} s"
    replaced = budgets.count_replacements()
    if replaced >= config.replacements:
        reasons.append(f"spare and replenish: all {config.replacements} replacements {period} are spent")
        return Choice("shrink", tuple(reasons))
    count = f"replacement {replaced + 1} of {config.replacements} {period}"
    if situation.spare_count:
        reasons.append(f"spare: {situation.spare_count} warm, {situation.tested_count} passed the self-checks; {count}")
        return Choice("spare", tuple(reasons))
    reasons.append("spare: none is free")
    if config.replenish_wait:
        reasons.append(f"replenish: waiting up to {config.replenish_wait:g} s for a new node; {count}")
        return Choice("replenish", tuple(reasons))
    reasons.append("replenish: resilience.replenish_wait=0 requests no new nodes")
    return Choice("shrink", tuple(reasons))


def _choose_in_place(config: ResilienceConfig, situation: Situation, budgets: _Budgets) -> RecoveryAction | None:
    """Choose an action that keeps the node, None if none is possible."""
    reasons = budgets.reasons
    if not situation.is_reachable:
        reasons.append(f"retry: not possible, the agent of {situation.node} does not answer")
    elif budgets.allows("retry", config.retries):
        return "retry"
    spare_can_replace = bool(situation.node) and not situation.is_reachable and situation.spare_count > 0
    if situation.node and not situation.can_start:
        reasons.append(f"respawn: not possible, {situation.node} is down")
    elif spare_can_replace and situation.is_running:
        reasons.append(
            f"respawn: skipped, the agent of {situation.node} runs but sends nothing: its network or its machine is at "
            "fault"
        )
    elif spare_can_replace and situation.has_slow_start:
        reasons.append(f"respawn: skipped, a spare takes over sooner than {situation.node} starts again")
    elif budgets.allows("respawn", config.respawns):
        return "respawn"
    return None


def refund_last_blameless_use(uses: list[Use]) -> None:
    """Remove the last start that blamed no node from `uses`, in place, since its cause was found later.

    Only `retry` and `respawn` are refunded. A `shrink` names no node either, but stays spent.
    """
    for index in reversed(range(len(uses))):
        if not uses[index].node and uses[index].action in ("retry", "respawn"):
            del uses[index]
            return


def list_past_uses(entries: Iterable[Entry], wall_time: float, current_time: float) -> list[Use]:
    """Return the recovery actions among the journal's events, on the monotonic clock of this process.

    The journal has the time of day. An event from the future was written before the clock was set back. Its age is
    unknown, so it counts as new and expires like other events.
    """
    actions = {str(action): action for action in RECOVERY_ACTIONS}
    uses: list[Use] = []
    for entry in entries:
        if entry.kind == Event.RECOVERY_ACTION and entry.action in actions:
            if entry.details.get("explains"):  # The action followed from a fault that also explains the one before.
                refund_last_blameless_use(uses)
            time = current_time - max(0.0, wall_time - entry.time)
            uses.append(Use(time, actions[entry.action], entry.nodes[0] if entry.nodes else ""))
    return uses


def list_data_sizes(config: Config, ranks_per_node: int, nodes: int) -> list[tuple[int, int]]:
    """Return the pairs (data-parallel size, number of nodes) that `nodes` nodes can run, largest first.

    The smallest size is resilience.min_data. The batch must be divisible by the size, and every node must be full.
    """
    parallel = config.parallel
    train = config.train
    model_ranks = parallel.model_ranks
    sizes = []
    largest_size = nodes * ranks_per_node // model_ranks
    for data in reversed(range(config.resilience.min_data, largest_size + 1)):
        fills_nodes = (data * model_ranks) % ranks_per_node == 0
        divides_batch = train.global_batch % (train.micro_batch * data) == 0
        if fills_nodes and divides_batch:
            sizes.append((data, data * model_ranks // ranks_per_node))
    return sizes


# progress -------------------------------------------------------------------------------------------------------------


def find_end_step(verdicts: Sequence[Verdict], workers: Iterable[Worker]) -> int:
    """Return the step in which a start ended, 0 if it ended while starting, loading, saving or evaluating.

    Args:
        verdicts: the reasons for the end. The steps of the blamed ranks count, or of all ranks if none is blamed.
        workers: all ranks as last seen.
    """
    blamed = {rank for verdict in verdicts for rank in verdict.ranks}
    steps = Counter(
        worker.step
        for worker in workers
        if worker.phase in ("train", FAILED_IN_STEP) and (not blamed or worker.rank in blamed)
    )
    if not steps:
        return 0
    most_common_step, _ = steps.most_common(1)[0]
    return most_common_step


def compute_progress(job: JobState, end_step: int) -> dict[str, Any]:
    """Return the changed fields of `job` after a start has ended in step `end_step` (0: outside of a step)."""
    if job.step > job.best:
        return {"best": job.step, "starts_without_progress": 0, "ends": (end_step,)}
    ends = (*job.ends, end_step)[-REMEMBERED_ENDS:]
    return {"starts_without_progress": job.starts_without_progress + 1, "ends": ends}


def count_equal_ends(job: JobState) -> tuple[int, int]:
    """Return (step, count): the last `count` starts all ended in `step`; step 0: outside of a step."""
    if not job.ends:
        return 0, 0
    last = job.ends[-1]
    equal_ends = takewhile(lambda step: step == last, reversed(job.ends))
    return last, len(list(equal_ends))


def explain_no_progress(job: JobState, limit: int) -> str:
    """Explain why a job whose starts brought no new step must not start again."""
    beyond = f"no step beyond {job.best}" if job.best else "no step at all"
    return (
        f"{job.starts_without_progress} starts in a row brought {beyond} (resilience.no_progress_limit={limit}): "
        "starting again does not help"
    )
