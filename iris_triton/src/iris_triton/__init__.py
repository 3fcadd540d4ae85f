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

from iris_triton.rocm_iris import names

if TYPE_CHECKING:
    from iris_core.bench import do_bench as do_bench
    from iris_core.logs import DEBUG as DEBUG
    from iris_core.logs import ERROR as ERROR
    from iris_core.logs import INFO as INFO
    from iris_core.logs import WARNING as WARNING
    from iris_core.logs import logger as logger
    from iris_core.logs import set_logger_level as set_logger_level
    from iris_triton.context import DeviceContext as Context
    from iris_triton.context import DeviceContext as DeviceContext
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
    from iris_triton.language import load_acquire as load_acquire
    from iris_triton.language import put as put
    from iris_triton.language import put_signal as put_signal
    from iris_triton.language import signal as signal
    from iris_triton.language import store as store
    from iris_triton.language import test as test
    from iris_triton.language import wait as wait
    from iris_triton.language import wait_any as wait_any
    from iris_triton.language.trace import TraceEvent as TraceEvent
    from iris_triton.rocm_iris.ported_context import Iris as Iris
    from iris_triton.rocm_iris.ported_context import get_device_id_for_rank as get_device_id_for_rank
    from iris_triton.rocm_iris.ported_context import iris as iris
    from iris_triton.rocm_iris.ported_context import is_simulation_env as is_simulation_env
    from iris_triton.rocm_iris.tensors import CUDAArrayInterface as CUDAArrayInterface
    from iris_triton.rocm_iris.tensors import tensor_from_ptr as tensor_from_ptr
    from iris_triton.rocm_iris.x import quiet as quiet
    from iris_triton.tiles import AllReduceConfig as AllReduceConfig
    from iris_triton.tiles import TensorView as TensorView
    from iris_triton.tiles import Tile as Tile
    from iris_triton.tiles import TileView as TileView
    from iris_triton.tiles import make_tensor_view as make_tensor_view

__version__ = "0.2.0"

_OURS = {"barrier", "load_acquire", "put_signal", "signal", "test", "wait", "wait_any"}
"""Device functions that AMD's Iris has not."""

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
    "copy",
    "do_bench",
    "get",
    "get_device_id_for_rank",
    "iris",
    "is_simulation_env",
    "load",
    "load_acquire",
    "logger",
    "make_tensor_view",
    "put",
    "put_signal",
    "quiet",
    "set_logger_level",
    "signal",
    "store",
    "tensor_from_ptr",
    "test",
    "wait",
    "wait_any",
]


def __getattr__(name: str) -> Any:
    if name in _OURS:
        value = getattr(importlib.import_module("iris_triton.language"), name)
    elif name in names.MODULES:
        value = importlib.import_module(f"{__name__}.{name}")  # a module of ours, or one of `names`
    else:
        try:
            value = names.find("iris", name)
        except (AttributeError, ModuleNotFoundError) as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error
    globals()[name] = value  # kernels look the device functions up often
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *names.NAMED["iris"], *names.children("iris")})


names.publish(__name__)
