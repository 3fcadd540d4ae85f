"""Asynchronous operations in the builder: mbarriers, TMA, copies in groups, fences, warpgroup products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.cta import Copy
from iris_gluon.interpreter.hopper import mbarrier, wgmma
from iris_gluon.interpreter.hopper.memory_ops import optional, partition, scalar
from iris_gluon.interpreter.hopper.tma import Box, Descriptor, DescriptorType
from iris_triton import _compat as _triton
from iris_triton.interpreter.frontend.values import Array, Handle, element_nbytes, numpy_dtype
from iris_triton.interpreter.source import here

if TYPE_CHECKING:
    from iris_gluon.interpreter.cta import Partition
    from iris_gluon.interpreter.hopper.shared import View

_PAD_NAN = _triton.ir.PADDING_OPTION.PAD_NAN


class AsyncOps:
    """Mixed into the builder."""

    # -- mbarriers ----------------------------------------------------------------------------------------------------
    def create_mbarrier_init(self, view: View, count: int) -> None:
        mbarrier.init(partition().cta, view, int(count))

    def create_mbarrier_inval(self, view: View) -> None:
        mbarrier.invalidate(partition().cta, view)

    def create_mbarrier_expect(self, view: View, nbytes: int, pred: Handle, from_cta: Any = None) -> None:
        if scalar(pred):
            mbarrier.find(view, "mbarrier.expect").expect(partition(), int(nbytes))

    def create_mbarrier_arrive(self, view: View, count: int, *predicate_and_routing: Any) -> None:
        if all(scalar(pred) for pred in predicate_and_routing if isinstance(pred, Handle)):
            mbarrier.find(view, "mbarrier.arrive").arrive(partition(), int(count))

    def create_mbarrier_wait(self, view: View, phase: Handle, pred: Handle, dependencies: Any = ()) -> None:
        if not scalar(pred):
            return
        barrier, parity, line = mbarrier.find(view, "mbarrier.wait"), scalar(phase), here()
        if parity not in (0, 1):
            raise ValueError(f"{line}: mbarrier.wait takes the parity of a phase, 0 or 1, not {parity}")
        waiter = partition()
        waiter.block(lambda: barrier.passed(parity, line), lambda: f"{barrier.describe(parity)} in {line}")
        barrier.acquire(waiter)

    # -- fences; a cluster is one CTA ---------------------------------------------------------------------------------
    def create_fence_async_shared(self, cluster: bool) -> None:
        partition().fence()

    def create_cluster_barrier(self, relaxed: bool = False) -> None:
        """The cluster is this program."""

    create_cluster_sync = create_cluster_arrive = create_cluster_wait = create_cluster_barrier
    create_fence_mbarrier_init_release_cluster = create_cluster_barrier

    # -- TMA ----------------------------------------------------------------------------------------------------------
    def get_tensor_descriptor_layout_type(self, block: Any, is_signed: bool, layout: Any) -> Any:
        return DescriptorType(block.scalar, tuple(int(n) for n in block.shape), layout)

    def create_make_tensor_descriptor(
        self, type_: DescriptorType, base: Handle, shape: list[Handle], strides: list[Handle], *options: Any
    ) -> Descriptor:
        padding = options[-1]
        made = Descriptor(
            scalar(base),
            type_.element,
            [scalar(n) for n in shape],
            [scalar(n) for n in strides],
            type_.block,
            type_.layout,
            padding == _PAD_NAN,
        )
        made.check_rules(str(here()))
        return made

    def create_async_tma_copy_global_to_local(
        self,
        descriptor: Descriptor,
        coordinates: list[Handle],
        barrier: View,
        view: View,
        pred: Handle,
        multicast: bool = False,
        offsets: Any = None,
        policy: Any = None,
    ) -> None:
        if offsets is not None:
            raise UnsupportedError("the CPU executor does not implement TMA loads in im2col mode")
        if not scalar(pred):
            return
        signalled = mbarrier.find(barrier, "a TMA load")
        descriptor.check(view, "a TMA load")
        view.access(partition(), "TMA load", write=True, generic=False, agent=signalled)
        data = Box(descriptor, [scalar(c) for c in coordinates]).read(self)
        what = f"the TMA load to {view.name!r} in {here()}"
        signalled.signal_after(mbarrier.Signal(descriptor.nbytes, 0, lambda: view.put(data), lambda: False, what))

    def create_async_tma_copy_local_to_global(
        self, descriptor: Descriptor, coordinates: list[Handle], view: View, policy: Any = None
    ) -> None:
        self._write_by_tma("TMA store", descriptor, coordinates, view, lambda box, data: box.write(self, data))

    def create_async_tma_reduce(
        self, kind: Any, descriptor: Descriptor, coordinates: list[Handle], view: View, policy: Any = None
    ) -> None:
        self._write_by_tma(
            "TMA reduction", descriptor, coordinates, view, lambda box, data: box.reduce(self, kind, data)
        )

    def _write_by_tma(
        self, what: str, descriptor: Descriptor, coordinates: list[Handle], view: View, write: Any
    ) -> None:
        """Read shared memory; `write` is done when the store is waited for, or when the program ends."""
        owner = partition()
        descriptor.check(view, f"a {what}")
        view.access(owner, what, write=False, generic=False, agent=owner.stores)
        data = view.get(f"a {what}")
        box = Box(descriptor, [scalar(c) for c in coordinates])
        box.check_writable(self)
        owner.unfinished_stores.append((owner.stores.issue(here()), lambda: write(box, data)))

    def create_async_tma_store_wait(self, pending: int, read_only: bool = True) -> None:
        # Until 3.8 Triton can only wait until shared memory has been read, and global memory may lag behind.
        owner = partition()
        done = owner.complete(owner.stores, int(pending))
        if not read_only:
            owner.deliver_stores(done)

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
        owner = partition()
        view.access(owner, "asynchronous copy", write=True, agent=owner.copies)
        kept = numpy_dtype(view.dtype)
        active = optional(mask)
        data = self.load(addresses, active, optional(other), kept)  # type: ignore[attr-defined]  # the builder
        idle = active is not None and not active.any()  # pipelines issue such copies beyond their last stage
        owner.uncommitted.append(
            Copy(lambda: view.put(data), idle, f"the asynchronous copy to {view.name!r} in {here()}")
        )

    def create_async_commit_group(self) -> None:
        partition().commit_copies()

    def create_async_wait_group(self, pending: int) -> None:
        partition().wait_copies(int(pending))

    def create_async_copy_mbarrier_arrive(self, barrier: View, increment_count: bool) -> None:
        owner = partition()
        signalled = mbarrier.find(barrier, "async_copy.mbarrier_arrive")
        lanes = self.options.warp_size  # type: ignore[attr-defined]  # of the launch
        time = owner.commit_copies()

        def deliver() -> None:
            owner.deliver_copies(time)
            signalled.publish(owner.copies, time)

        # Each thread arrives; with increment_count it raises the count by as much before.
        arrivals = 0 if increment_count else owner.warps * lanes
        what = f"async_copy.mbarrier_arrive in {here()}"
        signalled.signal_after(mbarrier.Signal(0, arrivals, deliver, lambda: not owner.copies_under_way(time), what))

    # -- warpgroup products -------------------------------------------------------------------------------------------
    def create_warpgroup_mma(
        self,
        a: Any,
        b: View,
        accumulator: Handle,
        use_accumulator: Handle,
        precision: Any,
        max_num_imprecise_acc: int,
        is_async: bool,
    ) -> Handle:
        owner = partition()
        left, right = self._operand(a, owner), self._operand(b, owner)
        time = owner.products.issue(here())
        before = wgmma.raw(accumulator)
        if not scalar(use_accumulator):
            before = Handle(np.zeros_like(before.data), before.dtype)
        result = self.create_dot(left, right, before)  # type: ignore[attr-defined]  # the builder
        if not is_async:
            owner.complete(owner.products, 0)
            return result  # type: ignore[no-any-return]
        return wgmma.Accumulator(result.data, result.dtype, owner.products, time)

    def _operand(self, operand: Any, owner: Partition) -> Handle:
        if isinstance(operand, Handle):
            return operand
        operand.access(owner, "warpgroup_mma", write=False, generic=False, agent=owner.products)
        return Handle(operand.get("warpgroup_mma"), operand.dtype)

    def create_warpgroup_mma_wait(self, handles: list[Handle], pending: int) -> list[Handle]:
        owner = partition()
        owner.complete(owner.products, int(pending))
        return handles


def buffer_addresses(base: Handle, offsets: Handle) -> Array:
    """Addresses of AMD's buffer operations: a scalar pointer and 32-bit offsets in elements."""
    step = element_nbytes(base.get_element_ty())
    addresses: Array = base.data.reshape(-1)[0] + np.multiply(offsets.data, step, dtype=np.int64).view(np.uint64)
    return addresses
