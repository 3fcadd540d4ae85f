"""Which tensor an address belongs to: the view that the kernel was given, with its strides.

While kernels are checked for "bounds", the pointer of each tensor argument carries the number of the argument in bits
that no address has.  Whatever a kernel adds to it, the number stays, also through a translation to another rank's heap;
each access takes it off and looks whether its bytes are bytes of that view.  A pointer that was made of an integer, or
loaded from memory, has no number, and is held against blocks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_triton.interpreter.frontend.offsets import WRAPPED
from iris_triton.interpreter.memory import regions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_BIT, _MOST = 48, (1 << 12) - 1
"""Where the number begins, and the largest one: below WRAPPED of `offsets`, above what addresses have."""

_TAG = np.uint64(_MOST << _BIT) | WRAPPED
_ADDRESS = ~_TAG


class Beyond(NamedTuple):
    """An access that leaves its view, or has wrapped: the rank on whose heap it lies (None: on none), and where."""

    name: str
    view: str
    access: str
    rank: int | None
    address: int
    first: int
    last: int
    has_wrapped: bool


class View(NamedTuple):
    """The bytes of a tensor: runs of bytes, repeated along axes of (stride in bytes, count), the widest first."""

    name: str
    text: str
    start: int
    heap: int | None
    run: int
    axes: tuple[tuple[int, int], ...]

    def has(self, first: Any, nbytes: int) -> Any:
        """Return which ranges of `nbytes` bytes, beginning at these offsets from the first element, it has."""
        inside = first >= 0
        for stride, count in self.axes:
            along = np.minimum(first // stride, count - 1)
            first = first - along * stride
        return inside & (first >= 0) & (first + nbytes <= self.run)


def view_of(tensor: torch.Tensor, name: str, heap: int | None) -> View:
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
    """The tensor arguments of one launch; `report` is called with what leaves its view."""

    def __init__(self, report: Callable[[Beyond], None]) -> None:
        self._report = report
        table = regions.current_regions().heaps
        self._ranks: dict[int, list[int]] = {}  # bases of a heap, by rank
        for base, (_, number) in table.items():
            self._ranks.setdefault(number, []).append(base)
        heaps = sorted((base, *each) for base, each in table.items())
        self._starts, self._ends, self._numbers = np.array(heaps, np.uint64).reshape(-1, 3).T
        self._views: list[View] = []

    def _heap_at(self, addresses: Any) -> Any:
        """The positions of the heaps that have some addresses, -1 for none."""
        if not self._starts.size:
            return np.full(np.shape(addresses), -1)
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        return np.where((at >= 0) & (addresses < self._ends[np.maximum(at, 0)]), at, -1)

    def tagged(self, tensor: torch.Tensor, address: int, name: str) -> int:
        """Return an address, the first of a tensor argument, with the argument's number."""
        if not address or not tensor.numel() or len(self._views) == _MOST:
            return address
        position = int(self._heap_at(np.uint64(address)))
        self._views.append(view_of(tensor, name, None if position < 0 else int(self._numbers[position])))
        return address | len(self._views) << _BIT

    def untag(self, addresses: Any) -> Any:
        """Return addresses without numbers."""
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
        offsets = flat.view(np.int64) - view.start
        if view.heap is not None:  # the same place on any rank
            at = self._heap_at(flat)
            own = self._starts[self._heap_at(np.uint64(view.start))]
            is_there = (at >= 0) & (self._numbers[at] == view.heap)
            offsets -= np.where(is_there, self._starts[at].view(np.int64) - np.int64(own), 0)
        is_address = flat < np.uint64(1 << _BIT)  # others are refused, with the reason
        wrong = (~view.has(offsets, nbytes) | has_wrapped) & is_address
        if not wrong.any():
            return
        first, low = int(np.argmax(wrong)), offsets[wrong]
        rank = None
        if view.heap is not None and is_there[first]:
            rank = self._ranks[view.heap].index(int(self._starts[at[first]]))
        place = int(flat[first]), int(low.min()), int(low.max()) + nbytes - 1
        self._report(Beyond(view.name, view.text, access, rank, *place, has_wrapped))
