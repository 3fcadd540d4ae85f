"""Products with gathered operands, and products that are gathered: all_gather_matmul and matmul_all_gather.

`push_product`: every tile is stored into the outputs of all members as soon as it is computed.
`pull_product`: tiles are computed from the members' shards of A where they lie, the own one first, then those of the
next members.  Every column of tiles reads a shard again over the links: for narrow B.
`fetch_product`: some programs copy the shards into local memory, the next member's first, and set a flag for each block
of rows; the others compute, the own shard first, and wait for flags.  A shard crosses the links once.

Shards are rows (gather_dim 0) or columns (gather_dim 1) of A.  Their rows are dense and begin at multiples of 16 bytes.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.gemm.tiles import add_product, own_program, place, store_tile, whole_rows, wide, with_bias
from iris_triton.language.asm import wait_stores
from iris_triton.language.flags import await_flag, set_flag

PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere."""

RUNTIME = ("me", "rank", "timeout_ns", "status")
"""Arguments for whose values kernels are not compiled anew."""


@triton.jit
def _announce(row, bases, me, matrix, down, SIZE: tl.constexpr):
    """Tell the members where a matrix of this rank lies, and how far its rows are apart."""
    nothing = members_of(SIZE).to(tl.int64) * 0
    tell(row, bases, me, nothing + (matrix.to(tl.int64) - tl.load(bases + me)), nothing + down, SIZE)


@triton.jit
def _announced(row, bases, peer, like, SIZE: tl.constexpr):
    """(pointer, stride of rows) of what a member has announced."""
    theirs = (tl.load(bases + peer) + told(row, peer, SIZE)).to(like.dtype)
    return tl.multiple_of(theirs, 16), whole_rows(told_second(row, peer, SIZE), like)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down, bias_step,
    tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Store A @ B into its place in the outputs of all members; see `iris_triton.gemm.reduce_kernel.matmul_reduce`.

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


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def pull_product(
    out, a, b, bias, control, bases, me, rank, rows, n, inner, a_down, b_down, b_right, out_down, out_right, bias_step,
    tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, B_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Multiply the members' shards, read where they lie, with B.

    Two meetings: the shards may be read; they were read.

    Args (beside those of `iris_triton.gemm.reduce_kernel.matmul_reduce`):
        rows, inner: shape of a shard.
        tiles_m, tiles_n: tiles below each other and beside each other, of a shard's rows if DIM is 0.
        DIM: 0 if shards are rows of A, 1 if they are columns.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    _announce(row, bases, me, a, a_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    per_shard = tiles_m * tiles_n
    total = per_shard
    if DIM == 0:
        total = per_shard * SIZE
    for i in range(own_program(0, XCDS, CHUNK), total, tl.num_programs(0)):
        acc = tl.zeros((BM, BN), tl.float32)
        down, right = place(i % per_shard, tiles_m, tiles_n, GROUP)
        to = out
        if DIM == 0:
            shard = (me + i // per_shard) % SIZE
            theirs, stride = _announced(row, bases, shard, a, SIZE)
            acc = add_product(
                acc, theirs, wide(b, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            first = shard * rows
        else:
            for j in range(SIZE):
                shard = (me + j) % SIZE
                theirs, stride = _announced(row, bases, shard, a, SIZE)
                part = b + tl.cast(shard, tl.int64) * inner * b_down
                acc = add_product(
                    acc, theirs, wide(part, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                    stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                )  # fmt: skip
            first = me * 0
        acc = with_bias(
            acc, bias, first + down * BM, right * BN, first + rows, n, bias_step, BIAS, BM, BN
        )  # fmt: skip
        store_tile(
            wide(to, OUT_ALIGNED), acc, first + down * BM, right * BN, first + rows, n, out_down, out_right, BM, BN
        )
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit
def _fetch(
    a, buffer, flags, generation, control, bases, me, rank, rows, inner, a_down, width, timeout_ns, status,
    SIZE: tl.constexpr, FETCHERS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Copy the shards of the others into local memory, block of rows by block of rows."""
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    _announce(row, bases, me, a, a_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    blocks = tl.cdiv(rows, BM)
    i = tl.arange(0, BM)
    step = tl.arange(0, BK)
    for number in range(tl.program_id(0), (SIZE - 1) * blocks, FETCHERS):
        shard = (me + 1 + number // blocks) % SIZE
        block = number % blocks
        theirs, stride = _announced(row, bases, shard, a, SIZE)
        source = as_words(theirs) + (block * BM + i.to(tl.int64))[:, None] * stride + step[None, :]
        mine = as_words(tl.multiple_of(buffer, 16)) + (tl.cast(shard, tl.int64) * rows + block * BM) * width
        target = mine + i.to(tl.int64)[:, None] * width + step[None, :]
        for k in range(0, inner, BK):
            mask = (block * BM + i[:, None] < rows) & (step[None, :] < inner - k)
            tl.store(target + k, tl.load(source + k, mask=mask, other=0), mask=mask)
        wait_stores()
        tl.debug_barrier()
        set_flag(flags + shard * blocks + block, generation, "release", "gpu")
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit
def _shard_at(
    a, a_down, buffer, width, flags, generation, shard, me, rows, block, blocks, rank, timeout_ns, status
):  # fmt: skip
    """(pointer, stride of rows) of a shard in local memory, when its block of rows is there."""
    own = shard == me
    if shard != me:
        await_flag(
            flags + shard * blocks + block, generation, "reached", "acquire", "gpu", timeout_ns,
            tl.cast(status, tl.int64), rank,
        )  # fmt: skip
    there = buffer.to(tl.int64) + tl.cast(shard, tl.int64) * rows * width * item_nbytes(a.dtype)
    where = tl.where(own, a.to(tl.int64), there).to(a.dtype)
    stride = tl.where(own, tl.cast(a_down, tl.int64), tl.cast(width, tl.int64))
    return tl.multiple_of(where, 16), whole_rows(stride, a)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def fetch_product(
    out, a, b, bias, buffer, state, control, bases, me, rank, rows, n, inner, a_down, width, b_down, b_right, out_down,
    out_right, bias_step, tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, FETCHERS: tl.constexpr, B_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr,
    XCDS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Multiply the members' shards with B, while some programs copy them here.

    All programs have to be there at the same time: no more than the device has multiprocessors.

    Args (beside those of `pull_product`):
        buffer: local memory for SIZE * rows * width elements.
        state: int64 words of this plan alone, zero at first: how often each program has run, then the flags.
        width: elements from row to row of `buffer`; rows begin at multiples of 16 bytes.
        FETCHERS: programs that copy; the others compute.
    """
    program = tl.program_id(0)
    generation = tl.load(state + program) + 1
    flags = state + tl.num_programs(0)
    if program < FETCHERS:
        _fetch(
            a, buffer, flags, generation, control, bases, me, rank, rows, inner, a_down, width, timeout_ns, status,
            SIZE, FETCHERS, BM, BK,
        )  # fmt: skip
    else:
        per_shard = tiles_m * tiles_n
        blocks = tl.cdiv(rows, BM)
        total = per_shard
        if DIM == 0:
            total = per_shard * SIZE
        for i in range(own_program(FETCHERS, XCDS, CHUNK), total, tl.num_programs(0) - FETCHERS):
            acc = tl.zeros((BM, BN), tl.float32)
            down, right = place(i % per_shard, tiles_m, tiles_n, GROUP)
            if DIM == 0:
                shard = (me + i // per_shard) % SIZE
                where, stride = _shard_at(
                    a, a_down, buffer, width, flags, generation, shard, me, rows, down, blocks, rank, timeout_ns, status
                )
                acc = add_product(
                    acc, where, wide(b, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                    stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                )  # fmt: skip
                first = shard * rows
            else:
                for j in range(SIZE):
                    shard = (me + j) % SIZE
                    where, stride = _shard_at(
                        a, a_down, buffer, width, flags, generation, shard, me, rows, down, blocks, rank, timeout_ns,
                        status
                    )  # fmt: skip
                    part = b + tl.cast(shard, tl.int64) * inner * b_down
                    acc = add_product(
                        acc, where, wide(part, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                        stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                    )  # fmt: skip
                first = me * 0
            acc = with_bias(
                acc, bias, first + down * BM, right * BN, first + rows, n, bias_step, BIAS, BM, BN
            )  # fmt: skip
            store_tile(
                wide(out, OUT_ALIGNED), acc, first + down * BM, right * BN, first + rows, n, out_down, out_right, BM, BN
            )
    tl.store(state + program, generation)
