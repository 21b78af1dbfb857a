"""Launches of Triton kernels that were launched alike before, without what Triton does anew at each of them.

Triton's `kernel[grid](...)` binds the arguments, finds out what they specialise the kernel on, makes a string of that
and asks for hooks, debug flags, device and stream: several times what handing a kernel to CUDA takes, and more than
many of ours run for. A `Kernel` goes that way once for each key and then calls the compiled kernel itself. Its key is
finer than Triton's: the integers themselves where Triton asks whether they are 1 or divisible by 16, the types of all
arguments, dtype, device and alignment of tensors, everything in `meta` (constants, warps), and the device.

No other file uses what Triton calls private; TESTED are the releases whose protocol of launches has been read:
`JITFunction.run` returns the compiled kernel, whose `run(grid x, y, z, stream, function, packed metadata, launch
metadata, two hooks, all arguments)` takes pointers as integers. Elsewhere launches go Triton's way, and `describe`
says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private

try:
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction
except ImportError:  # a CPU-only installation, or a Triton from before the releases that are tested
    knobs, JITFunction = None, object

TESTED = ((3, 6), (3, 9))  # first and last
MOST = 4096  # keys a kernel keeps: lengths of prompts are endless
_ONES = ((), (1, 1), (1,), ())


def describe() -> str:
    """How kernels are launched, for people."""
    why = _why_not()
    return f"each by Triton ({why})" if why else "by key, of what Triton compiled"


def _why_not() -> str:
    """Why this process leaves launches to Triton; "" if it does not."""
    if knobs is None:
        return "Triton is not installed, or too old"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "its interpreter runs them"
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    return _unknown()


def _unknown() -> str:
    """What of this Triton is not as it was read; "" if nothing."""
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not TESTED[0] <= release <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        return f"Triton {triton.__version__} is not among {first} to {last}, whose launches are known"
    for owner, name in (
        (JITFunction, "run"),
        (knobs.runtime, "launch_enter_hook"),
        (knobs.runtime, "launch_exit_hook"),
    ):
        if not hasattr(owner, name):
            return f"Triton {triton.__version__} has no {name}"
    return ""


def quick(function: Any) -> Any:
    """A function that `triton.jit` made, launched by key where that can be."""
    if type(function) is JITFunction and not _why_not():
        make_quick(function)
    return function


def make_quick(function: Any) -> None:
    """Let `function` be a Kernel; to Triton it stays what it is, and other kernels may call it."""
    function.__class__ = Kernel
    function.splits, function.known = {}, {}


# (positional arguments, meta, device) -> (key, arguments with addresses for tensors)
Split = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[tuple[Any, ...], tuple[Any, ...]]]


def make_split(parameters: Sequence[Any], types: tuple[type, ...]) -> Split:
    """How launches whose positional arguments have these types are keyed, as code without a loop: it runs at each.

    Integers, booleans and constants are keyed as they are (integers that are not specialised on by whether they fit 32
    bits), tensors by dtype, device and alignment, floats and None by type alone. Raises TypeError for anything else.
    """
    tensors: list[int] = []
    key = ["device", *(f"t{i}" for i in range(len(types)))]
    given = [f"a{i}" for i in range(len(types))]
    for i, (parameter, kind) in enumerate(zip(parameters, types, strict=False)):
        if parameter.is_constexpr or kind is bool:
            key.append(f"a{i}")
        elif parameter.annotation_type:
            raise TypeError(parameter.name)  # a type that was declared is not inferred
        elif issubclass(kind, Tensor):
            tensors.append(i)
            key += [f"a{i}.dtype", f"a{i}.get_device()"]
            given[i] = f"p{i}"
        elif kind is int:
            key.append(f"(None if a{i}.bit_length() < 32 else a{i})" if parameter.do_not_specialize else f"a{i}")
        elif kind is not float and kind is not type(None):
            raise TypeError(parameter.name)
    lines = [f"{', '.join(f'a{i}' for i in range(len(types)))}, = arguments"] if types else []
    lines += [f"p{i} = a{i}.data_ptr()" for i in tensors]
    # Most often all are aligned; else it counts which are not.
    away = [f"({' | '.join(f'p{i}' for i in tensors)}) & 15 and ({', '.join(f'p{i} & 15 == 0' for i in tensors)},)"]
    key += [*(away if tensors else []), "*meta", "*meta.values()", "*map(type, meta.values())"]
    lines.append(f"return ({', '.join(key)},), ({''.join(f'{one}, ' for one in given)})")
    names: dict[str, Any] = {f"t{i}": kind for i, kind in enumerate(types)}
    exec("def split(arguments, meta, device):\n    " + "\n    ".join(lines), names)
    made: Split = names["split"]
    return made


class Kernel(JITFunction):  # type: ignore[misc, valid-type]
    """A kernel of Triton, launched by key.

    Attributes:
        splits: by types of the positional arguments; None for those that go Triton's way.
        known: by key: the compiled kernel's `run`, `function` and `packed_metadata`, and the arguments behind the
            positional ones.
    """

    splits: dict[tuple[type, ...], Split | None]
    known: dict[Any, tuple[Any, Any, Any, tuple[Any, ...]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What launches over `grid`."""
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """As Triton's."""
        split = self.split(tuple(map(type, arguments)))
        if split is None or self.pre_run_hooks or _watched():
            self.run(*arguments, grid=grid, warmup=False, **meta)
            return
        device = torch_private.current_device()
        key, given = split(arguments, meta, device)
        found = self.known.get(key)
        if found is None:
            compiled = self.run(*arguments, grid=grid, warmup=False, **meta)
            self._keep(key, compiled, arguments, meta, device)
            return
        run, function, metadata, rest = found
        stream = torch_private.current_raw_stream(device)
        run(*grid, *_ONES[len(grid)], stream, function, metadata, None, None, None, *given, *rest)

    def split(self, types: tuple[type, ...]) -> Split | None:
        """How launches with such arguments are keyed; None if they are not."""
        try:
            return self.splits[types]
        except KeyError:
            pass
        try:
            self.splits[types] = make_split(self.params, types)
        except TypeError:
            self.splits[types] = None
        return self.splits[types]

    def _keep(self, key: Any, compiled: Any, arguments: tuple[Any, ...], meta: dict[str, Any], device: int) -> None:
        """Remember a kernel that has been launched, if all of it is as the next launch takes it."""
        rest: list[Any] = []
        for parameter in self.params[len(arguments) :]:
            if not parameter.is_constexpr:
                return  # a value that no key has
            rest.append(meta.get(parameter.name, parameter.default))
        parts = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
        if None in parts or any(isinstance(a, Tensor) and a.get_device() != device for a in arguments):
            return
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[key] = parts[0], parts[1], parts[2], tuple(rest)


def _watched() -> bool:
    """Whether somebody wants to hear of each launch: a profiler of Triton's."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
