"""Copies by address on a device's copy engines, and flags after them; a second stream for both, beside the caller's.

On the CPU the host copies.  NVIDIA's driver is called through cuda-bindings, which torch's CUDA wheels bring, AMD's
through hip-python.  A copy or flag enqueued while a stream is captured becomes a node of the graph.  Where
`copies_obstacle` names a reason, a copier, flag writer or handles are an ImportError.

The second stream has higher priority on multiprocessors, which only its barrier needs: a product does not delay it.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
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
    """The second stream; on the CPU there is none, and copies are synchronous."""

    barrier: Callable[[Any], None]
    copy: Callable[[Any, Any, int, Any], None]  # see `copier`, `flag_writer` and `handles`
    write: Callable[[Any, int, int, Any], None]
    address: Callable[[int], Any]
    second: SideStream | None = None
    stream: Any = None  # of `second`
    raw: Any = 0  # its handle for `copy`

    @classmethod
    def of(cls, team: Team, target: DeviceTarget) -> Self:
        """Make a second stream of a device, whose barrier is that of a team."""
        device = target.type
        address, raw = handles(device)
        side = cls(bind_alone(team), copier(device), flag_writer(device), address)
        if device is not DeviceType.CPU:
            side.second = SideStream(target.index, priority=-1)  # before all that say nothing
            side.stream = side.second.stream
            side.raw = raw(side.stream.cuda_stream)
        return side

    def wait(self) -> None:
        """Make the second stream wait for earlier work of the main stream."""
        if self.second is not None:
            self.second.follow()

    def follow(self) -> None:
        """Make the second stream wait for earlier work of the main stream, then for the barrier."""
        self.wait()
        self.barrier(self.stream)

    def join(self) -> None:
        """Make the main stream wait for the second stream."""
        if self.second is not None:
            self.second.join()
