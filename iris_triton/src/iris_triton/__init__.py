"""Triton device backend of Iris.

    import iris_triton as iris

    ctx = iris.iris(heap_size="64MiB")           # host: a symmetric heap, tensors on it, barriers

    @triton.jit
    def kernel(x, context_tensor, rank: tl.constexpr, world_size: tl.constexpr):
        dev = iris.DeviceContext.initialize(context_tensor, rank, world_size)
        dev.store(x, 1.0, (rank + 1) % world_size)

Scripts of the reference system find its names here; docs/porting.md says what is different.

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core import tensors as tensor_creation
    from iris_core.bench.once import do_bench as do_bench
    from iris_core.logs import DEBUG as DEBUG
    from iris_core.logs import ERROR as ERROR
    from iris_core.logs import INFO as INFO
    from iris_core.logs import WARNING as WARNING
    from iris_core.logs import logger as logger
    from iris_core.logs import set_logger_level as set_logger_level
    from iris_triton.context import DeviceContext as Context
    from iris_triton.context import DeviceContext as DeviceContext
    from iris_triton.host import get_device_id_for_rank as get_device_id_for_rank
    from iris_triton.host import iris as iris
    from iris_triton.host import is_simulation_env as is_simulation_env
    from iris_triton.language import atomic_add as atomic_add
    from iris_triton.language import atomic_and as atomic_and
    from iris_triton.language import atomic_cas as atomic_cas
    from iris_triton.language import atomic_max as atomic_max
    from iris_triton.language import atomic_min as atomic_min
    from iris_triton.language import atomic_or as atomic_or
    from iris_triton.language import atomic_sub as atomic_sub
    from iris_triton.language import atomic_xchg as atomic_xchg
    from iris_triton.language import atomic_xor as atomic_xor
    from iris_triton.language import barrier as barrier
    from iris_triton.language import copy as copy
    from iris_triton.language import get as get
    from iris_triton.language import load as load
    from iris_triton.language import put as put
    from iris_triton.language import put_signal as put_signal
    from iris_triton.language import signal as signal
    from iris_triton.language import store as store
    from iris_triton.language import wait as wait
    from iris_triton.porting.context import Iris as Iris
    from iris_triton.porting.engines import quiet as quiet
    from iris_triton.porting.pointers import CUDAArrayInterface as CUDAArrayInterface
    from iris_triton.porting.pointers import tensor_from_ptr as tensor_from_ptr
    from iris_triton.tiles import AllReduceConfig as AllReduceConfig
    from iris_triton.tiles import TensorView as TensorView
    from iris_triton.tiles import Tile as Tile
    from iris_triton.tiles import TileView as TileView
    from iris_triton.tiles import make_tensor_view as make_tensor_view
    from iris_triton.tracing import TraceEvent as TraceEvent

__version__ = "0.2.0"

_HOMES = {
    "AllReduceConfig": "iris_triton.tiles",
    "CUDAArrayInterface": "iris_triton.porting.pointers",
    "Context": "iris_triton.context",
    "DEBUG": "iris_core.logs",
    "DeviceContext": "iris_triton.context",
    "ERROR": "iris_core.logs",
    "INFO": "iris_core.logs",
    "Iris": "iris_triton.porting.context",
    "TensorView": "iris_triton.tiles",
    "Tile": "iris_triton.tiles",
    "TileView": "iris_triton.tiles",
    "TraceEvent": "iris_triton.tracing",
    "WARNING": "iris_core.logs",
    "atomic_add": "iris_triton.language",
    "atomic_and": "iris_triton.language",
    "atomic_cas": "iris_triton.language",
    "atomic_max": "iris_triton.language",
    "atomic_min": "iris_triton.language",
    "atomic_or": "iris_triton.language",
    "atomic_sub": "iris_triton.language",
    "atomic_xchg": "iris_triton.language",
    "atomic_xor": "iris_triton.language",
    "barrier": "iris_triton.language",
    "copy": "iris_triton.language",
    "do_bench": "iris_core.bench.once",
    "get": "iris_triton.language",
    "get_device_id_for_rank": "iris_triton.host",
    "iris": "iris_triton.host",
    "is_simulation_env": "iris_triton.host",
    "load": "iris_triton.language",
    "logger": "iris_core.logs",
    "make_tensor_view": "iris_triton.tiles",
    "put": "iris_triton.language",
    "put_signal": "iris_triton.language",
    "quiet": "iris_triton.porting.engines",
    "set_logger_level": "iris_core.logs",
    "signal": "iris_triton.language",
    "store": "iris_triton.language",
    "tensor_from_ptr": "iris_triton.porting.pointers",
    "wait": "iris_triton.language",
}
_MODULES = {
    "bench": "iris_triton.bench",
    "ccl": "iris_triton.ccl",
    "experimental": "iris_triton.experimental",
    "gluon": "iris_gluon",
    "hip": "iris_triton.hip",
    "ops": "iris_triton.ops",
    "tensor_creation": "iris_core.tensors",
    "x": "iris_triton.x",
}
_NAMES_THERE = {"Context": "DeviceContext"}

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "AllReduceConfig",
    "CUDAArrayInterface",
    "Context",
    "DeviceContext",
    "Iris",
    "TensorView",
    "Tile",
    "TileView",
    "TraceEvent",
    "__version__",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "barrier",
    "bench",
    "ccl",
    "copy",
    "do_bench",
    "experimental",
    "get",
    "get_device_id_for_rank",
    "hip",
    "iris",
    "is_simulation_env",
    "load",
    "logger",
    "make_tensor_view",
    "ops",
    "put",
    "put_signal",
    "quiet",
    "set_logger_level",
    "signal",
    "store",
    "tensor_creation",
    "tensor_from_ptr",
    "wait",
    "x",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = _module(name)
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), _NAMES_THERE.get(name, name))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # kernels look the device functions up often
    return value


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name != _MODULES[name]:
            raise
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, because {error.name} is not installed"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
