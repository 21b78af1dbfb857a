"""Tables of the simulator fit the terminal they are shown in."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megascale.simulate.render import print_waterfall


@pytest.mark.parametrize("width", [60, 72, 80, 100, 130])
@pytest.mark.parametrize("systems", [1, 2, 3, 4])
def test_a_waterfall_has_one_line_a_part_at_any_width(systems: int, width: int) -> None:
    parts = {"gemm": 1.864, "tensor": 0.224, "bubble": 0.066, "pipeline": -0.004}
    results: list[Any] = [
        SimpleNamespace(parts=parts, seconds=2.5, scenario=SimpleNamespace(label=f"megatron-core-h200-{i}"))
        for i in range(systems)
    ]
    report = io.StringIO()
    print_waterfall(results, Console(file=report, width=width))
    lines = report.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    body = lines[next(i for i, line in enumerate(lines) if "───" in line) + 1 :]
    assert [line.split("  ")[0].strip() for line in body if line.strip()] == [
        "GEMMs", "exposed tensor comm.", "exposed pipeline comm.", "pipeline bubble",
    ]  # fmt: skip
    assert body[0].count("1.864") == systems
