"""`python -m benchmarks observe --parts whatif`: a made-up trace beside a result that is right, and one that is not."""

from __future__ import annotations

import json

import pytest

from benchmarks.observe.whatif import lines, measure, missed
from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import write_trace
from tests.observe.analysis.recorded_jobs import Job


def test_what_is_off_by_more_than_a_hundredth_is_missed(tmp_path):
    job = Job(4, 1, 8, replicas=4, slow={(1, 1): 1.5})
    write_trace(job.trace, tmp_path / "trace-A.parquet")
    result = {
        "step_t_base": {"0": job.seconds}, "step_t_nodelay": {"0": job.seconds}, "step_t_noblk": {"0": job.ideal},
        "blocking_slowdown": job.seconds / job.ideal,
    }  # fmt: skip
    (tmp_path / "result-A.json").write_text(json.dumps(result))
    output = measure(tmp_path)
    assert missed(output) == []
    assert "what-if: A: " in lines(output)[0]
    assert missed([output[0] | {"seconds": 6.0}]) == ["A: 6.0 s, 5 wanted"]
    (tmp_path / "result-A.json").write_text(json.dumps(result | {"step_t_noblk": {"0": 1.02 * job.ideal}}))
    assert missed(measure(tmp_path))[0].startswith("A: ideal")
    (tmp_path / "result-A.json").write_text("{}")
    with pytest.raises(DataError, match="is not a result of StragglerAnalysis"):
        measure(tmp_path)
    (tmp_path / "result-A.json").unlink()
    with pytest.raises(DataError, match=r"holds no trace-NAME\.parquet"):
        measure(tmp_path)
