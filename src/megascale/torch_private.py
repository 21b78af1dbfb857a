"""Access to private names of torch under names of our own, so that a new torch release changes this module only.

A name is looked up at its first use. If the installed torch lacks it, or its arguments changed, TrainingError names
the torch release, the name, and the tested releases.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megascale.errors import TrainingError

# At least the first and below the second release, as in pyproject.toml; `make test-oldest` tests the first.
TESTED_RELEASES = ("2.11", "2.14")

_C10D = "torch.distributed.distributed_c10d"
# Maps our name to (module, name within it).
PRIVATE_NAMES: dict[str, tuple[str, str]] = {
    "abort_process_group": (_C10D, "_abort_process_group"),
    "assert_async": ("torch", "_assert_async"),
    "autograd_engine": ("torch.autograd", "Variable._execution_engine"),
    "c10d_world": (_C10D, "_world"),
    "current_device": ("torch._C", "_cuda_getDevice"),
    "cuda_sleep": ("torch.cuda", "_sleep"),
    "end_allocate_to_pool": ("torch._C", "_cuda_endAllocateToPool"),
    "current_raw_stream": ("torch._C", "_cuda_getCurrentRawStream"),
    "flash_attention_backward": ("torch", "ops.aten._flash_attention_backward"),
    "flash_attention_forward": ("torch", "ops.aten._flash_attention_forward"),
    "foreach_copy_": ("torch", "_foreach_copy_"),
    "foreach_norm": ("torch", "_foreach_norm"),
    "foreach_zero_": ("torch", "_foreach_zero_"),
    "fused_adamw_": ("torch", "_fused_adamw_"),
    "release_pool": ("torch._C", "_cuda_releasePool"),
    "scaled_mm": ("torch", "_scaled_mm"),
    "set_deterministic": ("torch._C", "_set_deterministic_algorithms"),
    "store_based_barrier": (_C10D, "_store_based_barrier"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "symmetric_memory": ("torch.distributed", "_symmetric_memory"),
}
# Names that only CUDA builds have.
CUDA_ONLY = frozenset({"current_device", "current_raw_stream"})


def __getattr__(name: str) -> Any:
    """Look up one of PRIVATE_NAMES and store it in the module, so that later uses need no look-up."""
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = lookup(*PRIVATE_NAMES[name])
    globals()[name] = value
    return value


def lookup(module: str, *names: str) -> Any:
    """Return the first of these (dotted) names that a module of torch has. Raises TrainingError if it has none."""
    for name in names:
        try:
            value = importlib.import_module(module)
            for part in name.split("."):
                try:
                    value = getattr(value, part)
                except AttributeError:
                    value = importlib.import_module(f"{module}.{part}")  # a submodule that is not imported yet
            return value
        except (AttributeError, ImportError):
            continue
    raise _missing(" or ".join(f"{module}.{name}" for name in names))


def _missing(name: str) -> TrainingError:
    return TrainingError(
        f"torch {torch.__version__} has no {name}, which this release of MegaScale uses; it is tested with torch >= "
        f"{TESTED_RELEASES[0]} and < {TESTED_RELEASES[1]}: install a tested release (constraints.txt pins one)"
    )


Operator = TypeVar("Operator", bound=type[torch.autograd.Function])


def call_directly(operator: Operator) -> Operator:
    """Decorate an autograd function so that its callers reach C++'s `apply`, and C++ calls its backward directly.

    torch's Python methods in between look for functorch's transforms (vmap, jvp, grad), which such a function does not
    support; that takes longer than most of our functions. A torch without the backward class is left unchanged.
    """
    backward_class = getattr(operator, "_backward_cls", None)
    if backward_class is not None and not getattr(operator, "boxed_grads_call", False):
        operator.apply = super(torch.autograd.Function, operator).apply  # type: ignore[misc, method-assign]
        backward_class.apply = operator.backward
    return operator


def get_cublaslt_workspace_bytes() -> int:
    """Return the size of the workspace with which torch asks cuBLASLt for the algorithm of a GEMM.

    Releases without a getter (2.11) take CUBLASLT_WORKSPACE_SIZE in KiB, 1 MiB if it is not set, and at most the size
    of cuBLAS's workspace (`:KiB:COUNT`, repeated).
    """
    getter = getattr(torch._C, "_cuda_getCublasLtWorkspaceSize", None)
    if getter is not None:
        return int(getter())
    nbytes = int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", "1024")) << 10
    chunks = re.findall(":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not chunks:
        return nbytes
    return min(nbytes, sum(int(kibibytes) * int(count) for kibibytes, count in chunks) << 10)


def dump_flight_recorder() -> str:
    """Return the records of torch's flight recorder as JSON: NCCL's calls if there are any, else gloo's.

    CUDA builds have separate recorders for both.
    """
    text = ""
    for names in (("_dump_nccl_trace_json", "_dump_fr_trace_json"), ("_dump_fr_trace_json", "_dump_nccl_trace_json")):
        records = lookup("torch._C._distributed_c10d", *names)()
        text = records.decode() if isinstance(records, bytes) else records
        if '"entries"' in text:
            break
    return text


def make_nccl_options(timeout: timedelta, channels: int) -> Any:
    """Return options of an NCCL group: time-out of a call, and the maximum channels (SMs) of a call."""
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "_timeout"):
        raise _missing("torch.distributed.ProcessGroupNCCL.Options._timeout")
    options._timeout = timeout
    options.config.max_ctas = channels
    return options


def make_gloo_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend that no group has yet. Collective over the `size` ranks, which connect to each other."""
    backend = _on_shared_devices(dist.ProcessGroupGloo)(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    return backend


def make_nccl_backend(
    store: dist.Store, rank: int, ranks: Sequence[int], *, name: str, timeout: timedelta, channels: int | None
) -> Any:
    """Return an NCCL backend without communicator that no group has yet.

    Args:
        rank: index of this rank in `ranks`.
        ranks: global ranks of the members, ascending.
        name: name of the group that will have the backend.
        channels: maximum channels of a call. For None, NCCL chooses.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    if channels is not None:
        options = make_nccl_options(timeout, channels)
    options._timeout = timeout
    options.is_high_priority_stream = False
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    backend = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def connect_nccl_backend(backend: Any, device: torch.device) -> None:
    """Make the communicator of an NCCL backend on `device`. Collective over the members."""
    if not hasattr(backend, "eager_connect_single_device"):
        raise _missing("torch.distributed.ProcessGroupNCCL.eager_connect_single_device")
    if backend.supports_splitting:  # torch's own condition
        backend.eager_connect_single_device(device)


class _ReusedBackend(type):
    """Metaclass of a stand-in for a class of backends: a call returns a backend that exists."""

    backend: Any

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls.backend

    def __instancecheck__(cls, instance: Any) -> bool:
        return instance is cls.backend


@contextmanager
def reuse_backends(gloo: Any = None, nccl: Any = None) -> Iterator[None]:
    """Give the group that is made inside this block backends that exist, in place of new ones.

    torch's tables of groups belong to the process, so only its main thread makes groups. Backends may be made in any
    thread.
    """
    c10d = importlib.import_module(_C10D)
    originals = {}
    for name, backend in (("ProcessGroupGloo", gloo), ("ProcessGroupNCCL", nccl)):
        if backend is None:
            continue
        original = lookup(_C10D, name)
        originals[name] = original
        attributes = {"backend": backend, "Options": getattr(original, "Options", None)}
        setattr(c10d, name, _ReusedBackend(name, (), attributes))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)


def forget_groups() -> None:
    """Remove all groups, the default group too, from torch's tables without aborting them."""
    c10d_world = lookup(*PRIVATE_NAMES["c10d_world"])
    c10d_world.pg_names.clear()  # the groups that `_abort_process_group` would abort
    lookup(*PRIVATE_NAMES["abort_process_group"])()


def connect_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the NCCL communicator of a group on `device`, and bind the group to the device. Collective over the group.

    Other threads of this process may connect other groups at the same time. Under TORCH_DISTRIBUTED_DEBUG=DETAIL the
    group's first call makes the communicator.
    """
    connect_nccl_backend(group._get_backend(device), device)
    group.bound_device_id = device


@contextmanager
def share_gloo_loop() -> Iterator[None]:
    """Let all gloo groups that are made inside such blocks of this process share one event loop.

    torch gives each group separate devices, whose threads poll for events a hundred times per second: ten idle groups
    take a hundredth of a core. The interfaces are those that torch would choose.
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


_devices: dict[tuple[int, str], list[Any]] = {}  # by process, which may have been forked, and its interfaces


def _on_shared_devices(base: Any) -> Any:
    class OnSharedDevices(base):
        """ProcessGroupGloo on shared devices, a subclass because torch checks the type of a group."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            devices = _devices.get((os.getpid(), interfaces))
            if devices is None:
                names = interfaces.split(",") if interfaces else []
                devices = [base.create_device(interface=name) for name in names] or [base.create_default_device()]
                _devices[os.getpid(), interfaces] = devices
                for device in devices:  # a forked process has no such thread and must not join it
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
            options = base._Options()
            options._devices = devices
            options._threads = 2 * len(devices)
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    return OnSharedDevices


@contextmanager
def name_process_group(name: str) -> Iterator[None]:
    """Give the group that is made inside this block a name.

    With local synchronisation torch names a group by its members and the number of groups that this process made
    before. Ranks of different stages make different numbers of groups, so members would wait under different names
    forever. Our names are the same on all members, and readable in the flight recorder.
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


def raise_recompile_limit(limit: int) -> None:
    """Let torch.compile keep at least `limit` versions of a function in this process.

    Beyond its limit, 8 by default, torch runs further versions of the function uncompiled.
    """
    config = lookup("torch._dynamo", "config")
    if not hasattr(config, "recompile_limit"):
        raise _missing("torch._dynamo.config.recompile_limit")
    config.recompile_limit = max(limit, config.recompile_limit)


@contextmanager
def register_lone_group(store: dist.Store, name: str) -> Iterator[None]:
    """Let torch find a group of this process alone by `name` inside this block. The group has no backend.

    Args:
        store: store of the group.
    """
    bindings = importlib.import_module("torch._C._distributed_c10d")
    if not hasattr(bindings, "_register_process_group") or not hasattr(bindings, "_unregister_process_group"):
        raise _missing("torch._C._distributed_c10d._register_process_group and _unregister_process_group")
    group = dist.ProcessGroup(store, 0, 1)
    group._set_group_name(lookup(_C10D, "GroupName")(name))
    bindings._register_process_group(name, group)
    try:
        yield
    finally:
        bindings._unregister_process_group(name)
