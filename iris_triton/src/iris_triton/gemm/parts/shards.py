"""Rows of all members in one matrix, gathered by copy engines on a second stream during a product.

After a barrier each member copies its rows into its peers' matrices, beginning with the previous member, and writes a
word after each copy.  A member has all rows when it has seen all words: no second barrier is needed.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.dispatch.team import Host
from iris_core.providers.baseline import scales_shape
from iris_core.types import FusedRequest
from iris_triton.collectives.parts.side import Side, words_of
from iris_triton.gemm.parts.fused import peer_memory

COPY_S = 1e-5  # seconds that a copy with its word takes beside its bytes (H200s)


@dataclass(slots=True)
class Shards:
    """The gathered matrix and its copies, in symmetric memory; made by `shards_of`.

    `words`, int32, has one for each member, 1 when its rows have arrived, and one more.  They are 0 between calls: the
    waiter clears them.
    """

    matrix: torch.Tensor  # rows of all members
    own: torch.Tensor  # this rank's rows of it
    words: torch.Tensor
    others: list[tuple[Any, ...]]  # where own rows, scales and word go, on each peer in turn, by `Side.address`
    side: Side
    scales: torch.Tensor | None = None  # of all rows
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


def shards_of(request: FusedRequest, host: Host, name: str) -> Shards:
    """Allocate a matrix of all members' rows of A (request.m x request.k), scales, and a word for each.  Collective.

    `name` is the algorithm's; an UnsupportedError with it, on all members, says that the heap has no space.
    """
    team, side = host.team, Side.of(host.team, request.target)
    dtype: torch.dtype = getattr(torch, request.dtype)
    end = request.m * request.k * dtype.itemsize
    begin, shape = -(-end // ROW_NBYTES) * ROW_NBYTES, scales_shape(request)  # of the scales
    memory = peer_memory(request, host, name, begin + 4 * math.prod(shape))
    matrix, scales = memory[:end].view(dtype).view(request.m, request.k), memory[begin:].view(torch.float32).view(shape)
    own, own_scales = (each.chunk(team.size)[team.rank] for each in (matrix, scales))
    words = words_of(team, "ops arrived", team.size + 1)
    heap = team.base_ptrs[team.rank]
    scaled = () if request.scales == "none" else (scales, own_scales)
    at = [each.data_ptr() - heap for each in (own, *scaled[1:], words[team.rank])]  # the same on all members
    before = [team.base_ptrs[(team.rank - step) % team.size] for step in range(1, team.size)]
    others = [tuple(side.address(base + each) for each in at) for base in before]
    return Shards(matrix, own, words, others, side, *scaled)
