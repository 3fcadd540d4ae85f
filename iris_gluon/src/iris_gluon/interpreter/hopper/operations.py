"""Shared memory and asynchronous operations in the builder: mbarriers, TMA, copies in groups, fences, products."""

from functools import partial
from typing import Any

import numpy as np

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.cta import Copy, Partition, running_partition
from iris_gluon.interpreter.hopper import mbarrier, wgmma
from iris_gluon.interpreter.hopper.shared import Allocation, BlockType, View
from iris_gluon.interpreter.hopper.tma import Descriptor
from iris_triton import _compat as _triton
from iris_triton.interpreter.frontend.values import Array, Handle, element_nbytes, numpy_dtype
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import here

_PAD_NAN = _triton.ir.PADDING_OPTION.PAD_NAN


def scalar(handle: Any) -> int:
    """Return the number in a scalar handle."""
    return int(handle.data.reshape(-1)[0])


def numbers(values: Any) -> tuple[int, ...]:
    """Return numbers of the language as Python's."""
    return tuple(int(n) for n in values)


def optional(handle: Any) -> Array | None:
    """Return the array of an operand that may be missing, for which the language gives an empty IR value."""
    return handle.data if isinstance(handle, Handle) else None


class HopperOps:
    """Mixed into the builder."""

    # -- shared memory ------------------------------------------------------------------------------------------------
    def get_shared_mem_desc_ty(self, element: Any, shape: Any, layout: Any, alloc_shape: Any) -> BlockType:
        return BlockType(element, numbers(shape), layout)

    def create_local_alloc(self, type_: BlockType, value: Handle | None = None) -> View:
        view = Allocation(type_).whole
        if isinstance(value, Handle):
            self.create_local_store(view, value)
        return view

    def create_local_dealloc(self, view: View) -> None:
        """Memory lives as long as the program."""

    def create_memdesc_index(self, type_: BlockType, view: View, index: Handle) -> View:
        return view.index(scalar(index))

    def create_memdesc_subslice(self, type_: BlockType, view: View, offsets: list[int]) -> View:
        return view.slice(numbers(offsets), type_.shape)

    def create_memdesc_trans(self, view: View, order: Any) -> View:
        return self._laid_out(view.transpose(numbers(order)), view.inferred)

    def create_memdesc_reshape(self, view: View, shape: Any) -> View:
        return self._laid_out(view.reshape(numbers(shape)), view.inferred)

    def _laid_out(self, view: View, layout: Any) -> View:
        view.inferred, view.layout = layout, layout._to_ir(self)
        return view

    def get_gluon_layout_from_memdesc(self, view: View) -> Any:
        return view.inferred

    def create_local_load(self, type_: Any, view: View, *token: Any) -> Handle:
        view.access(running_partition(), "load", write=False)
        return Handle(view.get("a load"), view.dtype)

    def create_local_store(self, view: View, value: Handle) -> None:
        view.access(running_partition(), "store", write=True)
        view.put(value.data)

    # -- mbarriers ----------------------------------------------------------------------------------------------------
    create_mbarrier_init = staticmethod(mbarrier.init)
    create_mbarrier_inval = staticmethod(mbarrier.invalidate)

    def create_mbarrier_expect(self, view: View, nbytes: int, pred: Handle, from_cta: Any = None) -> None:
        if scalar(pred):
            mbarrier.find(view, "mbarrier.expect").expect(running_partition(), int(nbytes))

    def create_mbarrier_arrive(self, view: View, count: int, *predicate_and_routing: Any) -> None:
        if all(scalar(pred) for pred in predicate_and_routing if isinstance(pred, Handle)):
            mbarrier.find(view, "mbarrier.arrive").arrive(running_partition(), int(count))

    def create_mbarrier_wait(self, view: View, phase: Handle, pred: Handle, dependencies: Any = ()) -> None:
        if scalar(pred):
            mbarrier.find(view, "mbarrier.wait").wait(running_partition(), scalar(phase))

    # -- fences; a cluster is one CTA ---------------------------------------------------------------------------------
    def create_fence_async_shared(self, cluster: bool) -> None:
        running_partition().fence()

    def create_cluster_barrier(self, relaxed: bool = False) -> None:
        """Do nothing: the cluster is this program."""

    create_cluster_sync = create_cluster_arrive = create_cluster_wait = create_cluster_barrier
    create_fence_mbarrier_init_release_cluster = create_cluster_barrier

    # -- TMA ----------------------------------------------------------------------------------------------------------
    def get_tensor_descriptor_layout_type(self, block: Any, is_signed: bool, layout: Any) -> Any:
        return BlockType(block.scalar, numbers(block.shape), layout)

    def create_make_tensor_descriptor(
        self, type_: BlockType, base: Handle, shape: list[Handle], strides: list[Handle], *options: Any
    ) -> Descriptor:
        sizes, steps = ([scalar(n) for n in values] for values in (shape, strides))
        made = Descriptor(scalar(base), sizes, steps, type_, options[-1] == _PAD_NAN)
        made.check_rules(str(here()))
        return made

    def create_async_tma_copy_global_to_local(
        self, descriptor: Descriptor, coordinates: list[Handle], barrier: View, view: View, pred: Handle, *more: Any
    ) -> None:
        _, offsets, *_ = (*more, None, None)  # whether to multicast, offsets, policy
        if offsets is not None:
            raise UnsupportedError("the CPU executor does not implement TMA loads in im2col mode")
        if not scalar(pred):
            return
        signalled = mbarrier.find(barrier, "a TMA load")
        descriptor.check(view, "a TMA load")
        view.access(running_partition(), "TMA load", write=True, generic=False, agent=signalled)
        data = descriptor.read([scalar(c) for c in coordinates])
        what = f"the TMA load to {view.name!r} in {here()}"
        signalled.copies.append(Copy(lambda: view.put(data), what, descriptor.nbytes))

    def create_async_tma_copy_local_to_global(
        self, descriptor: Descriptor, coordinates: list[Handle], view: View, policy: Any = None
    ) -> None:
        """Read shared memory; it is written when the store is waited for, or when the program ends."""
        owner = running_partition()
        descriptor.check(view, "a TMA store")
        view.access(owner, "TMA store", write=False, generic=False, agent=owner.stores)
        data = view.get("a TMA store")
        inside, addresses = descriptor.locate([scalar(c) for c in coordinates])
        part, copies = np.ascontiguousarray(data[inside]), []
        if part.size:
            addresses = accesses.untag(addresses, None, part.itemsize, "TMA store")  # before it is under way
            accesses.check(addresses, None, part.itemsize, "TMA store")
            copies.append(Copy(partial(accesses.store, addresses, None, part)))
        owner.stores.issue(*copies)

    def create_async_tma_store_wait(self, pending: int, read_only: bool = True) -> None:
        # Before 3.8 Triton can only wait until shared memory has been read; global memory may be written later.
        owner = running_partition()
        done = owner.complete(owner.stores, int(pending))
        if not read_only:
            owner.stores.deliver(done)

    # -- copies in groups (cp.async; AMD's direct-to-shared loads) ----------------------------------------------------
    def create_async_copy_global_to_local(
        self, view: View, pointers: Handle, mask: Any, other: Any, *policy: Any
    ) -> None:
        self._copy_in_group(view, pointers.data, mask, other)

    def create_buffer_load_to_local(
        self, view: View, base: Handle, offsets: Handle, mask: Any, other: Any, stride: Any, *policy: Any
    ) -> None:
        self._copy_in_group(view, buffer_addresses(base, offsets), mask, other)

    def _copy_in_group(self, view: View, addresses: Array, mask: Any, other: Any) -> None:
        owner = running_partition()
        view.access(owner, "asynchronous copy", write=True, agent=owner.copies)
        active = optional(mask)
        data = accesses.load(addresses, active, optional(other), numpy_dtype(view.dtype))
        idle = active is not None and not active.any()  # pipelines issue such copies beyond their last stage
        what = f"the asynchronous copy to {view.name!r} in {here()}"
        owner.uncommitted.append(Copy(lambda: view.put(data), what, idle=idle))

    def create_async_commit_group(self) -> None:
        owner = running_partition()
        owner.copies.issue(*owner.uncommitted)
        owner.uncommitted = []

    def create_async_wait_group(self, pending: int) -> None:
        owner = running_partition()
        owner.copies.deliver(owner.complete(owner.copies, int(pending)))

    # -- warpgroup products -------------------------------------------------------------------------------------------
    def create_warpgroup_mma(self, a: Any, b: View, accumulator: Handle, use_it: Handle, *options: Any) -> Handle:
        owner, (*_, is_async) = running_partition(), options
        left, right = self._operand(a, owner), self._operand(b, owner)
        time = owner.products.issue()
        before = accumulator.value if isinstance(accumulator, wgmma.Accumulator) else accumulator.data
        if not scalar(use_it):
            before = np.zeros_like(before)
        result: Handle = self.create_dot(left, right, Handle(before, accumulator.dtype))  # type: ignore[attr-defined]
        if is_async:
            return wgmma.Accumulator(result.data, result.dtype, owner.products, time)
        owner.complete(owner.products, 0)
        return result

    def _operand(self, operand: Any, owner: Partition) -> Handle:
        if isinstance(operand, Handle):
            return operand
        operand.access(owner, "warpgroup_mma", write=False, generic=False, agent=owner.products)
        return Handle(operand.get("warpgroup_mma"), operand.dtype)

    def create_warpgroup_mma_wait(self, handles: list[Handle], pending: int) -> list[Handle]:
        owner = running_partition()
        owner.complete(owner.products, int(pending))
        return handles


def buffer_addresses(base: Handle, offsets: Handle) -> Array:
    """Return the addresses of AMD's buffer operations: a scalar pointer and 32-bit offsets in elements."""
    step = element_nbytes(base.get_element_ty())
    return base.data.reshape(-1)[0] + np.multiply(offsets.data, step, dtype=np.int64).view(np.uint64)
