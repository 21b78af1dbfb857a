"""`megascale bench kernels --tiny` on a machine without a GPU: the references run, and no row is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from megascale.bench.kernels import main
from megascale.ops import dispatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels")
@pytest.mark.skipif(dispatch.IS_INTERPRETED, reason="tests/ops/fused_bench.py runs the kernels")
def test_tiny_shapes_run_without_a_gpu(tmp_path, capsys):
    main(tmp_path / "kernels.json", tiny=True, compile_until=0.0, only="")
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [row for row in result["rows"] if row["error"]] == []
    assert any(row["op"].startswith("grouped tiny: dw") for row in result["rows"])
    assert any(row["op"].startswith("grouped tiny: dx, 128 x 256 x 128") for row in result["rows"])
    assert result["active"]["grouped GEMM in float8"] == "reference (cpu tensors)"
    assert result["active"]["grouped GEMM"] == "reference (cpu tensors)"
    assert "copy" in capsys.readouterr().out
