"""Rows of all members in one matrix, the others' brought by copy engines on a second stream, beside a product.

Two ways.  "Pull": a member copies its rows to their place in its own matrix, meets the others, and takes theirs, the
next member's first; then members meet again: nobody reads this matrix any more.  "Push": members meet, and each puts
its rows, from where they are, into the others' matrices, first that of the member before it, with a word after them.
There is one meeting and no copy of the own rows, and links carry writes instead of answers to reads; what a member gets
is complete when it has seen all words, so no second meeting is needed.

The second stream goes before others where multiprocessors are asked for: a product that can begin with the own rows
waits for none of it.  A meeting needs a multiprocessor that has room; nothing else does.
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

WIRE, COPY_S = 3.2e11, 7.5e-6
"""Of one stream of copies on 8 x H200: bytes in a second, and what each copy takes beside that."""

_WORD, _WORDS_NBYTES = 4, 256
"""Bytes of a word; memory for words is asked for in multiples of the second, so that few sizes are there."""

_FIRST = -1
"""Priority of the second stream: before all that say nothing."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words (int32) that say what has arrived: 0 between calls, for whoever waits for them clears them.

    Attributes:
        own: this member's, in symmetric memory; the last one counts who has waited.
        targets: address of the word that a copy for, or from, each member sets; empty where kernels set them.
        write: see `iris_triton.copies.flag_writer`.
    """

    own: torch.Tensor
    targets: tuple[Any, ...] = ()
    write: Callable[[Any, int, int, Any], None] | None = None

    def set(self, member: int, stream: Any) -> None:
        """Set a member's word after everything that a stream was asked for."""
        assert self.write is not None
        self.write(self.targets[member], 1, 0, stream)


@dataclass(slots=True)
class Side:
    """The second stream; on the CPU there is none, and everything is done when it is asked for.

    Attributes:
        meet: the kernel by which members meet.
        copy: see `iris_triton.copies.copier`.
        address: see `iris_triton.copies.handles`.
        stream, raw: a torch stream, or None; the same as `copy` takes it.
        ready: the event that lets it begin; None on the CPU.
    """

    meet: Callable[[Any], None]
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
        others: (member, target, source) of the copies, in their order, addresses as `Side.address` makes them; the
            source is None where the own rows are, wherever they lie.
        pushes: which of the two ways.
        side: the second stream.
        memory: the bytes of the matrix.
    """

    matrix: torch.Tensor
    own: torch.Tensor
    others: list[tuple[int, Any, Any]]
    pushes: bool
    side: Side
    memory: torch.Tensor

    def move(self, a: torch.Tensor, words: Words) -> torch.Tensor:
        """Ask the second stream to bring the rows, and to set a word after each member's; return the own rows, dense.

        What begins with them need not wait.  On the CPU everything is done afterwards.
        """
        own, side = own_rows(a, self.own), self.side
        nbytes = own.numel() * own.element_size()
        side.follow()
        if not self.pushes and own is not self.own:
            side.copy(self.own.data_ptr(), own.data_ptr(), nbytes, side.raw)
        side.meet(side.stream)
        here = side.address(own.data_ptr())
        for member, target, source in self.others:
            side.copy(target, here if source is None else source, nbytes, side.raw)
            words.set(member, side.raw)
        if not self.pushes and side.stream is not None:
            side.meet(side.stream)
        return own

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


def gathered_rows(request: FusedRequest, host: Host, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find symmetric memory for rows of A of all members; as `shards_of`.

    Returns:
        (its bytes, the matrix of request.m x request.k elements in them, the own rows of that).
    """
    dtype: torch.dtype = getattr(torch, request.dtype)
    memory = peer_memory(host, request.m * request.k * dtype.itemsize, f"{request.op} ({name})")
    matrix = memory.view(dtype).view(request.m, request.k)
    return memory, matrix, matrix.chunk(host.team.size)[host.team.rank]


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


def words_of(host: Host, count: int) -> Words:
    """Find `count` words that kernels set, and one more that counts.  Collective: the same count on every member.

    Raises:
        UnsupportedError: there is no room; on all members.
    """
    nbytes = (count + 1) * _WORD
    region = host.team.region("ops arrived", -(-nbytes // _WORDS_NBYTES) * _WORDS_NBYTES)
    return Words(region.tensor[:nbytes].view(torch.int32))


def shards_of(request: FusedRequest, host: Host, name: str, *, pushes: bool) -> tuple[Shards, Words]:
    """Find memory for rows of A (request.m x request.k) of all members, and a word for each.  Collective.

    Args:
        request: an all_gather_matmul with gather_dim 0.
        host: what the library gives to algorithms.
        name: of the algorithm, for errors.
        pushes: which of the two ways.
    """
    team, side = host.team, side_of(request, host)
    memory, matrix, own = gathered_rows(request, host, name)
    found = words_of(host, team.size)
    heap, nbytes = team.base_ptrs[team.rank], memory.numel() // team.size
    rows, flags = matrix.data_ptr() - heap, found.own.data_ptr() - heap  # the same on all members
    if pushes:
        flags += team.rank * _WORD
        targets = [base + flags for base in team.base_ptrs]
    else:
        targets = [heap + flags + member * _WORD for member in range(team.size)]
    words = Words(found.own, tuple(map(side.address, targets)), flag_writer(request.target.type))
    others = []
    for step in range(1, team.size):
        member = (team.rank + (-step if pushes else step)) % team.size
        there = team.base_ptrs[member] + rows
        if pushes:
            others.append((member, side.address(there + team.rank * nbytes), None))
        else:
            at = member * nbytes
            others.append((member, side.address(heap + rows + at), side.address(there + at)))
    return Shards(matrix, own, others, pushes, side, memory), words
