"""Every private name of torch that MegaScale uses, by a name of our own: here a new release of torch is caught up with.

A name is looked up when it is first used. One that this torch does not have, or that takes other arguments than it
did, is a TrainingError with the torch that is installed, the name, and the releases that are tested.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megascale.errors import TrainingError

# At least the first, below the second, as pyproject.toml has it; `make test-oldest` tests the first.
TESTED_RELEASES = ("2.11", "2.14")

_C10D = "torch.distributed.distributed_c10d"
# Our name: (module, name within it).
PRIVATE_NAMES: dict[str, tuple[str, str]] = {
    "abort_process_group": (_C10D, "_abort_process_group"),
    "assert_async": ("torch", "_assert_async"),
    "current_device": ("torch._C", "_cuda_getDevice"),
    "cuda_sleep": ("torch.cuda", "_sleep"),
    "current_raw_stream": ("torch._C", "_cuda_getCurrentRawStream"),
    "flash_attention_backward": ("torch", "ops.aten._flash_attention_backward"),
    "flash_attention_forward": ("torch", "ops.aten._flash_attention_forward"),
    "foreach_copy_": ("torch", "_foreach_copy_"),
    "foreach_norm": ("torch", "_foreach_norm"),
    "foreach_zero_": ("torch", "_foreach_zero_"),
    "fused_adamw_": ("torch", "_fused_adamw_"),
    "scaled_mm": ("torch", "_scaled_mm"),
    "store_based_barrier": (_C10D, "_store_based_barrier"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "symmetric_memory": ("torch.distributed", "_symmetric_memory"),
}
# Those that only a build for CUDA has.
CUDA_ONLY = frozenset({"current_device", "current_raw_stream"})


def __getattr__(name: str) -> Any:
    """The private name behind one of ours, kept: the next use finds it like any other of this module's."""
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = lookup(*PRIVATE_NAMES[name])
    return found


def lookup(module: str, *names: str) -> Any:
    """The first of these names (dotted ones are walked) that a module of torch has; TrainingError if it has none."""
    for name in names:
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                try:
                    found = getattr(found, part)
                except AttributeError:
                    found = importlib.import_module(f"{module}.{part}")  # a submodule that nobody has imported yet
            return found
        except (AttributeError, ImportError):
            continue
    raise _missing(" or ".join(f"{module}.{name}" for name in names))


def _missing(what: str) -> TrainingError:
    return TrainingError(
        f"torch {torch.__version__} has no {what}, which this release of MegaScale uses; it is tested with torch >= "
        f"{TESTED_RELEASES[0]} and < {TESTED_RELEASES[1]}: install one of those (constraints.txt pins one)"
    )


Operator = TypeVar("Operator", bound=type[torch.autograd.Function])


def called_directly(operator: Operator) -> Operator:
    """Decorates an autograd function: its `apply` is C++'s, and its backward is what C++ calls.

    torch's own methods of Python between them look for functorch's transforms (vmap, jvp, grad), which such a function
    cannot be used under; that takes longer than most of ours do. In a torch without that class nothing changes.
    """
    behind = getattr(operator, "_backward_cls", None)
    if behind is not None and not getattr(operator, "boxed_grads_call", False):
        operator.apply = super(torch.autograd.Function, operator).apply  # type: ignore[misc, method-assign]
        behind.apply = operator.backward
    return operator


def flight_records() -> str:
    """What torch's flight recorder holds, as JSON: NCCL's calls where there are any, else gloo's, of which CUDA builds
    have another recorder."""
    text = ""
    for names in (("_dump_nccl_trace_json", "_dump_fr_trace_json"), ("_dump_fr_trace_json", "_dump_nccl_trace_json")):
        found = lookup("torch._C._distributed_c10d", *names)()
        text = found.decode() if isinstance(found, bytes) else found
        if '"entries"' in text:
            break
    return text


def nccl_options(timeout: timedelta, channels: int) -> Any:
    """Options of a NCCL group: how long a call may take, and the most channels (SMs) that one takes."""
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "_timeout"):
        raise _missing("torch.distributed.ProcessGroupNCCL.Options._timeout")
    options._timeout = timeout
    options.config.max_ctas = channels
    return options


@contextmanager
def gloo_loop_shared() -> Iterator[None]:
    """Have the gloo groups made inside, here and in other such blocks of this process, share one event loop.

    torch gives each group devices of its own, and the thread of each looks for events a hundred times a second: ten
    groups take a hundredth of a core for doing nothing. Interfaces are those that torch would take.
    """
    c10d = importlib.import_module(_C10D)
    original = c10d.ProcessGroupGloo
    if not hasattr(original, "_Options") or not hasattr(original, "create_default_device"):
        raise _missing(f"{_C10D}.ProcessGroupGloo._Options and create_default_device")
    c10d.ProcessGroupGloo = _on_shared_devices(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original  # type: ignore[attr-defined]


_devices: dict[tuple[int, str], list[Any]] = {}  # of a process, which may have been forked, by its interfaces


def _on_shared_devices(base: Any) -> Any:
    class OnSharedDevices(base):
        """A class, as torch asks whether a group is one of ProcessGroupGloo; called as torch calls that."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            devices = _devices.get((os.getpid(), interfaces))
            if devices is None:
                names = interfaces.split(",") if interfaces else []
                devices = [base.create_device(interface=name) for name in names] or [base.create_default_device()]
                _devices[os.getpid(), interfaces] = devices
                for device in devices:  # a process forked from this one, which has no such thread, must not join it
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
            options = base._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    return OnSharedDevices


@contextmanager
def process_group_named(name: str) -> Iterator[None]:
    """Give the group made inside this name.

    With local synchronisation torch names a group by its members and by how many groups this process made before.
    Ranks of different stages make different numbers of groups, so two members would wait under different names
    for ever. Our plan's names are the same on every member, and readable in the flight recorder.
    """
    c10d = importlib.import_module(_C10D)
    original = lookup(_C10D, "_process_group_name")
    group_name = lookup(_C10D, "GroupName")
    if list(inspect.signature(original).parameters) != ["ranks", "use_hashed_name"]:
        raise _missing(f"{_C10D}._process_group_name(ranks, use_hashed_name)")
    c10d._process_group_name = lambda ranks, use_hashed_name: group_name(name)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        c10d._process_group_name = original  # type: ignore[attr-defined]
