"""The suite itself can fail: bugs put in on purpose are found and named, and a job that fails leaves a working pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megascale.config import from_tree
from megascale.core.schedule import ActionKind
from megascale.model import experts as model_experts
from megascale.model import transformer
from megascale.ops.gradient_sink import get_sink
from megascale.optim import optimizer, sharded_lamb
from megascale.parallel import data_parallel, expert_dispatch
from megascale.parallel import experts as parallel_experts
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.parameters import ParameterSpec
from megascale.parallel.vocabulary import vocabulary_loss
from megascale.train import expert_balance
from tests.exact import kept_groups
from tests.exact.cases import case
from tests.exact.compare import TOLERANCE, assert_equal, differences
from tests.exact.pool import JobFailed
from tests.exact.test_experts import BALANCED, ROUTED, SINKS, data_case, experts_case
from tests.exact.training import Late, late_gemms, make_engine, train

pytestmark = pytest.mark.xdist_group("processes")


@contextmanager
def gradients_stay_local() -> Iterator[None]:
    """Gradients of shared parameters, of a tied embedding's copies and of ZeRO-0's replicas are not summed."""
    with mock.patch.object(data_parallel, "all_reduce", lambda x, axis, op=None: Pending(x)):
        yield


@contextmanager
def shared_parameters_count_on_every_rank() -> Iterator[None]:
    with mock.patch.object(
        optimizer, "_merge_ranges", lambda everything, local: [(e.start, e.stop) for e in everything]
    ):
        yield


@contextmanager
def trust_ratios_of_the_own_shard() -> Iterator[None]:
    def packed(x, axis: Axis, op=None) -> Pending:
        return Pending(x) if x.dim() == 2 else data_parallel.all_reduce(x, axis, op)

    with mock.patch.object(sharded_lamb, "all_reduce", packed):
        yield


@contextmanager
def buckets_go_out_before_they_are_full() -> Iterator[None]:
    """Every backward is armed, the first as well."""
    begin, reduce = data_parallel.DataParallel.begin_backward, data_parallel.DataParallel._reduce

    def begin_armed(self: data_parallel.DataParallel, chunk: int, kind: ActionKind) -> None:
        self.arm_reductions(chunk)
        begin(self, chunk, kind)

    def reduce_now(self: data_parallel.DataParallel, buckets: Any, bucket: int) -> None:
        reduce(self, buckets, bucket)
        buckets.pending_reductions[bucket].wait()

    with (
        mock.patch.object(data_parallel.DataParallel, "begin_backward", begin_armed),
        mock.patch.object(data_parallel.DataParallel, "_reduce", reduce_now),
    ):
        yield


@contextmanager
def every_rank_draws_the_same_mask() -> Iterator[None]:
    true = transformer.dropout
    with mock.patch.object(transformer, "dropout", lambda x, p, key, start, sample: true(x, p, key, 0, sample)):
        yield


@contextmanager
def padding_has_a_probability() -> Iterator[None]:
    def loss(*tensors, **options):
        return vocabulary_loss(*tensors, **(options | {"vocab": 1 << 30}))

    with mock.patch.object(transformer, "vocabulary_loss", loss):
        yield


@contextmanager
def gradients_are_read_before_gemms_end() -> Iterator[None]:
    with late_gemms(), mock.patch.object(Late, "synchronize"):
        yield


UNTIED = {"tied_embeddings": False}
MATRIX = "step 1 gradient layers.0.mlp.in.weight"


# (the bug, where it shows, what it makes wrong, what it leaves right)
@contextmanager
def experts_divide_by_their_ranks() -> Iterator[None]:
    """Gradients of experts are means over the ranks that hold experts instead of sums."""
    backward = parallel_experts.add_matrix_gradients

    def divided(*args: Any) -> Any:
        into, out = args[3], args[4]
        result = backward(*args)
        for weight in (into, out):
            get_sink(weight).main_grad.div_(2)
        return result

    with mock.patch.object(parallel_experts, "add_matrix_gradients", divided):
        yield


@contextmanager
def norm_without_experts() -> Iterator[None]:
    merge = optimizer._merge_ranges

    def merge_others(everything: Any, local: Any) -> Any:
        return merge(everything, [extent for extent in local if ".experts." not in extent.piece.name])

    with mock.patch.object(optimizer, "_merge_ranges", merge_others):
        yield


@contextmanager
def biases_from_local_counts() -> Iterator[None]:
    """Each rank moves its biases by the tokens of its own."""
    update = expert_balance.ExpertBalance.update

    def update_locally(self: expert_balance.ExpertBalance, summed: Any, skip: Any) -> Any:
        own = summed.clone()
        counts = self._view_counts(own)
        for module in self._modules:
            counts[self.layers.index(module.layer_index)] = module.counts.double()
        return update(self, own, skip)

    with mock.patch.object(expert_balance.ExpertBalance, "update", update_locally):
        yield


@contextmanager
def sequence_loss_of_the_own_slice() -> Iterator[None]:
    """A rank balances its slice of each sequence instead of the whole."""
    with mock.patch.object(model_experts, "all_reduce_small", lambda x, axis: x * axis.size):
        yield


@contextmanager
def balance_losses_are_means_of_micro_batches() -> Iterator[None]:
    """Balance losses are divided by the tokens of a micro-batch."""
    begin = model_experts.ExpertsMlp.begin_training

    def begin_divided(self: model_experts.ExpertsMlp, tokens: int, *args: Any) -> None:
        begin(self, tokens // 2, *args)

    with mock.patch.object(model_experts.ExpertsMlp, "begin_training", begin_divided):
        yield


@contextmanager
def experts_over_data_are_means() -> Iterator[None]:
    """Gradients of experts are means over the ranks that send tokens instead of sums."""
    backward = expert_dispatch.add_stack_gradients

    def divided(*args: Any) -> Any:
        result = backward(*args)
        for weight in args[4].parameters[:2]:
            get_sink(weight).main_grad.div_(2)
        return result

    with mock.patch.object(expert_dispatch, "add_stack_gradients", divided):
        yield


@contextmanager
def sinks_count_on_every_rank() -> Iterator[None]:
    """The norm counts the sinks of the first tensor rank only, as if they were replicas (Megatron-LM#7452)."""
    is_counted = ParameterSpec.is_counted

    def count(spec: ParameterSpec, position: Any) -> bool:
        is_sink = spec.pieces[0].name.endswith(".sink.weight")
        return is_counted(spec, position) and not (is_sink and position.get("tensor", 0))

    with mock.patch.object(ParameterSpec, "is_counted", count):
        yield


FAULTS = {
    "shared": (gradients_stay_local, case(2, microbatches=1), "step 1 gradient layers.0.norm1.weight", MATRIX),
    "tied": (gradients_stay_local, case(1, 2, microbatches=2), "step 1 gradient embedding.token.weight", MATRIX),
    "replicas": (gradients_stay_local, case(1, 1, 2, microbatches=2, zero=0), MATRIX, "step 1 loss on rank 0"),
    "norm": (shared_parameters_count_on_every_rank, case(2, microbatches=1), "step 1 norm on rank 0", MATRIX),
    "trust": (
        trust_ratios_of_the_own_shard,
        case(1, 1, 2, microbatches=1, optimizer={"name": "lamb"}, parallel={"bucket_elements": 300}),
        "state model.layers.0.mlp.in.weight",
        "step 1 norm on rank 0",
    ),
    "early": (
        buckets_go_out_before_they_are_full,
        case(1, 1, 2, microbatches=3, parallel={"bucket_elements": 300}),
        MATRIX,
        "step 1 loss on rank 0",
    ),
    "unsettled": (
        gradients_are_read_before_gemms_end,
        case(1, 1, 2, microbatches=2),
        "step 1 gradient layers.0.attention.query.weight",
        MATRIX,
    ),
    "experts divided": (
        experts_divide_by_their_ranks,
        experts_case(2, experts=ROUTED),
        "step 1 gradient layers.0.mlp.experts.in.weight",
        "step 1 gradient layers.1.mlp.router.weight",
    ),
    "experts not in the norm": (
        norm_without_experts,
        experts_case(2, experts=ROUTED),
        "step 1 norm on rank 0",
        "step 1 gradient layers.0.mlp.experts.in.weight",
    ),
    "biases from local counts": (
        biases_from_local_counts,
        experts_case(1, 1, 2, experts=BALANCED),
        "state model.layers.0.mlp.router.bias",
        "step 1 norm on rank 0",
    ),
    "balance of slices": (
        sequence_loss_of_the_own_slice,
        experts_case(2, experts=BALANCED),
        "step 1 gradient layers.0.mlp.router.weight",
        "step 1 loss on rank 0",
    ),
    "balance by micro-batch": (
        balance_losses_are_means_of_micro_batches,
        experts_case(2, experts=BALANCED),
        "step 1 gradient layers.0.mlp.router.weight",
        "step 1 loss on rank 0",
    ),
    "experts over data divided": (
        experts_over_data_are_means,
        data_case(2, experts={**ROUTED, "top_k": 1, "normalize": "none"}),
        "step 1 gradient layers.0.mlp.experts.in.weight",
        "step 1 loss on rank 0",
    ),
    "sinks not in the norm": (
        sinks_count_on_every_rank,
        experts_case(2, experts=ROUTED, model=SINKS),
        "step 1 norm on rank 0",
        "step 1 gradient layers.0.mlp.experts.in.weight",
    ),
    "mask": (every_rank_draws_the_same_mask, case(2, microbatches=1, model={"dropout": 0.2}), MATRIX, None),
    "padding": (padding_has_a_probability, case(2, microbatches=1, model={"vocab_size": 19, **UNTIED}), MATRIX, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_found(name, pool, one_process):
    fault, case, wrong, right = FAULTS[name]
    model, reference = from_tree(case.tree).model, one_process(case.twin, 1)
    assert_equal(reference, pool.run(train, case.world, case.tree, 1), model)
    broken = pool.run(train, case.world, case.tree, 1, fault)
    pool.renew_groups()
    result = differences(reference, broken, model)
    assert result[wrong] > 1e-6
    assert right is None or result[right] <= TOLERANCE
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(reference, broken, model)


def test_a_missing_element_is_found(pool, one_process):
    single = case(1, 1, 2, microbatches=1)
    report = pool.run(train, 2, single.tree, 1)
    report[1].state.pop()
    with pytest.raises(AssertionError, match="on no rank"):
        assert_equal(one_process(single.twin, 1), report, from_tree(single.tree).model)


def _raise_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def _die_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on_one(rank: int, world: int) -> None:
    if rank != 1:
        dist.barrier()
    else:
        time.sleep(600)


def _sum(rank: int, world: int) -> int:
    import torch

    x = torch.tensor(rank)
    dist.all_reduce(x)
    return int(x)


@pytest.mark.parametrize(
    ("job", "story"),
    [(_raise_on_one, "rank 1 has had enough"), (_die_on_one, "rank 1: the process died"), (_hang_on_one, "no answer")],
)
def test_a_job_that_fails_does_not_touch_the_next(job, story, pool):
    with pytest.raises(JobFailed, match=story):
        pool.run(job, 3, timeout=3.0 if job is _hang_on_one else 60.0)
    assert pool.run(_sum, 4) == [6] * 4


def test_workers_serve_many_jobs(pool):
    for world in (8, 2, 4):
        pool.run(_sum, world)
    before = pool.started
    assert [pool.run(_sum, n) for n in (2, 4, 3)] == [[1] * 2, [6] * 4, [3] * 3]
    assert pool.started == before


def _count_kept_groups(rank: int, world: int, tree: dict[str, Any]) -> int:
    """Return how many sets of groups this process keeps after two engines were made."""
    for _ in range(2):
        make_engine(rank, world, tree)
    return len(kept_groups._sets)


def _replace_groups(rank: int, world: int) -> None:
    dist.destroy_process_group()


def test_jobs_of_one_grid_use_the_same_groups(pool):
    tree = case(1, 1, 2, microbatches=1, model={"layers": 1}).tree
    other = case(2, microbatches=1, model={"layers": 1}).tree
    pool.renew_groups()
    # The engines of one job share no groups.
    assert pool.run(_count_kept_groups, 2, tree) == [2, 2]
    assert pool.run(_count_kept_groups, 2, tree) == [2, 2]
    assert pool.run(_count_kept_groups, 2, other) == [4, 4]
    pool.run(_replace_groups, 2)
    assert pool.run(_count_kept_groups, 2, tree) == [2, 2]
