"""`one_shot`, `two_shot`: all_reduce_rms_norm.  Whole rows are sent, summed, and normalised by the same program.

Chosen where a table or the model says so: one shot for few rows, two for many.  In one shot each member sends its rows
to all, and each computes everything after the only barrier.  In two shots the rows of a band, one for each member, are
summed by their owners, which send the sums to all.  Either way sums are made in the group's order and rounded, so all
members get the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from iris_core.dispatch import FP8, products
from iris_core.dispatch.team import Host, Team
from iris_core.providers.norms import norm_s
from iris_core.types import Availability, DeviceType, NormRequest, PluginInfo
from iris_triton.collectives.parts import barrier as sync
from iris_triton.collectives.parts.collective import RUNTIME, Plan, barrier_arguments
from iris_triton.collectives.parts.sizes import MOST_PROGRAMS
from iris_triton.gemm.parts.fused import fp8_problem
from iris_triton.gemm.parts.tiles import wide
from iris_triton.info import TRITON_INFO
from iris_triton.language.flags import lanes_for
from iris_triton.launcher import BoundKernel

TENSORS = ("out", "residual", "x", "weight", "scales")  # arguments that may lie anywhere


@triton.jit
def _slot(stage, bases, me, member, offset):
    """Return a pointer to a row in a member's memory; the compiler knows that it begins at a multiple of 16 bytes."""
    there = stage.to(tl.int64) + (tl.load(bases + member) - tl.load(bases + me))
    return tl.multiple_of(there.to(stage.dtype), 16) + offset


@triton.jit
def row_of(pointer, t, hidden, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Load row `t`, 0 beyond `hidden`, as float32."""
    at = tl.arange(0, BLOCK)
    begin = tl.cast(t, tl.int64) * hidden
    return tl.load(wide(pointer, ALIGNED) + begin + at, mask=at < hidden, other=0.0).to(tl.float32)


@triton.jit
def _publish(number, word, tag):
    """Hand a number to the programs of a row's other parts: all there is to know is in one word."""
    value = tag.to(tl.int64) << 32 | (number.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(word, value, sem="relaxed", scope="gpu")


@triton.jit
def _of_parts(first, tag, COUNT: tl.constexpr):
    """Return what the programs of a row's parts have published, in the same order in all; they run at the same time."""
    place = first + tl.arange(0, COUNT)
    seen = tl.atomic_add(place, tl.zeros((COUNT,), tl.int64), sem="relaxed", scope="gpu")
    while tl.sum(((seen >> 32).to(tl.int32) == tag).to(tl.int32), 0) < COUNT:
        seen = tl.atomic_add(place, tl.zeros((COUNT,), tl.int64), sem="relaxed", scope="gpu")
    return seen.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def finish(
    total, before, factors, t, out, residual, scales, hidden, eps, most, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr = 1, words=None, tag=0
):  # fmt: skip
    """Add a row's sum to the residual, and store the norm of that.

    Args:
        total, before, factors: the sum, the residual and the weight, float32, 0 beyond `hidden`.
        t: number of the row.
        out, residual, hidden, eps: see `all_reduce_rms_norm`.
        scales: float32 for each row, or None; then `most` is the largest number of the output's type.
        ALIGNED: all tensors begin at multiples of 16 bytes.
        PARTS: a row's parts, a power of two; what is called a row here is then one of them.
        words, tag: with several, an int64 of this rank for each part, two with scales, and what none was tagged with.
    """
    at = tl.max_contiguous(tl.arange(0, BLOCK), 8)  # or a thread would hold 16 of 8 bits, and so two packets in a row
    mask = at < hidden
    begin = tl.cast(t, tl.int64) * hidden
    row = (before + total).to(residual.dtype.element_ty)
    tl.store(wide(residual, ALIGNED) + begin + at, row, mask=mask)
    row = row.to(tl.float32)
    squares = tl.sum(row * row, 0)
    if scales is not None:
        largest = tl.max(tl.abs(row * factors), 0)
    if PARTS > 1:
        if scales is None:
            _publish(squares, words + t, tag)
            squares = tl.sum(_of_parts(words + t // PARTS * PARTS, tag, PARTS), 0)
        else:
            _publish(squares, words + 2 * t, tag)
            _publish(largest, words + 2 * t + 1, tag)
            both = tl.reshape(_of_parts(words + t // PARTS * (2 * PARTS), tag, 2 * PARTS), (PARTS, 2))
            all_squares, all_largest = tl.split(both)
            squares, largest = tl.sum(all_squares, 0), tl.max(all_largest, 0)
    inverse = tl.rsqrt(squares / (hidden * PARTS) + eps)
    row *= inverse * factors
    if scales is not None:
        factor = largest * inverse / most
        tl.store(scales + t // PARTS, factor, mask=t % PARTS == 0)
        row = tl.minimum(tl.maximum(row / tl.where(factor > 0, factor, 1.0), -most), most)
    tl.store(wide(out, ALIGNED) + begin + at, row.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=TENSORS)
def norm_one_shot(
    out, residual, x, weight, scales, control, stage, kinds, bases, me, rank, kind, rows, hidden, cap, eps, most,
    timeout_ns, status,
    SIZE: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Send all rows to all members, and finish each; a program takes every `num_programs`-th row.

    A member may be one call ahead, so halves of the memory take turns, by the epoch of the program's barriers: two
    calls with the same half have one between them.  A program's part of a half is its own, whatever the call's shape.

    Args (beside those of `finish`):
        control, bases, me, rank, kind, timeout_ns, status: see `iris_triton.collectives.pull.pull`.
        stage: symmetric memory, 2 * cap * SIZE * EACH rows of BLOCK elements.
        kinds: int64[2 * SIZE] of it: each member's call signature, which the row of the barrier cannot tell where the
            next call may begin before this one has looked.
        cap: programs for which there is memory.
        EACH: rows of a program for which there is memory.
        BLOCK: a power of two, at least `hidden`.
    """
    row, epoch = sync.enter(control, bases, me, kind, SIZE)
    epoch += 1
    program, programs = tl.program_id(0), tl.num_programs(0)
    half = epoch % 2
    words = kinds + half * SIZE
    if program == 0:
        members = sync.members_of(SIZE)
        place = sync.at_member(words + me, bases, me, members)
        tl.store(place, members.to(tl.int64) * 0 + kind, mask=lanes_for(SIZE) < SIZE)
    first = (half * cap + program) * (SIZE * EACH * BLOCK)
    at = tl.arange(0, BLOCK)
    mask = at < hidden
    for t in range(program, rows, programs):
        values = tl.load(wide(x, ALIGNED) + tl.cast(t, tl.int64) * hidden + at, mask=mask)
        for i in tl.static_range(SIZE):
            there = _slot(stage, bases, me, (me + 1 + i) % SIZE, first + (me * EACH + t // programs) * BLOCK)
            tl.store(there + at, values, mask=mask)
    sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    sync.compare_kinds(row, kind, status, rank, SIZE, words)
    factors = row_of(weight, 0, hidden, ALIGNED, BLOCK)
    for t in range(program, rows, programs):
        before = row_of(residual, t, hidden, ALIGNED, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(SIZE):
            came = wide(stage, True) + (first + (source * EACH + t // programs) * BLOCK)
            total += tl.load(came + at, mask=mask, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32)
        finish(total, before, factors, t, out, residual, scales, hidden, eps, most, ALIGNED, BLOCK)
    sync.leave(row, epoch, SIZE)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=TENSORS)
def norm_two_shot(
    out, residual, x, weight, scales, control, stage, bases, me, rank, kind, rows, hidden, bands, sums, eps, most,
    timeout_ns, status, SIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the rows that this member owns, send the sums to all, and finish every row; a program takes bands of rows.

    Row b * SIZE + i of band b belongs to member i.  Rows and sums need no second copy, whatever the next call's shape:
    who sends its rows has the sums of this call, before which all have read their rows; and who sends its sums has all
    members' rows for it, before which they have read the sums of this call.

    Args (beside those of `norm_one_shot`):
        stage: symmetric memory: SIZE * bands rows, those that each member sends to this one, and as many sums.
        bands: of rows, the last of which may be short.
        sums: where the sums begin, in elements; the same in all calls with this memory, as a member may still read them
            while another sends the rows of the next call.
    """
    row, epoch = sync.enter(control, bases, me, kind, SIZE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    mask = at < hidden
    apart = tl.cast(bands, tl.int64) * BLOCK
    for band in range(program, bands, programs):
        for i in tl.static_range(SIZE):
            owner = (me + 1 + i) % SIZE
            t = tl.cast(band * SIZE + owner, tl.int64)
            here = mask & (t < rows)
            there = _slot(stage, bases, me, owner, me * apart + band * BLOCK)
            tl.store(there + at, tl.load(wide(x, ALIGNED) + t * hidden + at, mask=here), mask=here)
    epoch += 1
    sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    sync.compare_kinds(row, kind, status, rank, SIZE)
    for band in range(program, bands, programs):
        here = mask & (band * SIZE + me < rows)
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(SIZE):
            came = wide(stage, True) + (source * apart + band * BLOCK)
            total += tl.load(came + at, mask=here, other=0.0).to(tl.float32)
        for i in tl.static_range(SIZE):
            there = _slot(stage, bases, me, (me + 1 + i) % SIZE, sums + me * apart + band * BLOCK)
            tl.store(there + at, total.to(x.dtype.element_ty), mask=here)
    epoch += 1
    sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    factors = row_of(weight, 0, hidden, ALIGNED, BLOCK)
    for band in range(program, bands, programs):
        for owner in range(SIZE):
            t = band * SIZE + owner
            if t < rows:
                came = wide(stage, True) + (sums + owner * apart + band * BLOCK)
                total = tl.load(came + at, mask=mask, other=0.0).to(tl.float32)
                before = row_of(residual, t, hidden, ALIGNED, BLOCK)
                finish(total, before, factors, t, out, residual, scales, hidden, eps, most, ALIGNED, BLOCK)
    sync.leave(row, epoch, SIZE)


_MOST_HIDDEN = 1 << 15  # a program holds whole rows
_ELEMENTS_OF_A_WARP = 1024
_SHARE = 1 << 12


class ReduceNorm:
    """all_reduce_rms_norm by one of these forms; satisfies `iris_core.protocols.NormOperation`."""

    op = products.NORM
    info: PluginInfo = TRITON_INFO
    deterministic = True

    def __init__(self, name: str, most_nbytes: int) -> None:
        self.name, self._most_nbytes = name, most_nbytes

    def supports(self, request: NormRequest) -> Availability:
        problem = self._problem(request)
        return Availability(not problem, problem)

    def _problem(self, request: NormRequest) -> str:
        config, most = request.options["config"], self._most_nbytes
        if request.group_size == 1:
            return "a single rank has no peers to communicate with"
        if request.hidden > _MOST_HIDDEN:
            return f"a program holds whole rows, of up to {_MOST_HIDDEN} elements"
        if request.nbytes > most:
            return f"it serves up to {most} bytes"
        if unused := [name for name in config if name not in ("comm_sms", "num_warps")]:
            return f"it has no use for {', '.join(unused)} of the config"
        return fp8_problem(request.out_dtype, request.target) if request.out_dtype in FP8 else ""

    def cost(self, request: NormRequest) -> float:
        """Estimate seconds: rows to all and one barrier, or rows and sums and two of them."""
        shots, others = (1, request.group_size - 1) if self.name == "one_shot" else (2, 1 - 1 / request.group_size)
        return norm_s(request, launches=1, barriers=shots, moved=shots * others * request.nbytes, passes=3)

    def tunings(self, request: NormRequest) -> list[dict[str, int]]:
        """Return the configs to measure."""
        return [{}] if request.target.type is DeviceType.CPU else [{}, {"num_warps": 4}, {"num_warps": 16}]

    @staticmethod
    def arguments(request: NormRequest, team: Team) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return arguments that all kernels have, and the names of the tensors of a call."""
        is_quantised = request.out_dtype in FP8
        arguments = {
            "kind": request.options.get("kind", 0), "rows": request.rows, "hidden": request.hidden, "eps": request.eps,
            "most": torch.finfo(getattr(torch, request.out_dtype)).max, "ALIGNED": request.aligned,
        }  # fmt: skip
        return (arguments, TENSORS) if is_quantised else (arguments | {"scales": None}, TENSORS[:-1])

    @staticmethod
    def resident(request: NormRequest, host: Host, on_cpu: int, on_gpu: int) -> int:
        """Return how many programs may wait for others: as many as are sure to be on the device at a time."""
        config = request.options["config"]
        if request.target.type is DeviceType.CPU:
            return int(config.get("comm_sms", on_cpu))
        return min(int(config.get("comm_sms", on_gpu)), host.processors)

    @staticmethod
    def planned(request: NormRequest, bound: BoundKernel) -> Plan:
        """Return the plan of one kernel, and begin to compile it."""
        out, dtype, weight = (getattr(torch, name) for name in (request.out_dtype, request.dtype, request.weight_dtype))
        bound.compile_ahead(out=out, residual=dtype, x=dtype, weight=weight, scales=torch.float32)
        return Plan((bound,))

    def prepare(self, request: NormRequest, host: Host) -> Plan:
        team, config, on_cpu = host.team, request.options["config"], request.target.type is DeviceType.CPU
        block = triton.next_power_of_2(request.hidden)
        dtype: torch.dtype = getattr(torch, request.dtype)
        cap = min(self.resident(request, host, 1, MOST_PROGRAMS), team.max_programs)
        arguments, names = self.arguments(request, team)
        arguments |= barrier_arguments(team) | {"BLOCK": block}
        if self.name == "one_shot":
            kernel: Any = norm_one_shot
            programs = min(cap, request.rows)
            # a power of two for each program: calls of different shapes share the region, and each one's own part of it
            each_nbytes = max(_SHARE, triton.next_power_of_2(-(-request.rows // programs)) * block * dtype.itemsize)
            rows_nbytes, kinds_nbytes = 2 * cap * team.size * each_nbytes, 2 * team.size * 8
            region = team.region(f"norms of {cap} programs of {each_nbytes} bytes", rows_nbytes + kinds_nbytes).tensor
            arguments |= {"stage": region[:rows_nbytes].view(dtype), "cap": cap}
            arguments |= {"kinds": region[rows_nbytes : rows_nbytes + kinds_nbytes].view(torch.int64)}
            arguments |= {"EACH": each_nbytes // (block * dtype.itemsize)}
        else:
            kernel = norm_two_shot
            bands = -(-request.rows // team.size)
            programs = min(cap, bands)
            nbytes = triton.next_power_of_2(2 * team.size * bands * block * dtype.itemsize)
            stage = team.region("norms", nbytes, fill=None).tensor.view(dtype)
            arguments |= {"stage": stage, "bands": bands, "sums": stage.numel() // 2}
        warps = config.get("num_warps", max(4, min(16, block // _ELEMENTS_OF_A_WARP)))
        options = {} if on_cpu else {"num_warps": warps}
        return self.planned(request, BoundKernel(kernel, programs, arguments, names, team.device, options))

    def launch(
        self, plan: Plan, out: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        given = (out, residual, x, weight) if scales is None else (out, residual, x, weight, scales)
        plan.kernels[0](None, *(each.detach() for each in given))
