"""Import of external tensors into the heap, without a copy where the allocator can (`SupportsImportTensor`).

Tensors often share an allocation, which is mapped once: if every rank already has a tensor's memory at the same offset
of the heap, the import adds one more holder to that block and takes no more space.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from iris_core.device.targets import same_device
from iris_core.errors import DeviceError, LayoutError, SymmetryError, UnsupportedError
from iris_core.heap.blocks import HeapState, Label, Op, Record
from iris_core.heap.symmetry import map_if_new, together, wait_for_device
from iris_core.protocols import SupportsImportTensor
from iris_core.types import Capability
from iris_core.world.failures import list_ranks

CANNOT_IMPORT = "cannot import the tensor that was passed to as_symmetric"
"""Text of messages after the ranks that could not go on."""


class Passed(NamedTuple):
    """A tensor that a rank passes to as_symmetric."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; those that it will have on the heap, where it is copied
    dtype: torch.dtype
    offset: int = -1  # where it lies on the heap; -1 if it does not
    # where its memory is to be imported: how much of the heap it needs, where the tensor begins in that, and the offset
    # at which it lies already, because its memory was imported before; -1 if it was not
    extent: tuple[int, int, int] | None = None

    @property
    def label(self) -> Label:
        return ("as_symmetric", self.shape, self.dtype)

    def __str__(self) -> str:
        where = f"on the heap at offset {self.offset}" if self.offset >= 0 else "not on the heap"
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}, strides {self.stride}, {where}"

    def signature(self) -> int:
        """Return the same number for tensors that fit together.  Strides along which no index moves do not count."""
        moves = 0 not in self.shape
        stride = [step if moves and size > 1 else 0 for size, step in zip(self.shape, self.stride, strict=True)]
        # numbers only: the hash of text differs between processes
        return hash((self.offset, *self.shape, *stride, len(stride), zlib.crc32(str(self.dtype).encode())))


def examine(state: HeapState, external: torch.Tensor, device: str) -> Passed:
    """Return the facts of this rank's tensor that as_symmetric needs, or raise its errors.  Local."""
    if not isinstance(external, torch.Tensor):
        raise TypeError(f"as_symmetric takes a torch tensor, not {type(external).__name__}")
    if external.layout is not torch.strided:
        raise LayoutError(f"as_symmetric: only torch.strided tensors can be on the heap, not {external.layout}")
    if external.is_quantized:
        raise LayoutError("as_symmetric: quantized tensors cannot be on the heap; pass their integers, int_repr()")
    if not same_device(external.device, device):
        raise DeviceError(
            f"as_symmetric: the tensor is on {external.device}, but this rank's heap is on {device}: pass "
            f"tensor.to({device!r})"
        )
    passed = Passed(tuple(external.shape), external.stride(), external.dtype)
    offset = state.backing.offset_within(external)
    if offset is not None:
        state.blocks.of(external, "as_symmetric")
        return passed._replace(offset=offset)
    if external.is_conj() or external.is_neg():  # kernels and peers would see what is in memory
        raise UnsupportedError(
            "as_symmetric: this tensor is a lazily conjugated or negated view, whose memory holds other values "
            "than it shows; pass tensor.resolve_conj().resolve_neg()"
        )
    state.order.check_not_capturing("as_symmetric")
    if Capability.IMPORT_TENSOR in state.allocator.info.provides and external.numel():
        wait_for_device(state)  # memory may be taken off the heap to make room for the tensor's
        allocator = cast("SupportsImportTensor", state.allocator)
        return passed._replace(extent=allocator.import_extent(external.detach()))
    like = torch.empty_like(external, device="meta")  # what torch makes of strides that are not dense
    return passed._replace(stride=like.stride())


def agree_on_tensor(state: HeapState, external: torch.Tensor, device: str) -> Passed:
    """Check that every rank passes the same kind of tensor to as_symmetric, in one exchange if so.  Collective."""
    passed: list[Passed] = []

    def look() -> dict[str, Any]:
        passed.append(examine(state, external, device))
        return {"label": passed[0].label, "signature": passed[0].signature()}

    steps = together(state, Op.IMPORT, CANNOT_IMPORT, look, label=("as_symmetric",))
    if len({step.signature for step in steps}) == 1:
        return passed[0]
    listed = list_ranks(state.world.all_gather_object(str(passed[0])))
    raise SymmetryError(
        f"as_symmetric: the ranks' tensors do not fit together:\n{listed}\nAll ranks must pass tensors of the same "
        "shape, strides and dtype, and either all of them lie on the heap already, at the same offset, or none does"
    )


def import_tensor(
    state: HeapState, external: torch.Tensor, passed: Passed, reserve: Callable[[int, int, Label], int]
) -> tuple[Record, torch.Tensor]:
    """Import a tensor; the caller records the block.

    Collective: every rank calls it, after all have agreed on what they pass.  If it fails on one rank, it raises on all
    and nothing has changed.
    """
    assert passed.extent is not None
    label = passed.label
    size, shared = _agree_on_place(state, passed.extent)
    is_new = shared < 0
    offset = reserve(size, state.allocator.granularity, label) if is_new else shared
    number, on_release = state.blocks.next_number()
    imported: list[torch.Tensor] = []

    def step() -> None:
        if is_new:
            state.backing.make_room(offset, size)  # free for all, but still backed by the heap's own memory
        allocator = cast("SupportsImportTensor", state.allocator)
        imported.append(allocator.import_tensor(offset, external, on_release))

    try:
        map_if_new(state, together(state, Op.IMPORT, CANNOT_IMPORT, step, nbytes=size, label=label))
    except BaseException as e:
        if is_new:
            state.offsets.free(offset)  # first of all: the free lists must stay equal on all ranks
            try:
                if imported:
                    state.backing.decommit([(offset, offset + size)])
            except Exception as undo:  # noqa: BLE001 - the first error is the one to raise
                e.add_note(f"while taking it off the heap again: {undo}")
        raise
    if is_new:
        state.backing.note(offset, size)
    state.holders[offset] = state.holders.get(offset, 0) + 1
    storage = imported[0].untyped_storage()
    start = storage.data_ptr() - state.allocator.base_ptr
    return Record(number, offset, size, start, storage._cdata, label, external.untyped_storage()), imported[0]


def _agree_on_place(state: HeapState, extent: Sequence[int]) -> tuple[int, int]:
    """How much of the heap an import takes, as much as on the rank that needs most, and which block has it already."""
    everyone = state.world.all_gather_ints(extent)
    places = {place for _, _, place in everyone}
    if len(places) == 1 and (place := places.pop()) >= 0:
        block = max(offset for offset in state.holders if offset <= place)
        return state.offsets.size_of(block), block
    if len({begin for _, begin, _ in everyone}) > 1:
        raise UnsupportedError(
            "as_symmetric: the ranks' tensors begin at different places of their memory allocations, so they "
            "cannot lie at the same offset of the heap; pass tensors that were allocated alike, or copy into "
            "ctx.empty_like(tensor)"
        )
    return max(size for size, _, _ in everyone), -1
