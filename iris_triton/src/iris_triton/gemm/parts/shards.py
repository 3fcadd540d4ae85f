"""Rows of all members in one matrix, gathered by copy engines on a second stream during a product.

After a barrier each member copies its rows into its peers' matrices, beginning with the previous member, and writes a
word after each copy.  A member has all rows when it has seen all words: no second barrier is needed.

The second stream has higher priority on multiprocessors: a product that begins with this rank's rows does not wait for
it.  Only the barrier needs a free multiprocessor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.providers.baseline import scales_shape
from iris_core.types import DeviceType
from iris_triton.collectives.parts.collective import bind_barrier
from iris_triton.copies import copier, flag_writer, handles
from iris_triton.gemm.parts.fused import peer_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.team import Host
    from iris_core.types import FusedRequest

COPY_S = 1e-5
"""Seconds that a copy with its word takes beside its bytes (H200s)."""

_WORD, _WORDS_NBYTES = 4, 256
"""Bytes of a word; memory for words is asked for in multiples of the second, so that few sizes are there."""

_FIRST = -1
"""Priority of the second stream: before all that say nothing."""


@dataclass(slots=True)
class Side:
    """The second stream; on the CPU there is none, and copies are synchronous.

    Attributes:
        barrier: the barrier kernel.
        copy, write: see `iris_triton.copies.copier` and `flag_writer`.
        address: see `iris_triton.copies.handles`.
        stream, raw: a torch stream, or None; its handle for `copy`.
        ready: the event that it waits for; None on the CPU.
    """

    barrier: Callable[[Any], None]
    copy: Callable[[Any, Any, int, Any], None]
    write: Callable[[Any, int, int, Any], None]
    address: Callable[[int], Any]
    stream: Any = None
    raw: Any = 0
    ready: Any = None

    def follow(self) -> None:
        """Make the second stream wait for earlier work of the main stream, then for the barrier."""
        if self.stream is not None:
            self.ready.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self.ready)
        self.barrier(self.stream)

    def join(self) -> None:
        """Make the main stream wait for the second stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@dataclass(slots=True)
class Shards:
    """The gathered matrix and its copies; made by `shards_of`.

    Attributes:
        matrix: rows of all members, in symmetric memory.
        own: this rank's rows of it.
        words: symmetric memory, int32, one for each member, 1 when its rows have arrived, and one more.  They are 0
            between calls: the waiter clears them.
        others: addresses of this rank's rows, scales and word on each peer, in the order of the copies, as
            `Side.address` converts them.
        side: the second stream.
        scales, own_scales: of all rows, in symmetric memory, and of this rank's; None where there are none.
    """

    matrix: torch.Tensor
    own: torch.Tensor
    words: torch.Tensor
    others: list[tuple[Any, ...]]
    side: Side
    scales: torch.Tensor | None = None
    own_scales: torch.Tensor | None = None

    def move(self, a: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Enqueue the copies to all peers, each followed by its word; return this rank's rows, dense.

        A product of these rows need not wait.  On the CPU the copies are done on return.
        """
        own, side = a, self.side
        if not a.is_contiguous() or a.data_ptr() % ROW_NBYTES:
            own = self.own.copy_(a.detach())
        moved = [own]
        if scales is not None and self.own_scales is not None:
            moved.append(self.own_scales.copy_(scales.detach().view(self.own_scales.shape)))
        parts = [(side.address(each.data_ptr()), each.nbytes) for each in moved]
        side.follow()
        for *targets, word in self.others:
            for target, (here, nbytes) in zip(targets, parts, strict=True):
                side.copy(target, here, nbytes, side.raw)
            side.write(word, 1, 0, side.raw)
        return own


def side_of(request: FusedRequest, host: Host) -> Side:
    """Make a second stream."""
    device = request.target.type
    address, raw = handles(device)
    side = Side(bind_barrier(host.team), copier(device), flag_writer(device), address)
    if device is not DeviceType.CPU:
        side.stream = torch.cuda.Stream(request.target.index, priority=_FIRST)  # type: ignore[no-untyped-call]
        side.raw, side.ready = raw(side.stream.cuda_stream), torch.cuda.Event()  # type: ignore[no-untyped-call]
    return side


def shards_of(request: FusedRequest, host: Host, name: str) -> Shards:
    """Allocate a matrix of all members' rows of A (request.m x request.k), scales, and a word for each.  Collective.

    Args:
        request: an all_gather_matmul with gather_dim 0.
        host: services of the library for algorithms.
        name: of the algorithm, for errors.

    Raises:
        UnsupportedError: the heap has no space; raised on all members.
    """
    team, side = host.team, side_of(request, host)
    dtype: torch.dtype = getattr(torch, request.dtype)
    end = request.m * request.k * dtype.itemsize
    begin, shape = -(-end // ROW_NBYTES) * ROW_NBYTES, scales_shape(request)  # of the scales
    memory = peer_memory(request, host, name, begin + 4 * math.prod(shape))
    matrix, scales = memory[:end].view(dtype).view(request.m, request.k), memory[begin:].view(torch.float32).view(shape)
    own, own_scales = (each.chunk(team.size)[team.rank] for each in (matrix, scales))
    nbytes = (team.size + 1) * _WORD
    words = team.region("ops arrived", -(-nbytes // _WORDS_NBYTES) * _WORDS_NBYTES).tensor[:nbytes].view(torch.int32)
    heap = team.base_ptrs[team.rank]
    scaled = () if request.scales == "none" else (scales, own_scales)
    at = [each.data_ptr() - heap for each in (own, *scaled[1:], words[team.rank])]  # the same on all members
    before = [team.base_ptrs[(team.rank - step) % team.size] for step in range(1, team.size)]
    others = [tuple(side.address(base + each) for each in at) for base in before]
    return Shards(matrix, own, words, others, side, *scaled)
