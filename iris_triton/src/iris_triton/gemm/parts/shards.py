"""Rows of all members in one matrix, the others' brought by copy engines on a second stream, beside a product.

Two ways.  "Pull": a member copies its rows to their place in its own matrix, meets the others, and takes theirs, the
next member's first; what says that rows have arrived, an event or a word, crosses no link.  Then members meet again:
nobody reads this matrix any more.  "Push": members meet, and each puts its rows, from where they are, into the others'
matrices, first that of the member before it, with a word behind them: there is one meeting and no copy of the own rows,
and links carry writes instead of answers to reads.  What a member gets is complete when it has seen all words, so no
second meeting is needed.

All of that is on the second stream, which goes before others where multiprocessors are asked for: a product that can
begin with the own rows waits for none of it.  A meeting needs a multiprocessor that has room; nothing else does.

Words are 0 between calls; who waits for them clears them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.types import DeviceType
from iris_triton.collectives.parts.barrier import bind_meeting
from iris_triton.copies import copier, flag_writer, handles
from iris_triton.gemm.parts.fused import peer_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.launcher import BoundKernel

WIRE, COPY_S = 3.2e11, 7.5e-6
"""Of one stream of copies on 8 x H200: bytes in a second, and what each copy takes beside that."""

_WORD = 4

_WORDS_NBYTES = 256
"""Memory for words is asked for in multiples of it, so that few sizes are there."""


_FIRST = -1
"""Priority of the second stream: before all that say nothing."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A copy for, or from, one of the others.

    Attributes (addresses as `iris_triton.copies.handles` makes them):
        member: the other one.
        here: pull: where in this member's matrix its rows go; push: not used, the own rows lie anywhere.
        there: pull: where its rows lie in its matrix; push: where the own ones go in its matrix.
    """

    member: int
    here: Any
    there: Any


@dataclass(frozen=True, slots=True)
class Words:
    """Words that say what has arrived.

    Attributes:
        own: this member's (int32), symmetric memory; the last one counts who has waited.
        here: addresses of the own words for the rows of each member.
        there: addresses of each member's word for the own rows.
        write: see `iris_triton.copies.flag_writer`; None where kernels write them.
    """

    own: torch.Tensor
    here: tuple[Any, ...]
    there: tuple[Any, ...]
    write: Callable[[Any, int, int, Any], None] | None = None

    def taken(self, member: int, stream: Any) -> None:
        """Say here, behind what a stream was asked for, that a member's rows are there."""
        assert self.write is not None
        self.write(self.here[member], 1, 0, stream)

    def put(self, member: int, stream: Any) -> None:
        """Say to a member, behind what a stream was asked for, that the own rows are there."""
        assert self.write is not None
        self.write(self.there[member], 1, 0, stream)


@dataclass(slots=True)
class Side:
    """The second stream; on the CPU there is none, and everything is done when it is asked for.

    Attributes:
        meet: the kernel by which members meet.
        copy: see `iris_triton.copies.copier`.
        stream: a torch stream, or None.
        address, raw: see `iris_triton.copies.handles`: makes addresses; the stream.
        ready: the event that lets it begin; None on the CPU.
    """

    meet: BoundKernel
    copy: Callable[[Any, Any, int, Any], None]
    address: Callable[[int], Any]
    stream: Any = None
    raw: Any = 0
    ready: Any = None

    def follow(self) -> None:
        """Let it begin when everything is done that the main stream was asked for until now."""
        if self.stream is not None:
            self.ready.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self.ready)

    def join(self) -> None:
        """Let the main stream wait for it."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@dataclass(slots=True)
class Shards:
    """The matrix, and how it is filled; made by `shards_of`.

    Attributes:
        matrix: rows of all members, in symmetric memory.
        own: the own rows of it.
        others: the copies, in their order.
        nbytes: of the rows of a member.
        pushes: which of the two ways.
        side: the second stream.
        memory: the bytes of the matrix.
    """

    matrix: torch.Tensor
    own: torch.Tensor
    others: list[Shard]
    nbytes: int
    pushes: bool
    side: Side
    memory: torch.Tensor

    def begin(self, a: torch.Tensor) -> torch.Tensor:
        """Return the own rows, dense: A itself, or a copy if it has gaps.  The second stream may begin."""
        own = own_rows(a, self.own)
        self.side.follow()
        return own

    def move(self, own: torch.Tensor, behind: Callable[[int, Any], None]) -> None:
        """Ask the second stream to bring the rows.

        Args:
            own: what `begin` has returned.
            behind: called with a member and the raw stream when a copy for or from it was asked for; what it asks for
                there happens when the copy is done.
        """
        side, nbytes = self.side, self.nbytes
        copy, raw = side.copy, side.raw
        if self.pushes:
            source = side.address(own.data_ptr())
            side.meet(side.stream)
            for each in self.others:
                copy(each.there, source, nbytes, raw)
                behind(each.member, raw)
            return
        if own.data_ptr() != self.own.data_ptr():
            copy(self.own.data_ptr(), own.data_ptr(), nbytes, raw)
        side.meet(side.stream)
        for each in self.others:
            copy(each.here, each.there, nbytes, raw)
            behind(each.member, raw)
        if side.stream is not None:
            side.meet(side.stream)

    def end(self) -> None:
        """Let the main stream wait until everything is done; on the CPU, where products come later, meet."""
        if self.side.stream is None and not self.pushes:
            self.side.meet(None)
        self.side.join()


def own_rows(a: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return A if its rows are dense and begin at a multiple of 16 bytes; else copy it to a place that is such."""
    if a.is_contiguous() and a.data_ptr() % ROW_NBYTES == 0:
        return a
    return place.copy_(a.detach())


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


def side_of(request: FusedRequest, host: Host) -> Side:
    """Make a second stream."""
    device = request.target.type
    address, raw = handles(device)
    meet, copy = bind_meeting(host.team), copier(device)
    if device is DeviceType.CPU:
        return Side(meet, copy, address)
    stream: Any = torch.cuda.Stream(request.target.index, priority=_FIRST)  # type: ignore[no-untyped-call]
    ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Side(meet, copy, address, stream, raw(stream.cuda_stream), ready)


def words_of(host: Host, count: int, device: DeviceType | None = None) -> Words:
    """Find words, 0 at first, and one more that counts.  Collective: every member calls it with the same count.

    Args:
        host: what the library gives to algorithms.
        count: how many.
        device: whose streams write them; None if kernels do.

    Raises:
        UnsupportedError: there is no room; on all members.
    """
    team = host.team
    nbytes = -(-(count + 1) * _WORD // _WORDS_NBYTES) * _WORDS_NBYTES
    region = team.region("ops arrived", nbytes)
    own = region.tensor[: (count + 1) * _WORD].view(torch.int32)
    if device is None:
        return Words(own, (), ())
    address, _ = handles(device)
    begin = [base + region.offset_bytes for base in team.base_ptrs]
    here = tuple(address(begin[team.rank] + _WORD * member) for member in range(team.size))
    there = tuple(address(each + _WORD * team.rank) for each in begin)
    return Words(own, here, there, flag_writer(device))


def shards_of(request: FusedRequest, host: Host, what: str, *, pushes: bool) -> Shards:
    """Find memory for rows of A (request.m x request.k) of all members.  Collective: every member calls it.

    Args:
        request: an all_gather_matmul with gather_dim 0.
        host: what the library gives to algorithms.
        what: who asks, for errors.
        pushes: which of the two ways.
    """
    team, side = host.team, side_of(request, host)
    memory, matrix, own = gathered_rows(request, host, what)
    nbytes = memory.numel() // team.size
    begin = matrix.data_ptr() - team.base_ptrs[team.rank]
    others = []
    for step in range(1, team.size):
        member = (team.rank + (-step if pushes else step)) % team.size
        at = begin + (team.rank if pushes else member) * nbytes
        here, there = (side.address(team.base_ptrs[each] + at) for each in (team.rank, member))
        others.append(Shard(member, here, there))
    return Shards(matrix, own, others, nbytes, pushes, side, memory)
