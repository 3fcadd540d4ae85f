"""Which tensor an address belongs to: the view that the kernel was given, with its strides.

While kernels are checked for "bounds", the pointer of each tensor argument carries the number of the argument in bits
that no address has.  Whatever a kernel adds to it, the number stays, also through a translation to another rank's heap;
each access takes it off and looks whether its bytes are bytes of that view.  A pointer that was made of an integer, or
loaded from memory, has no number, and is held against blocks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_triton.checker.places import Heaps
from iris_triton.interpreter.frontend.offsets import WRAPPED
from iris_triton.interpreter.memory.regions import registered_heaps

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_BIT, _MOST = 48, (1 << 12) - 1  # where the number begins, and the largest one: below WRAPPED, above addresses
_TAG = np.uint64(_MOST << _BIT) | WRAPPED
_ADDRESS = ~_TAG


class View(NamedTuple):
    """The bytes of a tensor: runs of bytes, repeated along axes of (stride in bytes, count), the widest first."""

    name: str
    text: str
    start: int
    heap: Heaps | None
    run: int
    axes: tuple[tuple[int, int], ...]

    def has(self, first: Any, nbytes: int) -> Any:
        """Return which ranges of `nbytes` bytes, beginning at these offsets from the first element, it has."""
        inside = first >= 0
        for stride, count in self.axes:
            along = np.minimum(first // stride, count - 1)
            first = first - along * stride
        return inside & (first >= 0) & (first + nbytes <= self.run)


def view_of(tensor: torch.Tensor, name: str, heap: Heaps | None) -> View:
    """Return the view of a tensor that has elements; one whose elements overlap in part has all that it spans."""
    size = tensor.element_size()
    axes = [(stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1]
    run = span = size
    left: list[tuple[int, int]] = []
    for stride, count in sorted((stride, count) for stride, count in axes if stride):
        if stride > span or (left and stride == span):
            left.append((stride, count))
        elif left and stride < span:
            left.clear()
        span += stride * (count - 1)
        if not left:
            run = span
    text = f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, strides {tensor.stride()}"
    return View(name, text, tensor.data_ptr(), heap, run, tuple(reversed(left)))


class Views:
    """The tensor arguments of one launch; `report` is called of accesses that leave their view, or have wrapped.

    Its arguments are the view, the kind of access, the rank on whose heap it lies (None: on none), the address, the
    first and the last byte from the beginning of the view, and whether it has wrapped.
    """

    def __init__(self, report: Callable[[View, str, int | None, int, int, int, bool], None]) -> None:
        self._report = report
        self._heaps = [Heaps(heap.heap_bases, heap.nbytes) for heap in registered_heaps()]
        self._views: list[View] = []

    def tagged(self, tensor: torch.Tensor, address: int, name: str) -> int:
        """Return an address, the first of a tensor argument, with the argument's number."""
        if not address or not tensor.numel() or len(self._views) == _MOST:
            return address
        heap = next((each for each in self._heaps if each.rank_of(address) is not None), None)
        self._views.append(view_of(tensor, name, heap))
        return address | len(self._views) << _BIT

    def untag(self, addresses: Any) -> Any:
        return addresses & _ADDRESS

    def enter(self, addresses: Any, mask: Any, nbytes: int, access: str) -> Any:
        """Return the addresses of an access without numbers; reports elements outside their views."""
        tags = addresses & _TAG
        if not tags.any():
            return addresses
        plain = addresses & _ADDRESS
        flat, tags = plain.reshape(-1), tags.reshape(-1)
        if mask is not None:
            active = np.broadcast_to(mask, addresses.shape).reshape(-1)
            flat, tags = flat[active], tags[active]
        if flat.size and (tags == tags[0]).all():
            self._look(tags[0], flat, nbytes, access)
        else:
            for tag in np.unique(tags):
                self._look(tag, flat[tags == tag], nbytes, access)
        return plain

    def _look(self, tag: Any, flat: Any, nbytes: int, access: str) -> None:
        has_wrapped, number = bool(tag & WRAPPED), int(tag) >> _BIT & _MOST
        if not 0 < number <= len(self._views):  # none, or an offset that is so large that it has changed the number
            return
        view = self._views[number - 1]
        offsets, ranks = flat.view(np.int64) - view.start, np.full(flat.shape, -1)
        if view.heap is not None and (own := view.heap.rank_of(view.start)) is not None:  # the same place on any rank
            ranks, places = view.heap.locate(flat)
            offsets = np.where(ranks < 0, offsets, places - own[1])
        is_address = flat < np.uint64(1 << _BIT)  # others are refused, with the reason
        wrong = (~view.has(offsets, nbytes) | has_wrapped) & is_address
        if not wrong.any():
            return
        first, low = int(np.argmax(wrong)), offsets[wrong]
        rank = None if ranks[first] < 0 else int(ranks[first])
        self._report(view, access, rank, int(flat[first]), int(low.min()), int(low.max()) + nbytes - 1, has_wrapped)
