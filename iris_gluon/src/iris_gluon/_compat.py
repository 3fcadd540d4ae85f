"""Private interfaces of Gluon; those of Triton are in `iris_triton._compat`, as are the versions that were tried.

interface                3.6                 3.7 and newer
barrier of a program     thread_barrier      barrier
shared_memory gather     missing             present
TMA                      async_copy_*        async_load, async_store from 3.8 on
"""

from typing import Any

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton._compat import aggregate as aggregate

try:
    import triton
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import _core, _layouts
    from triton.experimental.gluon.language._semantic import GluonSemantic as GluonSemantic
    from triton.experimental.gluon.language.nvidia import hopper as _hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _HostDescriptor
    from triton.runtime import _allocation
except ImportError as error:
    problem = f"this Triton's Gluon lacks what Iris needs ({error}); Iris works with Triton {_compat.KNOWN}"
    raise UnsupportedError(problem) from error

core: Any = _core
layouts: Any = _layouts
hopper: Any = _hopper
constexpr: Any = gl.constexpr
distributed_type = _core.distributed_type
DistributedLayout = _layouts.DistributedLayout
AutoLayouts = (_layouts.AutoLayout, _layouts.CoalescedLayout)  # which a pass of the compiler chooses later
HostDescriptor: Any = _HostDescriptor  # a description of a tensor made on the host, for TMA

tma_load = getattr(_hopper.tma, "async_load", None) or _hopper.tma.async_copy_global_to_shared
tma_store = getattr(_hopper.tma, "async_store", None) or _hopper.tma.async_copy_shared_to_global
"""The builtins that begin to copy a block to shared memory, and from it, by TMA."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the builtin that synchronises the threads of a program


def new_builder(num_warps: int, warp_size: int) -> tuple[Any, Any]:
    """Make an IR builder that stands in an empty function, and what must be kept alive for it."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
    for name, value in (("num-warps", num_warps), ("num-ctas", 1), ("threads-per-warp", warp_size)):
        module.set_attr(f"ttg.{name}", builder.get_int32_attr(value))
    builder.set_loc("iris_gluon", 0, 0)
    signature = builder.get_function_ty([], [])
    function = builder.get_or_insert_function(module, "nothing", signature, "public", False)
    module.push_back(function)
    builder.set_insertion_point_to_start(function.add_entry_block())
    return builder, (context, module, function)


def provide_scratch() -> None:
    """Set Triton's allocator of scratch memory, for descriptors made in kernels, unless one is set.

    Triton calls it at the launch, and keeps the allocator per context of Python, so for this thread.
    """
    import torch

    if _allocation._allocator.get() is not _allocation._NULL_ALLOCATOR:
        return

    def allocate(nbytes: int, alignment: int, stream: int | None) -> Any:
        return torch.empty(nbytes, dtype=torch.int8, device="cuda")  # torch aligns to 512 bytes; descriptions need 128

    triton.set_allocator(allocate)


def forwarded(name: str) -> Any | None:
    """Return Gluon's own version of a builtin of Triton's language, or None."""
    function = getattr(gl, name, None)
    return None if function is getattr(_compat.core, name, None) else function
