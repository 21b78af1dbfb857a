"""Fast launches of Triton kernels: a repeated launch skips the work that Triton does at every launch.

Triton's `kernel[grid](...)` binds the arguments, finds their specialisation, makes a string of the specialisation, and
looks up hooks, debug flags, device and stream. This takes several times as long as passing a kernel to CUDA, and longer
than many kernels run. A `Kernel` does this work at the first launch with a key, and stores the compiled kernel. Later
launches with the same key call the compiled kernel directly. The key has the types of all arguments, the values of
integers, the dtype, device and alignment of tensors, everything in `meta` (constants, warps), and the current device.
Keys distinguish all values of an integer. Triton only distinguishes whether an integer is 1 or divisible by 16.

Only this file uses Triton's private names. TESTED_RELEASES are the releases whose launch protocol is known:
`JITFunction.run` returns the compiled kernel, whose `run(grid x, y, z, stream, function, packed metadata, launch
metadata, two hooks, all arguments)` takes pointers as integers. With other releases Triton launches all kernels, and
`describe` returns the reason.
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
except ImportError:  # Triton is not installed, or older than the tested releases.
    knobs, JITFunction = None, object

TESTED_RELEASES = ((3, 6), (3, 9))  # (first, last)
# Whether launches also bypass Triton's launcher (`find_direct_call`). The variable's value 0 is a workaround for an
# incompatible Triton.
DIRECT_LAUNCHES = os.environ.get("MEGASCALE_STRAIGHT_LAUNCHES", "1") != "0"
# Maximum number of keys per kernel and argument types. Prompts of any length would otherwise add keys without end.
MAX_KEYS = 4096
# Sizes of the grid's missing dimensions, by the number of its dimensions.
_GRID_PADDING = ((), (1, 1), (1,), ())


def describe() -> str:
    """Return a description of how kernels are launched, for the log."""
    reason = _explain_unsupported()
    if reason:
        return f"each by Triton ({reason})"
    if DIRECT_LAUNCHES:
        return "by key, bypassing Triton's launcher"
    return "by key, through Triton's launcher"


def warm_up_forks() -> None:
    """Compute the hash of all of Triton's files, which takes half a second, once for all forked processes."""
    if not _explain_unsupported():
        from triton.runtime.cache import triton_key

        triton_key()


def _explain_unsupported() -> str:
    """Return why Triton must launch the kernels of this process, or "" if fast launches are possible."""
    if knobs is None:
        return "Triton is not installed, or too old"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "its interpreter runs them"
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not TESTED_RELEASES[0] <= release <= TESTED_RELEASES[1]:
        first, last = (".".join(map(str, version)) for version in TESTED_RELEASES)
        return f"Triton {triton.__version__} is not among {first} to {last}, whose launches are known"
    required_names = (
        (JITFunction, "run"),
        (knobs.runtime, "launch_enter_hook"),
        (knobs.runtime, "launch_exit_hook"),
    )
    for owner, name in required_names:
        if not hasattr(owner, name):
            return f"Triton {triton.__version__} has no {name}"
    return ""


def enable_fast_launches(function: Any) -> Any:
    """Turn the result of `triton.jit` into a `Kernel` if this Triton release is supported. Return it."""
    if type(function) is JITFunction and not _explain_unsupported():
        convert_to_kernel(function)
    return function


def convert_to_kernel(function: Any) -> None:
    """Turn a `JITFunction` into a `Kernel` in place. Other Triton kernels can still call it."""
    function.__class__ = Kernel
    function.launchers = {}


# How to launch for a known key: the function to call, its arguments between the stream and the kernel's arguments, the
# values of the kernel's constants, and whether the function takes the kernel's arguments packed in one tuple.
KnownCall = tuple[Any, tuple[Any, ...], tuple[Any, ...], bool]
# (grid, positional arguments, meta)
Launcher = Callable[[tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def make_launcher(
    parameters: Sequence[Any],
    types: tuple[type, ...],
    calls: dict[Any, KnownCall],
    call_first: Callable[..., None],
) -> Launcher:
    """Return the launcher for positional arguments of these types, as generated code without loops.

    The key holds the values of integers, booleans and constants. For an integer with do_not_specialize it holds only
    whether the integer fits 32 bits. For tensors it holds dtype, device and alignment, and for floats and None nothing.

    Args:
        parameters: the kernel's parameters.
        calls: known calls by key.
        call_first: called as call_first(key, grid, arguments, meta, device) for a key that is not in `calls`.

    Raises TypeError for arguments of other types.
    """
    tensors: list[int] = []
    key = ["device"]
    arguments = [f"a{i}" for i in range(len(types))]
    for i, (parameter, argument_type) in enumerate(zip(parameters, types, strict=False)):
        if parameter.is_constexpr or argument_type is bool:
            key.append(f"a{i}")
        elif parameter.annotation_type:
            raise TypeError(parameter.name)  # Triton does not infer the type of this parameter.
        elif issubclass(argument_type, Tensor):
            tensors.append(i)
            key += [f"a{i}.dtype", f"a{i}.get_device()"]
            arguments[i] = f"p{i}"
        elif argument_type is int:
            if parameter.do_not_specialize:
                key.append(f"(None if a{i}.bit_length() < 32 else a{i})")
            else:
                key.append(f"a{i}")
        elif argument_type is not float and argument_type is not type(None):
            raise TypeError(parameter.name)
    if tensors:
        # Usually all tensors are aligned to 16 bytes. Otherwise the key holds which are.
        pointers = " | ".join(f"p{i}" for i in tensors)
        key.append(f"({pointers}) & 15 and ({', '.join(f'p{i} & 15 == 0' for i in tensors)},)")
    key += ["*meta", "*meta.values()", "*map(type, meta.values())"]
    passed_arguments = "".join(f"{argument}, " for argument in arguments)
    lines = []
    if types:
        lines.append(f"{', '.join(f'a{i}' for i in range(len(types)))}, = arguments")
    lines += [f"p{i} = a{i}.data_ptr()" for i in tensors]
    lines += [
        "device = current_device()",
        f"key = ({', '.join(key)},)",
        "call = calls.get(key)",
        "if call is None:",
        "    return call_first(key, grid, arguments, meta, device)",
        "run, between, constants, packed = call",
        "if packed:",
        f"    run(*grid, *padding[len(grid)], stream(device), *between, ({passed_arguments}*constants))",
        "else:",
        f"    run(*grid, *padding[len(grid)], stream(device), *between, {passed_arguments}*constants)",
    ]
    names: dict[str, Any] = {
        "current_device": torch_private.current_device,
        "stream": torch_private.current_raw_stream,
        "calls": calls,
        "call_first": call_first,
        "padding": _GRID_PADDING,
    }
    exec("def launch(grid, arguments, meta):\n    " + "\n    ".join(lines), names)
    launcher: Launcher = names["launch"]
    return launcher


def find_direct_call(compiled: Any, argument_count: int) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Return how to call a compiled kernel of `argument_count` arguments, or None if it cannot be called.

    `compiled.run` is Triton's launcher. It allocates scratch memory and calls the C function `launch`. If the kernel
    needs no scratch memory, `launch` can be called directly. To find the arguments of `launch`, call a copy of the
    launcher in which a function that records its arguments replaces `launch`.

    Returns:
        The function to call, its arguments between the stream and the kernel's arguments, and whether it takes the
        kernel's arguments as one tuple.
    """
    attributes: list[Any] = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
    if None in attributes:
        return None
    launcher, *leading = attributes
    call_through_launcher = launcher, (*leading, None, None, None), False
    if not DIRECT_LAUNCHES:
        return call_through_launcher
    sizes = [getattr(launcher, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or getattr(launcher, "gsan_enabled", False) or not callable(getattr(launcher, "launch", None)):
        return call_through_launcher
    recorded: list[tuple[Any, ...]] = []
    recorder = copy.copy(launcher)
    recorder.launch = lambda *args, **kwargs: recorded.append((*args, kwargs) if kwargs else args)
    # Any values that can be recognised among the recorded arguments.
    grid = (3, 5, 7)
    stream = 11
    arguments = tuple(object() for _ in range(argument_count))
    recorder(*grid, stream, *leading, None, None, None, *arguments)
    if len(recorded) != 1 or recorded[0][:4] != (*grid, stream):
        return call_through_launcher
    trailing = recorded[0][4:]
    if argument_count and trailing[len(trailing) - argument_count :] == arguments:
        return launcher.launch, trailing[: len(trailing) - argument_count], False
    if trailing and trailing[-1] == arguments:
        return launcher.launch, trailing[:-1], True
    return call_through_launcher


class Kernel(JITFunction):  # type: ignore[misc, valid-type]
    """A Triton kernel with fast repeated launches.

    Attributes:
        launchers: launchers by the types of the positional arguments; None: Triton launches arguments of these types.
    """

    launchers: dict[tuple[type, ...], Launcher | None]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return the function that launches over `grid`."""
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """Launch over `grid`, with positional arguments, and constants and options by name."""
        types = tuple(map(type, arguments))
        try:
            launcher = self.launchers[types]
        except KeyError:
            launcher = self._make_launcher(types)
        if launcher is None or self.pre_run_hooks or _has_launch_hooks():
            self.run(*arguments, grid=grid, warmup=False, **meta)
        else:
            launcher(grid, arguments, meta)

    def _make_launcher(self, types: tuple[type, ...]) -> Launcher | None:
        calls: dict[Any, KnownCall] = {}
        try:
            self.launchers[types] = make_launcher(self.params, types, calls, partial(self._launch_first, calls))
        except TypeError:
            self.launchers[types] = None
        return self.launchers[types]

    def _launch_first(
        self,
        calls: dict[Any, KnownCall],
        key: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        meta: dict[str, Any],
        device: int,
    ) -> None:
        """Launch through Triton, and store the call for this key if later launches can repeat it."""
        compiled = self.run(*arguments, grid=grid, warmup=False, **meta)
        constants = self.params[len(arguments) :]
        if not all(parameter.is_constexpr for parameter in constants):
            return  # The key lacks the value of an argument.
        if any(isinstance(argument, Tensor) and argument.get_device() != device for argument in arguments):
            return
        call = find_direct_call(compiled, len(self.params))
        if call is None:
            return
        if len(calls) >= MAX_KEYS:
            calls.clear()
        run, between, packed = call
        values = tuple(meta.get(parameter.name, parameter.default) for parameter in constants)
        calls[key] = run, between, values, packed


def _has_launch_hooks() -> bool:
    """Return whether a Triton profiler hooks each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
