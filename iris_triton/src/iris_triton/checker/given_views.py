"""Which tensor an address belongs to, the view that the kernel was given; and offsets of int32 that have wrapped.

While kernels are checked for "bounds", the pointer of each tensor argument carries the number of the argument in bits
that no address has.  Whatever a kernel adds to it, the number stays, also through a translation to another rank's heap;
each access takes it off and looks whether its bytes are bytes of that view.  A pointer that was made of an integer, or
loaded from memory, has no number, and is held against blocks alone.

Sums, differences and products of int32 that do not fit are kept beside the array that they have become, as they are
exactly, as long as only these three, and changes of the shape, work on them.  A pointer to which such an offset is
added has a bit for each lane, which its access takes off.  What goes through anything else, such as `%` or `&`, is no
longer known: hashes and rings wrap on purpose.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from iris_triton.checker.places import Heaps
from iris_triton.interpreter.frontend.values import Array, facts_of, wrap
from iris_triton.interpreter.memory.regions import registered_heaps

WRAPPED = np.uint64(1 << 60)  # added to pointers that an offset which has wrapped leads to
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


# -- offsets ----------------------------------------------------------------------------------------------------------
_INT32 = np.dtype(np.int32)
_OPERATORS = {"Add": np.add, "Sub": np.subtract, "Mult": np.multiply}

_known: dict[int, tuple[Any, Array]] = {}  # by the identity of an array: a weak reference to it, and what it should be


def _keep(data: Array, exact: Array) -> None:
    key = id(data)
    _known[key] = weakref.ref(data, lambda _: _known.pop(key, None)), exact


def _exact(data: Array) -> Array | None:
    """Return the array that one of int32 should be; None if it is what it should be, or that is not known."""
    owner: Any
    for owner in (data, data.base):
        found = _known.get(id(owner))
        if found is not None and found[0]() is owner:
            break
    else:
        return None
    if owner is data:
        return found[1]
    begin = (data.__array_interface__["data"][0] - owner.__array_interface__["data"][0]) // _INT32.itemsize
    steps = [2 * stride for stride in data.strides]  # of int64
    return np.lib.stride_tricks.as_strided(found[1].reshape(-1)[begin:], data.shape, steps)


def _operand(value: Any) -> Any:
    """Return an operand as int64, or as it is if it is a Python number; None for what is neither."""
    if value.__class__ is not tl.tensor:
        return value if value.__class__ is int else None
    data = value.handle.data
    if data.dtype != _INT32:
        return None
    exact = _exact(data)
    return data.astype(np.int64) if exact is None else exact


def watched(name: str, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of `Operators.table` that keeps what does not fit."""
    ufunc = _OPERATORS.get(name)
    if ufunc is None:
        return operator

    def run(left: Any, right: Any) -> Any:
        result = operator(left, right)
        if result.__class__ is not tl.tensor:
            return result
        facts, data = facts_of(result.type), result.handle.data
        if facts.kind == "pointer":
            offsets = [each.handle.data for each in (left, right) if each.__class__ is tl.tensor]
            for offset in offsets:  # one of the two; the other is the pointer
                if offset.dtype == _INT32 and (exact := _exact(offset)) is not None:
                    return wrap(data | (exact != offset) * WRAPPED, result.type)
        elif facts.kind == "int" and data.dtype == _INT32:
            one, other = _operand(left), _operand(right)
            if one is not None and other is not None:
                exact = ufunc(one, other)
                if (exact != data).any():
                    _keep(data, np.ascontiguousarray(np.broadcast_to(exact, data.shape)))
        return result

    return run
