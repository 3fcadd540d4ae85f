"""A world of several ranks in one process: two or more heaps, and programs that play the ranks.

The executor switches programs when one waits, so a launch of `world_size` programs, each with its program id as its
rank, synchronises like as many processes.  The heaps are far apart, so that distances between them need 64 bits.
"""

import contextlib
import mmap
import os

import pytest
import torch

from iris_core.device.context_words import STATUS_WORDS, encode
from iris_core.types import Block, ContextSpec
from iris_triton import interpreter
from iris_triton.language.address import HEAP_ALIGNMENT

FAR = 5 << 30
"""Bytes between two heaps: more than 32 bits can count."""


class Heap:
    """What the executor asks of the core's heap; `memory` has the bytes of each rank's, `check` is called by waits."""

    def __init__(self, memory, blocks, rank=0, check=lambda: None):
        self.memory, self.blocks, self.rank, self.check_peers = memory, blocks, rank, check
        self.nbytes, self.version = memory[0].nbytes, 0
        self.heap_bases, self.nodes = tuple(each.data_ptr() for each in memory), ((*range(len(memory)), rank),)

    def live_blocks(self):
        return sorted(self.blocks, key=lambda block: block.offset_bytes)

    def stands_still(self, quiet):
        return False

    def elsewhere(self):
        return ()

    def free(self, offset):
        self.blocks = [block for block in self.blocks if block.offset_bytes != offset]
        self.version += 1

    def tensor(self, rank, offset, count, dtype=torch.float32):
        return self.memory[rank][offset:].view(dtype)[:count]


class World(Heap):
    """Heaps of `world_size` ranks, all of them one block."""

    def __init__(self, world_size, nbytes=1 << 20):
        self.world_size, self._next = world_size, 0
        fd = os.memfd_create("world")  # sparse: only what is touched exists
        os.ftruncate(fd, FAR * world_size)
        self._range = mmap.mmap(fd, FAR * world_size)
        os.close(fd)
        whole = torch.frombuffer(self._range, dtype=torch.uint8)
        assert whole.data_ptr() % HEAP_ALIGNMENT == 0
        # the highest address belongs to rank 0, so that distances have both signs
        heaps = [whole[(world_size - 1 - r) * FAR :][:nbytes] for r in range(world_size)]
        super().__init__(heaps, [Block(0, nbytes, "heap")])
        self.bases, self.status = torch.tensor(self.heap_bases), torch.zeros(STATUS_WORDS, dtype=torch.int64)

    def stands_still(self, quiet):
        """All ranks are programs of one launch."""
        return quiet

    def tensors(self, *values):
        """Put one value per rank at the same offset of every heap; returns the tensors by rank."""
        size, here = values[0].nbytes, self._next
        self._next += -(-size // 256) * 256
        out = [h[here : here + size].view(v.dtype).view(v.shape) for h, v in zip(self.memory, values, strict=True)]
        for tensor, value in zip(out, values, strict=True):
            tensor.copy_(value)
        return out

    def zeros(self, *size, dtype=torch.float32):
        return self.tensors(*(torch.zeros(size, dtype=dtype) for _ in range(self.world_size)))

    def context(self, rank, timeout_ns=0, *, reports=True):
        status = self.status.data_ptr() if reports else 0
        return torch.tensor(encode(ContextSpec(rank, self.world_size, self.heap_bases, timeout_ns, status)))

    def contexts(self, timeout_ns=0):
        return torch.stack([self.context(rank, timeout_ns) for rank in range(self.world_size)])


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


@pytest.fixture
def registered():
    """A function (heap) that lets the executor know a heap until the end of the test, and returns it."""
    with contextlib.ExitStack() as stack:

        def register(heap):
            stack.callback(interpreter.unregister_memory, interpreter.register_memory(heap))
            return heap

        yield register


@pytest.fixture
def make_heap(registered):
    """A function (ranks, *blocks, register, rank, check) that makes heaps of 4096 bytes."""

    def make(ranks, *blocks, register=registered, **how):
        memory = [torch.zeros(4096, dtype=torch.uint8) for _ in range(ranks)]
        return register(Heap(memory, [Block(*block) for block in blocks], **how))

    return make


@pytest.fixture
def make_world(registered):
    """A function that opens worlds (world_size, nbytes), which are closed at the end of the test."""
    tokens = []

    def make(*sizes):
        world = registered(World(*sizes))
        tokens.append(interpreter.allow_region(world.status.data_ptr(), STATUS_WORDS * 8, "status"))
        return world

    yield make
    for token in tokens:
        interpreter.unregister_memory(token)
