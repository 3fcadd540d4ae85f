"""`copy_engine_push`, `copy_engine`: torch.matmul on the main stream, and the copy engine on a second one.

Chosen where a table says so: what multiplies loses no multiprocessor.  all_gather_matmul: the product with the own rows
begins at once, that with each run of others when they are there.  matmul_reduce_scatter, matmul_all_reduce: the copy
engine carries the product for each owner of rows to its slot there beside the next product; then slots are added up.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import PLAIN, ROW_NBYTES
from iris_core.providers.baseline import multiply
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.copies import copies_obstacle
from iris_triton.gemm.parts.fused import Fused, Plan, staged_memory
from iris_triton.gemm.parts.shards import COPY_S, WIRE, Shards, Side, Words, shards_of, side_of
from iris_triton.gemm.parts.sum_slots import bind_sum
from iris_triton.language.flags import await_flag
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest


@triton.jit(do_not_specialize=("index", "rank", "timeout_ns", "status"))
def await_word(words, index, rank, timeout_ns, status):
    """Wait until a word is 1, and clear it.  One program; what its stream does afterwards sees what the word speaks of.

    Args:
        words: int32 words in own memory.
        index: which of them.
        rank, timeout_ns, status: the caller in the world; bound of the wait, and where it reports.
    """
    word = words + index
    one = tl.cast(index, tl.int32) * 0 + 1
    await_flag(word, one, "eq", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    tl.store(word, 0)


class _CopyEngine(Fused):
    """The common part: `num_pieces` is the number of products, one for each member without it."""

    uses = ("num_pieces",)
    measured_only = True
    _shots = 1
    """How often data crosses the links: once by the copy engine, otherwise by the kernel that adds up."""

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if answer and request.dtype not in PLAIN:
            return Availability.no(f"torch.matmul does not multiply {request.dtype}")
        obstacle = copies_obstacle(request.target.type)
        return Availability.no(obstacle) if answer and obstacle else answer

    def tunings(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return numbers of products that are worth measuring, the own choice first."""
        size = request.group_size
        fewer = {pieces: {"num_pieces": pieces} for pieces in (size // 2 + 1, 3, 2) if pieces < size}
        return [{}, *fewer.values()]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for a piece."""
        size = request.group_size
        moving = moving_s(request)
        if request.target.type is not DeviceType.CPU:
            moving = moving / self._shots * (self._shots - 1)
            moving += request.nbytes * (size - 1) / size / WIRE + (size - 1) * COPY_S
        product = product_s(request)
        return max(product, moving) + product / size + fixed_s(request, launches=size + 3, meetings=2)

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: a product, a copy and a word for each member (hosts of H200s)."""
        return 0.0 if request.target.type is DeviceType.CPU else 6e-5 + 3.5e-5 * request.group_size


def runs(me: int, size: int, pieces: int) -> list[list[int]]:
    """Members whose rows are multiplied at a time, in the order in which they come: the own ones alone, unless all are.

    Args:
        me: the own index.
        size: number of members.
        pieces: how many runs, at most one for each member.
    """
    order = [(me + i) % size for i in range(size)]
    if pieces == 1:
        return [order]
    others, number = order[1:], min(pieces, size) - 1
    bounds = [len(others) * i // number for i in range(number + 1)]
    return [[me], *(others[first:last] for first, last in itertools.pairwise(bounds))]


def neighbours(run: list[int]) -> list[tuple[int, int]]:
    """First and last members of the stretches in which a run lies in the matrix: two where it goes round the end."""
    if run[0] <= run[-1]:
        return [(run[0], run[-1])]
    wrap = run.index(0)
    return [(run[0], run[wrap - 1]), (0, run[-1])]


# -- gathering --------------------------------------------------------------------------------------------------------
class Product(NamedTuple):
    """A run of rows that is multiplied at a time: the own ones alone, or after waiting for those of some members."""

    begin: int
    end: int
    own: bool
    after: tuple[int, ...]


@dataclass(slots=True)
class GatheredProducts:
    """One launch of all_gather_matmul.

    Attributes:
        shards, words: A of all members, and how it is gathered.
        products: in their order.
        waits: the kernels that wait for members' words.
        tf32: products of float32 may be of TF32.
    """

    shards: Shards
    words: Words
    products: list[Product]
    waits: Mapping[int, Callable[[Any], None]]
    tf32: bool

    def __call__(
        self, stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Bring the rows beside the products."""
        shards = self.shards
        with torch.no_grad():
            own = shards.move(a, self.words)
            if not self.products[0].own and own is not shards.own:
                shards.own.copy_(own)  # one product of all rows
            along_rows = bias is not None and bias.dim() == 2 and bias.shape[0] > 1
            for begin, end, is_own, after in self.products:
                for member in after:
                    self.waits[member](None)
                added = bias[begin:end] if along_rows else bias  # type: ignore[index]
                multiply(a if is_own else shards.matrix[begin:end], b, added, out[begin:end], self.tf32)
            shards.end()


class CopyEngineGather(_CopyEngine):
    """`copy_engine_push` of all_gather_matmul with gather_dim 0; rows come as `iris_triton.gemm.parts.shards` says."""

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if answer and request.options["gather_dim"] != 0:
            return Availability.no("with gather_dim=1 the shards' products would be added up in the output, rounded")
        return answer

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for all rows, and for every copy its addresses.  Collective: every member calls it."""
        shards, words = shards_of(request, host, self.name, pushes=True)
        team, rows = host.team, request.m // host.team.size
        products: list[Product] = []
        for run in runs(team.rank, team.size, request.options["config"].get("num_pieces", team.size)):
            after = tuple(member for member in run if member != team.rank)
            for first, last in neighbours(run):
                products.append(Product(first * rows, (last + 1) * rows, run == [team.rank], after))
                after = ()  # the second stretch of a run has nothing to wait for
        common = {"words": words.own, "rank": team.world_rank, "timeout_ns": team.timeout_ns, "status": team.status_ptr}
        options = {} if team.device == "cpu" else {"num_warps": 1}
        waits = {
            member: BoundKernel(await_word, 1, {**common, "index": member}, (), team.device, options)
            for member, *_ in shards.others
        }
        run_all = GatheredProducts(shards, words, products, waits, request.options["tf32"])
        return Plan(run_all, aux_buffer=shards.memory)


# -- reducing ---------------------------------------------------------------------------------------------------------
class Carried(NamedTuple):
    """A product of rows of one of the others, or of several neighbours, and the copies to their slots.

    Attributes:
        begin, end: the rows.
        copies: (target, source, bytes), addresses as `iris_triton.copies.handles` makes them.
        computed: the event that lets the copies begin; None on the CPU.
    """

    begin: int
    end: int
    copies: list[tuple[Any, Any, int]]
    computed: Any


@dataclass(slots=True)
class ReducedProducts:
    """One launch of matmul_reduce_scatter or matmul_all_reduce.

    Attributes:
        side: the second stream.
        carried: products for the others, in their order.
        product: where these are computed.
        begin, end: the own rows; none if both are equal.
        slot: where their product goes.
        add: the kernel that adds up; it takes the output and, if there is one, the bias.
        meets: whether members meet before it, or it does that itself.
        tf32: products of float32 may be of TF32.
    """

    side: Side
    carried: list[Carried]
    product: torch.Tensor
    begin: int
    end: int
    slot: torch.Tensor
    add: Callable[..., None]
    meets: bool
    tf32: bool

    def __call__(self, stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> None:
        """Multiply and carry, then add up."""
        side = self.side
        with torch.no_grad():
            side.follow()
            side.meet(side.stream)  # the slots may be written to
            for begin, end, copies, computed in self.carried:
                multiply(a[begin:end], b, None, self.product[begin:end], self.tf32)
                if computed is not None:
                    computed.record(torch.cuda.current_stream(side.stream.device))
                    side.stream.wait_event(computed)
                for target, source, nbytes in copies:
                    side.copy(target, source, nbytes, side.raw)
            if self.begin < self.end:
                multiply(a[self.begin : self.end], b, None, self.slot, self.tf32)
            if self.meets:
                side.meet(side.stream)  # beside the last product
            side.join()
            self.add(None, out, *bias)


class CopyEngineReduce(_CopyEngine):
    """`copy_engine` of matmul_reduce_scatter and matmul_all_reduce: the next one's first, the own last."""

    def __init__(self, op: str, name: str) -> None:
        super().__init__(op, name)
        self._shots = 2 if op == "matmul_all_reduce" else 1

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.options["layout"] != "torch":
            return Availability.no("members own rows, not runs of tiles")
        if request.options["config"].get("num_pieces", 2) < 2:
            return Availability.no("the own rows are a product of their own, so there are two pieces at least")
        return answer

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the slots, and for every copy its addresses.  Collective: every member calls it."""
        team, on_cpu = host.team, request.target.type is DeviceType.CPU
        size, me = team.size, team.rank
        dtype: torch.dtype = getattr(torch, request.out_dtype)
        rows_each = -(-request.m // size)
        row_nbytes = request.n * dtype.itemsize
        slots_nbytes = -(-size * rows_each * row_nbytes // ROW_NBYTES) * ROW_NBYTES
        two_shot = self.op == "matmul_all_reduce"
        stages = two_shot and not request.reach_out
        memory, staged = staged_memory(request, host, self.name, slots_nbytes, stages=stages)
        slots = memory[: size * rows_each * row_nbytes].view(dtype).view(size, rows_each, request.n)
        whole = host.scratch(request.m * row_nbytes, "product")
        product = whole[: request.m * row_nbytes].view(dtype).view(request.m, request.n)
        side, mine = side_of(request, host), slots[me].data_ptr() - team.base_ptrs[me]
        bounds = [(min(i * rows_each, request.m), min((i + 1) * rows_each, request.m)) for i in range(size)]
        carried = []
        for run in runs(me, size, request.options["config"].get("num_pieces", size))[1:]:
            for first, last in neighbours(run):
                copies = []
                for owner in range(first, last + 1):
                    begin, end = bounds[owner]
                    if begin < end:
                        target, source = team.base_ptrs[owner] + mine, product[begin].data_ptr()
                        copies.append((side.address(target), side.address(source), (end - begin) * row_nbytes))
                if copies:
                    event = None if on_cpu else torch.cuda.Event()
                    carried.append(Carried(bounds[first][0], bounds[last][1], copies, event))
        begin, end = bounds[me]
        add = bind_sum(request, host, slots, rows_each, request.out_stride if staged is None else staged.stride())
        run_all = ReducedProducts(
            side, carried, product, begin, end, slots[me][: end - begin], add, not two_shot, request.options["tf32"]
        )
        return Plan(run_all, staged_out=staged, aux_buffer=memory)
