"""The compiler's IR builder, computing with numpy instead of building IR.

Triton's own semantic layer checks types, promotes and broadcasts, and then calls these methods.  So kernels get the
compiler's rules and error messages, and this module only has to compute.  Descriptors and block pointers are inherited
from Triton's own numpy builder; see `values` for how values are kept.

Numbers behave as on GPUs: integers wrap, division truncates, conversions round to nearest even and saturate, 16-bit
floats are rounded after every operation.  Products of tl.dot are accumulated in float32 (no tf32).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.entries import find_assembly
from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.elementwise import ElementwiseOps, as_float
from iris_triton.interpreter.frontend.libdevice import call_libdevice
from iris_triton.interpreter.frontend.typefacts import block_type
from iris_triton.interpreter.frontend.values import (
    Array,
    Handle,
    bit_view,
    element_nbytes,
    numpy_dtype,
    signless,
    unsigned,
)
from iris_triton.interpreter.hints import refute
from iris_triton.interpreter.memory import raw_atomics, regions
from iris_triton.interpreter.scheduler import place_of
from iris_triton.interpreter.state import current, program_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_PAD_NAN = _compat.ir.PADDING_OPTION.PAD_NAN


def _constant(name: str, kept: np.dtype[Any]) -> Callable[[Any, Any], Handle]:
    type_ = tl.str_to_ty(name.removeprefix("u").replace("int", "i"), None)
    return lambda self, value: Handle(signless(np.array([value], kept)), type_)


def _on_array(function: Callable[..., Array]) -> Callable[..., Handle]:
    """An operation that changes the shape only."""
    return lambda self, value, *arguments: Handle(function(value.data, *arguments), value.dtype)


class CpuBuilder(ElementwiseOps, _compat.InterpreterBuilder):  # type: ignore[misc]
    """Computes what the semantic layer asks for.  Has no state of its own: all threads share one."""

    def __init__(self) -> None:
        super().__init__()
        # debug: device_assert fires.  sanitize_overflow off: integers wrap, as in a compiled kernel.
        self.options = _compat.InterpreterOptions(debug=True, sanitize_overflow=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_")):
            raise UnsupportedError(
                f"the CPU executor does not implement the operation {name.removeprefix('create_')!r}"
            )
        raise AttributeError(name)

    def get_block_ty(self, dtype: Any, shape: Sequence[int]) -> Any:
        """Return a block type, the same object every time."""
        return block_type(dtype, tuple(shape))

    # -- program ------------------------------------------------------------------------------------------------------
    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([current.program.pid[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([current.launch.grid[axis]], np.int32), tl.int32)

    def create_barrier(self, *ignored: Any) -> None:
        """A program is one thread here."""

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(message or "device_assert failed")

    def create_assume(self, condition: Handle) -> None:
        if not condition.data.all():
            refute("tl.assume was given a condition that does not hold")

    def create_print(self, prefix: str, hex: bool, values: list[Handle], is_signed: list[bool]) -> None:
        text = f"pid {current.program.pid}{prefix}"
        parts = []
        for handle, signed in zip(values, is_signed, strict=True):
            data = numerics.bf16_to_f32(handle.data) if handle.dtype == tl.bfloat16 else handle.data
            if handle.dtype.is_int() and not signed:
                data = unsigned(data)
            formatter: Any = {"int": lambda x: f"{int(x):#x}"} if hex else None
            parts.append(np.array2string(data.reshape(()) if data.shape == (1,) else data, formatter=formatter))
        print(text + ", ".join(parts))

    # -- constants; those of numpy's types follow the class -----------------------------------------------------------
    def get_bf16(self, value: float) -> Handle:
        return Handle(numerics.to_bf16(np.array([value], np.float64)), tl.bfloat16)

    def get_null_value(self, dtype: Any) -> Handle:
        return Handle(np.zeros(1, numpy_dtype(dtype)), dtype.scalar)

    def get_all_ones_value(self, dtype: Any) -> Handle:
        kept = numpy_dtype(dtype)
        return Handle(np.array([True if kept == np.bool_ else -1], kept), dtype.scalar)

    def get_cache_policy(self, cache_modifier: str, eviction_policy: str) -> str:
        return cache_modifier

    def get_unit_attr(self) -> None:
        """Attributes are hints."""

    # -- memory -------------------------------------------------------------------------------------------------------
    def range_of(self, addresses: Array, mask: Array | None, nbytes: int, access: str) -> regions.Region | None:
        """Find the accessible range that holds every active element; None if they lie in several.

        Raises OutOfBoundsError where an active element lies in none, if checks are on.
        """
        launch = current.launch
        checker = launch.checker
        if addresses.size == 1:
            if mask is not None and not mask.reshape(-1)[0]:
                return None
            low = high = int(addresses.reshape(-1)[0])
        else:
            low, high = int(np.minimum.reduce(addresses, axis=None)), int(np.maximum.reduce(addresses, axis=None))
        region = checker.find(low, high + nbytes)
        if region is not None:
            return region
        flat = addresses.reshape(-1)
        lanes = np.arange(flat.size)
        if mask is not None:
            lanes = np.flatnonzero(mask)
            flat = flat[lanes]
            if not flat.size:
                return None
            region = checker.find(int(flat.min()), int(flat.max()) + nbytes)
        if region is None and launch.refuse and checker.outside(flat, nbytes).any():
            raise checker.error(launch.kernel, current.program.pid, access, flat, lanes, nbytes)
        return region

    def _observe(self, addresses: Array, values: Array) -> None:
        """Tell the scheduler what an atomic or volatile access has seen."""
        current.program.observe(place_of(addresses), values.tobytes())

    def create_load(self, pointers: Handle, *policy: Any, **named: Any) -> Handle:
        return self.create_masked_load(pointers, None, None, *policy, **named)

    def create_masked_load(
        self, pointers: Handle, mask: Any, other: Handle | None, *policy: Any, **named: Any
    ) -> Handle:
        *hints, is_volatile = *policy, *named.values()
        element = pointers.get_element_ty()
        is_poll = bool(is_volatile) or _compat.is_uncached(tuple(hints))
        fill = None if other is None else other.data
        data = self.load(pointers.data, _array(mask), fill, numpy_dtype(element), is_poll=is_poll)
        if is_poll:
            self._observe(pointers.data, data)
        return Handle(data, element)

    def load(
        self, addresses: Array, mask: Array | None, fill: Array | None, dtype: np.dtype[Any], *, is_poll: bool = False
    ) -> Array:
        """Read the active elements, after checking their addresses.  The caller observes what is a poll."""
        if mask is not None:
            mask = None if mask.all() else np.broadcast_to(mask, addresses.shape)
        region = self.range_of(addresses, mask, dtype.itemsize, "load")
        data = regions.load(region, addresses, mask, fill, dtype)
        if not is_poll:
            current.program.loaded(addresses, data)
        return data

    def create_descriptor_load(self, descriptor: Any, indices: list[Handle], *policy: Any) -> Handle:
        if (descriptor.padding, descriptor.base.get_element_ty()) == (_PAD_NAN, tl.bfloat16):
            pointers, mask = descriptor.materialize_pointers(indices)  # Triton's own would store NaN as uint16
            nan = Handle(np.array([0x7FC0], np.uint16), tl.bfloat16)
            return self.create_masked_load(pointers, mask, nan, is_volatile=False)
        handle: Handle = super().create_descriptor_load(descriptor, indices, *policy)
        return handle

    def create_store(self, pointers: Handle, value: Handle, *policy: Any) -> None:
        self.store(pointers.data, None, value.data)

    def create_masked_store(self, pointers: Handle, value: Handle, mask: Any, *policy: Any, **named: Any) -> None:
        self.store(pointers.data, _array(mask), value.data)

    def store(self, addresses: Array, mask: Array | None, data: Array) -> None:
        """Write the active elements, after checking their addresses."""
        if data.shape != addresses.shape:
            data = np.broadcast_to(data, addresses.shape)
        if mask is not None:
            mask = None if mask.all() else np.broadcast_to(mask, addresses.shape)
        region = self.range_of(addresses, mask, data.dtype.itemsize, "store")
        regions.store(region, addresses, mask, data)
        program = current.program
        program.scheduler.idle_polls = program.idle_loads = 0  # a program that stores is working, not only waiting

    def create_atomic_cas(self, pointers: Handle, expected: Handle, desired: Handle, sem: Any, scope: Any) -> Handle:
        self.range_of(pointers.data, None, desired.data.itemsize, "atomic_cas")
        old = raw_atomics.cas(pointers.data, expected.data, desired.data, sem)
        self._observe(pointers.data, old)
        return Handle(old, desired.dtype)

    def create_atomic_rmw(self, op: Any, pointers: Handle, value: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        addresses = pointers.data
        data, active = _spread(value.data, addresses.shape), _spread(mask.data, addresses.shape)
        self.range_of(addresses, active, data.itemsize, f"atomic_{op.name.lower()}")
        old = raw_atomics.rmw(op, addresses, data, active, sem, value.dtype)
        if active.any() if active.size > 1 else active.reshape(-1)[0]:
            self._observe(addresses, old)
        return Handle(old, value.dtype)

    def create_atomic_load(self, pointers: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        return self.create_masked_load(pointers, mask, None, is_volatile=True)

    def create_atomic_store(self, pointers: Handle, value: Handle, mask: Handle, sem: Any, scope: Any) -> None:
        self.store(pointers.data, mask.data, value.data)

    def create_atomic_poll(self, *operands: Any) -> NoReturn:
        raise UnsupportedError("the CPU executor does not implement atomic_poll: wait in a loop around an atomic load")

    # -- pointers -----------------------------------------------------------------------------------------------------
    def create_addptr(self, pointers: Handle, offset: Handle) -> Handle:
        delta = np.multiply(offset.data, element_nbytes(pointers.get_element_ty()), dtype=np.int64).view(np.uint64)
        return Handle(pointers.data + delta, pointers.dtype)

    def create_int_to_ptr(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(value.data.astype(np.int64, copy=False).view(np.uint64), dst_type.scalar)

    def create_ptr_to_int(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(value.data.view(np.int64), dst_type.scalar)

    def create_bitcast(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(bit_view(value.data, numpy_dtype(dst_type)), dst_type.scalar)

    # -- shapes -------------------------------------------------------------------------------------------------------
    def create_make_range(self, ret_type: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_splat(self, ret_type: Any, value: Handle) -> Handle:
        return Handle(np.broadcast_to(value.data.reshape(-1)[:1], tuple(ret_type.shape)), value.dtype)

    def create_unsplat(self, value: Handle) -> Handle:
        return Handle(value.data.reshape(-1)[:1], value.dtype)

    create_broadcast = _on_array(lambda data, shape: np.broadcast_to(data, tuple(shape)))
    create_expand_dims = _on_array(np.expand_dims)
    create_reshape = _on_array(lambda data, shape, allow_reorder: data.reshape(tuple(shape)))
    create_trans = _on_array(lambda data, order: np.transpose(data, tuple(order)))

    def create_cat(self, left: Handle, right: Handle) -> Handle:
        return Handle(np.concatenate([left.data, right.data]), left.dtype)

    def create_join(self, left: Handle, right: Handle) -> Handle:
        # The semantic layer gives scalars as they are; their join is a block of two.
        return Handle(np.stack([left.data, right.data], axis=-1), left.dtype)

    def create_split(self, value: Handle) -> tuple[Handle, Handle]:
        return Handle(value.data[..., 0], value.dtype), Handle(value.data[..., 1], value.dtype)

    def create_gather(self, source: Handle, index: Handle, axis: int) -> Handle:
        size = source.data.shape[axis]
        if ((index.data < 0) | (index.data >= size)).any():
            raise IndexError(f"tl.gather with an index outside [0, {size})")
        return Handle(np.take_along_axis(source.data, index.data.astype(np.int64), axis), source.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        values = data.data if mask is None else data.data[mask.data]
        values = values[(values >= 0) & (values < bins)]  # the GPU drops what is out of range
        return Handle(np.bincount(values.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    # -- linear algebra -----------------------------------------------------------------------------------------------
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

    # -- code that is not Triton --------------------------------------------------------------------------------------
    def create_inline_asm(
        self, assembly: str, constraints: str, values: list[Handle], types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        entry = find_assembly(assembly)
        if entry is None:
            raise UnsupportedError(
                f"the CPU executor cannot run the inline assembly {assembly.strip()!r}: put it into a jitted function "
                "of its own and register what the CPU shall do instead with iris_triton.interpreter.cpu_entry, or "
                "register the assembly with iris_triton.interpreter.cpu_assembly"
            )
        operands = [numerics.bf16_to_f32(x.data) if x.dtype == tl.bfloat16 else x.data for x in values]
        returned = entry(program_info(), *operands)
        results = returned if isinstance(returned, tuple) else (returned,)
        if len(results) < len(types):
            raise ValueError(f"the CPU entry for inline assembly returned {len(results)} of {len(types)} results")
        handles = []
        for result, type_ in zip(results, types, strict=False):
            shape = tuple(type_.shape) if type_.is_block() else (1,)
            data = numerics.to_bf16(np.asarray(result)) if type_.scalar == tl.bfloat16 else np.asarray(result)
            handles.append(Handle(np.broadcast_to(data.astype(numpy_dtype(type_)), shape), type_.scalar))
        return SimpleNamespace(get_result=handles.__getitem__)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list[Any], ret_type: Any, is_pure: bool
    ) -> Handle:
        data = call_libdevice(symbol, [a.data if hasattr(a, "data") else np.asarray(a) for a in arguments])
        return Handle(data.astype(numpy_dtype(ret_type), copy=False), ret_type.scalar)

    # -- regions: the combine function of a reduction runs on whole arrays instead of being compiled ------------------
    def get_insertion_point(self, *ignored: Any) -> None:
        """There is no IR to insert into."""

    restore_insertion_point = get_insertion_point

    def create_block_with_parent(self, region: Any, types: Any) -> Any:
        return region

    def create_reduce_ret(self, *handles: Handle) -> None:
        current.region.results = list(handles)

    create_scan_ret = create_reduce_ret


def _spread(data: Array, shape: tuple[int, ...]) -> Array:
    """The array in a shape, contiguous."""
    return np.ascontiguousarray(data if data.shape == shape else np.broadcast_to(data, shape))


def _array(mask: Any) -> Array | None:
    """The array of a mask; Triton's descriptors and block pointers give the array itself in some versions."""
    return mask if mask is None or isinstance(mask, np.ndarray) else mask.data


for _name, _kept in {
    **{f"int{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"fp{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
    "int1": "?",
}.items():
    setattr(CpuBuilder, f"get_{_name}", _constant(_name, np.dtype(_kept)))
