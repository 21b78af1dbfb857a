"""A step that is done again: the same bits or not, without and with kernels.deterministic, and what that costs.

    PYTHONPATH=src:. python tests/gpu/same_bits.py
    PYTHONPATH=src:. torchrun --nproc-per-node 2 tests/gpu/same_bits.py data

With several processes: in data, tensor or pipeline parallelism of all of them, as the argument says.

First, of one process, every available attention kernel, forward and backward 20 times from the same numbers. Then
a few steps of a small model twice from the same start: losses, gradient norms and weights. After each case a line says
what kernels.deterministic=auto decides. It ends with 1 if anything differs with kernels.deterministic=true, or with
auto where that is on, or if no attention kernel runs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from megascale import config as configuration
from megascale.bench.measured_steps import join_groups
from megascale.ops.attention import attention
from megascale.ops.attention_backends import BACKENDS
from megascale.ops.dispatch import Kernels
from megascale.rendezvous.groups import shutdown
from megascale.train.determinism_choice import ALL_KINDS
from tests.gpu.command_line import make_parser, require_gpu
from tests.gpu.small_steps import train

REPEATS = 20
STEPS = 4
TIMED = 10
S = 2048
B = 2
N = 16
D = 128
Case = dict[str, dict[str, Any]]
CASES: dict[str, Case] = {
    "serial": {},
    "parallel block": {"model": {"block": "parallel"}},
    "heads of 64": {"model": {"heads": 32}},
    "window of 512": {"model": {"window": 512}},
    "rotary, SwiGLU, 4 kv heads, untied": {
        "model": {
            "positions": "rotary",
            "activation": "swiglu",
            "norm": "rmsnorm",
            "kv_heads": 4,
            "tied_embeddings": False,
        }
    },
    "float8": {"train": {"linear_precision": "float8"}},
    "all recomputed": {"parallel": {"recompute": "full"}},
    "micro-batch 1, CUDA graphs": {"train": {"micro_batch": 1}, "kernels": {"graphs": "on"}},
    "dropout": {"model": {"dropout": 0.1}},
    "LAMB": {"optimizer": {"name": "lamb"}},
    "Muon": {"optimizer": {"name": "muon"}},
    "plain PyTorch operators": {"kernels": {"mode": "reference"}},
}


def tree_of(case: Case, deterministic: bool | str, axis: str = "") -> dict[str, Any]:
    """The configuration of a case; axis: which one several processes are laid along."""
    tree: dict[str, Any] = {
        "model": {"layers": 4, "hidden": N * D, "heads": N, "sequence_length": S, "vocab_size": 32000},
        "train": {"micro_batch": B, "global_batch": 8, "precision": "bfloat16"},
        "parallel": {"tensor": 2 if axis == "tensor" else 1, "pipeline": 2 if axis == "pipeline" else 1},
        "kernels": {"deterministic": deterministic},
        "lr": {"peak": 1e-3, "warmup_steps": 2},
    }
    for section, values in case.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def attend(name: str, window: int | None, deterministic: bool) -> tuple[str, float]:
    """Whether output and gradients of one kernel are the same bits each time (or why there are none), milliseconds."""
    draw = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(S, B, 3, N, D, generator=draw, device="cuda").to(torch.bfloat16).requires_grad_()
    upstream = torch.randn(S, B, N * D, generator=draw, device="cuda").to(torch.bfloat16)
    first: list[torch.Tensor] = []
    differ, began = 0, 0.0
    try:
        with Kernels(deterministic=deterministic).as_current():
            for number in range(REPEATS):
                if number == REPEATS // 2:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                out = attention(*qkv.unbind(2), window=window, backend=name)
                built = [out.detach()] + list(torch.autograd.grad(out, qkv, upstream))
                first = first or built
                differ += not all(map(torch.equal, built, first))
    except Exception as error:  # the others are still of interest
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}", 0.0
    torch.cuda.synchronize()
    return ("yes" if not differ else f"{differ} of {REPEATS} differ"), (time.perf_counter() - began) / (
        REPEATS // 2
    ) * 1e3


def kernels() -> int:
    """The table of attention kernels; how many are wrong, or 1 if none of them runs."""
    wrong = 0
    equal_kernels = 0
    print(f"{'attention, forward and backward':34} {'same bits':20} {'deterministic':20} ms (and comparing)")
    for window in (None, 512):
        for name in BACKENDS:
            usual, before = attend(name, window, False)
            report, after = attend(name, window, True)
            wrong += report.endswith("differ")
            equal_kernels += report == "yes"
            mask = "full" if window is None else f"window {window}"
            print(f"{name + ', ' + mask:34} {usual:20} {report:20} {before:.2f}, {after:.2f}", flush=True)
    if not equal_kernels:
        print("! no attention kernel has given equal bits: all of them differ or raise")
    return wrong + (equal_kernels == 0)


def main() -> int:
    """The tables; 1 if anything differs that must not."""
    parser = make_parser(__doc__)
    parser.add_argument("axis", nargs="?", default="", choices=("data", "tensor", "pipeline", ""))
    axis = parser.parse_args().axis
    require_gpu()
    location, groups = join_groups(configuration.from_tree(tree_of({}, False, axis)))
    wrong = 0
    if not location.rank:
        print(f"{location.world} x {torch.cuda.get_device_name()}, torch {torch.__version__} {axis}")
        wrong += kernels() if groups is None else 0
        print(f"{'steps':34} {'same bits':20} {'deterministic':20} {'auto':20} {'ms':22} attention")
    for name, case in CASES.items():
        output = []
        times = []
        names = []
        decision = ""
        for deterministic in (False, True, "auto"):
            try:
                tree = tree_of(case, deterministic, axis)
                first = train(tree, STEPS, TIMED, {}, location, groups)
                repeated = train(tree, STEPS, TIMED, first.attention, location, groups)
            except Exception as error:  # the others are still of interest
                output.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")
                wrong += 1
                continue
            is_on = deterministic is True or first.determinism.startswith("a repeated step")
            if deterministic == "auto":
                decision = first.determinism
            far = [i for i, (a, b) in enumerate(zip(first.bits, repeated.bits, strict=True)) if not torch.equal(a, b)]
            subject = ("loss", "gradient norm", "weights")[far[0] % 2 if far[0] < 2 * STEPS else 2] if far else ""
            output.append(f"no: {subject}, step {min(far[0] // 2 + 1, STEPS)}" if far else "yes")
            wrong += is_on and bool(far)
            times.append(f"{repeated.whole:.1f}")
            for kind, shapes in repeated.attention.items():
                if kind != ALL_KINDS:  # the entry of the order of sums
                    names += shapes.values()
        if not location.rank:
            print(
                f"{name:34} {' '.join(f'{x:20}' for x in output)} {', '.join(times):22} {', '.join(names)}", flush=True
            )
            print(f"    auto: {decision}", flush=True)
    if groups is not None:
        shutdown(groups)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
