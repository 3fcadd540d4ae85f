"""What Gluon's IR builder has beyond Triton's, computing with numpy.

Layouts are properties of types, and have no meaning for arrays: converting one leaves the array as it is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter import program
from iris_gluon.interpreter.hopper.async_ops import AsyncOps, buffer_addresses
from iris_gluon.interpreter.hopper.memory_ops import MemoryOps, optional, partition
from iris_gluon.interpreter.hopper.shared import SharedLayout
from iris_gluon.interpreter.inference import result_layout
from iris_triton import _compat as _triton
from iris_triton.interpreter.frontend.builder import CpuBuilder
from iris_triton.interpreter.frontend.typefacts import block_type
from iris_triton.interpreter.frontend.values import Array, Handle, numpy_dtype
from iris_triton.interpreter.memory import raw_atomics


class LaidOut(Handle):
    """A handle that knows its layout, where the result's has to be inferred from it."""

    __slots__ = ("layout",)

    def __init__(self, data: Any, dtype: Any, layout: Any) -> None:
        super().__init__(data, dtype)
        self.layout = layout


_REFUSED = {
    "tmem": "Blackwell's tensor memory is not emulated",
    "tcgen05": "Blackwell's tensor memory is not emulated",
    "clc": "cluster launch control is not emulated: programs do not take over each other's place",
    "tdm": "gfx1250's tensor data mover is not emulated",
    "im2col": "im2col is not emulated",
    "cluster": "there are no clusters",
    "async_shared_store": "there are no clusters",
    "threadwise_inline_asm": "put the assembly into a jitted function of its own and register what the CPU shall do "
    "instead with iris_triton.interpreter.cpu_entry",
}
"""Parts of names of operations that are left out, and why."""


class GluonBuilder(AsyncOps, MemoryOps, CpuBuilder):
    """Computes what Gluon's semantic layer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self._common_options = dict(vars(self.options))
        del self.options

    def __getattr__(self, name: str) -> Any:
        if name == "options":
            return self._options()
        if name.startswith("get_") and name.endswith("_layout"):
            return (lambda *arguments: SharedLayout(name, arguments)) if "shared" in name else _no_attribute
        for part, reason in _REFUSED.items():
            if name.startswith("create_") and part in name:
                raise UnsupportedError(
                    f"the CPU executor does not implement the operation {name.removeprefix('create_')!r}: {reason}"
                )
        return super().__getattr__(name)

    def _options(self) -> SimpleNamespace:
        """Options of the launch, as far as the language shows them to kernels; the same ones in all partitions."""
        return SimpleNamespace(
            **self._common_options,
            num_warps=program.launched_warps(),
            num_ctas=program.num_ctas(),
            warp_size=program.warp_size(),
            enable_iisan=False,
        )

    # -- memory -------------------------------------------------------------------------------------------------------
    def reduce(self, kind: Any, addresses: Array, data: Array, element: Any) -> None:
        """Combine elements with global memory, each atomically, as a TMA reduction does."""
        name = kind.name
        if name == "ADD" and element.is_floating():
            name = "FADD"
        elif name in ("MIN", "MAX") and element.is_int_unsigned():
            name = f"U{name}"
        if element.is_floating() and name != "FADD":
            raise UnsupportedError(f"the CPU executor does not implement TMA reductions {name} of {element}")
        op = getattr(_triton.ir.ATOMIC_OP, name)
        raw_atomics.rmw(op, addresses, data, np.ones(addresses.shape, np.bool_), self._relaxed, element)

    def create_inline_asm(self, assembly: str, *operands: Any) -> Any:
        results = super().create_inline_asm(assembly, *operands)
        if "fence.proxy.async" in assembly:
            partition().fence()
        return results

    _relaxed = _triton.ir.MEM_SEMANTIC.RELAXED

    def create_buffer_load(
        self, type_: Any, base: Handle, offsets: Handle, mask: Any, other: Any, *policy: Any
    ) -> Handle:
        element = base.get_element_ty()
        addresses = buffer_addresses(base, offsets)
        return Handle(self.load(addresses, optional(mask), optional(other), numpy_dtype(element)), element)

    def create_buffer_store(self, value: Handle, base: Handle, offsets: Handle, mask: Any, *policy: Any) -> None:
        self.store(buffer_addresses(base, offsets), optional(mask), value.data)

    def create_buffer_atomic_rmw(
        self, op: Any, base: Handle, offsets: Handle, value: Handle, sem: Any, scope: Any, mask: Any
    ) -> Handle:
        addresses = Handle(buffer_addresses(base, offsets), base.dtype)
        active = mask if isinstance(mask, Handle) else Handle(np.ones(addresses.data.shape, np.bool_), tl.int1)
        return self.create_atomic_rmw(op, addresses, value, active, sem, scope)

    def create_warp_pipeline_border(self, *arguments: Any) -> None:
        """A hint to the scheduler of AMD's compiler."""

    create_amd_sched_barrier = create_warp_pipeline_border

    def get_nvidia_cache_policy(self, *policy: Any) -> None:
        """Hints have no effect."""

    def get_bool_attr(self, value: bool) -> bool:
        return value

    # -- types --------------------------------------------------------------------------------------------------------
    def get_distributed_ty(self, element: Any, shape: Any, layout: None) -> Any:
        return block_type(element, tuple(shape))

    # -- layouts ------------------------------------------------------------------------------------------------------
    def get_gluon_layout_from_tensor(self, handle: Handle) -> Any:
        assert isinstance(handle, LaidOut)
        return handle.layout

    def create_convert_layout(self, type_: Any, value: Handle) -> Handle:
        return Handle(value.data, value.dtype)

    create_set_auto_layout = create_convert_layout

    def is_convert_layout_trivial(self, type_: Any, value: Handle) -> bool:
        raise NotImplementedError  # the semantic layer compares linear layouts instead

    # -- shapes -------------------------------------------------------------------------------------------------------
    def create_broadcast(self, value: Handle, type_: Any) -> Handle:
        return super().create_broadcast(value, type_.shape)

    def create_expand_dims(self, value: Handle, axis: int) -> Handle:
        return self._infer("expand_dims", value, super().create_expand_dims(value, axis), axis)

    def create_reshape(self, value: Handle, shape: Any, allow_reorder: bool) -> Handle:
        return self._infer("reshape", value, super().create_reshape(value, shape, allow_reorder), *shape)

    def create_trans(self, value: Handle, order: Any) -> Handle:
        return self._infer("trans", value, super().create_trans(value, order), *order)

    def create_join(self, left: Handle, right: Handle) -> Handle:
        return self._infer("join", left, super().create_join(left, right))

    def create_split(self, value: Handle) -> tuple[Handle, Handle]:
        left, right = super().create_split(value)
        return self._infer("split", value, left), self._infer("split", value, right)

    def _infer(self, operation: str, value: Handle, result: Handle, *arguments: Any) -> Handle:
        if not isinstance(value, LaidOut):
            return result
        shape = tuple(value.data.shape)
        layout = result_layout(
            operation,
            value.layout,
            shape,
            *map(int, arguments),
            num_warps=program.num_warps(),
            warp_size=program.warp_size(),
        )
        return LaidOut(result.data, result.dtype, layout)

    def create_cat(self, left: Handle, right: Handle, type_: Any = None) -> Handle:
        return super().create_cat(left, right)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None, layout: None = None) -> Handle:
        return super().create_histogram(data, bins, mask)


def _no_attribute(*arguments: Any, **named: Any) -> None:
    """Layouts have no form in IR here."""
