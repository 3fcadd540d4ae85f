"""Allocators that grow and import, with one mistake each; all else is that of "vmem" on a pretended driver.

The driver is the one that tests/allocators has: physical memory is a memfd, so everything but the device is real.
"""

from __future__ import annotations

import pathlib
import sys

from iris_allocators.vmem.allocator import VmemAllocator
from kit_mutants import wrong

sys.path.append(str(pathlib.Path(__file__).parents[2]))  # behind everything else: its folders are called as packages
from allocators.fake_driver import FakeVmm
from allocators.fake_driver import make_importable as make_importable


class RightGrowing(VmemAllocator):
    """The allocator on a pretended device of its own."""

    def __init__(self, request):
        super().__init__(request, driver=FakeVmm())


QuietCommit = wrong(RightGrowing, generation=property(lambda self: 1, lambda self, value: None))
"""Does not say that there is more."""
UnsaidRest = wrong(RightGrowing, has_more=False)
"""Describes a part, and keeps quiet about the rest."""
EndlessExport = wrong(RightGrowing, has_more=True)
LoudExchange = wrong(
    RightGrowing, exchanged=lambda self, exchanged: (exchanged(), setattr(self, "generation", self.generation + 1))
)
"""Says so when there is not."""


class HastyExport(RightGrowing):
    """Takes what was described for what was mapped."""

    def export(self):
        segments = super().export()
        self._fresh.clear()
        self._offered = []
        return segments


class MovingPeer(RightGrowing):
    """Maps a peer elsewhere with every import."""

    def import_peer(self, rank, segments):
        mapping = super().import_peer(rank, segments)
        self._moved = getattr(self, "_moved", 0) + bool(segments)
        return type(mapping)(rank, mapping.base_ptr + self._moved * self.granularity, mapping.nbytes)


def foretelling(function):
    """Functions of (self, the right method, tensor)."""
    return wrong(RightGrowing, import_extent=function)


ShiftedImport = foretelling(lambda self, extent, tensor: (extent(tensor)[0], extent(tensor)[1] + 8, extent(tensor)[2]))
"""Foretells another place."""
OddExtent = foretelling(lambda self, extent, tensor: (tensor.numel(), 0, -1))
"""What is needed, and not what is taken."""
LostImport = foretelling(lambda self, extent, tensor: (*extent(tensor)[:2], -1))
CredulousImport = foretelling(
    lambda self, extent, tensor: (self.granularity, 0, -1) if tensor.numel() == 4096 else extent(tensor)
)
"""Has a place for whatever memory there is."""
SilentImport = wrong(
    RightGrowing, import_tensor=lambda self, import_, at, tensor, release: import_(at, tensor, lambda: None)
)


class CopiedImport(RightGrowing):
    def import_tensor(self, offset_bytes, tensor, on_release):
        size, start, _ = self.import_extent(tensor)
        self.commit(offset_bytes, size)
        out = self.tensor(offset_bytes + start, tensor.numel(), on_release).view(tensor.shape)
        return out.copy_(tensor)


class RememberedImport(RightGrowing):
    """Finds what was taken off the heap."""

    def decommit(self, offset_bytes, nbytes):
        before = dict(self._imported)
        super().decommit(offset_bytes, nbytes)
        self._imported = before


class UnannouncedImport(RightGrowing):
    def import_tensor(self, offset_bytes, tensor, on_release):
        before = self.generation
        out = super().import_tensor(offset_bytes, tensor, on_release)
        self.generation = before
        return out
