"""Gluon device backend of Iris.

    from iris_core import Iris
    from iris_gluon import IrisDeviceCtx, default_layout

    ctx = Iris("64MiB", backend="gluon")

    @gluon.jit
    def kernel(IrisDeviceCtx: gl.constexpr, context_tensor, x, BLOCK: gl.constexpr):
        dev = IrisDeviceCtx.initialize(context_tensor)
        i = gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
        dev.store(x + i, 1.0, (dev.cur_rank + 1) % dev.num_ranks)

    kernel[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, BLOCK=1024)

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core import loaded_on_use

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_gluon.context import GluonDeviceTracing, IrisDeviceCtx
    from iris_gluon.layouts import blocked_layout, default_layout, warp_size
    from iris_triton.language.trace import TraceEvent
    from iris_triton.rocm_iris.ported_context import Iris

__version__ = "0.2.0"

__all__ = [
    "GluonDeviceTracing", "IrisDeviceCtx", "TraceEvent", "__version__", "blocked_layout", "default_layout", "iris",
    "warp_size",
]  # fmt: skip


def iris(
    heap_size: int | str | None = None, allocator_type: str = "auto", engines: str | Iterable[str] | None = ()
) -> Iris:
    """Open a context with the Gluon backend; otherwise as `iris_triton.iris`."""
    from iris_triton.rocm_iris.ported_context import Iris

    return Iris(heap_size, allocator_type, engines, backend="gluon")


__getattr__, __dir__ = loaded_on_use(__name__, {
    "TraceEvent": "iris_triton.language.trace",
    **dict.fromkeys(["GluonDeviceTracing", "IrisDeviceCtx"], "iris_gluon.context"),
    **dict.fromkeys(["blocked_layout", "default_layout", "warp_size"], "iris_gluon.layouts"),
})  # fmt: skip
