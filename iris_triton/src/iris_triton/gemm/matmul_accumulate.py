"""`atomic`, `spinlock`: matmul_all_reduce.  All members add their products to one sum for each tile, at its owner.

Chosen by name; `iris tune` leaves them out.  The owner stores its own product into an accumulator of float32; the
others add theirs there, by atomics or under a lock.  Then the owner adds the bias, rounds, and stores the result into
the outputs of all.  So all members get the same bits; but products arrive in any order, so the last bits may differ
from one run to the next.  Accumulators take as much memory as one slot of `matmul_reduce` in float32.

The tile with number L of an owner is handled by program L % programs on every member: so only the programs of one
number meet, or use one lock.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_core.providers.model import moving_s
from iris_core.types import DeviceType
from iris_triton.collectives.accumulate import LOCK_WORDS, draw
from iris_triton.collectives.parts.barrier import at_member, last_epoch, meet, meet_and_leave, publish, row_of
from iris_triton.gemm.parts.fused import Fused, Plan, programs_for, staged_memory
from iris_triton.gemm.parts.shapes import tiling
from iris_triton.gemm.parts.tiles import (
    PER_CALL,
    RUNTIME,
    add_product,
    announce,
    dense_tile,
    own_program,
    place,
    store_to_all,
    wide,
    with_bias,
)

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.gemm.parts.shapes import Tiling


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def matmul_accumulate(
    out, a, b, bias, control, sums, locks, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down,
    bias_step, tiles_m, tiles_n, per_owner, timeout_ns, status,
    SIZE: tl.constexpr, LOCKED: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Add up A @ B over the members, into one accumulator for each tile.

    Meetings: the owners' products are in the accumulators; all products are; the outputs are complete.

    Args (beside those of `iris_triton.gemm.matmul_reduce.matmul_reduce`):
        sums: symmetric memory for per_owner tiles of float32.
        locks: if LOCKED, LOCK_WORDS words for each program (int64) that only grow.
        LOCKED: whether to add under a lock; else by atomics.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    announce(row, bases, me, out, out_down, SIZE)
    program = own_program(0, XCDS, CHUNK)
    programs = tl.num_programs(0)
    total = tiles_m * tiles_n
    lock = locks + program * 2
    lanes = dense_tile(BM, BN)
    for i in range(SIZE):
        owner = (me + i) % SIZE
        there = tl.multiple_of(at_member(sums, bases, me, owner), 16)
        for tile in range(program, tl.minimum(per_owner, total - owner * per_owner), programs):
            down, right = place(owner * per_owner + tile, tiles_m, tiles_n, GROUP)
            acc = add_product(
                tl.zeros((BM, BN), tl.float32), wide(a, A_ALIGNED), wide(b, B_ALIGNED), down * BM, right * BN, m, n, k,
                a_down, a_right, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            at = there + tl.cast(tile, tl.int64) * (BM * BN) + lanes
            if i == 0:
                tl.store(at, acc)
            elif LOCKED:
                theirs = at_member(lock, bases, me, owner)
                ticket = draw(theirs, timeout_ns, status, rank)
                tl.store(at, tl.load(at) + acc)
                publish(theirs + 1, ticket + 1, "sys")
            else:
                tl.atomic_add(at, acc, sem="relaxed", scope="sys")
        if i == 0:
            meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    for tile in range(program, tl.minimum(per_owner, total - me * per_owner), programs):
        down, right = place(me * per_owner + tile, tiles_m, tiles_n, GROUP)
        acc = tl.load(sums + tl.cast(tile, tl.int64) * (BM * BN) + lanes)
        acc = with_bias(acc, bias, down * BM, right * BN, m, n, bias_step, BIAS, BM, BN)
        store_to_all(row, bases, me, out, acc, down * BM, right * BN, m, n, SIZE, BM, BN)
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class AllReduce(Fused):
    """What the other ways to matmul_all_reduce have in common: chosen by name, or where they were measured."""

    measured_only = True

    @staticmethod
    def _tiles(request: FusedRequest) -> Tiling:
        """How the product is divided: a tile and another one of float32 have to fit into registers."""
        if request.target.type is not DeviceType.CPU:
            config = {"block_size_n": 128, **request.options["config"]}
            request = replace(request, options={**request.options, "config": config})
        return tiling(request, request.m, request.k)

    def _arguments(self, request: FusedRequest, host: Host, tiles: Tiling) -> dict[str, Any]:
        arguments = self.product(request, host, tiles, request.m)
        return arguments | {"per_owner": -(-arguments["tiles_m"] * arguments["tiles_n"] // host.team.size)}


class Accumulate(AllReduce):
    """matmul_all_reduce into one sum for each tile: "atomic" or "spinlock"."""

    repeatable = False

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: sums are float32 on their way, and a lock is drawn and given back for each tile."""
        item: int = getattr(torch, request.out_dtype).itemsize
        moved = moving_s(request) * 4 / item
        meetings = 3 + (request.group_size if self.name == "spinlock" else 0)
        return self.model(request, meetings=meetings, moving=moved, seen=1)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the sums, and the locks, bind the kernel.  Collective."""
        tiles = self._tiles(request)
        arguments = self._arguments(request, host, tiles)
        sums_nbytes = arguments["per_owner"] * tiles.block_m * tiles.block_n * 4
        memory, staged = staged_memory(request, host, self.name, sums_nbytes, stages=not request.reach_out)
        locks = host.team.control
        if self.name == "spinlock":
            locks = host.team.region("ops locks", LOCK_WORDS * 8 * host.team.max_programs)
        arguments |= {
            "sums": memory[:sums_nbytes].view(torch.float32),
            "locks": locks.tensor.view(torch.int64),
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "LOCKED": self.name == "spinlock",
        }
        programs = programs_for(request, host, arguments["per_owner"], meeting=True)
        kernel = self.bind(request, host, matmul_accumulate, programs, arguments, tiles.options)
        held = locks.tensor if self.name == "spinlock" else None
        return Plan(kernel, staged_out=staged, aux_buffer=memory, locks=held)
