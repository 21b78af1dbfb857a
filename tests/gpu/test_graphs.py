"""Selection of the cases of `tests/gpu/graphs.py`, which runs on GPUs."""

from __future__ import annotations

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
