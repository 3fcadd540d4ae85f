"""`push`: matmul_all_gather.  Every tile is stored into the outputs of all members as soon as it is computed.

Chosen where a table or the model says so.
"""

import triton
import triton.language as tl

from iris_core.dispatch.team import Host
from iris_core.types import FusedRequest
from iris_triton.collectives.parts.barrier import last_barrier
from iris_triton.gemm.parts import tiles as parts
from iris_triton.gemm.parts.fused import Fused, Plan, arguments_of, bind, programs_for, staged_memory, tiling


@triton.jit(do_not_specialize=parts.RUNTIME, do_not_specialize_on_alignment=parts.PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down, bias_step,
    tiles_m, tiles_n, timeout_ns, status, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Store A @ B into its part of the outputs of all members, concatenated by rows or, with DIM 1, by columns.

    Two barriers: the outputs may be written to; they are complete.
    """
    row, epoch = parts.begin_call(control, bases, me, out, out_down, timeout_ns, status, rank, SIZE)
    for number in range(parts.own_program(0, XCDS, CHUNK), tiles_m * tiles_n, tl.num_programs(0)):
        down, right = parts.place(number, tiles_m, tiles_n, GROUP)
        acc = parts.add_product(
            tl.zeros((BM, BN), tl.float32), parts.wide(a, A_ALIGNED), parts.wide(b, B_ALIGNED), down * BM, right * BN,
            m, n, k, a_down, a_right, b_down, b_right, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down,
            b_scale_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES, SCALES,
        )  # fmt: skip
        acc = parts.with_bias(acc, bias, down * BM, right * BN, m, n, bias_step, BIAS, BM, BN)
        values = acc.to(out.dtype.element_ty)
        for i in range(SIZE):
            theirs, stride = parts.announced(row, bases, (me + 1 + i) % SIZE, out, SIZE)
            if DIM == 0:
                theirs += tl.cast(me, tl.int64) * m * stride
            else:
                theirs += tl.cast(me, tl.int64) * n
            parts.store_tile(theirs, values, down * BM, right * BN, m, n, stride, 1, BM, BN)
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class Push(Fused):
    """`push` of matmul_all_gather."""

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        tiles = tiling(request, request.m, request.k)
        memory, staged, stride = staged_memory(request, host, self.name, 0)
        arguments = arguments_of(request, tiles, request.m, stride) | {"DIM": request.options["gather_dim"]}
        programs = programs_for(request, host, arguments["tiles_m"] * arguments["tiles_n"])
        kernel = bind(request, host, push_product, programs, arguments, tiles.options)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)
