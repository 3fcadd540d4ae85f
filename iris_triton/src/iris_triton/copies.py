"""Copies by address on a device's copy engines, and flags written after them, in stream order.

On the CPU the host copies.  NVIDIA's driver is called through cuda-bindings, which torch's CUDA wheels bring, AMD's
through hip-python.  A copy or flag enqueued while a stream is captured becomes a node of the graph.  Where
`copies_obstacle` names a reason, the other functions raise ImportError.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from iris_core.errors import DriverError
from iris_core.types import DeviceType
from iris_triton.language.flags import set_flag

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = {DeviceType.CUDA: ("cuda.bindings", "cuda-bindings"), DeviceType.HIP: ("hip", "hip-python")}


def copies_obstacle(device: DeviceType) -> str:
    """Return why the copy engines of such a device are not available; empty if they are."""
    if device not in _MODULES:
        return ""
    module, distribution = _MODULES[device]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    return "" if found else f"the copy engines are driven through {distribution}, which is not installed"


def copier(device: DeviceType) -> Callable[[Any, Any, int, Any], Any]:
    """Return a function that copies memory which this process can address, peers' included.

    It takes the addresses of the target and of the source, the size in bytes, and the raw stream (0 for the default
    one), as numbers or as `handles` converts them.  On a GPU the copy is asynchronous, and a DriverError is raised if
    it cannot be enqueued; on the CPU it is synchronous and the stream is ignored.
    """
    if device in _MODULES:
        return _asking(device, "cuMemcpyDtoDAsync", "hipMemcpyDtoDAsync")
    return lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes)


def flag_writer(device: DeviceType) -> Callable[[Any, int, int, Any], None]:
    """Return a function that writes a 32-bit word after all earlier work of a stream.

    Its arguments are the word's address (a multiple of 4, also in a peer's memory), the value, 0, and the raw stream,
    as numbers or as `handles` converts them.  The write needs no multiprocessor, so a kernel that fills the device may
    wait for such words; it must acquire with scope "sys".
    """
    if device in _MODULES:
        return _asking(device, "cuStreamWriteValue32", "hipStreamWriteValue32", stream_first=True)
    # a kernel, so that the checker sees what it releases
    return lambda address, value, flags, stream: _write_word[(1,)](address, value)


def handles(device: DeviceType) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return functions that convert an address, and a raw stream, for repeated calls of a copier or flag writer.

    NVIDIA's bindings convert numbers to objects at every call, which takes longer than the rest of the call in Python.
    """
    if device is DeviceType.CUDA:
        from cuda.bindings import driver

        return driver.CUdeviceptr, driver.CUstream
    return int, int


def _asking(
    device: DeviceType, of_cuda: str, of_hip: str, *, stream_first: bool = False
) -> Callable[[Any, Any, int, Any], None]:
    """Wrap a driver's function of three numbers and a stream: raise DriverError for its result code."""
    if device is DeviceType.CUDA:
        from cuda.bindings import driver

        function, success = getattr(driver, of_cuda), driver.CUresult.CUDA_SUCCESS
    else:
        from hip import hip  # type: ignore[import-not-found]

        function, success = getattr(hip, of_hip), hip.hipError_t.hipSuccess

    def ask(first: Any, second: Any, third: int, stream: Any) -> None:
        arguments = (stream, first, second, third) if stream_first else (first, second, third, stream)
        (code,) = function(*arguments)
        if code != success:
            raise DriverError(function.__name__, int(code), code.name)

    return ask


@triton.jit(do_not_specialize=("address", "value"))
def _write_word(address, value):  # type: ignore[no-untyped-def]
    set_flag(tl.cast(address, tl.pointer_type(tl.int32)), value, "release", "sys")
