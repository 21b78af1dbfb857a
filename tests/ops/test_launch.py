"""Launches by key (ops/launch.py): never a kernel that Triton would not take, always what Triton would pass."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale import ops, torch_private
from megascale.ops import launch
from tests.ops.every_kernel import CASES
from tests.ops.offline import _Hopper, compile_for_hopper

DEVICE = -1  # what a tensor on the CPU calls its own


@triton.jit(do_not_specialize=["draw"])
def kernel(x_ptr, y_ptr, size, draw, factor, flag, WIDE: tl.constexpr, BLOCK: tl.constexpr = 4):
    """Never compiled."""


@triton.jit
def declared(x_ptr, size: tl.int32):
    """As above."""


class Compiled:
    """Return value of Triton's `run`, with the members that launches use."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *inputs: Any) -> None:
        self.launches.append(inputs)


class Triton:
    """Replacement of JITFunction.run: it records its arguments and returns the same `Compiled` for all."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.compiled: Any = Compiled()

    def __call__(self, function: Any, *arguments: Any, grid: Any, warmup: bool, **meta: Any) -> Any:
        assert not warmup
        self.asked.append((function, arguments, grid, meta))
        return self.compiled


@contextmanager
def by_key(*functions: Any) -> Iterator[Triton]:
    """Within, `functions` are launched by key, as on a GPU whose number is DEVICE."""
    requested = Triton()
    with (
        mock.patch.dict(vars(torch_private), current_device=lambda: DEVICE, current_raw_stream=lambda device: "stream"),
        mock.patch.object(JITFunction, "run", lambda self, *a, **k: requested(self, *a, **k)),
    ):
        for function in functions:
            launch.convert_to_kernel(function)
        try:
            yield requested
        finally:
            for function in functions:
                function.__class__ = JITFunction


def has_descriptor(arguments: tuple[Any, ...]) -> bool:
    """Return whether Triton launches these arguments itself: a tensor descriptor is encoded at each launch."""
    return any(isinstance(argument, TensorDescriptor) for argument in arguments)


def binder(function: Any) -> Any:
    """Return the function that binds and specialises arguments in Triton's own launch, for an H200."""
    return create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """One that begins `offset` elements after an address that is a multiple of 16."""
    return torch.zeros(64, dtype=dtype)[offset:]


TENSORS = [tensor(dtype, offset) for dtype in (torch.float32, torch.bfloat16, torch.uint8) for offset in (0, 1, 4, 8)]
# In the place of each other everywhere: what Python takes for equal, Triton need not.
NUMBERS = [
    0,
    1,
    2,
    15,
    16,
    17,
    32,
    2**31 - 1,
    2**31,
    2**31 + 16,
    -1,
    -16,
    -(2**31),
    2**62,
    2**63,
    True,
    False,
    1.0,
    0.5,
]
ANY = TENSORS + [torch.nn.Parameter(TENSORS[0]), None] + NUMBERS
PLAIN = (TENSORS[0], TENSORS[4], 3, 5, 0.5, True)
META = [
    {"WIDE": wide, **block, **warps}
    for wide in (0, 1, 2, True, False, 1.0, 0.0)
    for block in ({}, {"BLOCK": 1}, {"BLOCK": 4}, {"BLOCK": True}, {"BLOCK": 4.0})
    for warps in ({}, {"num_warps": 1}, {"num_warps": 4})
]


def launches() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield launches that differ from a plain launch in one argument, in two tensors, or in a keyword."""
    for location in range(len(PLAIN)):
        for value in ANY:
            yield PLAIN[:location] + (value,) + PLAIN[location + 1 :], {"WIDE": 1}
    for x in ANY:
        for y in ANY:
            yield (x, y) + PLAIN[2:], {"WIDE": 1}
    for meta in META:
        yield PLAIN, meta
    for wide in NUMBERS:
        yield PLAIN + (wide,), {}
        yield PLAIN + (1, wide), {}


def key_of(arguments: tuple[Any, ...], meta: dict[str, Any], device: int = DEVICE) -> Any:
    """Return the key of such a launch: types of the positional arguments, and the key of their form."""
    keys, types = [], tuple(map(type, arguments))
    with mock.patch.dict(vars(torch_private), current_device=lambda: device, current_raw_stream=None):
        form = launch.make_launcher(kernel.params, types, {}, lambda key, *_: keys.append(key))
    form((1,), arguments, meta)
    return types, *keys


def test_launches_of_one_key_are_one_kernel_to_triton():
    bind, theirs = binder(kernel), {}
    for arguments, meta in launches():
        key = key_of(arguments, meta)
        _, specialisation, options = bind(*arguments, **meta)
        report = repr((specialisation, options))
        assert theirs.setdefault(key, report) == report, (arguments, meta)
    assert len(set(theirs.values())) > 100


def test_what_is_not_specialised_on_shares_a_key():
    """Else each step would find nothing: random words, learning rates, and other tensors of the same alignment."""
    single = key_of((TENSORS[0], TENSORS[4], 7, 123456789, 0.1, True), {"WIDE": 1})
    assert single == key_of((TENSORS[0].clone(), TENSORS[4].clone(), 7, 987654321, 0.2, True), {"WIDE": 1})
    assert single != key_of((TENSORS[0], TENSORS[4], 7, 123456789, 0.1, True), {"WIDE": 1}, 1)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_compiled_kernel_gets_what_triton_would_pass(data):
    """The second launch is not Triton's, and has the same grid and arguments in the same order."""
    x, y = data.draw(st.sampled_from(TENSORS)), data.draw(st.sampled_from([None] + TENSORS))
    positional = data.draw(st.integers(6, 8))
    arguments = (x, y, data.draw(st.sampled_from([1, 16, 2**40])), 5, 0.5, True, 3, 16)[:positional]
    meta = {"WIDE": 3, "BLOCK": 16}
    meta = {name: meta[name] for name in list(meta)[positional - 6 :]} | {"num_warps": 2}
    grid = data.draw(st.sampled_from([(3,), (3, 2), (3, 2, 5)]))
    with by_key(kernel) as requested:
        kernel[grid](*arguments, **meta)
        assert len(requested.asked) == 1
        kernel[grid](*arguments, **meta)
    assert len(requested.asked) == 1
    bound, _, _ = binder(kernel)(*arguments, **meta)
    expected = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in bound.values()]
    x, y, z = (*grid, 1, 1)[:3]
    assert requested.compiled.launches == [
        (x, y, z, "stream", "function", "metadata", None, None, None) + tuple(expected)
    ]


def test_what_cannot_be_keyed_goes_tritons_way_each_time(monkeypatch):
    x, flat = TENSORS[0], (4,)
    with by_key(kernel, declared) as requested:
        for _ in range(2):
            declared[flat](x, 3)  # a type that is declared
            kernel[flat](x, None, 3, 5, 0.5, flag=True, WIDE=1)  # a value by name
            kernel[flat](x, None, torch.tensor(3).numpy(), 5, 0.5, True, WIDE=1)  # no integer of Python's
        assert len(requested.asked) == 6
        report = (x, None, 3, 5, 0.5, True)
        monkeypatch.setattr(requested, "compiled", None)  # a hook took it
        kernel[flat](*report, WIDE=1)
        kernel[flat](*report, WIDE=1)
        assert len(requested.asked) == 8
        monkeypatch.setattr(requested, "compiled", Compiled())
        kernel[flat](*report, WIDE=1)
        kernel[flat](*report, WIDE=1)
        assert len(requested.asked) == 9
        # A listener receives each launch.
        hook = print
        knobs.runtime.launch_enter_hook.add(hook)
        try:
            kernel[flat](*report, WIDE=1)
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        assert len(requested.asked) == 10


def test_tensors_elsewhere_are_triton_s_to_refuse():
    """An address of another device, or of the host, is not passed on as if it were this one's."""
    with by_key(kernel) as requested, mock.patch.dict(vars(torch_private), current_device=lambda: 0):
        for _ in range(2):
            kernel[(1,)](TENSORS[0], None, 3, 5, 0.5, True, WIDE=1)
    assert len(requested.asked) == 2


def kernels() -> list[Any]:
    """All of ops/."""
    modules = [importlib.import_module(match.name) for match in pkgutil.walk_packages(ops.__path__, "megascale.ops.")
               if "attention_" not in match.name]  # fmt: skip
    return list({id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}.values())


@pytest.mark.parametrize("name", CASES)
def test_every_operator_is_launched_by_key_the_second_time(name):
    """And passes what Triton would: each kernel's arguments can be keyed, and do not change from call to call."""
    with compile_for_hopper(by_key=True), by_key(*kernels()) as requested:
        CASES[name]()
        first = list(requested.asked)
        assert first
        before = len(requested.compiled.launches)
        CASES[name]()
        again = [
            function for function, arguments, _, _ in requested.asked[len(first) :] if not has_descriptor(arguments)
        ]
        assert not again, "a launch that was the same goes Triton's way again"
        repeated = requested.compiled.launches[before:]
    first = [request for request in first if not has_descriptor(request[1])]
    assert len(repeated) >= len(first)
    for function, arguments, grid, meta in first:
        bound, _, _ = binder(function)(*arguments, **meta)
        plain = [None if isinstance(value, torch.Tensor) else value for value in bound.values()]
        assert any(
            launched[:3] == (*grid, 1, 1)[:3]
            and len(launched) == 9 + len(plain)
            and all(a == b or b is None for a, b in zip(launched[9:], plain, strict=True))
            for launched in repeated
        ), function


class Launcher(CudaLauncher):
    """Triton's own way from `run` to its launch in C, which is listened to."""

    def __init__(self, launch: Any, /, **peers: Any) -> None:
        scratch = {f"{kind}_scratch_{subject}": 0 for kind in ("global", "profile") for subject in ("size", "align")}
        vars(self).update(scratch, launch=launch, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True)
        vars(self).update({"gsan_enabled": False, "arg_annotations": "annotations", "kernel_signature": b"signature"})
        vars(self).update(peers)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("peers", [{}, {"gsan_enabled": True}, {"launch": 1}])
def test_the_launch_in_c_gets_what_triton_s_launcher_passes_on(monkeypatch, count, peers):
    """And is not gone straight to where each launch needs something else."""
    received: list[tuple[Any, ...]] = []
    compiled, report = Compiled(), tuple(range(100, 100 + count))
    compiled.run = launcher = Launcher(lambda *passed: received.append(passed), **peers)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Hopper())
    monkeypatch.setattr(launch, "DIRECT_LAUNCHES", True)
    run, between, packed = launch.find_direct_call(compiled, count)
    assert (run is launcher) == bool(peers)
    if peers:
        assert between == ("function", "metadata", None, None, None)
        return
    assert not received
    launcher(1, 2, 3, "stream", "function", "metadata", None, None, None, *report)
    run(1, 2, 3, "stream", *between, *([report] if packed else report))
    assert len(received) == 2
    assert received[0] == received[1]


def test_a_kernel_that_needs_scratch_memory_is_launched_by_triton_s_launcher(monkeypatch):
    monkeypatch.setattr(launch, "DIRECT_LAUNCHES", True)
    compiled = Compiled()
    compiled.run = launcher = Launcher(print, global_scratch_size=128)
    assert launch.find_direct_call(compiled, 3)[0] is launcher


def test_what_stands_in_the_way_is_said(monkeypatch):
    assert "CUDA" in launch.describe() or torch.version.cuda
    monkeypatch.setattr(triton, "__version__", "3.99.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "3.99.1" in launch.describe()
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert launch.describe() == "by key, bypassing Triton's launcher"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in launch.describe()


def test_what_a_process_works_out_before_its_first_kernel_can_be_had_before_it_is_forked(monkeypatch):
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    monkeypatch.setattr(launch, "_explain_unsupported", lambda: "no device")
    launch.warm_up_forks()
    assert not triton_key.cache_info().currsize
    monkeypatch.setattr(launch, "_explain_unsupported", lambda: "")
    launch.warm_up_forks()
    triton_key()
    assert (triton_key.cache_info().misses, triton_key.cache_info().hits) == (1, 1)
