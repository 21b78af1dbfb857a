"""ZeRO-3 gives the one-process run's losses, gradients, weights and moments in float64."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megascale.config import from_tree
from megascale.core import copy_choice
from megascale.core.mapped_layout import MIN_SHARD_PAGES, count_mapped_bytes
from megascale.core.parameter_counts import count_stage_parameters, count_stage_units
from megascale.core.traffic import estimate_stage_traffic
from megascale.errors import ConfigError
from megascale.ops.linear import Gemms
from megascale.parallel import copy_reduction, device_pages, mapped_slots, parameter_slots, symmetric
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Axis, Pending, all_gather_into
from megascale.parallel.copy_reduction import _round as write_rounded
from megascale.parallel.parameter_slots import ParameterSlots
from megascale.train import engine_axes
from megascale.train.reduction_check import ReductionCheck
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal
from tests.exact.test_graphs import assert_same_bits
from tests.exact.training import FEW_STEPS, STEPS, RankReport, make_engine, run_step, train
from tests.parallel.host_pages import HostPages

pytestmark = pytest.mark.xdist_group("processes")

UNTIED = {"tied_embeddings": False}
CASES = {
    "accumulation, tied": case(data=2, microbatches=3, zero=3, parallel={"bucket_elements": 700}),
    "accumulation, untied, LAMB": case(
        data=4, microbatches=2, zero=3, model={**UNTIED, "head_bias": True}, optimizer={"name": "lamb"}
    ),
    "full recompute, dropout": case(
        data=2, microbatches=2, zero=3, model={**UNTIED, "dropout": 0.1}, parallel={"recompute": "full"}
    ),
    "selective recompute, parallel block, TP2, Muon": case(
        2,
        data=2,
        microbatches=2,
        zero=3,
        model={**UNTIED, "block": "parallel", "activation": "swiglu", "positions": "rotary"},
        parallel={"recompute": "selective"},
        optimizer={"name": "muon"},
    ),
    "TP2, nothing overlapped": case(
        2, data=2, microbatches=2, zero=3, model=UNTIED, overlap={"tensor": "off", "data": False}
    ),
    "state in host memory": case(data=2, microbatches=2, zero=3, model=UNTIED, optimizer={"offload": True}),
    "kept layers, LAMB": case(
        data=2,
        microbatches=3,
        zero=3,
        model={**UNTIED, "layers": 5},
        parallel={"zero3_keep_layers": 2},
        optimizer={"name": "lamb"},
    ),
    "kept layers, two stages of two chunks": case(
        1, 2, 2, virtual=2, microbatches=4, zero=3, model={"layers": 8}, parallel={"zero3_keep_layers": 3}
    ),
    "all layers kept, full recompute": case(
        data=2, microbatches=2, zero=3, model=UNTIED, parallel={"zero3_keep_layers": 9, "recompute": "full"}
    ),
    "one micro-batch": case(data=2, microbatches=1, zero=3, model=TWO_LAYERS),
    "two stages of one chunk, tied": case(1, 2, 2, microbatches=3, zero=3, model={"layers": 3}),
    "two stages of two chunks, untied": case(1, 2, 2, virtual=2, microbatches=4, zero=3, model=UNTIED),
    "two stages of five chunks": case(1, 2, 2, virtual=5, microbatches=4, zero=3, model={**UNTIED, "layers": 10}),
    "two stages of five chunks, tied, full recompute, LAMB": case(
        1,
        2,
        2,
        virtual=5,
        microbatches=3,
        zero=3,
        model={"layers": 11},
        parallel={"recompute": "full"},
        optimizer={"name": "lamb"},
    ),
    "four chunks on one stage, one round": case(
        data=2,
        virtual=4,
        microbatches=3,
        zero=3,
        model=UNTIED,
        parallel={"micro_batch_group_size": 3},
    ),
    "layers divided between chunks": case(
        1, 2, 2, virtual=2, microbatches=2, zero=3, model={"layers": 3}, parallel={"layer_split": [0.5, 1, 1, 0.5]}
    ),
    # With rotary positions the first chunk has no resident parameter.
    "an untied embedding in a chunk of its own": case(
        1,
        2,
        2,
        virtual=2,
        microbatches=2,
        zero=3,
        model={**UNTIED, "layers": 2, "positions": "rotary"},
        parallel={"layer_split": [0, 1, 1, 0]},
    ),
}


@contextmanager
def poisoned_slots() -> Iterator[None]:
    """Fill a slot with NaN when its unit is not in use."""
    with mock.patch.object(ParameterSlots, "poison_unused", True):
        yield


@pytest.mark.parametrize("name", CASES)
def test_zero_3_is_exact_and_reads_no_released_slot(name, pool, one_process):
    layout: Case = CASES[name]
    result = pool.run(train, layout.world, layout.tree, FEW_STEPS, poisoned_slots)
    assert_equal(one_process(layout.twin, FEW_STEPS), result, from_tree(layout.tree).model)


class GlooExchange:
    """Stands in for the exchange of a host's GPUs: peers' memory is read by a collective."""

    def __init__(self, axis: Axis, peer_memory_bytes: int) -> None:
        self.rank, self.size = axis.rank, axis.size
        # Only this rank's memory exists here; the counterparts of others are garbage.
        self.peer_memory = [torch.full((peer_memory_bytes,), 255, dtype=torch.uint8) for _ in range(axis.size)]
        self.memory_bytes = peer_memory_bytes
        self._axis = axis
        self.gather_count = self.meet_count = self.reduction_count = self.mapped_count = 0

    def gather_from_peers(
        self, out: torch.Tensor, shards: Sequence[torch.Tensor], copies_own: bool = True
    ) -> Callable[[], None]:
        self.gather_count += 1
        self.mapped_count += not copies_own
        gathered = torch.empty_like(out)
        pending = all_gather_into(gathered.view(-1), shards[self.rank], self._axis)

        def wait() -> None:
            pending.wait()
            for rank in range(self.size):
                if copies_own or rank != self.rank:
                    out[rank].copy_(gathered[rank])

        return wait

    def close(self) -> None:
        """Do nothing: there are no peers to watch."""

    def reduce_from_peers(
        self,
        parts: Sequence[torch.Tensor],
        staging: torch.Tensor,
        add: Callable[[int, int, torch.Tensor], None],
        prepare: Callable[[], Any] | None = None,
    ) -> Callable[[], None]:
        """Exchange parts; this rank's own memory for all ranks lies around its part, in slices of equal size."""
        self.reduction_count += 1
        if prepare is not None:
            prepare()
        own = parts[self.rank]
        start = (own.data_ptr() - self.peer_memory[self.rank].data_ptr()) // own.itemsize - self.rank * len(own)
        whole = self.peer_memory[self.rank].view(own.dtype)[start : start + self._axis.size * len(own)]
        received = torch.empty_like(whole)
        work = dist.all_to_all_single(received, whole, group=self._axis.group, async_op=True)

        def wait() -> None:
            work.wait()
            addends = received.view(self._axis.size, -1)
            peers = [peer for peer in range(self._axis.size) if peer != self.rank]
            add(0, len(own), addends[peers])
            whole.fill_(float("nan"))  # nothing reads the slot afterwards

        return wait

    def wait_for_peer_reads(self) -> None:
        self.meet_count += 1


def train_with_copies(rank: int, world: int, tree: dict[str, Any], steps: int) -> tuple[RankReport, int, int]:
    """Train with the stand-in; return also the meetings and gathers by copies."""
    made: list[GlooExchange] = []

    def make(axis: Axis, peer_memory_bytes: int, **options: Any) -> GlooExchange:
        made.append(GlooExchange(axis, peer_memory_bytes))
        return made[0]

    def refuse(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Pending:
        raise AssertionError("a unit was gathered by a collective")

    tree = {**tree, "overlap": {**tree["overlap"], "gathers": "copies", "reductions": "collectives"}}
    with (
        mock.patch.object(symmetric, "make_exchange", make),
        mock.patch.object(parameter_slots, "all_gather_into", refuse),
    ):
        report = train(rank, world, tree, steps, poisoned_slots)
    return report, made[0].meet_count, made[0].gather_count


COPY_LAYOUTS = {
    "tied": CASES["accumulation, tied"],
    "untied, LAMB": CASES["accumulation, untied, LAMB"],
    "chunks": CASES["two stages of five chunks"],
    "float8": case(
        data=2,
        microbatches=2,
        zero=3,
        model=UNTIED,
        train={"linear_precision": "float8"},
        parallel={"gather_precision": "float8"},
    ),
}


@pytest.mark.parametrize("name", COPY_LAYOUTS)
def test_gathers_by_copies_give_the_bits_of_collectives(name, pool):
    """Shards lie where peers read them; an update begins when all ranks have ended their gathers."""
    layout = COPY_LAYOUTS[name]
    collectives = pool.run(train, layout.world, layout.tree, STEPS, poisoned_slots)
    copies = pool.run(train_with_copies, layout.world, layout.tree, STEPS)
    for expected, (report, meet_count, gather_count) in zip(collectives, copies, strict=True):
        assert_same_bits(expected, report)
        assert meet_count >= STEPS
        assert gather_count > 0


def train_with_mapped_shards(
    rank: int, world: int, tree: dict[str, Any], steps: int
) -> tuple[RankReport, int, int, int]:
    """Train with the stand-in and slots in pages of the host; return also the gathers without a copy of the shard."""
    tree = {**tree, "overlap": {**tree["overlap"], "gathers": "copies", "reductions": "collectives"}}
    with map_host_pages() as made:
        report = train(rank, world, tree, steps, poisoned_slots)
    exchange = made[-1]
    return report, exchange.mapped_count, exchange.gather_count, exchange.memory_bytes


@contextmanager
def map_host_pages() -> Iterator[list[GlooExchange]]:
    """Replace exchanges by the stand-in and a GPU's pages by those of the host. Yield the exchanges that are made."""
    made: list[GlooExchange] = []

    def make(axis: Axis, peer_memory_bytes: int, **options: Any) -> GlooExchange:
        made.append(GlooExchange(axis, peer_memory_bytes))
        return made[-1]

    def select(
        buffers: Sequence[ParamAndGradBuffer], gathers_in_float8: bool, device: torch.device
    ) -> tuple[frozenset[tuple[int, int]], str]:
        return mapped_slots.select_mapped_buckets(buffers, gathers_in_float8, torch.device("cuda"))

    with (
        mock.patch.object(symmetric, "make_exchange", make),
        mock.patch.object(engine_axes, "select_mapped_buckets", select),
        mock.patch.object(mapped_slots, "MIN_MAPPED_BYTES", MIN_SHARD_PAGES * mmap.PAGESIZE),
        mock.patch.object(device_pages, "make_pages", lambda axis, device: HostPages(axis)),
    ):
        yield made


def measure_mapped_memory(rank: int, world: int, tree: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of a rank's slots and shards, and the planner's bytes of the fullest rank."""
    with map_host_pages():
        engine = make_engine(rank, world, {**tree, "overlap": {"gathers": "copies", "reductions": "collectives"}})
    layout = engine.layout
    units = count_stage_units(layout.config.model, layout.config.parallel, 0)
    planned_bytes = count_mapped_bytes(
        units.list_slot_units(layout.config.parallel.zero3_keep_layers, itemsize=8),
        layout.grid.shards,
        page_bytes=mmap.PAGESIZE,
        trail_bytes=mmap.PAGESIZE,
        min_bytes=MIN_SHARD_PAGES * mmap.PAGESIZE,
    )
    assert planned_bytes is not None
    copied_elements = (sum(units.embeddings) + sum(units.heads)) // layout.grid.shards  # in shards that are too small
    return engine.mapped_bytes + 8 * copied_elements, planned_bytes


MAPPED_MODEL = {**UNTIED, "layers": 4, "hidden": 64}
MAPPED_LAYOUTS = {
    "two ranks": case(data=2, microbatches=2, zero=3, model=MAPPED_MODEL),
    "kept layers": case(data=2, microbatches=2, zero=3, model=MAPPED_MODEL, parallel={"zero3_keep_layers": 2}),
    "state in host memory": case(data=2, microbatches=2, zero=3, model=MAPPED_MODEL, optimizer={"offload": True}),
}


@pytest.mark.parametrize("name", MAPPED_LAYOUTS)
def test_mapped_shards_give_the_bits_of_collectives(name, pool):
    """A shard that lies in its slot survives releases, and the next gather sees its update."""
    layout = MAPPED_LAYOUTS[name]
    collectives = pool.run(train, layout.world, layout.tree, STEPS, poisoned_slots)
    mapped = pool.run(train_with_mapped_shards, layout.world, layout.tree, STEPS)
    for expected, (report, mapped_count, _, _) in zip(collectives, mapped, strict=True):
        assert_same_bits(expected, report)
        assert mapped_count > 0


@pytest.mark.parametrize("name", MAPPED_LAYOUTS)
def test_mapped_memory_is_planned(name, pool):
    layout = MAPPED_LAYOUTS[name]
    results = pool.run(measure_mapped_memory, layout.world, layout.tree)
    assert max(mapped for mapped, _ in results) == results[0][1]


def test_copies_are_refused_where_they_do_not_work(pool):
    layout = CASES["accumulation, tied"]
    tree = {**layout.tree, "overlap": {"gathers": "copies"}}
    with pytest.raises(AssertionError, match=r"overlap\.gathers=copies is unavailable: cpu tensors have no symmetric"):
        pool.run(make_engine, layout.world, tree)
    with pytest.raises(ConfigError, match=r"overlap\.gathers=copies gathers the matrices of parallel\.zero=3"):
        from_tree({**tree, "parallel": {"zero": 2}})


@pytest.mark.parametrize(
    "name",
    [
        "accumulation, tied",
        "full recompute, dropout",
        "two stages of five chunks",
        "kept layers, LAMB",
        "kept layers, two stages of two chunks",
    ],
)
def test_zero_3_is_exact_where_slots_stay_gathered(name, pool, one_process):
    layout: Case = CASES[name]
    result = pool.run(train, layout.world, layout.tree, STEPS)
    assert_equal(one_process(layout.twin, STEPS), result, from_tree(layout.tree).model)


def count_gathers(rank: int, world: int, tree: dict[str, Any]) -> tuple[int, int, int]:
    """Return the gathers of units in the second step, their bytes, and the planner's bytes."""
    engine = make_engine(rank, world, tree)
    report = RankReport()
    run_step(engine, 1, report)
    slots = engine.data_parallel.parameter_slots
    assert slots is not None
    before = slots.gather_count
    nbytes = 0
    gather = all_gather_into

    def count_bytes(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Pending:
        nonlocal nbytes
        nbytes += out.nbytes
        return gather(out, shard, axis)

    with mock.patch.object(parameter_slots, "all_gather_into", count_bytes):
        run_step(engine, 2, report)
        engine.synchronize()
    layout, stage = engine.layout, engine.pipeline.stage
    model, parallel = layout.config.model, layout.config.parallel
    traffic = estimate_stage_traffic(
        model,
        parallel,
        layout.grid,
        layout.schedule(),
        stage,
        1,
        "float64",
        linear_precision=layout.config.train.linear_precision,
    )
    units = count_stage_units(model, parallel, stage)
    planned_slots = units.count_parameter_slots(parallel.zero3_keep_layers)
    assert slots.memory.numel() == pytest.approx(planned_slots, rel=0.03)
    resident = count_stage_parameters(model, parallel, stage) - units.sharded
    planned = traffic.data_gather / (1 - 1 / layout.grid.shards) - 8 * resident
    return slots.gather_count - before, nbytes, round(planned)


# Five blocks: a micro-batch's forward gathers embedding, blocks and head, and its backward the three blocks that the
# slots have lost. Full recompute gathers no more. The next forward finds two blocks in their slots.
FIVE_BLOCKS = {**UNTIED, "layers": 5}


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (case(data=2, microbatches=1, zero=3, model=FIVE_BLOCKS), [7 + 3]),
        (case(data=2, microbatches=1, zero=3, model=FIVE_BLOCKS, parallel={"recompute": "full"}), [7 + 3]),
        (case(data=2, microbatches=2, zero=3, model=FIVE_BLOCKS), [2 * (7 + 3) - 2]),
        # Rounds of all eight micro-batches: forward gathers each chunk once, and backward the two that are lost.
        (
            case(
                data=2,
                virtual=5,
                microbatches=8,
                zero=3,
                model=FIVE_BLOCKS,
                parallel={"micro_batch_group_size": 8},
            ),
            [5 + 2],
        ),
        # Two rounds of four micro-batches on two stages: far fewer gathers than the 2 x 5 x 8 uses of a chunk.
        (
            case(
                1,
                2,
                2,
                virtual=5,
                microbatches=8,
                zero=3,
                model={**UNTIED, "layers": 10},
                parallel={"micro_batch_group_size": 4},
            ),
            None,
        ),
        (case(1, 2, 2, microbatches=3, zero=3, model={"layers": 8}), None),
        # Embedding and head in each micro-batch, three blocks twice except the two that stay in their slots, and two
        # blocks once per step.
        (
            case(data=2, microbatches=3, zero=3, model=FIVE_BLOCKS, parallel={"zero3_keep_layers": 2}),
            [3 * 2 + (3 * 6 - 5 * 2) + 2],
        ),
        (
            case(
                1,
                2,
                2,
                virtual=2,
                microbatches=4,
                zero=3,
                model={**UNTIED, "layers": 20},
                parallel={"zero3_keep_layers": 2},
            ),
            None,
        ),
        (
            case(
                data=2,
                microbatches=2,
                zero=3,
                model=FIVE_BLOCKS,
                train={"linear_precision": "float8"},
                parallel={"gather_precision": "float8"},
            ),
            [2 * (7 + 3) - 2],
        ),
    ],
    ids=[
        "one micro-batch",
        "full recompute",
        "two micro-batches",
        "one round",
        "two rounds",
        "1F1B",
        "kept layers",
        "kept layers, two chunks",
        "float8",
    ],
)
def test_gathers_of_a_step_are_those_of_the_planner(layout, counts, pool):
    for count, nbytes, planned in pool.run(count_gathers, layout.world, layout.tree):
        if counts is not None:
            assert [count] == counts
        assert nbytes == pytest.approx(planned, rel=0.03)  # buckets are padded


def train_with_copied_reductions(rank: int, world: int, tree: dict[str, Any], steps: int) -> tuple[RankReport, int]:
    """Train with the stand-in; return also the reductions by copies."""
    made: list[GlooExchange] = []

    def make(axis: Axis, peer_memory_bytes: int, **options: Any) -> GlooExchange:
        made.append(GlooExchange(axis, peer_memory_bytes))
        return made[0]

    tree = {**tree, "overlap": {**tree["overlap"], "gathers": "collectives", "reductions": "copies"}}
    with mock.patch.object(symmetric, "make_exchange", make):
        report = train(rank, world, tree, steps, poisoned_slots)
    return report, made[0].reduction_count


REDUCTION_LAYOUTS = {
    "ZeRO-2": case(data=2, microbatches=3, zero=2, model=UNTIED),
    "ZeRO-2, small buckets, pipeline": case(
        1, 2, 2, microbatches=2, zero=2, model=UNTIED, parallel={"bucket_elements": 1}
    ),
    "ZeRO-3, tied": CASES["accumulation, tied"],
    "ZeRO-3, chunks": CASES["two stages of five chunks"],
}


@pytest.mark.parametrize("name", REDUCTION_LAYOUTS)
def test_reductions_by_copies_are_exact(name, pool, one_process):
    layout = REDUCTION_LAYOUTS[name]
    results = pool.run(train_with_copied_reductions, layout.world, layout.tree, FEW_STEPS)
    assert all(count > 0 for _, count in results)
    reports = [report for report, _ in results]
    assert_equal(one_process(layout.twin, FEW_STEPS), reports, from_tree(layout.tree).model)


def train_by_default(
    rank: int, world: int, tree: dict[str, Any], steps: int, least_tokens: int
) -> tuple[RankReport, dict[str, str], list[tuple[bool, bool]]]:
    """Train with the stand-in and the default choices, with another COPIED_REDUCTION_TOKENS.

    Returns:
        (the report, the start-up lines, whether each exchange has gathered and reduced).
    """
    made: list[GlooExchange] = []

    def make(axis: Axis, peer_memory_bytes: int, **options: Any) -> GlooExchange:
        made.append(GlooExchange(axis, peer_memory_bytes))
        return made[-1]

    with (
        mock.patch.object(symmetric, "make_exchange", make),
        mock.patch.object(copy_choice, "COPIED_REDUCTION_TOKENS", least_tokens),
    ):
        engine = make_engine(rank, world, tree)
        assert engine.count_exchange_bytes() == sum(exchange.memory_bytes for exchange in made)
        made.clear()
        report = train(rank, world, tree, steps)
    uses = [(exchange.gather_count > 0, exchange.reduction_count > 0) for exchange in made]
    return report, engine.active, uses


GATHERS, REDUCES = (True, False), (False, True)  # whether an exchange has gathered, and whether it has reduced


@pytest.mark.parametrize(
    ("least_tokens", "expected_uses", "line"),
    [
        (1, [GATHERS, REDUCES], "copy engines"),
        (
            4096,
            [GATHERS],
            "collectives (no copies: collectives are faster with micro-batches of fewer than 4,096 tokens)",
        ),
    ],
)
def test_zero_3_chooses_copies_by_itself(least_tokens, expected_uses, line, pool, one_process):
    """Tiny micro-batches are reduced by collectives unless the least number of tokens is lower."""
    layout = CASES["accumulation, tied"]
    results = pool.run(train_by_default, layout.world, layout.tree, FEW_STEPS, least_tokens)
    for _, lines, uses in results:
        assert uses == expected_uses
        line_of_gathers = "copy engines (own shards are copied too: cpu memory is not mapped)"
        assert lines["matrices gathered by"] == line_of_gathers
        assert lines["gradients of units reduced by"] == line
    reports = [report for report, _, _ in results]
    assert_equal(one_process(layout.twin, FEW_STEPS), reports, from_tree(layout.tree).model)


def test_collectives_replace_copies_that_do_not_work(pool):
    layout = CASES["accumulation, tied"]
    for lines in pool.run(read_start_lines, layout.world, layout.tree):
        assert lines["matrices gathered by"] == "collectives (no copies: cpu tensors have no symmetric memory)"


def read_start_lines(rank: int, world: int, tree: dict[str, Any]) -> dict[str, str]:
    """Return the start-up lines of an engine."""
    return make_engine(rank, world, tree).active


@pytest.mark.parametrize("zero", [2, 3])
def test_rounded_reductions_by_copies_differ_from_exact_ones_by_their_rounding(zero, pool):
    """Copies round the addends of this rank too, collectives those of the others alone."""
    float32 = {"train": {"precision": "float32"}}
    rounded = {"parallel": {"reduce_dtype": "bfloat16"}}
    layout = case(data=2, microbatches=3, zero=zero, model=UNTIED, **float32, **rounded)
    exact = case(data=2, microbatches=3, zero=zero, model=UNTIED, **float32)
    expected = pool.run(train, 2, layout.tree, 1)
    unrounded = pool.run(train, 2, exact.tree, 1)
    results = pool.run(train_with_copied_reductions, 2, layout.tree, 1)
    assert all(count > 0 for _, count in results)
    error_of_collectives = compare_gradients(unrounded, expected)
    error_of_copies = compare_gradients(unrounded, [report for report, _ in results])
    assert error_of_collectives > 1e-4
    assert 1.1 * error_of_collectives < error_of_copies < 1.7 * error_of_collectives  # by chance the root of 2


ROUNDED_LAYOUTS = {
    "ZeRO-2": case(data=2, microbatches=3, zero=2, model=UNTIED),
    "ZeRO-2, small buckets, pipeline": REDUCTION_LAYOUTS["ZeRO-2, small buckets, pipeline"],
    "ZeRO-3, tied": case(data=2, microbatches=3, zero=3),
    "ZeRO-3, chunks": CASES["two stages of five chunks"],
}


@contextmanager
def slots_in_float32() -> Iterator[None]:
    """Give blocks slots in float32 next to the rounded ones."""
    with mock.patch.object(engine_axes, "rounds_block_gradients", return_value=False):
        yield


@contextmanager
def unrounded_gemms() -> Iterator[None]:
    """Let GEMMs write their gradients in float32 where they can."""
    with mock.patch.object(Gemms, "can_round_wgrad", False):
        yield


@contextmanager
def rounded_afterwards() -> Iterator[None]:
    """Let GEMMs write their gradients to slots in float32."""
    with slots_in_float32(), unrounded_gemms():
        yield


def train_rounded(
    rank: int, world: int, tree: dict[str, Any], steps: int, change: Callable[[], AbstractContextManager[None]]
) -> tuple[RankReport, int]:
    """Train with the stand-in; return also how many elements of rounded slots were written afterwards."""
    element_count = 0

    def count(sent: torch.Tensor, grads: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        nonlocal element_count
        element_count += sum(stop - start for start, stop in ranges)
        write_rounded(sent, grads, ranges)

    with change(), mock.patch.object(copy_reduction, "_round", count):
        report, _ = train_with_copied_reductions(rank, world, tree, steps)
    return report, element_count


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("name", ROUNDED_LAYOUTS)
def test_gradients_that_gemms_round_have_the_bits_of_a_rounding_afterwards(name, graphs, pool):
    layout = ROUNDED_LAYOUTS[name]
    tree = {
        **layout.tree,
        "train": {**layout.tree["train"], "precision": "float32"},
        "parallel": {**layout.tree["parallel"], "reduce_dtype": "bfloat16"},
        "kernels": {"graphs": graphs},
    }
    direct = pool.run(train_rounded, layout.world, tree, STEPS, nullcontext)
    afterwards = pool.run(train_rounded, layout.world, tree, STEPS, rounded_afterwards)
    for (report, direct_count), (expected, count) in zip(direct, afterwards, strict=True):
        assert_same_bits(expected, report)
        assert direct_count < 0.6 * count
    if graphs == "on":
        return
    in_float32 = pool.run(train_rounded, layout.world, tree, STEPS, slots_in_float32)
    for (report, direct_count), (expected, count) in zip(direct, in_float32, strict=True):
        assert_same_bits(expected, report)
        assert direct_count < count  # the first micro-batch writes to the slots in float32


@pytest.mark.parametrize("microbatches", [1, 3])
def test_blocks_whose_gradients_are_not_rounded_by_one_gemm_are_named(microbatches, pool):
    """A layer that does not fit the slots of blocks is an error in the first step, not a lower precision."""
    layout = case(data=2, microbatches=microbatches, zero=2, model=UNTIED)
    tree = {
        **layout.tree,
        "train": {**layout.tree["train"], "precision": "float32"},
        "parallel": {**layout.tree["parallel"], "reduce_dtype": "bfloat16"},
    }
    reason = (
        r"layers\.1\.mlp\.in\.weight has a gradient that is not written by one GEMM; set --overlap\.reductions=coll"
    )
    with pytest.raises(AssertionError, match=reason):
        pool.run(train_rounded, layout.world, tree, 1, unrounded_gemms)


def find_wrong_sums(rank: int, world: int, tree: dict[str, Any], fault: float) -> bool:
    """Return whether the check of a step's reductions finds a wrong block; `fault` is added to one gradient."""
    tree = {**tree, "overlap": {**tree["overlap"], "gathers": "collectives", "reductions": "copies"}}

    def make(axis: Axis, peer_memory_bytes: int, **options: Any) -> GlooExchange:
        return GlooExchange(axis, peer_memory_bytes)

    with mock.patch.object(symmetric, "make_exchange", make):
        engine = make_engine(rank, world, tree)
    report = RankReport()
    run_step(engine, 1, report)
    check = ReductionCheck(engine.data_parallel, engine.layout.microbatches, torch.bfloat16)
    check.begin()
    run_step(engine, 2, report)
    check.end()
    slots = engine.data_parallel.gradient_slots
    assert slots is not None
    slots.buckets[0][1]._shard_grads[0] += fault
    return bool(check.find_wrong_blocks().any())


@pytest.mark.parametrize("zero", [2, 3])
def test_the_check_of_reductions_reads_gradients_in_rounded_slots(zero, pool):
    layout = case(data=2, microbatches=2, zero=zero, model=UNTIED)
    tree = {
        **layout.tree,
        "train": {**layout.tree["train"], "precision": "float32"},
        "parallel": {**layout.tree["parallel"], "reduce_dtype": "bfloat16"},
    }
    assert pool.run(find_wrong_sums, 2, tree, 0.0) == [False, False]
    assert pool.run(find_wrong_sums, 2, tree, 1.0) == [True, True]


def compare_gradients(expected: list[RankReport], reports: list[RankReport]) -> float:
    """Return the relative 2-norm of the difference of the first step's gradients, which lie on the same ranks."""
    difference = total = 0.0
    for first, second in zip(expected, reports, strict=True):
        for expected_box, box in zip(first.gradients[0], second.gradients[0], strict=True):
            assert expected_box[:3] == box[:3]
            difference += float(np.square(box.values - expected_box.values).sum())
            total += float(np.square(expected_box.values).sum())
    return float((difference / total) ** 0.5)
