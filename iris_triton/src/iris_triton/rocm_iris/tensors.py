"""Tensors of other memory, and `iris.tensor_creation`: the factories of a context as functions of a heap.

zeros(ctx.heap, ctx.get_device(), (2, 3), dtype=torch.float32)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import ArgumentError
from iris_core.heap.backing import tensor_at
from iris_core.heap.tensors import Device, TensorFactories

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.heap.heap import SymmetricHeap

_TYPESTRS = {
    **{getattr(torch, f"int{bits}"): f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    torch.bool: "b1",
    torch.float16: "f2",
    torch.float32: "f4",
    torch.float64: "f8",
    torch.complex64: "c8",
    torch.complex128: "c16",
}
"""Element types that the protocol has a name for; others are given as integers."""


class CUDAArrayInterface:
    """Memory of a GPU in the form that torch, cupy and numba take (CUDA Array Interface, version 3).

    Element types that the protocol does not know, such as bfloat16, are given as integers of the same size; see
    `tensor_from_ptr`, which gives them their type back.

    Args:
        ptr: address on the device.
        size_bytes: bytes of memory there.
        dtype: torch's element type.
        device: where the memory is; torch asks the driver, others may look here.
        shape: sizes of a contiguous array; None for one dimension with all that there is room for.

    Raises:
        ArgumentError: (a ValueError) the shape needs more bytes than there are, or an address or size is negative.
    """

    def __init__(
        self,
        ptr: int,
        size_bytes: int,
        dtype: torch.dtype,
        device: str | int | torch.device | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        if ptr < 0 or size_bytes < 0:
            raise ArgumentError(f"memory at {ptr:#x} of {size_bytes} bytes: neither can be negative")
        self.ptr, self.size_bytes, self.dtype, self.device = ptr, size_bytes, dtype, device
        self.shape = (size_bytes // dtype.itemsize,) if shape is None else tuple(int(size) for size in shape)
        needed = math.prod(self.shape) * dtype.itemsize
        if needed > size_bytes:
            raise ArgumentError(
                f"a tensor of shape {self.shape} and {dtype} needs {needed} bytes, and there are {size_bytes}"
            )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        nbytes = self.dtype.itemsize
        typestr = ("|" if nbytes == 1 else "<") + _TYPESTRS.get(self.dtype, f"i{nbytes}")
        return {"shape": self.shape, "typestr": typestr, "data": (self.ptr, False), "strides": None, "version": 3}


def tensor_from_ptr(
    ptr: int,
    size_bytes: int,
    dtype: torch.dtype,
    device: str | int | torch.device = "cuda",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a tensor of memory at an address; the memory stays its owner's, who must outlive the tensor.

    Args:
        ptr: address: on the device, or in this process for the CPU.  A peer's address (`ctx.heap.translate`) will do.
        size_bytes: bytes of memory there.
        dtype: any element type.
        device: "cuda", "cuda:1", 1, or "cpu".
        shape: sizes of a contiguous tensor; None for one dimension with all that there is room for.

    Raises:
        ArgumentError: (a ValueError) the shape needs more bytes than there are, or the memory cannot be there.

    Example:
        >>> import torch
        >>> from iris_triton import tensor_from_ptr
        >>> x = torch.arange(4)
        >>> tensor_from_ptr(x.data_ptr(), 32, torch.int64, "cpu", (2, 2))
        tensor([[0, 1],
                [2, 3]])
    """
    view = CUDAArrayInterface(ptr, size_bytes, dtype, device, shape)
    like = torch.empty(view.shape, dtype=dtype, device="meta")
    if like.numel() and ptr == 0:
        raise ArgumentError("there is no memory at address 0")
    return tensor_at(ptr, dtype, torch.device(device), like.shape, like.stride())


class _Factories(TensorFactories):
    def __init__(self, heap: SymmetricHeap, device: Device) -> None:
        self.heap, self.device = heap, str(torch.device(device or "cpu"))


def _factory(name: str) -> Callable[..., torch.Tensor]:
    def make(heap: SymmetricHeap, device: Device, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(_Factories(heap, device), name)(*args, **kwargs)  # type: ignore[no-any-return]

    return make


arange, empty, full, linspace, ones, rand = map(_factory, ("arange", "empty", "full", "linspace", "ones", "rand"))
randint, randn, uniform, zeros, zeros_like = map(_factory, ("randint", "randn", "uniform", "zeros", "zeros_like"))
