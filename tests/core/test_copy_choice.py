"""Copy engines or collectives for the units of ZeRO-2 and 3, by the settings."""

from __future__ import annotations

import pytest

from megascale import config
from megascale.core.copy_choice import explain_collective_gathers, explain_collective_reductions
from megascale.core.grid import Grid
from megascale.core.layout import lay_out


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
