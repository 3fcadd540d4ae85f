"""Triton device backend of Iris.

    import iris_triton as iris

    ctx = iris.iris(heap_size="64MiB")           # host: a symmetric heap, tensors on it, barriers

    @triton.jit
    def kernel(x, context_tensor, rank: tl.constexpr, world_size: tl.constexpr):
        dev = iris.DeviceContext.initialize(context_tensor, rank, world_size)
        dev.store(x, 1.0, (rank + 1) % world_size)

Scripts of AMD's Iris find its names here; docs/porting.md says what is different.

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""
# ruff: noqa: F405 - device functions come by a star

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from iris_triton.rocm_iris import names

if TYPE_CHECKING:
    from iris_core.bench import do_bench
    from iris_core.logs import DEBUG, ERROR, INFO, WARNING, logger, set_logger_level
    from iris_triton.checker import benign_race
    from iris_triton.context import DeviceContext
    from iris_triton.context import DeviceContext as Context
    from iris_triton.language import *  # noqa: F403 - the device functions
    from iris_triton.language.trace import TraceEvent
    from iris_triton.rocm_iris.ported_context import (
        CUDAArrayInterface,
        Iris,
        get_device_id_for_rank,
        iris,
        is_simulation_env,
        tensor_from_ptr,
    )
    from iris_triton.rocm_iris.x import quiet
    from iris_triton.tiles import AllReduceConfig, TensorView, Tile, TileView, make_tensor_view

__version__ = "0.2.0"

_ADDED = ("barrier", "load_acquire", "put_signal", "signal", "test", "wait", "wait_any")
_OURS = dict.fromkeys(_ADDED, "iris_triton.language") | {"benign_race": "iris_triton.checker"}  # not in AMD's
__all__ = [
    "DEBUG", "ERROR", "INFO", "WARNING", "AllReduceConfig", "CUDAArrayInterface", "Context", "DeviceContext",
    "Iris", "TensorView", "Tile", "TileView", "TraceEvent", "__version__", "atomic_add", "atomic_and", "atomic_cas",
    "atomic_max", "atomic_min", "atomic_or", "atomic_sub", "atomic_xchg", "atomic_xor", "barrier", "benign_race",
    "copy", "do_bench", "get", "get_device_id_for_rank", "iris", "is_simulation_env", "load", "load_acquire",
    "logger", "make_tensor_view", "put", "put_signal", "quiet", "set_logger_level", "signal", "store",
    "tensor_from_ptr", "test", "wait", "wait_any",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = importlib.import_module(_OURS[name]) if name in _OURS else names.MODULES["iris"]
    value = globals()[name] = getattr(home, name)  # kernels look the device functions up often
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *dir(names.MODULES["iris"])})


names.publish(__name__)
