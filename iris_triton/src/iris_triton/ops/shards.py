"""Rows of all members in one matrix, the others' brought by copy engines beside the main stream.

A member puts its rows into a matrix at the same place on all members, and meets the others.  On a second stream the
copy engine then takes the rows out of theirs, the next member's first.  Everybody takes, and nobody gives, so what says
that rows have arrived, an event or a word, crosses no link.  Behind the copies members meet again on that stream: then
nobody reads this matrix any more.  No multiprocessor is used, but for the meetings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.types import DeviceType
from iris_triton.collectives.engine import bind_meeting
from iris_triton.copies import copier
from iris_triton.ops.fused import peer_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest

WIRE, COPY_S = 3.2e11, 7.5e-6
"""Of one stream of copies on 8 x H200: bytes in a second, and what each copy takes beside that."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one of the others: where they go, where they lie (addresses), and their bytes."""

    member: int
    target: int
    source: int
    nbytes: int


@dataclass(slots=True)
class Shards:
    """The matrix, and how it is filled; made by `shards_of`.

    Attributes:
        matrix: rows of all members, in symmetric memory.
        own: the own rows of it.
        others: those of the others, in the order in which they come.
        meet: the kernel by which members meet.
        copy: see `iris_triton.copies.copier`.
        memory: the bytes of the matrix.
        side: the second stream; None on the CPU, where copies are done when they are asked for.
        ready: the event that lets it begin; None on the CPU.
    """

    matrix: torch.Tensor
    own: torch.Tensor
    others: list[Shard]
    meet: Callable[[Any], None]
    copy: Callable[[int, int, int, int], None]
    memory: torch.Tensor
    side: Any = None
    ready: Any = None

    def give(self, a: torch.Tensor) -> None:
        """Put the own rows to the others, and meet: in front of products, which would leave no room for it."""
        self.own.copy_(a)
        self.meet(None)

    def take(self, behind: Callable[[int, Any], None]) -> None:
        """Ask for the others' rows.

        Args:
            behind: called with a member and the second stream (None on the CPU) when its rows were asked for; what it
                asks for on that stream happens when they are there.
        """
        if self.side is None:
            for each in self.others:
                self.copy(each.target, each.source, each.nbytes, 0)
                behind(each.member, None)
            return
        self.ready.record(torch.cuda.current_stream(self.side.device))
        self.side.wait_event(self.ready)
        for each in self.others:
            self.copy(each.target, each.source, each.nbytes, self.side.cuda_stream)
            behind(each.member, self.side)
        with torch.cuda.stream(self.side):
            self.meet(None)

    def end(self) -> None:
        """Let the main stream wait until nobody reads this matrix any more."""
        if self.side is None:
            self.meet(None)
        else:
            torch.cuda.current_stream(self.side.device).wait_stream(self.side)


def gathered_rows(request: FusedRequest, host: Host, what: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find symmetric memory for rows of A of all members; as `shards_of`.

    Returns:
        (its bytes, the matrix of request.m x request.k elements in them, the own rows of that).
    """
    dtype: torch.dtype = getattr(torch, request.dtype)
    need = request.m * request.k * dtype.itemsize
    memory = peer_memory(host, need, what)[:need]
    matrix = memory.view(dtype).view(request.m, request.k)
    rows, rank = request.m // host.team.size, host.team.rank
    return memory, matrix, matrix[rank * rows : (rank + 1) * rows]


def shards_of(request: FusedRequest, host: Host, what: str) -> Shards:
    """Find memory for rows of A (request.m x request.k) of all members.  Collective: every member calls it.

    Args:
        request: an all_gather_matmul with gather_dim 0.
        host: what the library gives to algorithms.
        what: who asks, for errors.
    """
    team, on_cpu = host.team, request.target.type is DeviceType.CPU
    memory, matrix, own = gathered_rows(request, host, what)
    nbytes = memory.numel() // team.size
    begin = matrix.data_ptr() - team.base_ptrs[team.rank]
    others = []
    for step in range(1, team.size):
        member = (team.rank + step) % team.size
        at = begin + member * nbytes
        others.append(Shard(member, team.base_ptrs[team.rank] + at, team.base_ptrs[member] + at, nbytes))
    return Shards(
        matrix=matrix,
        own=own,
        others=others,
        meet=bind_meeting(team),
        copy=copier(request.target.type),
        memory=memory,
        side=None if on_cpu else torch.cuda.Stream(request.target.index),  # type: ignore[no-untyped-call]
        ready=None if on_cpu else torch.cuda.Event(),  # type: ignore[no-untyped-call]
    )
