"""Shared memory in the builder: allocations, views, loads, stores, gathers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_gluon.interpreter.hopper.shared import Allocation, View
from iris_gluon.interpreter.inference import memory_problem
from iris_triton.interpreter.frontend.values import Array, Handle, element_nbytes
from iris_triton.interpreter.memory import raw_atomics
from iris_triton.interpreter.source import here
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from iris_gluon.interpreter.cta import Partition


class SharedType(NamedTuple):
    """The IR's type of a memory descriptor."""

    element: Any
    shape: tuple[int, ...]
    layout: Any


def partition() -> Partition:
    """The running partition."""
    return current.program  # type: ignore[return-value]  # Gluon programs are partitions


def scalar(handle: Any) -> int:
    """The number in a scalar handle."""
    return int(handle.data.reshape(-1)[0])


def optional(handle: Any) -> Array | None:
    """The array of an operand that may be missing, for which the language gives an empty IR value."""
    return handle.data if isinstance(handle, Handle) else None


class MemoryOps:
    """Mixed into the builder."""

    # -- descriptors --------------------------------------------------------------------------------------------------
    def get_shared_mem_desc_ty(self, element: Any, shape: Any, layout: Any, alloc_shape: Any) -> SharedType:
        sizes = tuple(int(n) for n in shape)
        problem = memory_problem(element, sizes, layout, tuple(int(n) for n in alloc_shape))
        if problem:
            raise ValueError(f"{here()}: {problem}")
        return SharedType(element, sizes, layout)

    def create_local_alloc(self, type_: SharedType, value: Handle | None = None) -> View:
        nbytes = math.prod(type_.shape) * element_nbytes(type_.element)
        view = Allocation(nbytes).view(type_.element, type_.shape, type_.layout)
        if isinstance(value, Handle):
            self.create_local_store(view, value)
        return view

    def create_local_dealloc(self, view: View) -> None:
        """Memory lives as long as the program."""

    def create_memdesc_index(self, type_: SharedType, view: View, index: Handle) -> View:
        return view.index(scalar(index))

    def create_memdesc_subslice(self, type_: SharedType, view: View, offsets: list[int]) -> View:
        return view.slice([int(n) for n in offsets], type_.shape)

    def create_memdesc_trans(self, view: View, order: Any) -> View:
        return self._laid_out(view.transpose(tuple(int(n) for n in order)), view.inferred)

    def create_memdesc_reshape(self, view: View, shape: Any) -> View:
        return self._laid_out(view.reshape(tuple(int(n) for n in shape)), view.inferred)

    def _laid_out(self, view: View, layout: Any) -> View:
        view.inferred, view.layout = layout, layout._to_ir(self)
        return view

    def get_gluon_layout_from_memdesc(self, view: View) -> Any:
        return view.inferred

    def create_memdesc_reinterpret(self, type_: SharedType, view: View) -> View:
        return view.reinterpret(type_.element, type_.shape, type_.layout)

    # -- accesses -----------------------------------------------------------------------------------------------------
    def create_local_load(self, type_: Any, view: View, *token: Any) -> Handle:
        view.access(partition(), "load", write=False)
        return Handle(view.get("a load"), view.dtype)

    def create_local_store(self, view: View, value: Handle) -> None:
        view.access(partition(), "store", write=True)
        view.put(value.data)

    def create_local_gather(self, type_: Any, view: View, indices: Handle, axis: int) -> Handle:
        view.access(partition(), "gather", write=False)
        return Handle(view.get("a gather", _along(view, indices.data, axis)), view.dtype)

    def create_local_scatter(self, view: View, values: Handle, indices: Handle, axis: int) -> None:
        view.access(partition(), "scatter", write=True)
        view.put(values.data, _along(view, indices.data, axis))

    def create_local_atomic_scatter_rmw(
        self, op: Any, view: View, values: Handle, indices: Handle, mask: Any, axis: int
    ) -> Handle:
        view.access(partition(), "atomic scatter", write=True)
        active = optional(mask)
        shape = indices.data.shape
        chosen = np.ones(shape, np.bool_) if active is None else np.broadcast_to(active, shape)
        places = tuple(index[chosen] for index in np.broadcast_arrays(*_along(view, indices.data, axis)))
        view.get("an atomic scatter", places)
        base = view.data.__array_interface__["data"][0]
        offsets = sum(index * stride for index, stride in zip(places, view.data.strides, strict=True))
        addresses = np.uint64(base) + np.asarray(offsets, np.int64).view(np.uint64)
        operands = np.ascontiguousarray(np.broadcast_to(values.data, shape)[chosen])
        old = np.zeros(shape, view.data.dtype)
        every = np.ones(addresses.shape, np.bool_)
        old[chosen] = raw_atomics.rmw(op, addresses, operands, every, self._relaxed, values.dtype)  # type: ignore[attr-defined]
        return Handle(old, view.dtype)


def _along(view: View, indices: Array, axis: int) -> tuple[Array, ...]:
    """Index arrays of the elements that a gather reads or a scatter writes, which must lie inside the view."""
    size = view.data.shape[axis]
    if ((indices < 0) | (indices >= size)).any():
        raise IndexError(f"{here()}: an index into {view.name!r} is outside [0, {size}) along axis {axis}")
    places = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    for other, (n, of) in enumerate(zip(indices.shape, view.data.shape, strict=True)):
        if other != axis and n > of:
            raise IndexError(f"{here()}: indices of size {n} along axis {other} of {view.name!r}, which has size {of}")
    places[axis] = indices.astype(np.intp)
    return tuple(places)
