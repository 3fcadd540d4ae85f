"""Iris as scripts of AMD's Iris know it: the context, and the functions of the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from iris_core import api
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.heap.backing import tensor_at
from iris_core.logs import logger
from iris_core.settings import load_settings
from iris_core.tracing import recorder
from iris_core.tracing.layout import COLUMNS
from iris_triton.rocm_iris.collectives import PortedCollectives
from iris_triton.rocm_iris.hip import count_devices
from iris_triton.rocm_iris.operations import PortedOperations

T = TypeVar("T")

_ALLOCATORS = {"torch": "torch", "vmem": "vmem", "vmem_chunked": "vmem"}  # of AMD's Iris, all for GPUs, and ours


class Tracing(recorder.Tracing):
    """`iris_core.tracing.recorder.Tracing`, whose buffers scripts may read, after a `ctx.barrier()`."""

    @property
    def trace_counter(self) -> torch.Tensor | None:
        """Number of events that kernels have recorded or dropped: int32[1]; None when off."""
        return None if self._counters is None else self._counters[:1]

    @property
    def op_index_counter(self) -> torch.Tensor | None:
        """Number of remote operations that were recorded: int32[1]; None when off."""
        return None if self._counters is None else self._counters[1:]

    @property
    def trace_buffers(self) -> dict[str, torch.Tensor]:
        """Columns of the events by name, int32 or int64[max_events]; empty when off.  A duration of -1 is none."""
        return dict(zip((each.name for each in COLUMNS), self._columns, strict=False))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "this context has no copy engines, leave engines out; use put, signal and wait in a kernel, or ctx.ccl.send, "
        "recv and the algorithm copy_engine of ctx.ccl on the host"
    )


class Iris(api.Iris):
    """`iris_core.Iris` with the constructor of AMD's Iris, its `ccl` and `ops`, and names of its own.

    Collective: every rank of the world constructs it with the same arguments.

    What allocates ends with `barrier()`, after the memory is filled: every factory without `out`, `allocate`,
    `allocate_symmetric` and `as_symmetric`.  IRIS_TRITON__ALLOCATION_BARRIER=0, or
    `options={"triton": {"allocation_barrier": False}}`, leaves it out, for programs that synchronise by themselves.

    Args:
        allocator_type: the same as `allocator`; names of AMD's Iris are translated (docs/porting.md).
        engines: copy engines; there are none, so anything but None or nothing is refused.
        heap_size, allocator, backend, device, and all others: as in `iris_core.Iris`.

    Raises:
        ArgumentError: (a ValueError) an unknown engine, or two allocators.
        UnsupportedError: (a RuntimeError) a copy engine was asked for; `put`, `put_tile`, `put_tiles` and `quiet` do.
        IrisError: everything that `iris_core.Iris` raises.
    """

    _collectives, _operations, _tracer = PortedCollectives, PortedOperations, Tracing

    comm: None = None  # there is no communicator of MPI
    copy_engines_device_ctx: None = None  # kernels have no copy engines

    def __init__(
        self, heap_size: int | str | None = None, allocator_type: str = "auto",
        engines: str | Iterable[str] | None = (), *, allocator: str = "auto", backend: str = "triton",
        device: str | torch.device | None = None, **others: Any,
    ) -> None:  # fmt: skip
        wanted = [engines] if isinstance(engines, str) else list(engines or ())
        if unknown := [each for each in wanted if each != "sdma"]:
            raise ArgumentError(f"engines={wanted}: there is no {unknown[0]!r}; there is sdma")
        if wanted:
            _refuse()
        if allocator != "auto" and allocator_type not in ("auto", allocator):
            raise ArgumentError(f"two allocators: allocator_type={allocator_type!r} and allocator={allocator!r}")
        on_cpu = is_simulation_env() if device is None else str(device).startswith("cpu")
        name = allocator if allocator != "auto" else allocator_for(allocator_type, on_cpu)
        super().__init__(heap_size, allocator=name, backend=backend, device=device, **others)

    put = put_tile = put_tiles = quiet = _refuse

    @property
    def heap_size(self) -> int:
        """Bytes of each rank's heap that were asked for; `heap.usable_nbytes` has them rounded up."""
        return int(self.settings.heap_size)

    def get_device(self) -> torch.device:  # type: ignore[override]
        """Return this rank's device; `device` is its name."""
        return torch.device(self.device)

    def get_copy_engine_ctx(self) -> None:
        """Return None: kernels have no copy engines."""

    def broadcast(
        self, value: Any, src: int = 0, *, source_rank: int | None = None, src_rank: int | None = None
    ) -> Any:
        """Return rank `src`'s value on every rank; `source_rank` and `src_rank` are older names of `src`."""
        return super().broadcast(value, src, source_rank=source_rank if src_rank is None else src_rank)

    # -- memory: a script there writes, allocates and launches, so what allocates ends with a barrier -----------------
    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor of one dimension on the heap, after a barrier; `heap.allocate` has none."""
        return self._end_allocation(self.heap.allocate(num_elements, dtype))

    def allocate_symmetric(self, *size: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an uninitialised tensor and its address on every rank, after a barrier; see `iris_core.Iris`."""
        return self._end_allocation(super().allocate_symmetric(*size, dtype=dtype))

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the heap with the content of `external`, after a barrier; see `iris_core.Iris`."""
        return self._end_allocation(super().as_symmetric(external))

    def _new(self, name: str, sizes: tuple[Any, ...], *how: Any, **options: Any) -> torch.Tensor:
        sizes = sizes or (() if "size" in options else ((),))  # without one it is a tensor without dimensions
        return super()._new(name, sizes, *how, **options)

    def _make(self, name: str, like: torch.Tensor, out: torch.Tensor | None, *how: Any) -> torch.Tensor:
        made = super()._make(name, like, out, *how)
        return self._end_allocation(made) if out is None else made

    def _end_allocation(self, made: T) -> T:
        settings = getattr(self.backend, "settings", None)  # of a backend by others, anything
        if getattr(settings, "allocation_barrier", True) and not self.heap.streams.is_capturing():
            self.barrier()
        return made


iris = Iris


def allocator_for(name: str, on_cpu: bool) -> str:
    """Return the allocator that does the job of one of AMD's Iris; other names are ours."""
    if name not in _ALLOCATORS or not on_cpu:
        return _ALLOCATORS.get(name, name)
    logger.warning("allocator_type=%r needs GPUs; ranks that compute on the CPU take the allocator 'host'", name)
    return "host"


def is_simulation_env() -> bool:
    """Return whether contexts compute on the CPU: there is no GPU, or IRIS_DEVICE says so."""
    device = load_settings().device
    return not torch.cuda.is_available() if device is None else device.startswith("cpu")


def get_device_id_for_rank(rank: int) -> int:
    """Return the index of the GPU that a rank of a host uses when its ranks share its GPUs in turn; 0 without one."""
    return rank % max(1, count_devices())


# -- tensors of memory at an address ----------------------------------------------------------------------------------
@dataclass(eq=False)
class CUDAArrayInterface:
    """Memory of a GPU in the form that torch, cupy and numba take (CUDA Array Interface, version 3).

    Element types that the protocol does not know, such as bfloat16, are given as integers of the same size;
    `tensor_from_ptr` gives them their type back.

    Raises:
        ArgumentError: (a ValueError) the shape needs more bytes than there are, or an address or size is negative.
    """

    ptr: int  #: ptr, size_bytes: address on the device, and bytes of memory there
    size_bytes: int
    dtype: torch.dtype  #: torch's element type
    device: str | int | torch.device | None = None  #: where the memory is; torch asks the driver, others may look here
    shape: Sequence[int] | None = None  #: sizes of a contiguous array; None for one dimension with all of the memory

    def __post_init__(self) -> None:
        if self.ptr < 0 or self.size_bytes < 0:
            raise ArgumentError(f"memory at {self.ptr:#x} of {self.size_bytes} bytes: neither can be negative")
        itemsize = self.dtype.itemsize
        self.shape = (self.size_bytes // itemsize,) if self.shape is None else tuple(map(int, self.shape))
        if (needed := math.prod(self.shape) * itemsize) > self.size_bytes:
            raise ArgumentError(f"shape {self.shape} of {self.dtype}: {needed} bytes, and there are {self.size_bytes}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.")
        typestr = np.dtype(name if hasattr(np, name) else f"i{self.dtype.itemsize}").str
        return {"shape": self.shape, "typestr": typestr, "data": (self.ptr, False), "strides": None, "version": 3}


def tensor_from_ptr(
    ptr: int, size_bytes: int, dtype: torch.dtype, device: str | int | torch.device = "cuda",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a tensor of memory at an address; the memory stays its owner's, who must outlive the tensor.

    The address is one on the device, or in this process for the CPU; a peer's (`ctx.heap.translate`) will do.  The
    other arguments are as of `CUDAArrayInterface`, and so are the errors.

    Example:
        >>> import torch
        >>> from iris_triton import tensor_from_ptr
        >>> x = torch.arange(4)
        >>> tensor_from_ptr(x.data_ptr(), 32, torch.int64, "cpu", (2, 2))
        tensor([[0, 1],
                [2, 3]])
    """
    view = CUDAArrayInterface(ptr, size_bytes, dtype, device, shape)
    like = torch.empty(view.shape or (), dtype=dtype, device="meta")
    if like.numel() and ptr == 0:
        raise ArgumentError("there is no memory at address 0")
    return tensor_at(ptr, dtype, torch.device(device), like.shape, like.stride())
