"""The operations of Gluon's IR builder beyond Triton's, computed with numpy.

Layouts are properties of types, and have no meaning for arrays: converting one leaves the array as it is.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter import program
from iris_gluon.interpreter.cta import running_partition
from iris_gluon.interpreter.hopper.operations import HopperOps, buffer_addresses, optional
from iris_gluon.interpreter.hopper.shared import shared_layout
from iris_gluon.interpreter.program import result_layout
from iris_triton.interpreter.frontend.builder import CpuBuilder
from iris_triton.interpreter.frontend.values import Handle, block_type, numpy_dtype
from iris_triton.interpreter.memory import accesses


class LaidOut(Handle):
    """A handle that knows its layout, where the result's has to be inferred from it."""

    __slots__ = ("layout",)

    def __init__(self, data: Any, dtype: Any, layout: Any) -> None:
        super().__init__(data, dtype)
        self.layout = layout


_REFUSED = {  # parts of names of operations that are left out, and why
    **dict.fromkeys(["tmem", "tcgen05"], "Blackwell's tensor memory is not emulated"),
    **dict.fromkeys(["clc", "cluster", "async_shared_store"], "there are no clusters"),
    "async_copy_mbarrier_arrive": "commit and await groups instead",
    "memdesc_reinterpret": "physical layouts are not kept",
    "local_": "shared memory is loaded and stored in whole blocks",
    "tdm": "gfx1250's tensor data mover is not emulated",
    "threadwise_inline_asm": "put it into a jitted function of its own and register a cpu_entry for that",
}


class GluonBuilder(HopperOps, CpuBuilder):
    """Computes what Gluon's semantic layer asks for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") and name.endswith("_layout"):
            # others have no form in IR here
            return functools.partial(shared_layout, name) if "shared" in name else lambda *_, **named: None
        for part, reason in _REFUSED.items():
            if name.startswith("create_") and part in name:
                raise UnsupportedError(
                    f"the CPU executor does not implement the operation {name.removeprefix('create_')!r}: {reason}"
                )
        return super().__getattr__(name)

    @property
    def options(self) -> SimpleNamespace:
        """Options of the launch, as far as the language shows them to kernels; the same ones in all partitions."""
        return SimpleNamespace(
            **self._common_options,
            num_warps=program.launched_warps(),
            num_ctas=program.num_ctas(),
            warp_size=program.warp_size(),
            enable_iisan=False,
        )

    @options.setter
    def options(self, common: Any) -> None:
        self._common_options = vars(common)

    def create_inline_asm(self, assembly: str, *operands: Any) -> Any:
        results = super().create_inline_asm(assembly, *operands)
        if "fence.proxy.async" in assembly:
            running_partition().fence()
        return results

    def create_buffer_load(self, type_: Any, base: Handle, offsets: Handle, mask: Any, other: Any, *_: Any) -> Handle:
        element = base.get_element_ty()
        addresses = buffer_addresses(base, offsets)
        return Handle(accesses.load(addresses, optional(mask), optional(other), numpy_dtype(element)), element)

    def create_buffer_store(self, value: Handle, base: Handle, offsets: Handle, mask: Any, *policy: Any) -> None:
        accesses.store(buffer_addresses(base, offsets), optional(mask), value.data)

    def create_buffer_atomic_rmw(
        self, op: Any, base: Handle, offsets: Handle, value: Handle, sem: Any, scope: Any, mask: Any
    ) -> Handle:
        addresses = Handle(buffer_addresses(base, offsets), base.dtype)
        active = mask if isinstance(mask, Handle) else Handle(np.ones(addresses.data.shape, np.bool_), tl.int1)
        return self.create_atomic_rmw(op, addresses, value, active, sem, scope)

    def create_warp_pipeline_border(self, *arguments: Any) -> None:
        """Hints to the scheduler of AMD's compiler, and to caches, have no effect."""

    create_amd_sched_barrier = get_nvidia_cache_policy = create_warp_pipeline_border

    def get_bool_attr(self, value: bool) -> bool:
        return value

    def get_distributed_ty(self, element: Any, shape: Any, layout: None) -> Any:
        return block_type(element, tuple(shape))

    def get_gluon_layout_from_tensor(self, handle: Handle) -> Any:
        assert isinstance(handle, LaidOut)
        return handle.layout

    def create_convert_layout(self, type_: Any, value: Handle) -> Handle:
        return Handle(value.data, value.dtype)

    create_set_auto_layout = create_convert_layout

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

    def create_split(self, value: Handle) -> tuple[Handle, ...]:
        return tuple(self._infer("split", value, half) for half in super().create_split(value))

    def _infer(self, operation: str, value: Handle, result: Handle, *arguments: Any) -> Handle:
        if not isinstance(value, LaidOut):
            return result
        layout = result_layout(operation, value.layout, tuple(value.data.shape), *map(int, arguments))
        return LaidOut(result.data, result.dtype, layout)
