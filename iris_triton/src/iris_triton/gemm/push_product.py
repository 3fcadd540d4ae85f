"""`push`: matmul_all_gather.  Every tile is stored into the outputs of all members as soon as it is computed.

Chosen where a table or the model says so.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, row_of
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
    PER_CALL,
    RUNTIME,
    _announce,
    _announced,
    add_product,
    own_program,
    place,
    store_tile,
    wide,
    with_bias,
)

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down, bias_step,
    tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Store A @ B into its place in the outputs of all members; see `iris_triton.gemm.matmul_reduce.matmul_reduce`.

    Two meetings: the outputs may be written to; they are complete.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    _announce(row, bases, me, out, out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    for number in range(own_program(0, XCDS, CHUNK), tiles_m * tiles_n, tl.num_programs(0)):
        down, right = place(number, tiles_m, tiles_n, GROUP)
        acc = add_product(
            tl.zeros((BM, BN), tl.float32), wide(a, A_ALIGNED), wide(b, B_ALIGNED), down * BM, right * BN, m, n, k,
            a_down, a_right, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
        )  # fmt: skip
        acc = with_bias(acc, bias, down * BM, right * BN, m, n, bias_step, BIAS, BM, BN)
        values = acc.to(out.dtype.element_ty)
        for i in range(SIZE):
            theirs, stride = _announced(row, bases, (me + 1 + i) % SIZE, out, SIZE)
            if DIM == 0:
                theirs += tl.cast(me, tl.int64) * m * stride
            else:
                theirs += tl.cast(me, tl.int64) * n
            store_tile(theirs, values, down * BM, right * BN, m, n, stride, 1, BM, BN)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


class Push(Fused):
    """matmul_all_gather: every tile goes to all members as soon as it is computed."""

    def __init__(self) -> None:
        super().__init__("matmul_all_gather", "push")

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, or the other way round."""
        hidden = max(product_s(request, efficiency(request)), moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where the output cannot be reached, bind the kernel."""
        tiles = tiling(request, request.m, request.k)
        tiles_m, tiles_n = tiles.tiles(request.m, request.n)
        staged = memory = None
        if not request.reach_out:
            need = staging_nbytes(*request.out_shape, request.out_dtype)
            memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
            staged = staging(memory, 0, *request.out_shape, request.out_dtype)
        arguments = common_arguments(request, host, tiles) | {
            "m": request.m,
            "k": request.k,
            "a_down": request.a_stride[0],
            "a_right": request.a_stride[1],
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "DIM": request.options["gather_dim"],
            "A_ALIGNED": request.aligned[0],
            "B_ALIGNED": request.aligned[1],
        }
        programs = programs_for(request, host, tiles_m * tiles_n, meeting=True)
        kernel = bind(request, host, push_product, programs, arguments, tiles)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)
