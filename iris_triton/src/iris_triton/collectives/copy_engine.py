"""`copy_engine`: all_gather and all_to_all of dense tensors by copy engines, which need no multiprocessor.

Chosen for large messages where it was measured as the fastest; by name, for what runs beside products.  After a barrier
the parts for all peers are copied to staging memory there, in pieces, by a second stream, each followed by a word.  The
caller's stream waits for the word of each piece, in a kernel of one warp, and copies the piece to the output while the
next one is on its way.  Pieces go to both halves of the staging memory in turn; before one is used again is a barrier.
With `same_place`, parts are copied whole to the peers' outputs themselves.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest
from iris_triton.collectives.parts.barrier import enter_alone
from iris_triton.collectives.parts.collective import KernelCollective, bind_alone
from iris_triton.collectives.parts.side import WORD_NBYTES, Side, await_word, copies_obstacle, words_of
from iris_triton.collectives.parts.sizes import layout_of, pieces
from iris_triton.collectives.pull import received_nbytes
from iris_triton.launcher import BoundKernel

COPIED = ("all_gather", "all_to_all")  # operations that it serves
_LINK_SHARE = 1.25  # of the model: a copy engine's bandwidth
_COPY_S = 1e-5  # of the model


@dataclass(slots=True)
class _Plan:
    """A prepared call; its lists have an item for each half."""

    direct: bool  # to the outputs: `peers` has the distances of heaps
    enter: BoundKernel  # the barrier that begins it
    side: Side
    nbytes: int  # for each member
    capacity: int  # bytes of a piece, at most
    me: int
    step: int  # bytes from one member's part of the input to the next one's
    peers: list[list[tuple[int, Any, Any]]]  # whom to copy to, where, and the word there
    arrivals: list[list[tuple[int, BoundKernel, Any]]]  # who sends, wait for its word, uint8[capacity]
    free: list[Any]  # events after which the halves may be used again; None on the CPU

    def run(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Copy parts of the input to the outputs, one after the other for each member."""
        side, source, place = self.side, inp.data_ptr(), out.data_ptr() + self.me * self.nbytes
        main, own = None if side.second is None else side.second.current(), self.me * self.step
        rows = None if self.direct else _bytes_of(out).view(-1, self.nbytes)
        self.enter(None, *[out] * self.direct)
        side.wait()
        for number, done in enumerate(range(0, self.nbytes, self.capacity)):
            end = min(done + self.capacity, self.nbytes)
            half = number % 2
            if number > 1 and main is not None:
                side.stream.wait_event(self.free[half])
            for member, there, word in self.peers[half]:
                target = side.address(place + there) if rows is None else there
                side.copy(target, side.address(source + member * self.step + done), end - done, side.raw)
                side.write(word, 1, 0, side.raw)
            if number == 0 and place != source + own:
                _bytes_of(out)[self.me * self.nbytes :][: self.nbytes].copy_(_bytes_of(inp)[own:][: self.nbytes])
            for member, wait, piece in self.arrivals[half]:
                wait(main)
                if rows is not None:
                    rows[member, done:end].copy_(piece if end - done == self.capacity else piece[: end - done])
            if done + 2 * self.capacity < self.nbytes:
                side.barrier(main)
                if main is not None:
                    self.free[half].record(main)
        side.join()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


class CopyEngine(KernelCollective):
    """all_gather or all_to_all by copy engines."""

    uses = ("comm_sms",)  # of which it needs none
    measured_only: ClassVar = True

    def _problem(self, request: CollectiveRequest) -> str:
        if problem := super()._problem(request) or copies_obstacle(request.target.type):
            return problem
        options = request.options
        sides = (request.shape, options["in_stride"]), (options["out_shape"], options["out_stride"])
        if any(len(shape) != len(stride) or layout_of(shape, stride).num_dims for shape, stride in sides):
            return "it copies dense tensors only"
        overwrites = self.op == "all_to_all" and options["in_place"]
        return "it reads the input while it writes the output" if overwrites else ""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: the barrier, bytes over the links, what each copy and the last one's end add."""
        moved, peers = received_nbytes(request), max(1, request.group_size - 1)
        link = self.model(request, barriers=1, moved=moved, copied=moved / peers, link_share=_LINK_SHARE)
        return link + _COPY_S * peers

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return the config to measure: there is nothing to vary."""
        return [{}]

    def prepare(self, request: CollectiveRequest, context: Any) -> Any:
        """Find staging memory and words, and for every copy its addresses.  Collective: every member calls it."""
        team: Team = context.ccl.team(request.members)
        me, size, sharded = team.rank, team.size, self.op == "all_to_all"
        item = getattr(torch, request.dtype).itemsize
        nbytes = math.prod(request.shape) * item // (size if sharded else 1)
        direct = request.direct_out and request.options.get("same_place", False)
        memory = {"capacity": nbytes, "stage": None} if direct else pieces(team, nbytes, 1, size, name="copied")
        capacity, own, stage = memory["capacity"], team.base_ptrs[me], memory["stage"]
        halves = range(min(2, -(-nbytes // capacity)))
        if stage is not None:
            stage = stage[: len(halves) * size * capacity].view(len(halves), size, capacity)
        words, side = words_of(team, "copies arrived", 2 * size), Side.of(team, request.target)

        def at(member: int, half: int) -> tuple[int, Any, Any]:
            there = team.base_ptrs[member] - own
            word = words.data_ptr() + (half * size + me) * WORD_NBYTES
            place = there if stage is None else side.address(stage[half, me].data_ptr() + there)
            return member, place, side.address(word + there)

        def arrival(member: int, half: int) -> tuple[int, BoundKernel, Any]:
            wait = bind_alone(team, await_word, words=words, index=half * size + member)
            return member, wait, None if stage is None else stage[half, member]

        after, before = ([(me + sign * step) % size for step in range(1, size)] for sign in (1, -1))
        kind, tensors = request.options.get("kind", 0), ("out",) * direct
        plan = _Plan(
            direct=direct,
            enter=bind_alone(team, enter_alone, tensors, kind=kind, out=None),
            side=side,
            nbytes=nbytes,
            capacity=capacity,
            me=me,
            step=nbytes if sharded else 0,
            peers=[[at(member, half) for member in after] for half in halves],
            arrivals=[[arrival(member, half) for member in before] for half in halves],
            free=[None if side.stream is None else torch.cuda.Event() for _ in halves],  # type: ignore[no-untyped-call]
        )
        plan.enter.compile_ahead(**dict.fromkeys(tensors, getattr(torch, request.dtype)))
        for _, kernel, _ in plan.arrivals[0][:1]:  # the others are the same
            kernel.compile_ahead()
        return plan

    def launch(self, plan: Any, out: Any, inp: Any, stream: Any = None) -> None:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            plan.run(out, inp)
