"""Copy engines or collectives for the units of ZeRO-2 and 3, by the settings."""

from __future__ import annotations

import pytest

from megascale import config
from megascale.core.copy_choice import (
    FLOAT8_SLOTS,
    SHARD_SWITCH,
    explain_collective_gathers,
    explain_collective_reductions,
    explain_copied_shards,
)
from megascale.core.grid import Grid
from megascale.core.layout import lay_out
from megascale.core.mapped_layout import GPU_PAGE_BYTES, count_mapped_bytes
from megascale.core.parameter_counts import count_stage_parameters, count_stage_units
from megascale.core.rank_memory import estimate_rank_memory


def explain(world: int, *settings: str) -> tuple[str, str]:
    """Return why collectives gather, and why they reduce."""
    resolved = config.load(None, ["--model.preset=llama-8b", "--train.micro_batch=1", *settings])
    grid = Grid.from_config(resolved.parallel, world)
    return explain_collective_gathers(resolved, grid), explain_collective_reductions(resolved, grid)


def test_zero_3_gathers_and_reduces_by_copies_within_a_host():
    assert explain(4, "--parallel.zero=3") == ("", "")
    assert explain(16, "--parallel.zero=3", "--parallel.data=8", "--parallel.replicate=2") == ("", "")
    assert explain(16, "--parallel.zero=3", "--parallel.tensor=2", "--parallel.pipeline=2") == ("", "")


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (16, ["--parallel.zero=3"]),
        (16, ["--parallel.zero=3", "--parallel.tensor=4"]),
        (6, ["--parallel.zero=3", "--parallel.data=2", "--parallel.pipeline=3", "--parallel.gpus_per_host=3"]),
    ],
)
def test_several_hosts_use_collectives(world, settings):
    for reason in explain(world, *settings):
        assert "on several hosts of" in reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["--parallel.zero=2"], "with parallel.zero=3, not 2"),
        (["--parallel.zero=3", "--parallel.reduce_dtype=bfloat16"], "parallel.reduce_dtype=bfloat16"),
        (["--parallel.zero=3", "--model.sequence_length=2048"], "fewer than 4,096 tokens"),
        (["--parallel.zero=3", "--model.sequence_length=8192", "--parallel.context=4"], "fewer than 4,096 tokens"),
        (["--parallel.zero=3", "--overlap.reductions=collectives"], "overlap.reductions=collectives"),
    ],
)
def test_reductions_by_collectives_have_a_reason(settings, reason):
    assert reason in explain(4, *settings)[1]
    assert explain(4, *settings)[0] == ("" if "--parallel.zero=3" in settings else "parallel.zero=2 gathers no units")


def test_requested_copies_are_not_doubted():
    settings = ["--parallel.zero=3", "--model.sequence_length=2048", "--overlap.gathers=copies"]
    assert explain(16, *settings, "--overlap.reductions=copies") == ("", "")
    assert explain(1, *settings, "--overlap.reductions=copies") == ("there is one data-parallel rank",) * 2


def test_the_planned_memory_has_the_staging_of_the_chosen_copies():
    """Reductions by copies stage two pieces of 32 MiB on GPUs, with two to four ranks."""
    gradients = {}
    for setting in ("auto", "copies", "collectives"):
        settings = ["--model.preset=llama-8b", "--parallel.zero=3", f"--overlap.reductions={setting}"]
        layout = lay_out(config.load(None, [*settings, "--train.micro_batch=1"]), 4)
        gradients[setting] = layout.stage_memory(0)[0].gradients
    assert gradients["auto"] == gradients["copies"]
    assert gradients["auto"] - gradients["collectives"] == pytest.approx(64 << 20, rel=1e-4)


@pytest.mark.parametrize(
    ("world", "settings", "gathers_in_float8", "reason"),
    [
        (4, ["--parallel.zero=3"], False, ""),
        (4, ["--parallel.zero=2"], False, "parallel.zero=2 gathers no units"),
        (4, ["--parallel.zero=3", "--overlap.gathers=collectives"], False, "overlap.gathers=collectives"),
        (16, ["--parallel.zero=3"], False, "its ranks are on several hosts of 8 GPUs"),
        (4, ["--parallel.zero=3"], True, FLOAT8_SLOTS),
    ],
)
def test_own_shards_are_mapped_where_copies_gather_in_the_weights_type(world, settings, gathers_in_float8, reason):
    resolved = config.load(None, ["--model.preset=llama-8b", "--train.micro_batch=1", *settings])
    grid = Grid.from_config(resolved.parallel, world)
    assert explain_copied_shards(resolved, grid, gathers_in_float8) == reason


# GPT 13B's blocks have 300 x 2 MiB. A shard on four ranks has 75 pages, and its block one more for torch's signals.
@pytest.mark.parametrize(
    ("kept", "has_gpu", "switch", "saved_pages"),
    [
        (0, True, "1", 2 * 75 - 20),
        (5, True, "1", 7 * 75 - 20),
        (0, False, "1", 0),
        (0, True, "0", 0),
    ],
)
def test_slots_with_own_shards_are_planned_without_memory_for_them(monkeypatch, kept, has_gpu, switch, saved_pages):
    """Each slot saves a rank's share, and each shard needs a page more."""
    settings = [
        "--model.preset=gpt-13b",
        "--model.layers=20",
        "--model.vocab_size=50304",
        "--train.micro_batch=1",
        "--train.global_batch=32",
        "--train.precision=bfloat16",
        "--parallel.zero=3",
        f"--parallel.zero3_keep_layers={kept}",
    ]
    layout = lay_out(config.load(None, settings), 4)

    def estimate_weights(switch: str) -> int:
        monkeypatch.setenv(SHARD_SWITCH, switch)
        memory, _ = estimate_rank_memory(layout.config, layout.grid, layout.schedule(), 0, has_gpu=has_gpu)
        return memory.weights

    saved_bytes = estimate_weights("0") - estimate_weights(switch)
    assert saved_bytes == saved_pages * GPU_PAGE_BYTES


def test_slots_of_chunks_are_planned_as_the_trainer_assigns_them():
    """Chunks differ in size, so that another assignment needs up to a tenth more memory, or less."""
    settings = [
        "--model.preset=gpt-13b",
        "--model.layers=40",
        "--model.vocab_size=50304",
        "--model.tied_embeddings=false",
        "--train.micro_batch=1",
        "--train.global_batch=32",
        "--train.precision=bfloat16",
        "--parallel.zero=3",
        "--parallel.data=4",
        "--parallel.pipeline=2",
        "--parallel.virtual_stages=4",
        "--parallel.layer_split=[5,5,5,5,5,5.5,5.5,4]",
    ]
    layout = lay_out(config.load(None, settings), 8)
    parallel = layout.config.parallel
    units = count_stage_units(layout.config.model, parallel, 0)
    resident = count_stage_parameters(layout.config.model, parallel, 0) - units.sharded
    chunk_slots = layout.chunk_slots(0)
    slot_bytes = count_mapped_bytes(units.list_slot_units(0, itemsize=2, chunk_slots=chunk_slots), 4)
    round_robin_bytes = count_mapped_bytes(units.list_slot_units(0, itemsize=2, chunk_slots=(0, 1, 2, 0)), 4)
    assert slot_bytes > round_robin_bytes
    memory, _ = layout.stage_memory(0)
    assert memory.weights == 2 * resident + slot_bytes
