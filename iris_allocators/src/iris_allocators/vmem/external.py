"""Finding the physical memory behind an existing tensor, so that it can be mapped a second time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris_core.errors import DeviceError, DriverError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from iris_allocators.driver import VmmDriver
    from iris_allocators.driver.transaction import Transaction
    from iris_allocators.vmem.pieces import Handles


@dataclass(frozen=True, slots=True)
class External:
    """The physical memory behind a tensor.

    Attributes:
        handles: the driver's handle of each piece and the piece's size in bytes, by address.
        start_bytes: where the tensor's first element lies in the first piece.
        extent_bytes: from the tensor's first element to the end of its last one.
    """

    handles: tuple[tuple[int, int], ...]
    start_bytes: int
    extent_bytes: int

    @property
    def nbytes(self) -> int:
        """Sum of the pieces."""
        return sum(nbytes for _, nbytes in self.handles)


def retain(driver: VmmDriver, taken: Handles, tensor: torch.Tensor, device: str, undo: Transaction) -> External:
    """Find a tensor's memory and take a reference to every piece of it.

    Args:
        driver: the device's.
        taken: lets go of the references.
        tensor: any tensor with at least one element.
        device: torch's name of the device on which it has to be.
        undo: gets the steps that let go of the references.

    Raises:
        DeviceError: the tensor is on another device.
        UnsupportedError: the driver cannot share its memory.
    """
    if str(tensor.device) != device:
        raise DeviceError(f"as_symmetric: the tensor is on {tensor.device}, but this rank's heap is on {device}")
    begin = tensor.data_ptr()
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = (1 + sum(steps)) * tensor.element_size()
    handles: list[tuple[int, int]] = []
    first = ptr = begin
    try:
        while ptr < begin + extent:
            handle = driver.retain(ptr)
            undo.add(taken.release, handle)
            if not handles:
                os.close(driver.export_fd(handle))  # what cannot be exported is refused before anything is mapped
            base, nbytes = driver.address_range(ptr)
            first = first if handles else base
            handles.append((handle, nbytes))
            ptr = base + nbytes
    except DriverError as e:
        raise UnsupportedError(
            f"as_symmetric: the driver cannot share the memory of this tensor ({e}). It can share what torch allocates "
            "with PYTORCH_ALLOC_CONF=expandable_segments:True (set before the program starts; where the older "
            "PYTORCH_CUDA_ALLOC_CONF, or with ROCm PYTORCH_HIP_ALLOC_CONF, is set, torch reads that one instead), and "
            "tensors made inside `with ctx.use_mem_pool():` are on the heap from the beginning. To get a copy instead: "
            "ctx.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)"
        ) from e
    return External(tuple(handles), begin - first, extent)
