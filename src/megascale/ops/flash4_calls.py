"""Calls of FlashAttention-4's compiled kernels without the package's Python around them.

Each call of the package checks its tensors and computes the key of a compiled kernel. On the host of four H100 that
took 220 us in a forward and 113 us in a backward before the first launch (dev/log.md, 2026-11-28). The first call of a
problem goes through the package here, and a recorder notes which compiled functions it calls with which arguments.
Later calls with the same types, shapes, strides and options call these functions with the new tensors. Kernels,
arguments and bits are the same.

Recorded arguments are an input of the call, a temporary tensor, or a constant. Temporaries are allocated anew in each
call. Those that the preprocessing kernel writes are not initialised, all others are zeros, as in the package's source.
All calls are left to the package if a recorded call shows anything else, on other GPUs than Hopper, and with other
releases than those whose source was read. A start-up line gives the reason. MEGASCALE_DIRECT_ATTENTION=1 turns direct
calls on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.ops import dispatch

CHOICE_NAME = "FlashAttention-4 calls"
# Whether compiled kernels are called directly: off until `tests/gpu/flash4_calls.py` has run on a GPU.
CALLS_DIRECTLY = os.environ.get("MEGASCALE_DIRECT_ATTENTION", "0") == "1"
# Releases whose source was read. Another release may allocate or order arguments in another way.
READ_RELEASES = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15.post2"}
HOPPER = 9  # major compute capability
ALIGNED_BYTES = 16  # the package copies inputs at other addresses

FORWARD = "_flash_attn_fwd"
BACKWARD = "_flash_attn_bwd"
PREPROCESS = "_bwd_preprocess"
POSTPROCESS = "_bwd_postprocess_convert"
# Functions of the package that call compiled kernels, in the order of calls. With fewer heads of keys than of queries,
# a backward postprocesses three gradients instead of one.
_SEQUENCES = {
    FORWARD: [[FORWARD]],
    BACKWARD: [
        [PREPROCESS, BACKWARD, POSTPROCESS],
        [PREPROCESS, BACKWARD, POSTPROCESS, POSTPROCESS, POSTPROCESS],
    ],
}
# Positions of temporary tensors where they are first an argument. The preprocessing kernel writes the row sums of
# dO * O, the scaled logarithms, and zeros for the sums of dq. The others are the sums of dk and dv, and semaphores.
_UNINITIALISED = {PREPROCESS: {2, 4, 5}}
_ZEROED = {BACKWARD: {7, 8, 16, 17, 18}}


class UnknownCallError(Exception):
    """A recorded call differs from the calls in the source that was read."""


class RecordedCall(NamedTuple):
    """A call of a compiled function.

    Attributes:
        name: function of the package that made the call.
        keywords: names of arguments that the call passed by keyword.
    """

    name: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: tuple[str, ...] = ()


class Temporary(NamedTuple):
    """A tensor that each call allocates."""

    shape: torch.Size
    dtype: torch.dtype
    is_zeroed: bool

    def allocate(self, device: torch.device) -> Tensor:
        """Return the tensor."""
        make = torch.zeros if self.is_zeroed else torch.empty
        return make(self.shape, dtype=self.dtype, device=device)


class Launch(NamedTuple):
    """A call of a compiled function by a plan.

    Attributes:
        select: returns the arguments from a tuple of inputs, temporaries and constants.
    """

    function: Callable[..., object]
    select: Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Plan:
    """The launches of a forward or a backward of one problem.

    Args:
        calls: recorded calls of the compiled functions.
        inputs: tensors of the recorded call, in the order in which `run` receives them.

    Raises UnknownCallError if the calls differ from those in the package's source.
    """

    def __init__(self, name: str, calls: Sequence[RecordedCall], inputs: Sequence[Tensor]) -> None:
        names = [call.name for call in calls]
        if names not in _SEQUENCES[name]:
            raise UnknownCallError(f"{name} calls {', '.join(names) or 'no kernel'}")
        self._temporaries: list[Temporary] = []
        self._constants: list[Any] = []
        indices_by_tensor = {_identify(tensor): index for index, tensor in enumerate(inputs)}
        if len(indices_by_tensor) != len(inputs):
            raise UnknownCallError(f"two inputs of {name} have the same memory")
        # Negative indices stand for constants until the number of temporaries is known.
        indices_by_call = []
        for call in calls:
            if call.keywords:
                raise UnknownCallError(f"{call.name} passes {', '.join(call.keywords)} by keyword")
            indices = []
            for position, argument in enumerate(call.arguments):
                if not isinstance(argument, Tensor):
                    indices.append(self._add_constant(call.name, argument))
                    continue
                key = _identify(argument)
                if key not in indices_by_tensor:
                    indices_by_tensor[key] = len(inputs) + len(self._temporaries)
                    self._temporaries.append(_make_temporary(call.name, position, argument))
                indices.append(indices_by_tensor[key])
            indices_by_call.append(indices)
        first_constant = len(inputs) + len(self._temporaries)
        self._launches = []
        for call, indices in zip(calls, indices_by_call, strict=True):
            final_indices = [index if index >= 0 else first_constant - index - 1 for index in indices]
            self._launches.append(Launch(call.function, itemgetter(*final_indices)))

    def _add_constant(self, name: str, value: Any) -> int:
        """Keep a constant argument, and return its negative index."""
        is_plain = value is None or isinstance(value, bool | int | float)
        is_empty = isinstance(value, tuple) and all(item is None for item in value)
        if not is_plain and not is_empty:
            raise UnknownCallError(f"{name} passes {type(value).__name__} to a kernel")
        self._constants.append(value)
        return -len(self._constants)

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Launch the kernels on `inputs`, which must have the layout of the recorded call."""
        device = inputs[0].device
        detached = [tensor.detach() if tensor.requires_grad else tensor for tensor in inputs]
        temporaries = [temporary.allocate(device) for temporary in self._temporaries]
        values = (*detached, *temporaries, *self._constants)
        for launch in self._launches:
            launch.function(*launch.select(values))


def _identify(tensor: Tensor) -> Hashable:
    """Return what distinguishes a tensor of a call from all others."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _make_temporary(name: str, position: int, tensor: Tensor) -> Temporary:
    """Return the temporary tensor that is first an argument at this position. Raises UnknownCallError for any other."""
    is_zeroed = position in _ZEROED.get(name, ())
    if not is_zeroed and position not in _UNINITIALISED.get(name, ()):
        raise UnknownCallError(f"argument {position} of {name} is not an input")
    if not tensor.is_contiguous():
        raise UnknownCallError(f"argument {position} of {name} is not contiguous")
    return Temporary(tensor.shape, tensor.dtype, is_zeroed)


class _RecordingCache:
    """A cache of compiled functions that notes their calls.

    Args:
        cache: the package's cache, by key.
        name: function of the package that uses the cache.
    """

    def __init__(self, cache: Any, name: str, calls: list[RecordedCall]) -> None:
        self._cache = cache
        self._name = name
        self._calls = calls

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def __setitem__(self, key: Hashable, function: Callable[..., object]) -> None:
        self._cache[key] = function

    def __getitem__(self, key: Hashable) -> Callable[..., object]:
        function = self._cache[key]

        def call(*arguments: Any, **options: Any) -> object:
            self._calls.append(RecordedCall(self._name, function, arguments, tuple(options)))
            return function(*arguments, **options)

        return call


class Flash4Calls:
    """Forwards and backwards of FlashAttention-4 for dense sequences.

    Args:
        interface: the module flash_attn.cute.interface.
        obstacle: why all calls go through the package, "" if they do not.
    """

    def __init__(self, interface: Any, obstacle: str = "") -> None:
        self._interface = interface
        self._obstacle = obstacle
        self._choice = f"through the package ({obstacle})" if obstacle else "compiled kernels directly"
        # By problem; None for a problem whose calls go through the package.
        self._plans: dict[Hashable, Plan | None] = {}
        self._lock = threading.Lock()

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, window_size_left: int | None
    ) -> None:
        """Compute attention into `out`, and the logarithms of the sums of exponentials into `lse`.

        Args:
            q, out: [B, S, N, D].
            k, v: [B, S, G, D].
            lse: float32 [B, N, S].
        """
        options: dict[str, Any] = {"causal": causal, "window_size_left": window_size_left}
        self._run(FORWARD, (q, k, v, out, lse), {"out": out, "lse": lse}, options, arguments=3)

    def run_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        d_out: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        *,
        causal: bool,
        window_size_left: int | None,
        deterministic: bool,
    ) -> None:
        """Compute the gradients of q, k and v into `grads`. Shapes are as in `run_forward`."""
        dq, dk, dv = grads
        options = {"causal": causal, "window_size_left": window_size_left, "deterministic": deterministic}
        tensors = (q, k, v, out, d_out, lse, *grads)
        self._run(BACKWARD, tensors, {"dq": dq, "dk": dk, "dv": dv}, options, arguments=6)

    def _run(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        outputs: dict[str, Tensor],
        options: dict[str, Any],
        arguments: int,
    ) -> None:
        """Call kernels directly, or the package's function `name` if that is impossible or if the problem is new.

        Args:
            tensors: all inputs and outputs.
            outputs: the outputs by the names of the function's parameters.
            arguments: number of tensors that the function takes by position.
        """
        dispatch.record_choice(CHOICE_NAME, self._choice)
        call_package = lambda: getattr(self._interface, name)(*tensors[:arguments], **outputs, **options)
        if not self._can_call_directly(tensors):
            call_package()
            return
        layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        key = (name, *options.values(), tensors[0].device, *layouts)
        if key not in self._plans:
            with self._lock:
                self._plans[key] = self._record(name, tensors, call_package)
            return
        plan = self._plans[key]
        if plan is None:
            call_package()
        else:
            plan.run(tensors)

    def _can_call_directly(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the package would pass the tensors on as they are.

        Tensors of a subclass, such as torch's fake tensors, may have no memory.
        """
        if self._obstacle:
            return False
        return all(type(tensor) is Tensor and tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors)

    def _record(self, name: str, tensors: Sequence[Tensor], call_package: Callable[[], object]) -> Plan | None:
        """Call the package's function, and return a plan of its calls of kernels; None if they are unknown."""
        with self._record_calls() as calls:
            call_package()
        try:
            plan = Plan(name, calls, tensors)
        except UnknownCallError as error:
            self._choice = f"through the package for some problems ({error})"
            dispatch.record_choice(CHOICE_NAME, self._choice)
            return None
        return plan

    @contextmanager
    def _record_calls(self) -> Iterator[list[RecordedCall]]:
        """Note the calls of compiled functions within the context."""
        calls: list[RecordedCall] = []
        functions = [value for value in vars(self._interface).values() if hasattr(value, "compile_cache")]
        caches = [function.compile_cache for function in functions]
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = _RecordingCache(cache, function.__name__, calls)
        try:
            yield calls
        finally:
            for function, cache in zip(functions, caches, strict=True):
                function.compile_cache = cache


def make_calls(interface: Any) -> Flash4Calls:
    """Return the calls of the loaded package."""
    return Flash4Calls(interface, _find_obstacle())


def _find_obstacle() -> str:
    """Return why kernels are not called directly, "" if they are."""
    if not CALLS_DIRECTLY:
        return "MEGASCALE_DIRECT_ATTENTION=1 calls its compiled kernels directly"
    for package, release in READ_RELEASES.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "missing"
        if installed != release:
            return f"{package} is {installed}, and {release} was read"
    if not torch.cuda.is_available():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != HOPPER:
        return f"compute capability {major}.{minor}, and only Hopper's kernels were read"
    return ""
