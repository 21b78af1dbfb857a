"""Launches by key (ops/launch.py) beside Triton's own, on a real GPU: results bit for bit, and host time of each.

    PYTHONPATH=src:. python tests/gpu/launches.py --out launches.json

Every kernel of ops/ as its operators launch it (tests/ops/every_kernel.py), on random numbers: once each way from the
same memory, all of which must then hold the same bits. Then the same launch REPEATS times each way, in turn, without
waiting for the device: microseconds of host a launch, the best of ROUNDS; beside them those of the call into C alone.
It ends with 1 if any bit differs, if a kernel is not launched by key or writes nothing, or if launches by key are not
faster in sum.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from megascale import torch_private
from megascale.ops import launch
from tests.gpu.command_line import make_parser, require_gpu
from tests.ops.every_kernel import CASES

DEVICE = "cuda"
TIMES = ("triton_us", "by_key_us", "in_c_us")
by_key = launch.Kernel.launch
REPEATS, ROUNDS = 200, 5  # CUDA takes about a thousand launches before it makes the host wait


def fill(tensors: list[Tensor]) -> None:
    """Replace plain floats by random numbers. Integers are positions and keys and stay."""
    for tensor in tensors:
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            tensor.data.normal_()  # which autograd does not take for a change of what it saved


def bits(tensors: list[Tensor]) -> list[Tensor]:
    """Return the bytes of tensors, so that NaN is compared, too."""
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in tensors]


def restore(tensors: list[Tensor], stored: list[Tensor]) -> None:
    for tensor, retained in zip(tensors, stored, strict=True):
        tensor.data.copy_(retained)


def microseconds(call: Callable[[], Any]) -> float:
    """Return the host's microseconds for one of REPEATS calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    used = time.perf_counter() - begin
    torch.cuda.synchronize()
    return used / REPEATS * 1e6


def in_c(kernel: Any, grid: Any, arguments: tuple[Any, ...], ours: Callable[[], None]) -> Callable[[], None]:
    """Return the time of the final C call with known arguments, which both ways need."""
    calls = kernel.launchers[tuple(map(type, arguments))].__globals__["calls"]
    earlier_calls = dict(calls)
    calls.clear()
    ours()
    ((run, between, constants, packed),) = calls.values()
    calls.update(earlier_calls)
    inputs = tuple([a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]) + tuple(constants)
    stream = torch_private.current_raw_stream(torch_private.current_device())
    passed = (*grid, *(1,) * (3 - len(grid)), stream, *between, *((inputs,) if packed else inputs))
    return lambda: run(*passed)


class Compared:
    """Every launch of a case, both ways."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.recorded: set[Any] = set()
        self.timed: list[tuple[dict[str, Any], Callable[[], None], Callable[[], None], Callable[[], None]]] = []
        self.case = ""

    def launch(self, kernel: Any, grid: Any, *arguments: Any, **meta: Any) -> None:
        """Replace Kernel.launch: compare, and launch the requested kernel on the same input."""
        itself = kernel.fn.__name__
        tensors = list({id(a): a for a in arguments if isinstance(a, Tensor)}.values())
        inputs = [tensor.detach().clone() for tensor in tensors]
        fill(tensors)
        before = [tensor.detach().clone() for tensor in tensors]

        def triton_s() -> None:
            JITFunction.run(kernel, *arguments, grid=grid, warmup=False, **meta)

        def ours() -> None:
            by_key(kernel, grid, *arguments, **meta)

        ours()  # the first of a key is Triton's
        restore(tensors, before)
        requested = 0
        run = JITFunction.run

        def counted(self: Any, *a: Any, **k: Any) -> Any:
            nonlocal requested
            requested += 1
            return run(self, *a, **k)

        with mock.patch.object(JITFunction, "run", counted):
            ours()
        torch.cuda.synchronize()
        got = bits(tensors)
        restore(tensors, before)
        triton_s()
        torch.cuda.synchronize()
        expected = bits(tensors)
        equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        moved = any(not torch.equal(a, b) for a, b in zip(bits(before), expected, strict=True))
        row = {
            "case": self.case,
            "kernel": itself,
            "arguments": len(arguments),
            "equal": equal,
            "by_key": not requested,
        }
        row |= {"wrote": moved, "grid": list(grid)}
        if (itself, len(arguments), tuple(sorted(meta))) not in self.recorded:
            self.recorded.add((itself, len(arguments), tuple(sorted(meta))))
            self.timed.append((row, triton_s, ours, in_c(kernel, grid, arguments, ours)))
        self.rows.append(row)
        restore(tensors, inputs)
        triton_s()

    def time(self) -> None:
        """One launch of each kernel, both ways in turn; outside of any mode of torch, which each tensor would ask."""
        for row, triton_s, ours, in_c in self.timed:
            used = [(microseconds(triton_s), microseconds(ours), microseconds(in_c)) for _ in range(ROUNDS)]
            row |= {name: min(column) for name, column in zip(TIMES, zip(*used, strict=True), strict=True)}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("launches.json"), help="file for the results as JSON")
    out = parser.parse_args().out
    require_gpu()
    print(f"launches: {launch.describe()}")
    if launch._explain_unsupported():
        return 1
    compared = Compared()
    start_time = time.monotonic()  # kernels that no cache has are compiled, for minutes
    with (
        torch.device(DEVICE),
        mock.patch.object(launch.Kernel, "launch", lambda self, grid, *a, **k: compared.launch(self, grid, *a, **k)),
    ):
        for name, case in CASES.items():
            compared.case = name
            print(f"{time.monotonic() - start_time:6.1f} s  {name}", file=sys.stderr, flush=True)
            case()
    torch.cuda.synchronize()
    compared.time()
    rows = compared.rows
    timed = [row for row in rows if "triton_us" in row]
    print(f"{'kernel':28} {'case':52} {'Triton us':>10} {'by key us':>10} {'in C us':>10}")
    for row in timed:
        times = "".join(f" {row[name]:10.1f}" for name in TIMES)
        print(f"{row['kernel']:28} {row['case'][:52]:52}{times}")
    wrong = [row for row in rows if not row["equal"]]
    remaining = [row for row in rows if not row["by_key"]]
    idle = [row for row in rows if not row["wrote"]]
    for subject, match in (("other bits", wrong), ("not by key", remaining), ("wrote nothing", idle)):
        for row in match:
            print(f"! {subject}: {row['kernel']} in {row['case']}")
    theirs, ours, least = (sum(row[name] for row in timed) / len(timed) for name in TIMES)
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "kernels": len({row["kernel"] for row in rows}),
        "launches": len(rows),
        "other_bits": len(wrong),
        "not_by_key": len(remaining),
        "wrote_nothing": len(idle),
        "triton_us": theirs,
        "by_key_us": ours,
        "in_c_us": least,
    }
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    return int(bool(wrong or remaining or idle) or ours >= theirs)


if __name__ == "__main__":
    sys.exit(main())
