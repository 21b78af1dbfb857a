"""Setup of tests that run Triton kernels on the CPU: import it first in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/ops/test_fused.py with TRITON_INTERPRET=1", allow_module_level=True)
interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """Triton 3.6 turns a loop bound into int() of a 1-element array, which NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index


def _patch_member(owner, name, member, builder, scope):
    """Call a member of the language itself. Triton copies the keywords of every call and checks them in a wrapper."""
    code = getattr(member, "__code__", None)
    function = member
    if code is not None and code.co_name == "wrapper":
        function = getattr(member, "__wrapped__", member)

    def call(*arguments, **keywords):
        keywords["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **keywords)

    scope.set_attr(owner, name, call)


interpreter._patch_attr = _patch_member

_core = interpreter.tl.core
_unwrap = _core._unwrap_if_constexpr
_PLAIN_TYPES = {int, bool, float, str, type(None), _core.tensor, _core.dtype, _core.block_type, _core.pointer_type}


def _unwrap_constant(value):
    """Return plain values as they are before Triton compares their type with three kinds of sequences."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is _core.constexpr:
        return value.value
    return _unwrap(value)


_core._unwrap_if_constexpr = _unwrap_constant

_patch_all = interpreter._patch_lang
_patched: set[int] = set()


def _patch_once(fn):
    """Triton patches its whole language for each launch, and again for each call of a device function in it, which is
    a third of all that the interpreter costs. Nothing is compiled in this process, so what is patched may stay."""
    if id(fn.__globals__) not in _patched:
        _patch_all(fn)
        _patched.add(id(fn.__globals__))
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once


def _check_overflow(self, lhs, rhs, binary_op):
    """Triton's own check that an addition, subtraction or multiplication of integers fits, in three calls of NumPy
    instead of nine of its language, which are another quarter of the cost."""
    import numpy as np

    scalar = lhs.type.scalar
    if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    assert scalar == rhs.type.scalar
    exact = getattr(np, {"add": "add", "sub": "subtract", "mul": "multiply"}[binary_op.__name__])(
        lhs.handle.data, rhs.handle.data, dtype=np.int64
    )
    fits = scalar.get_int_min_value() <= exact.min() and exact.max() <= scalar.get_int_max_value()
    assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {binary_op.__name__}"


_semantic = type(interpreter.interpreter_semantic)
_semantic.binary_op_sanitize_overflow_impl = _check_overflow
_broadcast = _semantic.broadcast_impl_value


def _list_sizes(shape):
    """Return the sizes of a shape, whose own comparison makes a constant of the language."""
    return getattr(shape, "values", shape)


def _broadcast_unless_equal(self, lhs, rhs):
    """Return operands that need no common shape as they are. Triton makes new blocks of them."""
    left_type, right_type = lhs.type, rhs.type
    if left_type.is_block() and right_type.is_block():
        if left_type is right_type or _list_sizes(left_type.shape) == _list_sizes(right_type.shape):
            return lhs, rhs
    elif not left_type.is_block() and not right_type.is_block():
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


_semantic.broadcast_impl_value = _broadcast_unless_equal

_Block = interpreter.tl.core.block_type
_make_block = _Block.__init__
_blocks: dict[tuple, dict] = {}


def _known_block(self, element_ty, shape):
    """A type of blocks, which is made for every result, as one of the same numbers and shape was made before."""
    key = (id(element_ty),) + tuple(getattr(size, "value", size) for size in shape)
    if type(element_ty) is not interpreter.tl.core.dtype:  # a pointer's, which is not kept and whose id comes again
        _make_block(self, element_ty, shape)
    elif key in _blocks:
        self.__dict__.update(_blocks[key])
    else:
        _make_block(self, element_ty, shape)
        _blocks[key] = dict(self.__dict__)


_Block.__init__ = _known_block

_find_numpy_type = interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}


def _find_known_numpy_type(dtype):
    """Return the NumPy type of a type. Triton makes its table of all types for every call."""
    if type(dtype) is _Block:
        return _find_known_numpy_type(dtype.element_ty)
    if type(dtype) is not interpreter.tl.core.dtype:
        return _find_numpy_type(dtype)
    if dtype.name not in _numpy_types:
        _numpy_types[dtype.name] = _find_numpy_type(dtype)
    return _numpy_types[dtype.name]


interpreter._get_np_dtype = _find_known_numpy_type

_compare_types = interpreter.tl.core.dtype.__eq__
interpreter.tl.core.dtype.__eq__ = lambda self, other: self is other or _compare_types(self, other)

_Tensor = interpreter.tl.core.tensor
_make_tensor = _Tensor.__init__
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _make_tensor_of_known_shape(self, handle, type):
    """Share the shape and the number of elements, which are constants of the language, between all results."""
    sizes = tuple(_list_sizes(type.shape)) if type.is_block() else ()
    known = _shapes.get(sizes)
    if known is None:
        _make_tensor(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
        return
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = known


_Tensor.__init__ = _make_tensor_of_known_shape


@functools.cache
def _float8_types() -> dict:
    import torch
    import triton.language as tl

    return {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


_convert = interpreter._convert_float


def _convert_as_hardware_does(data, from_type, to_type, rounding):
    """The interpreter's own conversion cuts, and loses a carry and NaN. Nothing that is too large may come here."""
    import numpy as np
    import torch

    if from_type == interpreter.tl.bfloat16 and to_type == interpreter.tl.float32:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if from_type == interpreter.tl.float32 and to_type == interpreter.tl.bfloat16:
        return torch.tensor(data).to(torch.bfloat16).view(torch.uint16).numpy()
    kinds = _float8_types()
    if from_type in kinds:  # the interpreter's own conversion makes 480 of NaN
        exact = torch.from_numpy(data.copy()).view(kinds[from_type]).float().numpy()
        assert to_type == interpreter.tl.float32, to_type
        return exact
    if to_type not in kinds:
        return _convert(data, from_type, to_type, rounding)
    wide = torch.from_numpy(np.frombuffer(data.tobytes(), np.float32).copy())
    built = wide.to(kinds[to_type])
    assert not ((wide.abs() > torch.finfo(built.dtype).max) & wide.isfinite()).any(), "not clamped"
    return built.view(torch.uint8).numpy().reshape(data.shape)


interpreter._convert_float = _convert_as_hardware_does

_create_dot = interpreter.InterpreterBuilder.create_dot


def _widen(handle):
    """Return a block of bfloat16 or float8, which NumPy holds as its bits, in float32."""
    import numpy as np

    if handle.dtype.scalar in _float8_types():
        numbers = interpreter._convert_float(handle.data, handle.dtype.scalar, interpreter.tl.float32, None)
        return interpreter.TensorHandle(numbers.reshape(handle.data.shape), interpreter.tl.float32)
    if handle.dtype.scalar != interpreter.tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)


def _create_dot_of_numbers(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Triton's interpreter multiplies the bits of bfloat16 as integers, and makes 480 of the NaN of float8."""
    return _create_dot(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)


interpreter.InterpreterBuilder.create_dot = _create_dot_of_numbers


def _add_to_block(self, kind, descriptor, value, indices):
    """Add a block to memory through a tensor descriptor, which Triton's interpreter does not have."""
    assert kind == interpreter._ir.DESCRIPTOR_REDUCE_KIND.ADD
    load = self.create_descriptor_load
    cache_options = [None] * (len(inspect.signature(load).parameters) - 2)  # their number depends on the release
    before = load(descriptor, indices, *cache_options)
    after = interpreter.TensorHandle(before.data + value.data, value.dtype)
    return self.create_descriptor_store(descriptor, after, indices)


interpreter.InterpreterBuilder.create_descriptor_reduce = _add_to_block
