"""Replay of real micro-batches on another replica, which finds devices that compute wrong bits.

Once per `resilience.replay_interval` steps each data-parallel replica sends its first micro-batch to another replica.
The receiver replays the micro-batch with the step's weights, on all its tensor- and pipeline-parallel ranks, before its
own step. The traces (parallel/compute_trace.py) of the replay and of the training must be equal.

If a trace differs on any rank, the micro-batch is replayed once more before the update. With three or more replicas a
third one replays it, with two replicas both do. A vote over all executions names the rank (core/replay_verdict.py).
The distance between sender and receiver changes with each check.

The same step checks the sums of gradient reductions and the optimizer's state (train/reduction_check.py). After its
update other replicas recompute a part of the update (train/update_check.py).

A replay accumulates into the gradient buffers, which the following step overwrites. It needs additional memory of 1 MiB
per trace, and for the activations of one micro-batch.

A *coordinate* is a position along all axes within a replica. A process belongs to one replica at one coordinate. The
*owner* of a micro-batch is the replica that trains it; its *executor* in a replay is another replica.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.object_collectives import Peers
from megascale.config.axes import AXES
from megascale.core.batch import Batch
from megascale.core.layout import Layout
from megascale.core.replay_interval import MAX_COST
from megascale.core.replay_verdict import (
    Execution,
    LocatedSuspicion,
    Phase,
    ReplayVerdict,
    Suspicion,
    TracePoint,
    judge_executions,
    name_ranks,
)
from megascale.core.schedule import INPUT_BACKWARDS
from megascale.errors import ConfigError
from megascale.parallel.collectives import Axis, all_gather, all_reduce
from megascale.parallel.compute_trace import ComputeTrace, TracedRunner
from megascale.parallel.pipeline import EagerRunner
from megascale.train.check_cost import CheckCost
from megascale.train.engine import Engine
from megascale.train.engine_parts import REDUCE_DTYPES
from megascale.train.reduction_check import ReductionCheck, StateCheck
from megascale.train.replayed_batch import keep_results, replay_batch
from megascale.train.update_check import RANGE, UpdateCheck


@dataclass(frozen=True)
class ReplayEvidence:
    """Evidence of a check that failed.

    Attributes:
        verdict: which ranks are suspected.
        message: the verdict as a sentence for people.
        suspicions: first difference at each coordinate of a replica.
        first_samples: by replica, the index in the global batch of the first sample of its replayed micro-batch.
        micro_batch: number of samples of a replayed micro-batch.
        confirmed_step: last step whose replays agreed.
        is_after_update: whether the step's update was wrong, and has changed the weights.
    """

    verdict: ReplayVerdict
    message: str
    suspicions: list[LocatedSuspicion]
    first_samples: list[int]
    micro_batch: int
    confirmed_step: int
    is_after_update: bool = False

    def to_record(self) -> dict[str, Any]:
        """Return the evidence as a dictionary for JSON."""
        return asdict(self)


class ReplayCheck:
    """Replays micro-batches between the replicas of a job. Make one per engine, on all ranks.

    Args:
        device_name: name of this rank's device and host, for messages.
        device_kind: kind of this rank's device, which must be the same on all ranks.
        interval: number of steps from one check to the next.
        on_mismatch: called on every rank with the evidence, before the step's update. If the update itself was wrong,
            it is called after the update.
        update_range: number of elements of each kind of optimizer state that a check recomputes.
        cost: times the first checks, which then may lengthen the interval; None: the interval stays.
        report: called on every rank with a line for the user if the interval is lengthened.

    Attributes:
        interval: steps between two checks.
        checked_step: last step whose replays agreed; 0 if there is none.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        device_name: str,
        device_kind: str,
        *,
        interval: int,
        on_mismatch: Callable[[ReplayEvidence], None],
        update_range: int = RANGE,
        cost: CheckCost | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        layout = engine.layout
        self.interval = interval
        self.checked_step = 0
        self._engine = engine
        self._layout = layout
        self._rank = rank
        self._on_mismatch = on_mismatch
        self._cost = cost
        self._report = report
        self._peers = Peers()
        self._axis = engine.buffers[0].axes.reduce
        self._replica_count = layout.grid.replicas
        self._replica = layout.grid.replica(rank)
        self._axis_indices = _index_replicas(layout, rank)
        schedule = layout.schedule()
        stage = engine.pipeline.stage
        self._chunk_positions = [schedule.global_chunk(stage, chunk) for chunk in range(len(engine.chunks))]
        self._devices = self._peers.all_gather((device_name, device_kind), tuple[str, str])
        self._has_run_step = False
        self._trained_trace: ComputeTrace | None = None  # trace of the present step's first micro-batch
        self._replayed_trace: ComputeTrace | None = None  # trace of the other replica's micro-batch
        self._batch: Batch[Tensor] = Batch()
        reduce_dtype = REDUCE_DTYPES.get(layout.config.parallel.reduce_dtype)
        self._reduction_check = ReductionCheck(engine.data_parallel, layout.microbatches, reduce_dtype)
        self._state_check = StateCheck(engine.optimizer)
        self._update_check = UpdateCheck(engine.optimizer, self._shift, self._peers, update_range)
        self._is_checking_update = False
        self._has_agreed = False  # whether the replays of the present step agreed
        engine.after_update_hooks.append(self._after_update)
        self._check_comparable()
        distances = "1" if self._replica_count == 2 else f"1 to {self._replica_count - 1}"
        description = (
            f"once per {interval} steps, by the replica at distance {distances}; {self._update_check.description}"
        )
        if cost is not None:
            description += "; checks take at most 1% of the time (resilience.replay_interval=auto)"
        engine.active["replay"] = description

    def _check_comparable(self) -> None:
        """Raise ConfigError if ranks have devices of several kinds, or if the schedule cannot be replayed."""
        obstacle = find_obstacle(self._engine, [kind for _, kind in self._devices])
        if obstacle:
            raise ConfigError(
                f"resilience.replay_interval={self.interval} is unavailable: {obstacle}; set "
                "--resilience.replay_interval=0"
            )

    def restart(self) -> None:
        """Forget the results of earlier steps, and restore what this check has replaced in the engine.

        Call it when another state has been loaded into the engine, or when a step has failed.
        """
        self._trained_trace = self._replayed_trace = None
        self._batch = Batch()
        self._is_checking_update = False
        self._reduction_check.end()
        self._state_check.drop()
        self._update_check.end()
        if self._cost is not None:
            self._cost.forget_step()

    # a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """If a check is due at `step`, replay another replica's micro-batch and prepare to trace this replica's.

        The first step of a process is never checked: during it, buffers learn which gradients a GEMM overwrites.
        """
        self._trained_trace = self._replayed_trace = None
        is_checked = self._is_due(step) and self._has_run_step
        self._has_run_step = True
        if self._cost is not None and (is_checked or self._is_due(step + 1)):
            self._cost.begin_step()
        if not is_checked:
            return
        self._batch = self._engine.chunk_forward.read_first_micro_batch()
        self._replayed_trace = self._replay(self._choose_distance(step))
        self._trained_trace = self._make_trace()
        self._reduction_check.begin()

    def watch(self, runner: EagerRunner) -> EagerRunner:
        """Return a runner that traces the step's first micro-batch, or `runner` itself if no check is due."""
        if self._trained_trace is None:
            return runner
        return TracedRunner(runner, self._trained_trace)

    def needs_eager_step(self) -> bool:
        """Return whether the step is checked and must run without graphs, which hide the operators from a trace.

        Only the first micro-batch is traced. With tensor or context parallelism it always runs eagerly, except that
        experts run a step twice if a graph has too few rows.
        """
        if self._trained_trace is None:
            return False
        graphs = self._engine.graphs
        return self._engine.experts is not None or (graphs is not None and graphs.can_replay(0, 0))

    def end_step(self, step: int) -> None:
        """Compare the traces before the update. On any difference collect evidence and report it on all ranks."""
        trained, replayed = self._trained_trace, self._replayed_trace
        if trained is None or replayed is None:
            return
        trained.finish()
        self._reduction_check.end()
        expected = self._shift(trained.sums, self._choose_distance(step))
        wrong_blocks = self._reduction_check.find_wrong_blocks()
        wrong_tensors = self._state_check.find_changed_tensors()
        has_differences = expected != replayed.sums
        local_flags = torch.stack([has_differences.any(), wrong_blocks.any(), wrong_tensors.any()])
        flags = all_reduce(local_flags.double(), self._engine.world_axis, dist.ReduceOp.MAX).wait()
        differs_in_replay, has_wrong_sums, has_changed_state = [bool(flag) for flag in flags.tolist()]
        evidence = None
        if differs_in_replay and not has_changed_state:  # changed weights give other bits on healthy devices
            evidence = self._collect_evidence(step, trained, replayed)
        elif has_changed_state or has_wrong_sums:
            evidence = self._collect_local_evidence(step, wrong_blocks, wrong_tensors)
        self._trained_trace = self._replayed_trace = None
        self._batch = Batch()
        if evidence is not None:
            self._on_mismatch(evidence)
        self._is_checking_update = True
        self._has_agreed = evidence is None
        self._update_check.begin(step // self.interval)  # the number of the check chooses what is recomputed

    def _after_update(self, step: int) -> None:
        """Check the step's update if its micro-batches were checked. Before a checked step, store checksums."""
        if self._engine.replay_check is not self:  # the engine has left its groups, or has another check
            self._state_check.drop()
            return
        if self._is_checking_update:
            self._is_checking_update = False
            self._compare_updates(step)
            self._measure_check()
        if not self._is_due(step + 1):
            self._state_check.drop()
            return
        if self._cost is not None:
            self._cost.end_plain_step()
        self._state_check.take()
        if self._cost is not None:
            self._cost.end_preparation()

    def _is_due(self, step: int) -> bool:
        """Return whether the interval ends with `step`."""
        return step % self.interval == 0

    def _measure_check(self) -> None:
        """End the timing of a checked step. After enough of them lengthen the interval if checks cost too much."""
        if self._cost is None:
            return
        self._cost.end_checked_step()
        if not self._cost.is_complete():
            return
        interval = self._cost.choose_interval(self.interval)
        if interval > self.interval and self._report is not None:
            check_time = statistics.median(self._cost.check_times)
            self._report(
                f"replays run once per {interval} steps from here on: a check takes {check_time:.2f} times as long as "
                f"a step, and checks may take {MAX_COST:.0%} of the time (resilience.replay_interval=auto)"
            )
        self.interval = interval
        self._cost = None

    def _compare_updates(self, step: int) -> None:
        """Recompute another replica's update. On any difference collect evidence and report it on all ranks."""
        evidence = None
        if self._update_check.is_active():
            distance = self._choose_distance(step)
            own_sums = self._update_check.sum_updated()
            recomputed_sums = self._update_check.recompute(distance)
            differs = (self._shift(own_sums, distance) != recomputed_sums).any() & ~self._update_check.skip
            differs = all_reduce(differs.double().view(1), self._engine.world_axis, dist.ReduceOp.MAX).wait()
            if differs.item():
                evidence = self._collect_update_evidence(step, own_sums, recomputed_sums)
            self._update_check.end()
        if evidence is not None:
            self._on_mismatch(evidence)
        elif self._has_agreed:
            self.checked_step = step

    def _choose_distance(self, step: int) -> int:
        """Return the distance from a replica to the one that replays its micro-batch; it changes with each check."""
        return 1 + (step // self.interval) % (self._replica_count - 1)

    def _replay(self, distance: int) -> ComputeTrace:
        """Replay the micro-batch of the replica that is `distance` before this one, and return the trace."""
        shifted = {}
        for field in fields(self._batch):
            value = getattr(self._batch, field.name)
            if value is not None:
                shifted[field.name] = self._shift(value, distance)
        batch = replace(self._batch, **shifted)
        owner = (self._replica - distance) % self._replica_count
        trace = self._make_trace()
        first_sample = self._find_first_sample(owner)
        replay_batch(self._engine, batch, first_sample, lambda runner: TracedRunner(runner, trace))
        trace.finish()
        return trace

    def _make_trace(self) -> ComputeTrace:
        """Return an empty trace of this rank's chunks."""
        engine = self._engine
        return ComputeTrace(
            engine.buffers, self._chunk_positions, engine.buffers[0].axes.model.values(), engine.runtime
        )

    def _find_first_sample(self, owner: int) -> int:
        """Return the index in the global batch of the first sample of a replica's first micro-batch."""
        return owner * self._layout.samples_per_rank

    def _shift(self, tensor: Tensor, distance: int) -> Tensor:
        """Send a tensor to the replica `distance` after this one; return the tensor of the one `distance` before."""
        if distance == 0:
            return tensor
        return shift_along(tensor, self._axis, self._axis_indices, self._replica, distance)

    # a mismatch -------------------------------------------------------------------------------------------------

    def _collect_evidence(self, step: int, trained: ComputeTrace, replayed: ComputeTrace) -> ReplayEvidence:
        """Replay again, and judge all executions. The step's gradients are unchanged afterwards."""
        engine, distance = self._engine, self._choose_distance(step)
        engine.data_parallel.finish_tied()
        with keep_results(engine):
            repeated = [(other, self._replay(other)) for other in self._choose_repetitions(distance)]
        # Pairs of the distance to the micro-batch's owner, and the trace; the training itself has the distance 0.
        traces = [(0, trained), (distance, replayed), *repeated]
        executions = self._gather_executions(traces)
        points = trained.list_points()
        located = [self._locate(suspicion, points) for suspicion in judge_executions(executions)]
        suspicions = self._gather_suspicions(located)
        return self._make_evidence(name_ranks(step, suspicions), suspicions)

    def _choose_repetitions(self, distance: int) -> list[int]:
        """Return the distances of the repeated executions: one to a third replica, or 0 and 1 with two replicas."""
        if self._replica_count > 2:
            return [1 + distance % (self._replica_count - 1)]
        return [0, 1]

    def _gather_suspicions(self, located: list[LocatedSuspicion]) -> list[LocatedSuspicion]:
        """Return the suspicions of all ranks, without repetitions: all replicas suspect the same at a coordinate."""
        suspicions: dict[LocatedSuspicion, None] = {}
        for rank_suspicions in self._peers.all_gather(located, list[LocatedSuspicion]):
            suspicions |= dict.fromkeys(rank_suspicions)
        return list(suspicions)

    def _collect_update_evidence(self, step: int, own_sums: Tensor, recomputed_sums: Tensor) -> ReplayEvidence:
        """Recompute the update again, and judge all executions."""
        distance = self._choose_distance(step)
        # Pairs of the distance to the owner of the update, and the checksums.
        sums = [(0, own_sums), (distance, recomputed_sums)]
        for repeated_distance in self._choose_repetitions(distance):
            sums.append((repeated_distance, self._update_check.recompute(repeated_distance)))
        suspicions = judge_executions(self._gather_sums(sums))
        # Only the owner of a range knows the names of its tensors.
        located = [self._locate_update(suspicion) for suspicion in suspicions if suspicion.owner == self._replica]
        suspicions_of_all = self._gather_suspicions(located)
        return self._make_evidence(name_ranks(step, suspicions_of_all), suspicions_of_all, is_after_update=True)

    def _locate_update(self, suspicion: Suspicion) -> LocatedSuspicion:
        """Return a suspicion about this rank's update with ranks and tensor names."""
        return LocatedSuspicion(
            ranks=tuple(self._find_rank(executor) for executor in suspicion.executors),
            owner=suspicion.owner,
            order=(Phase.UPDATE, 0, 0, 0),
            action="the optimizer's update",
            tensor=self._update_check.describe(suspicion.first),
            wrong=suspicion.wrong,
            total=suspicion.total,
        )

    def _make_evidence(
        self, verdict: ReplayVerdict, suspicions: list[LocatedSuspicion], is_after_update: bool = False
    ) -> ReplayEvidence:
        return ReplayEvidence(
            verdict=verdict,
            message=verdict.describe([name for name, _ in self._devices]),
            suspicions=suspicions,
            first_samples=[self._find_first_sample(owner) for owner in range(self._replica_count)],
            micro_batch=self._layout.config.train.micro_batch,
            confirmed_step=self.checked_step,
            is_after_update=is_after_update,
        )

    def _collect_local_evidence(self, step: int, wrong_blocks: Tensor, wrong_tensors: Tensor) -> ReplayEvidence:
        """Collect evidence of wrong sums of gradients or a changed optimizer state, which each rank finds by itself."""
        located = []
        for wrong, action, describe in (
            (wrong_tensors, "state at rest before the update", self._state_check.describe),
            (wrong_blocks, "reduction of the gradients", self._reduction_check.describe),
        ):
            indices = wrong.nonzero().flatten().tolist()
            if indices:
                located.append(
                    LocatedSuspicion(
                        ranks=(self._rank,),
                        owner=self._replica,
                        order=(Phase.UPDATE, 0, 0, indices[0]),
                        action=action,
                        tensor=describe(indices[0]),
                        wrong=1,
                        total=1,
                    )
                )
        suspicions_by_rank = self._peers.all_gather(located, list[LocatedSuspicion])
        suspicions = [suspicion for rank_suspicions in suspicions_by_rank for suspicion in rank_suspicions]
        first = suspicions[0]
        ranks = tuple(sorted({rank for suspicion in suspicions for rank in suspicion.ranks}))
        # With ZeRO-0 all ranks have the same wrong sum, which does not show the rank at fault.
        is_sure = len(ranks) == 1
        verdict = ReplayVerdict(
            step, ranks, is_sure=is_sure, is_persistent=False, action=first.action, tensor=first.tensor
        )
        return self._make_evidence(verdict, suspicions)

    def _gather_executions(self, traces: list[tuple[int, ComputeTrace]]) -> list[Execution]:
        """Return the executions of all replicas at this coordinate, cut to the longest trace of any rank.

        Args:
            traces: pairs (distance to the owner of the micro-batch, trace by this replica).
        """
        local_length = max(len(trace) for _, trace in traces)
        lengths = torch.tensor([local_length], dtype=torch.float64, device=self._engine.device)
        length = int(all_reduce(lengths, self._engine.world_axis, dist.ReduceOp.MAX).wait().item())
        sums = []
        for distance, trace in traces:
            # The last element of a trace is its number of entries.
            sums.append((distance, torch.cat((trace.sums[:length], trace.sums[-1:]))))
        return self._gather_sums(sums)

    def _gather_sums(self, sums: list[tuple[int, Tensor]]) -> list[Execution]:
        """Return the executions of all replicas at this coordinate.

        Args:
            sums: pairs (distance to the owner of the work, checksums by this replica); all of equal length.
        """
        local_sums = torch.stack([checksums for _, checksums in sums])
        sums_by_index = all_gather(local_sums.unsqueeze(0), self._axis).wait().cpu().numpy()
        executions = []
        for executor, index in enumerate(self._axis_indices):
            for (distance, _), checksums in zip(sums, sums_by_index[index], strict=True):
                owner = (executor - distance) % self._replica_count
                executions.append(Execution(owner, executor, checksums))
        return executions

    def _locate(self, suspicion: Suspicion, points: list[TracePoint]) -> LocatedSuspicion:
        """Return a suspicion at this coordinate with ranks and names."""
        ranks = tuple(self._find_rank(executor) for executor in suspicion.executors)
        point = points[min(suspicion.first, len(points) - 1)]
        return LocatedSuspicion(
            ranks, suspicion.owner, point.order, point.action, point.tensor, suspicion.wrong, suspicion.total
        )

    def _find_rank(self, replica: int) -> int:
        """Return the rank that has this rank's coordinate in `replica`."""
        return self._layout.grid.group(AXES.shards, self._rank)[self._axis_indices[replica]]


def find_obstacle(engine: Engine, device_kinds: Sequence[str]) -> str:
    """Return why the ranks cannot replay each other's micro-batches, or "" if they can.

    Args:
        device_kinds: kind of each rank's device.
    """
    kinds = sorted(set(device_kinds))
    if len(kinds) > 1:
        return f"it compares bits, and the ranks have unlike devices ({', '.join(kinds)})"
    first_backwards: dict[int, int] = {}  # micro-batch of the first backward of each chunk
    for kind, chunk, microbatch in engine.pipeline.actions:
        if kind in INPUT_BACKWARDS:
            first_backwards.setdefault(chunk, microbatch)
    for microbatch in first_backwards.values():
        if microbatch != 0:
            return (
                f"it needs a schedule that begins with the backward of micro-batch 0, and parallel.schedule="
                f"{engine.config.parallel.schedule} begins with {microbatch}"
            )
    return ""


def _index_replicas(layout: Layout, rank: int) -> list[int]:
    """Return the index of each replica within the group that reduces gradients, at this rank's coordinate."""
    grid = layout.grid
    return [grid.group(AXES.shards, rank).index(peer) for peer in grid.group(AXES.samples, rank)]


def shift_along(tensor: Tensor, axis: Axis, indices: list[int], position: int, distance: int) -> Tensor:
    """Send a tensor to the member `distance` positions after this rank; return the tensor of the member before it.

    Args:
        indices: index within the axis of the member at each position.
    """
    member_count = len(indices)
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    send_sizes, receive_sizes = [0] * axis.size, [0] * axis.size
    send_sizes[indices[(position + distance) % member_count]] = len(flat)
    receive_sizes[indices[(position - distance) % member_count]] = len(flat)
    received = torch.empty_like(flat)
    transfer = axis.transfer("all_to_all", flat.nbytes)
    dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=axis.group)
    transfer.done()
    return received.view(tensor.dtype).view(tensor.shape)
