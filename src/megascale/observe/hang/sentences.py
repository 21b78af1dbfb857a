"""Sentences of a verdict on a hang: where ranks are, for what they wait, and their stacks."""

from __future__ import annotations

from collections.abc import Sequence

from megascale.observe.hang.call_waits import Wait
from megascale.observe.hang.scene import RankEvidence, Scene

_MAX_LISTED_RANKS = 12  # per line of the verdict
_MAX_WAIT_LINES = 12
_MAX_STACK_FRAMES = 4  # per rank


def list_ranks(ranks: Sequence[int], limit: int = _MAX_LISTED_RANKS) -> str:
    """Return the ranks as text, for example "ranks 1, 2 and 3 more"."""
    text = ", ".join(map(str, ranks[:limit]))
    if len(ranks) > limit:
        text += f" and {len(ranks) - limit} more"
    return f"rank{'s' if len(ranks) != 1 else ''} {text}"


def conjugate_wait(ranks: Sequence[int]) -> str:
    """Return the verb "wait" in the form that fits the number of `ranks`."""
    return "waits" if len(ranks) == 1 else "wait"


def format_call(wait: Wait) -> str:
    """Return the call of a wait with its group and number."""
    return f"{wait.op or 'call'} (call {wait.sequence} of {wait.group})"


def describe_position(evidence: RankEvidence) -> str:
    """Describe the position of a rank: step and action in training, otherwise its phase and step."""
    record, status = evidence.record, evidence.status
    if status:
        phase = status.phase
    else:
        phase = "an unknown phase"
    if record is None or not record.action or phase not in ("train", "an unknown phase"):
        return f"{phase}, step {status.step if status else 0}"
    text = f"step {record.step}, {record.action}"
    if record.microbatch >= 0:
        text += f", chunk {record.chunk}, micro-batch {record.microbatch}"
    return text


def describe_positions(scene: Scene, ranks: Sequence[int]) -> list[str]:
    """Return a line with the position of each of `ranks`, except ranks of another trainer."""
    return [
        f"rank {rank} is at {describe_position(scene.ranks[rank])}"
        for rank in ranks
        if rank in scene.ranks and not _lacks_position(scene.ranks[rank])
    ]


def _lacks_position(evidence: RankEvidence) -> bool:
    """Return whether a rank runs another trainer, which writes no position."""
    return evidence.is_foreign and evidence.status is None


def describe_waits(waits: Sequence[Wait]) -> list[str]:
    """Return a line per call in which ranks wait, with the awaited ranks, in the order of `waits`."""
    waiters: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    for wait in waits:
        key = (wait.group, wait.sequence, () if wait.all_came else wait.on)
        waiters.setdefault(key, []).append(wait.rank)
    lines = []
    for (group, sequence, awaited), ranks in list(waiters.items())[:_MAX_WAIT_LINES]:
        target = f" for {list_ranks(awaited)}" if awaited else ""
        lines.append(f"{list_ranks(sorted(ranks))} {conjugate_wait(ranks)}{target} in {group} call {sequence}")
    return lines


def describe_stacks(scene: Scene, ranks: Sequence[int]) -> list[str]:
    """Return a line with the innermost frames of each of `ranks` that answered with a stack."""
    stacks = [(rank, scene.ranks[rank].stack) for rank in ranks if rank in scene.ranks]
    return [f"stack of rank {rank}: {' < '.join(stack[:_MAX_STACK_FRAMES])}" for rank, stack in stacks if stack]
