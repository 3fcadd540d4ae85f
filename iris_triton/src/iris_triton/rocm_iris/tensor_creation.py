"""`iris.tensor_creation` of AMD's Iris: the factories of a context as functions of a heap, and their checks.

zeros(ctx.heap, ctx.get_device(), (2, 3), dtype=torch.float32)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.device.targets import same_device
from iris_core.heap.tensors import Device, TensorFactories

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.heap.heap import SymmetricHeap

_FACTORIES = (
    "arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "uniform", "zeros", "zeros_like"
)  # fmt: skip


class _Factories(TensorFactories):
    def __init__(self, heap: SymmetricHeap | None, device: Device) -> None:
        self.device = str(torch.device(device or "cpu"))
        if heap is not None:
            self.heap = heap


def parse_size(size: Any) -> tuple[Any, int]:
    """Return the sizes without the tuples and lists around them, and their product.

    Args:
        size: what a factory got: (2, 3), ((2, 3),), ([2, 3],).
    """
    while len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = size[0]
    return size, math.prod(size)


def is_valid_device(device: Device, iris_device: Device) -> bool:
    """Say whether a requested device is a context's own."""
    return device is None or same_device(torch.device(device), str(iris_device))


def throw_if_invalid_device(device: Device, iris_device: Device) -> None:
    """Check a requested device.

    Raises:
        DeviceError: (a RuntimeError) it is not the context's own.
    """
    _Factories(None, iris_device)._check_options("iris", device)


def apply_layout(tensor: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    """Return the tensor.

    Raises:
        LayoutError: (a ValueError) the layout is not torch.strided.
    """
    _Factories(None, tensor.device)._check_options("iris", layout=layout)
    return tensor


def throw_if_invalid_output_tensor(
    heap: SymmetricHeap, tensor: torch.Tensor, num_elements: int, dtype: torch.dtype | None
) -> None:
    """Check a tensor that is to be filled.

    Raises:
        ArgumentError, NotOnHeapError: (RuntimeErrors) its size, its dtype, or where it lies.
    """
    like = torch.empty(num_elements, dtype=tensor.dtype if dtype is None else dtype, device="meta")
    _Factories(heap, tensor.device)._checked_output(tensor, like)


def __getattr__(name: str) -> Callable[..., torch.Tensor]:
    if name not in _FACTORIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda heap, device, *args, **kwargs: getattr(_Factories(heap, device), name)(*args, **kwargs)
