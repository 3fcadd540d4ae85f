"""A world of several ranks in one process: two or more heaps, and programs that play the ranks.

The executor switches programs when one waits, so a launch of `world_size` programs, each with its program id as its
rank, synchronises like as many processes.  The heaps are far apart, so that distances between them need 64 bits.
"""

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from iris_core.device.context_words import STATUS_WORDS, encode
from iris_core.types import Block, ContextSpec
from iris_triton import interpreter
from iris_triton.language.address import HEAP_ALIGNMENT

FAR = 5 << 30
"""Bytes between two heaps: more than 32 bits can count."""


class World:
    """Heaps of `world_size` ranks; `heap(rank)` is a uint8 tensor."""

    def __init__(self, world_size: int, nbytes: int = 1 << 20) -> None:
        self.world_size, self.nbytes = world_size, nbytes
        fd = os.memfd_create("world")  # sparse: only what is touched exists
        os.ftruncate(fd, FAR * world_size)
        self._range = mmap.mmap(fd, FAR * world_size)
        os.close(fd)
        whole = torch.frombuffer(self._range, dtype=torch.uint8)
        assert whole.data_ptr() % HEAP_ALIGNMENT == 0
        # the highest address belongs to rank 0, so that distances have both signs
        self._heaps = [whole[(world_size - 1 - r) * FAR :][:nbytes] for r in range(world_size)]
        self.bases = torch.tensor([heap.data_ptr() for heap in self._heaps], dtype=torch.int64)
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64)
        self._next = 0
        self.rank, self.version, self.heap_bases = 0, 0, tuple(self.bases.tolist())
        self.nodes = (tuple(range(world_size)),)
        self._tokens = [interpreter.register_memory(self)]
        self._tokens.append(interpreter.allow_region(self.status.data_ptr(), STATUS_WORDS * 8, "status"))

    def live_blocks(self) -> list[Block]:
        """One block, the whole heap."""
        return [Block(0, self.nbytes, "heap")]

    def check_peers(self) -> None:
        """All ranks are in this process."""

    def stands_still(self, quiet: bool) -> bool:
        """All ranks are programs of one launch."""
        return quiet

    def elsewhere(self) -> tuple[int, ...]:
        return ()

    def tensors(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Put one value per rank at the same offset of every heap; returns the tensors by rank."""
        assert len(values) == self.world_size
        nbytes = values[0].nbytes
        out = []
        for heap, value in zip(self._heaps, values, strict=True):
            tensor = heap[self._next : self._next + nbytes].view(value.dtype).view(value.shape)
            tensor.copy_(value)
            out.append(tensor)
        self._next += -(-nbytes // 256) * 256
        return out

    def zeros(self, *size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Zeros on every heap, by rank."""
        return self.tensors(*(torch.zeros(size, dtype=dtype) for _ in range(self.world_size)))

    def context(self, rank: int, timeout_ns: int = 0, *, reports: bool = True) -> torch.Tensor:
        """The context tensor of a rank."""
        bases = tuple(self.bases.tolist())
        status = self.status.data_ptr() if reports else 0
        return torch.tensor(encode(ContextSpec(rank, self.world_size, bases, timeout_ns, status)), dtype=torch.int64)

    def contexts(self, timeout_ns: int = 0) -> torch.Tensor:
        """The context tensors of all ranks, one per row."""
        return torch.stack([self.context(rank, timeout_ns) for rank in range(self.world_size)])

    def close(self) -> None:
        """Forget the heaps."""
        for token in self._tokens:
            interpreter.unregister_memory(token)


@pytest.fixture
def make_world() -> Iterator:
    """A function that opens worlds (world_size, nbytes), which are closed at the end of the test."""
    interpreter.enable()
    opened: list[World] = []

    def make(world_size: int = 2, nbytes: int = 1 << 20) -> World:
        opened.append(World(world_size, nbytes))
        return opened[-1]

    yield make
    for world in opened:
        world.close()
