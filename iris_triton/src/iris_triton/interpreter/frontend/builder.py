"""The compiler's IR builder, computing with numpy instead of building IR.

Triton's own semantic layer checks types, promotes and broadcasts, and then calls these methods.  So kernels get the
compiler's rules and error messages, and this module only has to compute.  Descriptors and block pointers are inherited
from Triton's own numpy builder; see `values` for how values are kept.

Numbers behave as on GPUs: integers wrap, division truncates, conversions round to nearest even and saturate, 16-bit
floats are rounded after every operation.  Products of tl.dot are accumulated in float32 (no tf32).
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.entries import find_assembly
from iris_triton.interpreter.frontend import numerics, values
from iris_triton.interpreter.frontend.elementwise import ElementwiseOps, as_float
from iris_triton.interpreter.frontend.values import Array, Handle, numpy_dtype
from iris_triton.interpreter.hints import refute
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import current, program_info

_PAD_NAN = _compat.ir.PADDING_OPTION.PAD_NAN


def _constant(name: str, kept: np.dtype[Any]) -> Callable[[Any, Any], Handle]:
    type_ = tl.str_to_ty(name.removeprefix("u").replace("int", "i"), None)
    return lambda self, value: Handle(values.signless(np.array([value], kept)), type_)


def _on_array(function: Callable[..., Array]) -> Callable[..., Handle]:
    """Make an operation that changes the shape only."""
    return lambda self, value, *arguments: Handle(function(value.data, *arguments), value.dtype)


class CpuBuilder(ElementwiseOps, _compat.InterpreterBuilder):  # type: ignore[misc]
    """Computes what the semantic layer asks for.  Has no state of its own: all threads share one."""

    def __init__(self) -> None:
        super().__init__()
        # debug: device_assert fires.  sanitize_overflow off: integers wrap, as in a compiled kernel.
        self.options = _compat.InterpreterOptions(debug=True, sanitize_overflow=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_")):
            raise UnsupportedError(f"the CPU executor does not implement {name.removeprefix('create_')!r}")
        raise AttributeError(name)

    def get_block_ty(self, dtype: Any, shape: Sequence[int]) -> Any:
        return values.block_type(dtype, tuple(shape))

    def create_get_program_id(self, axis: int) -> Any:
        return self.get_int32(current.program.pid[axis])

    def create_get_num_programs(self, axis: int) -> Any:
        return self.get_int32(current.launch.grid[axis])

    def launched_libraries(self) -> Any:
        """Libraries by name that a compiled kernel would be linked with."""
        return current.launch.options.get("extern_libs")

    def create_barrier(self, *ignored: Any) -> None:
        """Nothing: a program is one thread here, attributes are hints, and there is no IR to insert into."""

    get_unit_attr = get_insertion_point = restore_insertion_point = create_barrier

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message or "device_assert failed")

    def create_assume(self, condition: Handle) -> None:
        if not condition.data.all():
            refute("tl.assume was given a condition that does not hold")

    def create_print(self, prefix: str, hex: bool, handles: list[Handle], is_signed: list[bool]) -> None:
        formatter: Any = {"int": lambda x: f"{int(x):#x}"} if hex else None
        parts = []
        for handle, signed in zip(handles, is_signed, strict=True):
            data = as_float(handle) if signed or not handle.dtype.is_int() else values.unsigned(handle.data)
            parts.append(np.array2string(data.reshape(()) if data.shape == (1,) else data, formatter=formatter))
        print(f"pid {current.program.pid}{prefix}{', '.join(parts)}")

    def get_bf16(self, value: float) -> Handle:
        return Handle(numerics.to_bf16(np.array([value], np.float64)), tl.bfloat16)

    def get_null_value(self, dtype: Any) -> Handle:
        return Handle(np.zeros(1, numpy_dtype(dtype)), dtype.scalar)

    def get_all_ones_value(self, dtype: Any) -> Handle:
        return Handle(~np.zeros(1, numpy_dtype(dtype)), dtype.scalar)

    def get_cache_policy(self, cache_modifier: str, eviction_policy: str) -> str:
        return cache_modifier

    def create_load(self, pointers: Handle, *policy: Any, **named: Any) -> Handle:
        return self.create_masked_load(pointers, None, None, *policy, **named)

    def create_masked_load(self, pointers: Handle, mask: Any, other: Any, *policy: Any, **named: Any) -> Handle:
        *hints, is_volatile = *policy, *named.values()
        element = pointers.get_element_ty()
        fill = None if other is None else other.data
        is_poll = bool(is_volatile) or _compat.is_uncached(tuple(hints))
        data = accesses.load(pointers.data, _array(mask), fill, numpy_dtype(element), poll=is_poll)
        return Handle(data, element)

    def create_descriptor_load(self, descriptor: Any, indices: list[Handle], *policy: Any) -> Handle:
        if (descriptor.padding, descriptor.base.get_element_ty()) == (_PAD_NAN, tl.bfloat16):
            pointers, mask = descriptor.materialize_pointers(indices)  # Triton's own would store NaN as uint16
            nan = Handle(np.array([0x7FC0], np.uint16), tl.bfloat16)
            return self.create_masked_load(pointers, mask, nan, is_volatile=False)
        return super().create_descriptor_load(descriptor, indices, *policy)

    def create_store(self, pointers: Handle, value: Handle, *policy: Any) -> None:
        accesses.store(pointers.data, None, value.data)

    def create_masked_store(self, pointers: Handle, value: Handle, mask: Any, *policy: Any, **named: Any) -> None:
        accesses.store(pointers.data, _array(mask), value.data)

    def create_atomic_cas(self, pointers: Handle, expected: Handle, desired: Handle, sem: Any, scope: Any) -> Handle:
        return Handle(accesses.cas(pointers.data, expected.data, desired.data, sem, scope), desired.dtype)

    def create_atomic_rmw(self, op: Any, pointers: Handle, value: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        return Handle(accesses.rmw(op, pointers.data, value.data, mask.data, sem, value.dtype, scope), value.dtype)

    def create_atomic_load(self, pointers: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        return self.create_masked_load(pointers, mask, None, is_volatile=True)

    def create_atomic_store(self, pointers: Handle, value: Handle, mask: Handle, sem: Any, scope: Any) -> None:
        accesses.store(pointers.data, mask.data, value.data)

    def create_atomic_poll(self, *operands: Any) -> NoReturn:
        raise UnsupportedError("the CPU executor does not implement atomic_poll: wait in a loop around an atomic load")

    def create_addptr(self, pointers: Handle, offset: Handle) -> Handle:
        delta = np.multiply(offset.data, values.element_nbytes(pointers.get_element_ty()), dtype=np.int64)
        return Handle(pointers.data + delta.view(np.uint64), pointers.dtype)

    def create_int_to_ptr(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(value.data.astype(np.int64, copy=False).view(np.uint64), dst_type.scalar)

    def create_bitcast(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(value.data.view(numpy_dtype(dst_type)), dst_type.scalar)

    def create_make_range(self, ret_type: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_splat(self, ret_type: Any, value: Handle) -> Handle:
        return Handle(np.broadcast_to(value.data.reshape(-1)[:1], tuple(ret_type.shape)), value.dtype)

    create_unsplat = _on_array(lambda data: data.reshape(-1)[:1])
    create_broadcast = _on_array(lambda data, shape: np.broadcast_to(data, tuple(shape)))
    create_expand_dims = _on_array(np.expand_dims)
    create_reshape = _on_array(lambda data, shape, allow_reorder: data.reshape(tuple(shape)))
    create_trans = _on_array(lambda data, order: np.transpose(data, tuple(order)))

    def create_cat(self, left: Handle, right: Handle, *type_: Any) -> Handle:
        return Handle(np.concatenate([left.data, right.data]), left.dtype)

    def create_join(self, left: Handle, right: Handle) -> Handle:
        return Handle(np.stack([left.data, right.data], axis=-1), left.dtype)

    def create_split(self, value: Handle) -> tuple[Handle, ...]:
        return tuple(Handle(value.data[..., n], value.dtype) for n in (0, 1))

    def create_gather(self, source: Handle, index: Handle, axis: int) -> Handle:
        size = source.data.shape[axis]
        if ((index.data < 0) | (index.data >= size)).any():
            raise IndexError(f"tl.gather with an index outside [0, {size})")
        return Handle(np.take_along_axis(source.data, index.data.astype(np.int64), axis), source.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None, *layout: Any) -> Handle:
        found = data.data if mask is None else data.data[mask.data]
        found = found[(found >= 0) & (found < bins)]  # the GPU drops what is out of range
        return Handle(np.bincount(found.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    def create_dot(self, a: Handle, b: Handle, accumulator: Handle, *precision: Any) -> Handle:
        out = accumulator.data
        if a.dtype.is_int():  # float64 holds every partial sum of 8-bit products exactly, and has a fast product
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int64)
            return Handle(product.astype(out.dtype) + out, accumulator.dtype)
        if accumulator.dtype == tl.bfloat16:
            raise UnsupportedError("tl.dot accumulates in float16, float32, float64 or int32, not in bfloat16")
        product = np.matmul(*[as_float(x) if x.data.dtype != np.float16 else x.data.astype(np.float32) for x in (a, b)])
        return Handle((product + out).astype(out.dtype, copy=False), accumulator.dtype)

    def create_dot_scaled(self, *operands: Any) -> NoReturn:
        raise UnsupportedError("the CPU executor does not implement tl.dot_scaled: scale the operands and use tl.dot")

    def create_inline_asm(
        self, assembly: str, constraints: str, operands: list[Handle], types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        entry = find_assembly(assembly)
        if entry is None:
            raise UnsupportedError(
                f"the CPU executor cannot run the inline assembly {assembly.strip()!r}: put it into a jitted "
                "function of its own, and register what the CPU shall do instead with iris_triton.interpreter.cpu_entry"
            )
        value, shapes = entry(program_info()), [tuple(type_.shape) if type_.is_block() else (1,) for type_ in types]
        handles = [
            Handle(np.full(shape, value, numpy_dtype(type_)), type_.scalar)
            for type_, shape in zip(types, shapes, strict=True)
        ]
        return SimpleNamespace(get_result=handles.__getitem__)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list[Any], ret_type: Any, is_pure: bool
    ) -> Handle:
        data = numerics.call_libdevice(symbol, [a.data if hasattr(a, "data") else np.asarray(a) for a in arguments])
        return Handle(data.astype(numpy_dtype(ret_type), copy=False), ret_type.scalar)

    # The combine function of a reduction runs on whole arrays instead of being compiled.
    def create_block_with_parent(self, region: Any, types: Any) -> Any:
        return region

    def create_reduce_ret(self, *handles: Handle) -> None:
        current.region.results = list(handles)

    create_scan_ret = create_reduce_ret


def _array(mask: Any) -> Array | None:
    """Return the array of a mask; Triton's descriptors and block pointers give the array itself in some versions."""
    return mask if mask is None or isinstance(mask, np.ndarray) else mask.data


for _bits in (8, 16, 32, 64):
    for _name, _kind in (("int", "i"), ("uint", "u"), *([("fp", "f")] if _bits > 8 else [])):
        setattr(CpuBuilder, f"get_{_name}{_bits}", _constant(f"{_name}{_bits}", np.dtype(f"{_kind}{_bits // 8}")))
CpuBuilder.get_int1 = _constant("int1", np.dtype(np.bool_))
