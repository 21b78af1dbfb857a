"""Steps of a large job replayed from its schedule, with machines that differ as real ones do and faults on purpose.

Every wait follows from the dependencies: tensor peers leave each compute together, a compute begins when its message is
there, a data-parallel group's reduction ends after its last member came, and all ranks meet at the gradients' norm.
The ranks' records are the roll-ups that a trainer writes.

The noise, of which nothing is known to what is measured with it:

- healthy GPUs differ for good: a normal distribution of 0.6% (two of 12,288 then differ by up to 5%);
- each rank's step differs: lognormal, 1.5%, of which half is carried over to the next step;
- all ranks' steps differ together: 1%;
- one rank's step in 200 takes longer by 8% in the mean (exponential): a busy operating system;
- three ranks are 10% slower for eight steps and then healthy again;
- stages differ in their work: 3% more with the embedding, 8% with the logits;
- links differ by 2% for good and 10% from step to step; messages take 0.3 ms, reductions 30 ms, gathers 10 ms exposed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.observe.synthetic_spans import BACKWARD_NS, FORWARD_NS, TRANSFER_NS, UPDATE_NS, Job
from megascale.core.schedule import ActionKind
from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.store.frames import ROLLUP

Array = np.ndarray[Any, Any]

_REDUCE_NS = 30e6
_GATHER_NS = 10e6
_NORM_NS = 0.4e6
_OUTSIDE_NS = 4e6
_SAMPLES_NS = 0.3e6
_PACE = 0.006
_JITTER = 0.015
_COMMON = 0.01
_CARRIED = 0.5
_HICCUPS, _HICCUP = 0.005, 0.08
_SPELLS = 3
_SPELL_STEPS = 8
_SPELL = 0.10
_LINKS, _LINK_JITTER = 0.02, 0.10
_EMBEDDING, _LOGITS = 1.03, 1.08


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults of the job, each by rank: its computes take this factor, its link's transfers this factor."""

    slow_gpu: dict[int, float] = dataclasses.field(default_factory=dict)
    slow_link: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Extra:
    """Additions by the causes of a decline, arrays [steps, ranks] or that broadcast to it.

    Nanoseconds within the forwards, of waiting for samples and of garbage collection in the forwards, counts of
    allocator retries, and factors of computes.
    """

    late_ns: Any = 0.0
    samples_ns: Any = 0.0
    pause_ns: Any = 0.0
    pauses: Any = 0
    retries: Any = 0
    pace: Any = 1.0


@functools.cache
def _order(job: Job) -> tuple[tuple[int, int, int, int], ...]:
    """Computes of all stages in an order in which each one's message is there: (stage, kind, chunk, micro-batch)."""
    schedule = job.schedule()
    lists = [[a for a in schedule[s] if a.kind.is_compute] for s in range(job.stages)]
    last = job.stages * job.virtual - 1
    done: set[tuple[int, int, int]] = set()
    at = [0] * job.stages
    order: list[tuple[int, int, int, int]] = []
    while any(at[s] < len(lists[s]) for s in range(job.stages)):
        before = len(order)
        for s in range(job.stages):
            while at[s] < len(lists[s]):
                kind, chunk, batch = lists[s][at[s]]
                full = chunk * job.stages + s
                forward = kind == ActionKind.FORWARD
                needs = full - 1 if forward else full + 1
                if 0 <= needs <= last and (int(kind), needs, batch) not in done:
                    break
                done.add((int(kind), full, batch))
                order.append((s, int(kind), chunk, batch))
                at[s] += 1
        if len(order) == before:
            raise AssertionError("the schedule stands still")
    return tuple(order)


def replayed(
    job: Job, steps: int, seed: int, faults: Faults | None = None, extra: Extra | None = None, begin_ns: int = 10**15
) -> Iterator[tuple[int, Array]]:
    """(step, ROLLUP records [ranks, kinds]) of each step; times on a host's monotonic clock, from `begin_ns` on."""
    figures = _times(job, steps, np.random.default_rng(seed), faults or Faults(), extra or Extra())
    rows = _rows()
    count = job.virtual * job.microbatches
    world = job.world
    for k in range(steps):
        records = np.zeros((world, len(rows)), ROLLUP)
        for column, (kind, axis, total, waited) in enumerate(rows):
            single = records[:, column]
            single["kind"], single["axis"] = kind, axis
            if kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
                single["count"] = count
            else:
                single["count"] = 1
            single["total_ns"] = figures[total][k]
            if waited:
                single["waited_ns"] = figures[waited][k]
            single["longest_ns"] = single["total_ns"] // np.maximum(1, single["count"])
            single["host_ns"] = 0.6 * single["total_ns"]
            single["first_ns"], single["last_ns"] = begin_ns + figures["begin"][k], begin_ns + figures["end"][k]
            if kind == SpanKind.FINISH_REDUCTIONS:
                single["first_ns"] = begin_ns + figures["reduce_begin"][k]
            elif kind in (SpanKind.GARBAGE_PAUSE, SpanKind.ALLOCATOR_RETRY):
                single["count"] = figures["pauses" if kind == SpanKind.GARBAGE_PAUSE else "retries"][k]
        yield k + 1, records
        begin_ns += int(figures["sync"][k])


def _rows() -> list[tuple[int, int, str, str]]:
    """Kind, axis, and the figures of a roll-up's total and waited time."""
    kinds = SpanKind
    return [
        (kinds.FORWARD, 0, "forward", "forward_waited"),
        (kinds.BACKWARD, 0, "backward", "backward_waited"),
        (kinds.FINISH_REDUCTIONS, 0, "wait_reduce", "wait_reduce"),
        (kinds.OPTIMIZER, 0, "optimizer", "wait_world"),
        (kinds.STEP, 0, "step", "step_waited"),
        (kinds.WAIT, SpanAxis.TENSOR, "wait_tensor", ""),
        (kinds.WAIT, SpanAxis.PIPELINE, "wait_pipeline", ""),
        (kinds.WAIT, SpanAxis.DATA, "wait_data", ""),
        (kinds.WAIT, SpanAxis.WORLD, "wait_world", ""),
        (kinds.DATA_WAIT, 0, "samples", ""),
        (kinds.GARBAGE, 0, "garbage", ""),
        (kinds.GARBAGE_PAUSE, 0, "pause", ""),
        (kinds.ALLOCATOR_RETRY, 0, "zero", ""),
    ]


def machine_noise(world: int, steps: int, random: Any, spells: int = _SPELLS) -> Array:
    """Factors of all computes by machines as they are, [steps, ranks]; see the head of this file."""
    pace = 1 + _PACE * random.standard_normal(world)
    fresh = random.standard_normal((steps, world), np.float32)
    local = np.empty_like(fresh)
    local[0] = fresh[0]
    for k in range(1, steps):
        local[k] = _CARRIED * local[k - 1] + np.sqrt(1 - _CARRIED**2) * fresh[k]
    factor = pace * np.exp(_JITTER * local) * np.exp(_COMMON * random.standard_normal((steps, 1)))
    factor *= 1 + (random.random((steps, world)) < _HICCUPS) * random.exponential(_HICCUP, (steps, world))
    for rank in random.choice(world, min(spells, world), replace=False):
        first = random.integers(0, max(1, steps - _SPELL_STEPS))
        factor[first : first + _SPELL_STEPS, rank] *= 1 + _SPELL
    return np.asarray(factor, np.float32)


def _times(job: Job, steps: int, random: Any, faults: Faults, extra: Extra) -> dict[str, Array]:
    """Nanoseconds of each figure, [steps, ranks], by the dependencies of the schedule."""
    tensor = job.tensor
    stages = job.stages
    data = job.data
    shape = (steps, stages, data, tensor)  # ranks: stage-major, tensor ranks side by side

    def spread(values: Any) -> Array:
        return np.broadcast_to(np.asarray(values, np.float32), (steps, job.world)).reshape(shape)

    factor = machine_noise(job.world, steps, random) * np.asarray(extra.pace, np.float32)
    link = 1 + _LINKS * random.standard_normal(job.world)
    for rank, by in faults.slow_gpu.items():
        factor[:, rank] *= by
    for rank, by in faults.slow_link.items():
        link[rank] *= by
    update = spread(UPDATE_NS * factor)
    outside = spread(_OUTSIDE_NS * factor * np.exp(0.2 * random.standard_normal((steps, job.world), np.float32)))
    samples = np.zeros(shape, np.float32)
    samples[:, [0, -1]] = _SAMPLES_NS
    samples = samples + spread(extra.samples_ns)
    pause = spread(extra.pause_ns)
    work = np.ones(stages, np.float32)
    work[0], work[-1] = _EMBEDDING, _LOGITS
    count = job.virtual * job.microbatches
    added = (spread(extra.late_ns) + pause + samples) / count  # within the forwards, in equal parts
    local: dict[ActionKind, Array] = {
        ActionKind.FORWARD: spread(FORWARD_NS * factor) * work[:, None, None],
        ActionKind.BACKWARD: spread(BACKWARD_NS * factor) * work[:, None, None],
    }
    full: dict[ActionKind, Array] = {
        ActionKind.FORWARD: local[ActionKind.FORWARD] + added,
        ActionKind.BACKWARD: local[ActionKind.BACKWARD],
    }
    of_link = spread(np.broadcast_to(link, (steps, job.world)))
    message = np.exp(_LINK_JITTER * random.standard_normal(shape).astype(np.float32)) * TRANSFER_NS

    # Between steps: each rank's own update lies before its next step.
    begin = np.concatenate([update[:1], update[:-1]]) + outside
    gather = _moved(_GATHER_NS, of_link, random)
    current = {s: (begin[:, s] + gather[:, s]).max(2) for s in range(stages)}  # [steps, data]: tensor peers together
    at_tensor = {s: current[s][:, :, None] - begin[:, s] - gather[:, s] for s in range(stages)}
    waits = {name: np.zeros(shape, np.float32) for name in ("pf", "pb", "tf", "tb")}
    for s in range(stages):
        waits["tf"][:, s] = at_tensor[s]
    slowest = {kind: values.max(3) for kind, values in full.items()}
    sent: dict[tuple[int, int, int], Array] = {}
    last = stages * job.virtual - 1
    for s, code, chunk, batch in _order(job):
        kind = ActionKind(code)
        forward = kind == ActionKind.FORWARD
        position = chunk * stages + s
        start = current[s]
        from_ = position - 1 if forward else position + 1
        if 0 <= from_ <= last:
            source = from_ % stages
            slower = np.maximum(of_link[0, source], of_link[0, s])
            present = sent.pop((code, from_, batch))[:, :, None] + message[:, s] * slower
            waited = np.maximum(0.0, present - start[:, :, None])
            waits["pf" if forward else "pb"][:, s] += waited
            longest = waited.max(2)
            waits["tf" if forward else "tb"][:, s] += longest[:, :, None] - waited
            start = start + longest
        current[s] = start + slowest[kind][:, s]
        if (forward and position < last) or (not forward and position > 0):
            sent[code, position, batch] = current[s]
    end = np.stack([current[s] for s in range(stages)], 1)[..., None] + np.zeros(tensor, np.float32)
    for name, kind in (("tf", ActionKind.FORWARD), ("tb", ActionKind.BACKWARD)):
        waits[name] += count * (slowest[kind][..., None] - full[kind])
    reduced = end.max(2, keepdims=True) + _moved(_REDUCE_NS, of_link, random)
    wait_reduce = reduced - end
    sync = reduced.max((1, 2, 3)) + _NORM_NS
    wait_world = sync[:, None, None, None] - reduced + np.zeros(shape, np.float32)
    previous = np.concatenate([update[:1], update[:-1]])
    figures = {
        "forward": count * full[ActionKind.FORWARD] + waits["pf"] + waits["tf"] + gather,
        "forward_waited": waits["pf"] + waits["tf"] + gather + samples,
        "backward": count * full[ActionKind.BACKWARD] + waits["pb"] + waits["tb"],
        "backward_waited": waits["pb"] + waits["tb"],
        "wait_reduce": wait_reduce,
        "optimizer": wait_world + update,
        "wait_world": wait_world,
        "wait_tensor": waits["tf"] + waits["tb"],
        "wait_pipeline": waits["pf"] + waits["pb"],
        "wait_data": wait_reduce + gather,
        "samples": samples,
        "garbage": np.zeros(shape, np.float32),
        "pause": pause,
        "zero": np.zeros(shape, np.float32),
        "begin": previous,
        "end": sync[:, None, None, None] + update,
        "reduce_begin": end,
    }
    figures["step"] = figures["end"] - figures["begin"]
    figures["step_waited"] = (
        figures["wait_tensor"] + figures["wait_pipeline"] + figures["wait_data"] + samples + wait_world
    )
    result = {name: np.asarray(values.reshape(steps, job.world), np.int64) for name, values in figures.items()}
    result["pauses"] = np.broadcast_to(np.asarray(extra.pauses, np.int64), (steps, job.world))
    result["retries"] = np.broadcast_to(np.asarray(extra.retries, np.int64), (steps, job.world))
    result["sync"] = sync.astype(np.int64)
    return result


def _moved(nanoseconds: float, link: Array, random: Any) -> Array:
    """Return the time of each data-parallel group's collective by its slowest link, equal for all members."""
    steps, stages, _, tensor = link.shape
    noise = np.exp(_LINK_JITTER * random.standard_normal((steps, stages, 1, tensor)).astype(np.float32))
    return np.asarray(nanoseconds * noise * link.max(2, keepdims=True) + np.zeros(link.shape, np.float32))
