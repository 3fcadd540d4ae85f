"""Copies by address on a device's copy engines, and flags after them; a second stream for both, beside the caller's.

On the CPU the host copies.  NVIDIA's driver is called through cuda-bindings, which torch's CUDA wheels bring, AMD's
through hip-python.  A copy or flag enqueued while a stream is captured becomes a node of the graph.  Where
`copies_obstacle` names a reason, `engines` raises ImportError.

The second stream has higher priority on multiprocessors, which only its barrier needs: a product does not delay it.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import triton
import triton.language as tl

from iris_core.device.launch_order import SideStream
from iris_core.dispatch.team import Team
from iris_core.errors import DriverError
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.collectives.parts.collective import bind_alone
from iris_triton.language.flags import await_flag, set_flag

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


def engines(device: DeviceType) -> tuple[Callable[..., Any], Callable[..., Any], type, type]:
    """Return `copy` and `write` of `Side`, and what makes what they take of an address and of a raw stream (or 0).

    NVIDIA's bindings convert numbers to objects at every call, which takes longer than the rest of the call in Python.
    """
    if device is DeviceType.CUDA:
        from cuda.bindings import driver

        success, kinds = driver.CUresult.CUDA_SUCCESS, (driver.CUdeviceptr, driver.CUstream)
        copy, write = driver.cuMemcpyDtoDAsync, driver.cuStreamWriteValue32
    elif device is DeviceType.HIP:
        from hip import hip  # type: ignore[import-not-found]

        success, kinds = hip.hipError_t.hipSuccess, (int, int)
        copy, write = hip.hipMemcpyDtoDAsync, hip.hipStreamWriteValue32
    else:
        move = lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes)
        # a kernel, so that the checker sees what it releases
        return move, lambda address, value, flags, stream: _write_word[(1,)](address, value), int, int

    def ask(function: Any, *arguments: Any) -> None:
        (code,) = function(*arguments)
        if code != success:
            raise DriverError(function.__name__, int(code), code.name)

    stream_first = lambda address, value, flags, stream: ask(write, stream, address, value, flags)
    return partial(ask, copy), stream_first, *kinds


@triton.jit(do_not_specialize=("address", "value"))
def _write_word(address, value):
    set_flag(tl.cast(address, tl.pointer_type(tl.int32)), value, "release", "sys")


WORD_NBYTES = 4
_WORDS_NBYTES = 256  # memory for words is asked for in multiples of it, so that few sizes are there


@triton.jit(do_not_specialize=("index", "rank", "timeout_ns", "status"))
def await_word(words, index, rank, timeout_ns, status):
    """Wait until one of some int32 words is 1, and clear it; later work of the stream sees the data before the flag."""
    word = words + index
    one = tl.cast(index, tl.int32) * 0 + 1
    await_flag(word, one, "eq", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    tl.store(word, 0)


def words_of(team: Team, name: str, number: int) -> torch.Tensor:
    """Return int32 words of symmetric memory, a region by its name, for `await_word`: 0 between calls.  Collective."""
    nbytes = number * WORD_NBYTES
    return team.region(name, -(-nbytes // _WORDS_NBYTES) * _WORDS_NBYTES).tensor[:nbytes].view(torch.int32)


@dataclass(slots=True)
class Side:
    """What copies without a multiprocessor, and the second stream; on the CPU is none, and copies are synchronous.

    `copy` and `write` raise DriverError where the driver refuses.
    """

    barrier: Callable[[Any], None]
    #: copies memory that this process can address, peers' included: target, source, bytes, `raw`
    copy: Callable[[Any, Any, int, Any], Any]
    #: writes a 32-bit word of such memory after all earlier work of the stream: address, value, 0, `raw`.  A kernel
    #: that fills the device may wait for it; it must acquire with scope "sys".
    write: Callable[[Any, int, int, Any], Any]
    address: Callable[[int], Any]  #: makes what both take of an address
    second: SideStream | None = None
    stream: Any = None  #: of `second`
    raw: Any = 0  #: its handle, as both take it

    @classmethod
    def of(cls, team: Team, target: DeviceTarget) -> Self:
        """Make a second stream of a device, whose barrier is that of a team."""
        device = target.type
        copy, write, address, raw = engines(device)
        side = cls(bind_alone(team), copy, write, address)
        if device is not DeviceType.CPU:
            side.second = SideStream(target.index, priority=-1)  # before all that say nothing
            side.stream = side.second.stream
            side.raw = raw(side.stream.cuda_stream)
        return side

    def wait(self) -> None:
        if self.second is not None:
            self.second.follow()

    def follow(self) -> None:
        """Make the second stream wait for earlier work of the main stream, then for the barrier."""
        self.wait()
        self.barrier(self.stream)

    def join(self) -> None:
        if self.second is not None:
            self.second.join()
