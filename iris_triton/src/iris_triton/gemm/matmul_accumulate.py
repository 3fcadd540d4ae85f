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

from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import DeviceType
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.gemm.parts.fused import (
    Fused,
    Plan,
    bind,
    common_arguments,
    efficiency,
    peer_memory,
    programs_for,
    staging,
    staging_nbytes,
    tile_shapes,
)
from iris_triton.gemm.parts.shapes import tiling
from iris_triton.gemm.parts.tiles import (
    add_product,
    dense_tile,
    own_program,
    place,
    store_tile,
    whole_rows,
    wide,
    with_bias,
)
from iris_triton.language.asm import wait_stores
from iris_triton.language.flags import await_flag, set_flag

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.gemm.parts.shapes import Tiling

PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere."""

RUNTIME = ("me", "rank", "per_owner", "timeout_ns", "status")
"""Arguments for whose values kernels are not compiled anew."""

LOCK_WORDS = 2
"""Words of a program's lock: the number that is drawn next, and the one that is served."""


@triton.jit
def _elsewhere(pointer, bases, me, member):
    """The same place in a member's heap."""
    return (pointer.to(tl.int64) + (tl.load(bases + member) - tl.load(bases + me))).to(pointer.dtype)


@triton.jit
def _acquire(lock, timeout_ns, status, rank):
    """Wait for a ticket lock; returns the ticket.

    Any member draws, and only the holder of a ticket sets the number that is served next: none can serve another's.
    """
    ticket = tl.atomic_add(lock, 1, sem="relaxed", scope="sys")
    await_flag(lock + 1, ticket, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    return ticket


@triton.jit
def _tell_after_stores(word, value):
    """Set a flag when everything that this program has stored and loaded is done."""
    wait_stores()
    tl.debug_barrier()
    set_flag(word, value, "release", "sys")


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
    nothing = members_of(SIZE).to(tl.int64) * 0
    tell(row, bases, me, nothing + (out.to(tl.int64) - tl.load(bases + me)), nothing + out_down, SIZE)
    program = own_program(0, XCDS, CHUNK)
    programs = tl.num_programs(0)
    total = tiles_m * tiles_n
    lock = locks + program * 2
    lanes = dense_tile(BM, BN)
    for i in range(SIZE):
        owner = (me + i) % SIZE
        there = tl.multiple_of(_elsewhere(sums, bases, me, owner), 16)
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
                theirs = _elsewhere(lock, bases, me, owner)
                ticket = _acquire(theirs, timeout_ns, status, rank)
                tl.store(at, tl.load(at) + acc)
                _tell_after_stores(theirs + 1, ticket + 1)
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
        for j in range(SIZE):
            peer = (me + 1 + j) % SIZE
            target = tl.multiple_of((tl.load(bases + peer) + told(row, peer, SIZE)).to(out.dtype), 16)
            stride = whole_rows(told_second(row, peer, SIZE), out)
            store_tile(target, acc, down * BM, right * BN, m, n, stride, 1, BM, BN)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


_WORD = 8


class _Variant(Fused):
    """What the other ways to matmul_all_reduce have in common: chosen by name, or where they were measured."""

    measured_only = True

    def __init__(self, name: str) -> None:
        super().__init__("matmul_all_reduce", name)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    @staticmethod
    def _tiles(request: FusedRequest) -> Tiling:
        """How the product is divided: a tile and another one of float32 have to fit into registers."""
        if request.target.type is not DeviceType.CPU:
            config = {"block_size_n": 128, **request.options["config"]}
            request = replace(request, options={**request.options, "config": config})
        return tiling(request, request.m, request.k)

    @staticmethod
    def _arguments(request: FusedRequest, host: Host, tiles: Tiling) -> dict[str, Any]:
        tiles_m, tiles_n = tiles.tiles(request.m, request.n)
        return common_arguments(request, host, tiles) | {
            "m": request.m,
            "k": request.k,
            "a_down": request.a_stride[0],
            "a_right": request.a_stride[1],
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "per_owner": -(-tiles_m * tiles_n // host.team.size),
            "A_ALIGNED": request.aligned[0],
            "B_ALIGNED": request.aligned[1],
        }


class Accumulate(_Variant):
    """matmul_all_reduce into one sum for each tile: "atomic" or "spinlock".

    The members' products arrive in any order, so the last bits may differ from one run to the next; they are the same
    on all members.
    """

    repeatable = False

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: sums are float32 on their way, and a lock is drawn and given back for each tile."""
        item: int = getattr(torch, request.out_dtype).itemsize
        moved = moving_s(request) * 4 / item
        meetings = 3 + (request.group_size if self.name == "spinlock" else 0)
        hidden = max(product_s(request, efficiency(request)), moved)
        return hidden + moved + fixed_s(request, launches=1, meetings=meetings)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the sums, and the locks, bind the kernel.  Collective."""
        tiles = self._tiles(request)
        arguments = self._arguments(request, host, tiles)
        sums_nbytes = arguments["per_owner"] * tiles.block_m * tiles.block_n * 4
        stages = not request.reach_out
        need = sums_nbytes + stages * staging_nbytes(request.m, request.n, request.out_dtype)
        memory = peer_memory(host, need, f"{self.op} ({self.name})")
        staged = staging(memory, sums_nbytes, request.m, request.n, request.out_dtype) if stages else None
        locks = host.team.control
        if self.name == "spinlock":
            locks = host.team.region("ops locks", LOCK_WORDS * _WORD * host.team.max_programs)
        arguments |= {
            "sums": memory[:sums_nbytes].view(torch.float32),
            "locks": locks.tensor.view(torch.int64),
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "LOCKED": self.name == "spinlock",
        }
        programs = programs_for(request, host, arguments["per_owner"], meeting=True)
        kernel = bind(request, host, matmul_accumulate, programs, arguments, tiles)
        held = locks.tensor if self.name == "spinlock" else None
        return Plan(kernel, staged_out=staged, aux_buffer=memory[:need], locks=held)
