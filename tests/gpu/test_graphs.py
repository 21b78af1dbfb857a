"""Selection of the cases of `tests/gpu/graphs.py`, which runs on GPUs."""

from __future__ import annotations

from megascale.config import from_tree
from megascale.core.layout import lay_out
from tests.gpu import graphs


def test_cases_with_another_number_of_chunks_need_a_call_of_their_own():
    names, omitted = graphs.select_cases([], ["pipeline", "data"])
    assert names[0] == "serial"
    assert "float8, gathered" in names
    assert omitted == [graphs.TWO_CHUNKS]
    assert graphs.select_cases([graphs.TWO_CHUNKS], ["pipeline", "data"]) == ([graphs.TWO_CHUNKS], [])


def test_one_process_runs_cases_of_all_numbers_of_chunks():
    names, omitted = graphs.select_cases([], [])
    assert graphs.TWO_CHUNKS in names
    assert not omitted


def test_data_parallelism_has_cases_in_which_each_micro_batch_is_the_first_or_the_last():
    names, omitted = graphs.select_cases([], ["data"])
    assert not omitted
    assert {graphs.ONE_MICROBATCH, graphs.TWO_MICROBATCHES, "float8, gathered"} <= set(names)
    for name, microbatches in graphs.MICROBATCHES.items():
        layouts = [(["data"], 4), (["pipeline", "data"], 4), (["data"], 2)]
        for axes, world in layouts:
            global_batch = graphs.find_global_batch(name, world, axes)
            layout = lay_out(from_tree(graphs.tree_of(graphs.CASES[name], "on", axes, global_batch)), world)
            assert layout.microbatches == microbatches
        assert name not in graphs.select_cases([], [])[0]


def test_a_block_has_several_buckets_with_data_parallelism():
    """Captures are cut between buckets, and a bucket of the usual size holds the complete model."""
    layout = lay_out(from_tree(graphs.tree_of(graphs.CASES["serial"], "on", ["data"])), 2)
    model = layout.config.model
    assert layout.bucket_elements is not None
    assert 12 * model.hidden**2 >= 3 * layout.bucket_elements
