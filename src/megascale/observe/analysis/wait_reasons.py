"""Waits of a rank in a step: the rank and the reason for which it waited.

A wait is split at the moment at which the other ranks were ready:

- *bubble*: the peer had not yet sent the message, or had not yet joined the collective.
- *exposed* (non-overlapped) communication: all ranks were ready, and bytes were transferred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megascale.observe.analysis.run_steps import ActionSpan, InnerSpan, RankStep
from megascale.observe.analysis.step_connections import StepConnections


@dataclass(frozen=True)
class Wait:
    """A wait of a rank within an action. Times are nanoseconds since the timeline's begin.

    Attributes:
        action: description of the action, with micro-batch and chunk.
        kind: "bubble", "exposed" or "samples".
        axis: axis of the communication, empty for samples.
        waited_on: the rank that was ready last, -1 if unknown.
        root: rank that caused the wait: if `waited_on` itself waited for another rank at that time, that rank, and so
            on.
    """

    rank: int
    action: str
    kind: str
    axis: str
    begin: int
    end: int
    waited_on: int
    reason: str
    root: int = -1


class WaitExplainer:
    """Splits the waits of ranks and states their reasons.

    Args:
        connections: steps of all ranks that were read, with messages and collectives.
        origin: begin of the timeline, nanoseconds since 1970.
    """

    def __init__(self, connections: StepConnections, origin: int) -> None:
        self.connections = connections
        self.origin = origin

    def explain_waits(self, rank_step: RankStep) -> list[Wait]:
        """Return the waits of a rank's step, split at the time when the other ranks were ready, without `root`."""
        return [wait for act in rank_step.actions for wait in self._explain_action(rank_step, act)]

    def _explain_action(self, rank_step: RankStep, act: ActionSpan) -> list[Wait]:
        waits: list[Wait] = []
        message = self.connections.find_message(rank_step, act)
        for span in act.inner_spans:
            if span.action == "data_wait":
                reason = "samples from the loader"
                waits.append(self._make_wait(rank_step.rank, act, span, kind="samples", waited_on=-1, reason=reason))
            elif span.action != "wait":
                continue
            elif span.axis == "pipeline" and message is not None:
                waits += self._split_message_wait(rank_step.rank, act, span, message)
                message = None  # the first wait is for the message, further waits are for the buffers of sends
            elif span.axis == "pipeline":
                reason = f"an earlier send to rank {span.waited_on} still occupies its buffer"
                waits.append(
                    self._make_wait(rank_step.rank, act, span, kind="exposed", waited_on=span.waited_on, reason=reason)
                )
            else:
                waits += self._split_collective_wait(rank_step.rank, act, span)
        # A wait that lies before or after that time as a whole has an empty half.
        return [wait for wait in waits if wait.end > wait.begin]

    # The methods below take `rank`, the waiting rank; `act`, its action; `span`, the recorded wait in the action.

    def _make_wait(self, rank: int, act: ActionSpan, span: InnerSpan, kind: str, waited_on: int, reason: str) -> Wait:
        begin = span.begin - self.origin
        end = span.end - self.origin
        return Wait(
            rank=rank,
            action=describe_action(act),
            kind=kind,
            axis=span.axis,
            begin=begin,
            end=end,
            waited_on=waited_on,
            reason=reason,
        )

    def _split_message_wait(
        self, rank: int, act: ActionSpan, span: InnerSpan, message: tuple[int, ActionSpan]
    ) -> list[Wait]:
        sender, send = message
        send_time = min(max(send.begin, span.begin), span.end)
        before = replace(span, end=send_time)
        after = replace(span, begin=send_time)
        bubble_reason = f"rank {sender} had not yet sent it: {self._describe_activity(sender, span, send)}"
        exposed_reason = f"rank {sender}'s {describe_action(send)} under way"
        return [
            self._make_wait(rank, act, before, kind="bubble", waited_on=sender, reason=bubble_reason),
            self._make_wait(rank, act, after, kind="exposed", waited_on=sender, reason=exposed_reason),
        ]

    def _split_collective_wait(self, rank: int, act: ActionSpan, span: InnerSpan) -> list[Wait]:
        # The awaited collective ends with the wait, but it may have begun in an earlier action.
        candidates = [
            (collective.end, key)
            for key, collective in self.connections.collectives[rank, span.axis]
            if collective.begin <= span.begin and collective.end >= span.end
        ]
        last_rank = -1  # the rank that joined last, and the time at which it did
        ready_time = span.begin
        if candidates:
            _, key = min(candidates, key=lambda candidate: candidate[0])
            join_times = self.connections.join_times[key]
            last_rank = max(join_times, key=lambda member: join_times[member])
            ready_time = min(max(join_times[last_rank], span.begin), span.end)
        before = replace(span, end=ready_time)
        after = replace(span, begin=ready_time)
        bubble_reason = f"rank {last_rank} had not yet joined the {span.axis} collective"
        exposed_reason = f"{span.axis} collective under way"
        return [
            self._make_wait(rank, act, before, kind="bubble", waited_on=last_rank, reason=bubble_reason),
            self._make_wait(rank, act, after, kind="exposed", waited_on=last_rank, reason=exposed_reason),
        ]

    def _describe_activity(self, rank: int, wait: InnerSpan, send: ActionSpan) -> str:
        """Describe the action in which `rank` spent most time while another rank waited for its send."""
        longest = 0
        description = "in no action that was timed"
        for act in self.connections.rank_steps[rank].actions:
            overlap = min(act.end, send.begin, wait.end) - max(act.begin, wait.begin)
            if overlap <= longest:
                continue
            longest = overlap
            wait_ns = sum(
                max(0, min(span.end, wait.end) - max(span.begin, wait.begin))
                for span in act.inner_spans
                if span.action == "wait"
            )
            description = f"in {describe_action(act)}"
            if wait_ns > overlap / 2:
                description += ", which itself waited"
        return description


def find_root(wait: Wait, waits_by_rank: dict[int, list[Wait]]) -> int:
    """Return the rank that caused a wait, by following the bubbles of the awaited ranks at the same time."""
    visited = {wait.rank}
    begin, end, root = wait.begin, wait.end, wait.waited_on
    while wait.kind == "bubble" and root in waits_by_rank and root not in visited:
        visited.add(root)
        longest = 0
        cause = None
        for candidate in waits_by_rank[root]:
            overlap = min(candidate.end, end) - max(candidate.begin, begin)
            if candidate.kind == "bubble" and overlap > longest:
                longest = overlap
                cause = candidate
        # A bubble that covers less than half of the wait does not explain it.
        if cause is None or 2 * longest < end - begin or cause.waited_on in visited:
            break
        begin = max(cause.begin, begin)
        end = min(cause.end, end)
        root = cause.waited_on
    return root


def describe_action(act: ActionSpan) -> str:
    """Return the action with its micro-batch and, beyond the first, its chunk."""
    text = act.action
    if act.microbatch >= 0:
        text += f" of micro-batch {act.microbatch}"
    if act.chunk > 0:
        text += f", chunk {act.chunk}"
    return text
