"""Schedules of another package: ZB-H1 and two V shapes, whose order a greedy simulation finds."""

from __future__ import annotations

from megascale.core.chunk_map import make_chunk_map, v_shape
from megascale.core.schedule import Action, ActionKind, Schedule, schedule_computes
from megascale.core.schedule_registry import SCHEDULES, ScheduleDefinition
from megascale.errors import FitError

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zb_h1(stages: int, virtual: int, microbatches: int, reduce_each: bool, group_size: int | None) -> Schedule:
    """ZB-H1 (Qi et al. 2023): 1F1B in which stage s computes weight gradients s micro-batches later."""
    if virtual != 1:
        raise FitError(f"parallel.virtual_stages={virtual} is not 1; set --parallel.virtual_stages=1")
    computes = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        actions = [Action(FORWARD, 0, i) for i in range(warmup)]
        for i in range(microbatches):
            if warmup + i < microbatches:
                actions.append(Action(FORWARD, 0, warmup + i))
            actions.append(Action(BACKWARD_INPUT, 0, i))
            if i >= stage:
                actions.append(Action(BACKWARD_WEIGHT, 0, i - stage))
        delayed = range(max(0, microbatches - stage), microbatches)
        actions += [Action(BACKWARD_WEIGHT, 0, i) for i in delayed]
        computes.append(actions)
    return schedule_computes("ZB-H1", stages, 1, microbatches, computes, reduce_each_microbatch=reduce_each)


def zb_h1_armed_early(
    stages: int, virtual: int, microbatches: int, reduce_each: bool, group_size: int | None
) -> Schedule:
    """ZB-H1 whose reductions are armed as early as the checker allows, before other backwards of the input."""
    schedule = zb_h1(stages, virtual, microbatches, reduce_each, group_size)
    lists = []
    for actions in schedule:
        early: list[Action] = []
        for action in actions:
            if action.kind == ActionKind.REDUCE_GRADS:
                kinds = [earlier.kind for earlier in early]
                last = len(kinds) - 1 - kinds[::-1].index(BACKWARD_WEIGHT) if BACKWARD_WEIGHT in kinds else -1
                early.insert(last + 1, action)
            else:
                early.append(action)
        lists.append(early)
    return schedule.replace_actions(lists)


def order_v(stages: int, microbatches: int, splits_backward: bool) -> list[list[Action]]:
    """Return each stage's computes as a greedy simulation with equal durations runs them.

    A stage prefers backwards to forwards, and later chunks to earlier ones. It begins a micro-batch if fewer than
    2 p - s are in flight. Gradients of weights fill the time in which nothing else can run.
    """
    chunk_map = make_chunk_map(stages, 2, v_shape)
    last = chunk_map.chunks - 1
    computes: list[list[Action]] = [[] for _ in range(stages)]
    forward_done = {(-1, i): 0 for i in range(microbatches)}
    backward_done = {(last + 1, i): 0 for i in range(microbatches)}
    queued: list[list[Action]] = [[] for _ in range(stages)]
    time = 0
    while len(backward_done) < (last + 2) * microbatches:
        time += 1
        for stage in range(stages):
            early, late = chunk_map.stage_chunks(stage)
            begun = sum((early, i) in forward_done for i in range(microbatches))
            ended = sum((early, i) in backward_done for i in range(microbatches))
            may_begin = begun - ended < 2 * stages - stage
            candidates = [
                *((position, i, True) for position in (late, early) for i in range(microbatches)),
                *((late, i, False) for i in range(microbatches)),
                *((early, i, False) for i in range(microbatches) if may_begin),
            ]
            for position, i, is_backward in candidates:
                done = backward_done if is_backward else forward_done
                previous = (position + 1, i) if is_backward else (position - 1, i)
                is_ready = done.get(previous, time) < time and (position, i) not in done
                if not is_ready or (is_backward and forward_done.get((position, i), time) >= time):
                    continue
                done[position, i] = time
                chunk = int(chunk_map.indices[position])
                if not is_backward:
                    computes[stage].append(Action(FORWARD, chunk, i))
                elif splits_backward:
                    computes[stage].append(Action(BACKWARD_INPUT, chunk, i))
                    queued[stage].append(Action(BACKWARD_WEIGHT, chunk, i))
                else:
                    computes[stage].append(Action(BACKWARD, chunk, i))
                break
            else:
                if queued[stage]:
                    computes[stage].append(queued[stage].pop(0))
    return [actions + tail for actions, tail in zip(computes, queued, strict=True)]


def v_schedule(stages: int, virtual: int, microbatches: int, reduce_each: bool, group_size: int | None) -> Schedule:
    """A V with whole backwards."""
    return _build_v(stages, virtual, microbatches, reduce_each, splits_backward=False)


def zb_v(stages: int, virtual: int, microbatches: int, reduce_each: bool, group_size: int | None) -> Schedule:
    """A V in which gradients of weights fill the bubbles (ZB-V, Qi et al. 2024)."""
    return _build_v(stages, virtual, microbatches, reduce_each, splits_backward=True)


def _build_v(stages: int, virtual: int, microbatches: int, reduce_each: bool, splits_backward: bool) -> Schedule:
    if virtual != 2:
        raise FitError(f"parallel.virtual_stages={virtual} is not 2; set --parallel.virtual_stages=2")
    computes = order_v(stages, microbatches, splits_backward)
    return schedule_computes(
        "V", stages, 2, microbatches, computes, placement=v_shape, reduce_each_microbatch=reduce_each
    )


SCHEDULES.register("zb_h1", ScheduleDefinition(zb_h1))
SCHEDULES.register("zb_h1_armed_early", ScheduleDefinition(zb_h1_armed_early))
SCHEDULES.register("v", ScheduleDefinition(v_schedule, v_shape))
SCHEDULES.register("zb_v", ScheduleDefinition(zb_v, v_shape))
