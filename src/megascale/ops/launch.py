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

import copy
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
# Whether launches go round Triton's launcher too (`straight`); a way out for a Triton in which that goes wrong.
STRAIGHT = os.environ.get("MEGASCALE_STRAIGHT_LAUNCHES", "1") != "0"
MOST = 4096  # keys of launches of the same types: lengths of prompts are endless
_ONES = ((), (1, 1), (1,), ())


def describe() -> str:
    """How kernels are launched, for people."""
    why = _why_not()
    return (
        f"each by Triton ({why})"
        if why
        else f"by key, of what Triton compiled{', round its launcher' if STRAIGHT else ''}"
    )


def warm_up_forks() -> None:
    """Have Triton work out now what each process would before its first kernel, for processes that are forked from this
    one: the hash of all of its files, half a second and more."""
    if not _why_not():
        from triton.runtime.cache import triton_key

        triton_key()


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
        convert(function)
    return function


def convert(function: Any) -> None:
    """Let `function` be a Kernel; to Triton it stays what it is, and other kernels may call it."""
    function.__class__ = Kernel
    function.forms = {}


# What a key knows: a function, what it takes between the stream and the kernel's arguments, the arguments behind the
# positional ones, and whether it takes the kernel's arguments as one tuple.
Found = tuple[Any, tuple[Any, ...], tuple[Any, ...], bool]
# (grid, positional arguments, meta)
Form = Callable[[tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def make_launcher(
    parameters: Sequence[Any], types: tuple[type, ...], known: dict[Any, Found], first: Callable[..., None]
) -> Form:
    """How launches whose positional arguments have these types go, as code without a loop: it runs at each.

    Integers, booleans and constants are keyed as they are (integers that are not specialised on by whether they fit 32
    bits), tensors by dtype, device and alignment, floats and None by type alone. Raises TypeError for anything else.
    first(key, grid, arguments, meta, device) is called for a key that is not `known`.
    """
    tensors: list[int] = []
    key = ["device"]
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
    # Most often all are aligned; else it counts which are not.
    away = [f"({' | '.join(f'p{i}' for i in tensors)}) & 15 and ({', '.join(f'p{i} & 15 == 0' for i in tensors)},)"]
    key += [*(away if tensors else []), "*meta", "*meta.values()", "*map(type, meta.values())"]
    lines = [
        *([f"{', '.join(f'a{i}' for i in range(len(types)))}, = arguments"] if types else []),
        *(f"p{i} = a{i}.data_ptr()" for i in tensors),
        "device = current_device()",
        f"key = ({', '.join(key)},)",
        "found = known.get(key)",
        "if found is None:",
        "    return first(key, grid, arguments, meta, device)",
        "run, between, rest, packed = found",
        "if packed:",
        f"    run(*grid, *ones[len(grid)], stream(device), *between, ({''.join(f'{one}, ' for one in given)}*rest))",
        "else:",
        f"    run(*grid, *ones[len(grid)], stream(device), *between, {''.join(f'{one}, ' for one in given)}*rest)",
    ]
    names: dict[str, Any] = {
        "current_device": torch_private.current_device,
        "stream": torch_private.current_raw_stream,
        "known": known,
        "first": first,
        "ones": _ONES,
    }
    exec("def form(grid, arguments, meta):\n    " + "\n    ".join(lines), names)
    made: Form = names["form"]
    return made


def find_direct_call(compiled: Any, count: int) -> tuple[Any, tuple[Any, ...], bool] | None:
    """How a compiled kernel of `count` arguments is launched: a function, what it takes between stream and arguments,
    and whether it takes these as one tuple. None if this is no kernel that can be.

    `compiled.run` is a launcher that asks for scratch memory and goes on to `launch`, in C. What it would pass on is
    found out by asking it, with a `launch` that only listens; it is gone round where all of that but grid, stream and
    arguments is the same each time.
    """
    parts: list[Any] = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
    if None in parts:
        return None
    launcher, *before = parts
    usual = launcher, (*before, None, None, None), False
    if not STRAIGHT:
        return usual
    sizes = [getattr(launcher, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or getattr(launcher, "gsan_enabled", False) or not callable(getattr(launcher, "launch", None)):
        return usual
    heard: list[tuple[Any, ...]] = []
    listening = copy.copy(launcher)
    listening.launch = lambda *passed, **named: heard.append((*passed, named) if named else passed)
    grid, stream, arguments = (3, 5, 7), 11, tuple(object() for _ in range(count))
    listening(*grid, stream, *before, None, None, None, *arguments)
    if len(heard) != 1 or heard[0][:4] != (*grid, stream):
        return usual
    rest = heard[0][4:]
    if count and rest[len(rest) - count :] == arguments:
        return launcher.launch, rest[: len(rest) - count], False
    if rest and rest[-1] == arguments:
        return launcher.launch, rest[:-1], True
    return usual


class Kernel(JITFunction):  # type: ignore[misc, valid-type]
    """A kernel of Triton, launched by key.

    Attributes:
        forms: by types of the positional arguments; None for those that go Triton's way.
    """

    forms: dict[tuple[type, ...], Form | None]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What launches over `grid`."""
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """As Triton's."""
        types = tuple(map(type, arguments))
        try:
            form = self.forms[types]
        except KeyError:
            form = self._form(types)
        if form is None or self.pre_run_hooks or _watched():
            self.run(*arguments, grid=grid, warmup=False, **meta)
        else:
            form(grid, arguments, meta)

    def _form(self, types: tuple[type, ...]) -> Form | None:
        known: dict[Any, Found] = {}
        try:
            self.forms[types] = make_launcher(self.params, types, known, partial(self._first, known))
        except TypeError:
            self.forms[types] = None
        return self.forms[types]

    def _first(
        self,
        known: dict[Any, Found],
        key: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        meta: dict[str, Any],
        device: int,
    ) -> None:
        """Launch Triton's way, and remember the kernel if the next launch can take it as it is."""
        compiled = self.run(*arguments, grid=grid, warmup=False, **meta)
        rest = self.params[len(arguments) :]
        if not all(parameter.is_constexpr for parameter in rest):
            return  # a value that no key has
        if any(isinstance(one, Tensor) and one.get_device() != device for one in arguments):
            return
        way = find_direct_call(compiled, len(self.params))
        if way is None:
            return
        if len(known) >= MOST:
            known.clear()
        run, between, packed = way
        known[key] = run, between, tuple(meta.get(one.name, one.default) for one in rest), packed


def _watched() -> bool:
    """Whether somebody wants to hear of each launch: a profiler of Triton's."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
