"""Kernels and the worker of `test_cpu_processes`; run as a script, one process per rank, over memfd heaps.

    python cpu_process_kernels.py RANK WORLD PIPE FD... CASES

Every rank maps the memory of all ranks and runs the cases in turn.  Each case works on a page of its own.
"""

import ctypes
import mmap
import sys
import time

import torch
import triton
import triton.language as tl

from iris_core.errors import PeerLostError
from iris_core.types import Block
from iris_triton import interpreter

NBYTES, PAGE = 1 << 20, 4096
ROUNDS = 100


@triton.jit
def hammer_kernel(word, ROUNDS: tl.constexpr, OP: tl.constexpr, start):
    for r in range(ROUNDS):
        if OP == "add":
            tl.atomic_add(word, 1, sem="relaxed", scope="sys")
        elif OP == "max":
            tl.atomic_max(word, start + r)
        else:
            tl.atomic_min(word, -(start + r))


@triton.jit
def lanes_kernel(word, ROUNDS: tl.constexpr, N: tl.constexpr):
    for _ in range(ROUNDS):
        tl.atomic_add(word + tl.arange(0, N) % 2, 1)


@triton.jit
def lock_kernel(lock, counter, ROUNDS: tl.constexpr):
    for _ in range(ROUNDS):
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="sys") != 0:
            pass
        tl.store(counter, tl.load(counter) + 1)
        tl.atomic_xchg(lock, 0, sem="release", scope="sys")


@triton.jit
def ping_pong_kernel(mine, theirs, payload, out, rank, ROUNDS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    for r in range(1, ROUNDS + 1):
        if rank == 0:
            tl.store(payload + i, i + r)
            tl.atomic_xchg(theirs, r, sem="release", scope="sys")
        while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < r:
            pass
        if rank != 0:
            tl.store(out + i, tl.load(out + i) + tl.load(payload + i))
            tl.atomic_xchg(theirs, r, sem="release", scope="sys")


@triton.jit
def wait_kernel(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


class Heap:
    """What the executor needs to know of mapped memory; a peer is lost when it has closed its end of a pipe."""

    def __init__(self, rank, fds, alive_fd):
        self.rank, self.nbytes, self.version, self._alive = rank, NBYTES, 0, alive_fd
        self.nodes = (tuple(range(len(fds))),)
        self.maps = [mmap.mmap(fd, NBYTES) for fd in fds]
        self.heap_bases = tuple(ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps)

    def live_blocks(self):
        return [Block(0, NBYTES, "everything")]

    def stands_still(self, quiet):
        return False

    def elsewhere(self):
        return ()

    def check_peers(self):
        import select

        if select.select([self._alive], [], [], 0)[0]:
            raise PeerLostError("rank 1 has ended", ranks=(1,))

    def words(self, rank, offset, count, dtype):
        return torch.frombuffer(self.maps[rank], dtype=dtype, count=count, offset=offset)


def run_case(heap, page, case):
    kind, _, name = case.partition(":")
    dtype = getattr(torch, name) if name else torch.int32
    word = heap.words(0, page, 2, dtype)
    if kind in ("add", "max", "min"):
        hammer_kernel[(2,)](word, ROUNDS=ROUNDS, OP=kind, start=heap.rank * 1000)
    elif kind == "lanes":
        lanes_kernel[(2,)](word, ROUNDS=ROUNDS, N=64)
    elif kind == "lock":
        lock_kernel[(2,)](word, word[1:], ROUNDS=ROUNDS)
    elif kind == "pingpong":
        out = torch.zeros(64, dtype=torch.int32)
        mine, theirs = (heap.words(rank, page, 1, torch.int32) for rank in (heap.rank, 1 - heap.rank))
        payload = heap.words(1, page + 256, 64, torch.int32)
        ping_pong_kernel[(1,)](mine, theirs, payload, out, heap.rank, ROUNDS=ROUNDS, N=64)
        print(case, out[:3].tolist() if heap.rank else "sent")
    elif heap.rank == 0:
        try:
            wait_kernel[(2,)](word)
        except PeerLostError as error:
            print(case, error, error.__notes__[0])


def main(rank, world, alive_fd, fds, cases):
    torch.set_num_threads(1)
    interpreter.enable()
    heap = Heap(rank, fds, alive_fd)
    interpreter.register_memory(heap)
    arrived = heap.words(0, NBYTES - PAGE, len(cases), torch.int32)
    for number, case in enumerate(cases):
        # All ranks begin a case together, or the fast one would be done before the other starts.
        hammer_kernel[(1,)](arrived[number:], ROUNDS=1, OP="add", start=0)
        while arrived[number].item() < world:
            time.sleep(1e-3)
        run_case(heap, number * PAGE, case)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:-1]]
    main(numbers[0], numbers[1], numbers[2], numbers[3:], sys.argv[-1].split(","))
