"""Tensors of memory at an address."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris_core.errors import ArgumentError
from iris_core.heap.backing import tensor_at

if TYPE_CHECKING:
    from collections.abc import Sequence


class CUDAArrayInterface:
    """Memory of a GPU in the form that torch, cupy and numba take (CUDA Array Interface, version 3).

    Element types that the protocol does not know, such as bfloat16, are given as integers of the same size;
    `tensor_from_ptr` gives them their type back.

    Args:
        ptr, size_bytes: address on the device, and bytes of memory there.
        dtype: torch's element type.
        device: where the memory is; torch asks the driver, others may look here.
        shape: sizes of a contiguous array; None for one dimension with all of the memory.

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
        try:
            typestr = np.dtype(str(self.dtype).removeprefix("torch.")).str
        except TypeError:
            typestr = np.dtype(f"i{self.dtype.itemsize}").str
        return {"shape": self.shape, "typestr": typestr, "data": (self.ptr, False), "strides": None, "version": 3}


def tensor_from_ptr(
    ptr: int,
    size_bytes: int,
    dtype: torch.dtype,
    device: str | int | torch.device = "cuda",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
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
    like = torch.empty(view.shape, dtype=dtype, device="meta")
    if like.numel() and ptr == 0:
        raise ArgumentError("there is no memory at address 0")
    return tensor_at(ptr, dtype, torch.device(device), like.shape, like.stride())
