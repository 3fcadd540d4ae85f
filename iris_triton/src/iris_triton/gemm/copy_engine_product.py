"""`copy_engine`, `copy_engine_push`: torch.matmul on the main stream, and the copy engine on a second one.

Chosen by name, or where a table says so: what multiplies loses no multiprocessor.

all_gather_matmul: rows come as `iris_triton.gemm.parts.shards` says, and the product with each run of them begins as
soon as they are there, that with the own rows at once.

matmul_reduce_scatter and matmul_all_reduce: for each owner of rows a product, that of the next member first, which the
copy engine carries to a slot of the owner while the next one is computed.  The own rows come last, and their product
goes to its slot at once.  Then the slots are added up (`iris_triton.gemm.parts.sum_slots`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.providers.baseline import Unfused, multiply
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.copies import copies_obstacle
from iris_triton.gemm.parts.fused import staged_memory
from iris_triton.gemm.parts.shards import COPY_S, WIRE, Shards, Side, Words, shards_of, side_of, words_of
from iris_triton.gemm.parts.sum_slots import bind_sum
from iris_triton.info import TRITON_INFO
from iris_triton.language.flags import await_flag
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest, PluginInfo


class _CopyEngine(Unfused):
    """What is common: `num_pieces` is the number of products, one for each member without it."""

    uses = ("num_pieces",)
    measured_only = True

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return TRITON_INFO

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.group_size == 1:
            return Availability.no("a rank alone has nobody to communicate with")
        obstacle = copies_obstacle(request.target.type)
        return Availability.no(obstacle) if obstacle else answer

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

    _shots = 1
    """How often data crosses the links: once by the copy engine, otherwise by the kernel that adds up."""


# -- gathering --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Product:
    """A run of rows that is multiplied at a time.

    Attributes:
        begin, end: the rows.
        own: they are the own ones alone.
        after: members whose rows are waited for before, in the order in which they come; those of earlier products are
            there.
    """

    begin: int
    end: int
    own: bool
    after: tuple[int, ...]


@dataclass(slots=True)
class _GatherPlan:
    """What is asked for in a launch.

    Attributes:
        shards: A of all members, and how it is gathered.
        products: in their order.
        arrived: pull, on a GPU: events, by the last members that products wait for.
        words, waits: push: words of all members, and the kernels that wait for them, by member.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    shards: Shards
    products: list[_Product]
    arrived: dict[int, Any]
    words: Words | None
    waits: dict[int, Callable[[Any], None]]
    tf32: bool
    aux_buffer: torch.Tensor


class CopyEngineGather(_CopyEngine):
    """all_gather_matmul, gather_dim 0, by the copy engine.

    Args:
        pushes: see `iris_triton.gemm.parts.shards`.
    """

    def __init__(self, *, pushes: bool) -> None:
        super().__init__("all_gather_matmul")
        self.name = "copy_engine_push" if pushes else "copy_engine"
        self._pushes = pushes

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if answer and request.options["gather_dim"] != 0:
            return Availability.no("with gather_dim=1 the shards' products would be added up in the output, rounded")
        return answer

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for all rows, and for every copy its addresses.  Collective: every member calls it."""
        shards = shards_of(request, host, f"{self.op} ({self.name})", pushes=self._pushes)
        team, rows = host.team, request.m // host.team.size
        products: list[_Product] = []
        for run in runs(team.rank, team.size, request.options["config"].get("num_pieces", team.size)):
            after = tuple(member for member in run if member != team.rank)
            for first, last in neighbours(run):
                products.append(_Product(first * rows, (last + 1) * rows, run == [team.rank], after))
                after = ()  # the second stretch of a run has nothing to wait for
        words: Words | None = None
        waits: dict[int, Callable[[Any], None]] = {}
        arrived: dict[int, Any] = {}
        if self._pushes:
            words = words_of(host, team.size, request.target.type)
            common = {"rank": team.world_rank, "timeout_ns": team.timeout_ns, "status": team.status_ptr}
            options = {} if team.device == "cpu" else {"num_warps": 1}
            for shard in shards.others:
                arguments = {"words": words.own, "index": shard.member, **common}
                waits[shard.member] = BoundKernel(await_word, 1, arguments, (), team.device, options)
        elif shards.side.stream is not None:
            awaited = [each.after[-1] for each in products if each.after]
            arrived = {member: torch.cuda.Event() for member in awaited}
        return _GatherPlan(shards, products, arrived, words, waits, request.options["tf32"], shards.memory)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Bring the rows beside the products."""
        shards, arrived, waits = plan.shards, plan.arrived, plan.waits

        def behind(member: int, raw: Any) -> None:
            if member in arrived:
                arrived[member].record(shards.side.stream)

        with torch.no_grad():
            own = shards.begin(a)
            shards.move(own, behind if plan.words is None else plan.words.put)
            if plan.words is not None and not plan.products[0].own and own is not shards.own:
                shards.own.copy_(own)  # one product of all rows
            for each in plan.products:
                for member in each.after:
                    if member in waits:
                        waits[member](None)
                    elif member in arrived:
                        torch.cuda.current_stream(shards.side.stream.device).wait_event(arrived[member])
                along_rows = bias is not None and bias.dim() == 2 and bias.shape[0] > 1
                added = bias[each.begin : each.end] if along_rows else bias  # type: ignore[index]
                rows = a if each.own else shards.matrix[each.begin : each.end]
                multiply(rows, b, added, out[each.begin : each.end], plan.tf32)
            shards.end()


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


# -- reducing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Carried:
    """A product of rows of one of the others, or of several neighbours, and the copies to their slots.

    Attributes:
        begin, end: the rows.
        copies: (target, source, bytes), addresses as `iris_triton.copies.handles` makes them.
        computed: the event that lets the copies begin; None on the CPU.
    """

    begin: int
    end: int
    copies: tuple[tuple[Any, Any, int], ...]
    computed: Any


@dataclass(slots=True)
class _ReducePlan:
    """What is asked for in a launch.

    Attributes:
        side: the second stream.
        carried: products for the others, in their order.
        product: where these are computed.
        begin, end: the own rows; none if both are equal.
        slot: where their product goes.
        add: the kernel that adds up; it takes the output and, if there is one, the bias.
        meets: whether members meet before it, or it does that itself.
        staged_out: what it writes, and is copied to the output afterwards; None if it writes the output.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    side: Side
    carried: list[_Carried]
    product: torch.Tensor
    begin: int
    end: int
    slot: torch.Tensor
    add: BoundKernel
    meets: bool
    staged_out: torch.Tensor | None
    tf32: bool
    aux_buffer: torch.Tensor


class CopyEngineReduce(_CopyEngine):
    """matmul_reduce_scatter or matmul_all_reduce by the copy engine.

    Args:
        op: which of the two.
    """

    name = "copy_engine"

    def __init__(self, op: str) -> None:
        super().__init__(op)
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

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for the slots, and for every copy its addresses.  Collective: every member calls it."""
        team, on_cpu = host.team, request.target.type is DeviceType.CPU
        size, me = team.size, team.rank
        dtype: torch.dtype = getattr(torch, request.out_dtype)
        rows_each = -(-request.m // size)
        slot_nbytes = rows_each * request.n * dtype.itemsize
        slots_nbytes = -(-size * slot_nbytes // ROW_NBYTES) * ROW_NBYTES
        two_shot = self.op == "matmul_all_reduce"
        stages = two_shot and not request.reach_out
        memory, staged = staged_memory(request, host, self.name, slots_nbytes, stages=stages)
        slots = memory[: size * slot_nbytes].view(dtype).view(size, rows_each, request.n)
        whole = host.scratch(request.m * request.n * dtype.itemsize, "product")
        product = whole[: request.m * request.n * dtype.itemsize].view(dtype).view(request.m, request.n)

        def bounds(member: int) -> tuple[int, int]:
            return min(member * rows_each, request.m), min((member + 1) * rows_each, request.m)

        side, mine = side_of(request, host), slots[me].data_ptr() - team.base_ptrs[me]

        def copies(first: int, last: int) -> tuple[tuple[Any, Any, int], ...]:
            found = []
            for owner in range(first, last + 1):
                begin, end = bounds(owner)
                if begin < end:
                    nbytes = (end - begin) * request.n * dtype.itemsize
                    target, source = team.base_ptrs[owner] + mine, product[begin].data_ptr()
                    found.append((side.address(target), side.address(source), nbytes))
            return tuple(found)

        carried = []
        for run in runs(me, size, request.options["config"].get("num_pieces", size))[1:]:
            for first, last in neighbours(run):
                begin, end = bounds(first)[0], bounds(last)[1]
                if begin < end:
                    event = None if on_cpu else torch.cuda.Event()
                    carried.append(_Carried(begin, end, copies(first, last), event))
        begin, end = bounds(me)
        stride = request.out_stride if staged is None else (staged.stride(0), staged.stride(1))
        return _ReducePlan(
            side=side,
            carried=carried,
            product=product,
            begin=begin,
            end=end,
            slot=slots[me][: end - begin],
            add=bind_sum(request, host, slots, rows_each, stride, tells=two_shot),
            meets=not two_shot,
            staged_out=staged,
            tf32=request.options["tf32"],
            aux_buffer=memory,
        )

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply and carry, then add up."""
        side, copy, raw = plan.side, plan.side.copy, plan.side.raw
        with torch.no_grad():
            side.follow()
            side.meet(side.stream)  # the slots may be written to
            for each in plan.carried:
                multiply(a[each.begin : each.end], b, None, plan.product[each.begin : each.end], plan.tf32)
                if each.computed is not None:
                    each.computed.record(torch.cuda.current_stream(side.stream.device))
                    side.stream.wait_event(each.computed)
                for target, source, nbytes in each.copies:
                    copy(target, source, nbytes, raw)
            if plan.begin < plan.end:
                multiply(a[plan.begin : plan.end], b, None, plan.slot, plan.tf32)
            if plan.meets:
                side.meet(side.stream)  # beside the last product
            side.join()
            target = out if plan.staged_out is None else plan.staged_out
            plan.add(None, target, *(() if bias is None else (bias,)))
            if plan.staged_out is not None:
                out.copy_(plan.staged_out)


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
