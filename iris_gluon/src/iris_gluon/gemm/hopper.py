"""A persistent GEMM for Hopper: TMA loads, wgmma, and two partitions of warps.  The core of fused kernels.

One warp loads tiles of A and B into a ring of stages in shared memory, the other warps multiply.  Two things are left
to the caller, as aggregates: the *order* (which tile comes next, and when its operands are there; `RowGroups`) and the
*sink* (where a finished tile goes; `StoreTile`).

    @gluon.jit
    def kernel(a, b, c, tiles_m, tiles_n, BLOCK_M: gl.constexpr, ...):
        multiply_tiles(a, b, RowGroups(tiles_m, tiles_n, 8), StoreTile(c), tiles_m * tiles_n, k_tiles, ...)

A, B and C are tensor descriptors, so what a tile has beyond their edges is read as 0 and not written.

Scales of rows are applied to finished tiles.  Scales of blocks belong to a step, whose sums are added to those of the
tile outside of the tensor cores, as in DeepGEMM (DeepSeek, 2025).  These multiply for somebody else then: a tile of 128
rows has two partitions of four warps, each with half of its rows.  A tile of 256 columns has two such sums for each
step, one after the other: three blocks of 64 x 128 sums are what the registers of four warps hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_gluon._compat import barrier, tma_load
from iris_gluon.bulk import await_bulk_stores

_LOADER_WARPS = gl.constexpr(1)
_LOADER_REGISTERS = gl.constexpr(40)
_SCALED_COLUMNS = gl.constexpr(128)  # columns whose sums of a step are scaled together
_SCALING_REGISTERS = gl.constexpr(224)  # of the second partition that scales; the first one has about as many


@gluon.constexpr_function
def part_rows(block_m, num_warps, scales):
    """Return the rows of a part of a tile: those of a partition where blocks are scaled, else all."""
    return 16 * num_warps if scales == "blocks" else block_m


@gluon.jit
def _load(
    a_desc, own_desc, b_desc, a_stages, b_stages, full, empty, order, first, tiles, every, k_tiles,
    TURNED_A: gl.constexpr, TURNED_B: gl.constexpr, OWN: gl.constexpr
):  # fmt: skip
    """Run the loading warp: fill the stages in turn, each as soon as it is empty."""
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[1 if TURNED_A else 0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[0 if TURNED_A else 1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if TURNED_B else 1]
    STAGES: gl.constexpr = a_stages.type.shape[0]
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    step = 0
    for tile in range(first, tiles, every):
        row, column = order.place(tile)
        order.await_operands(row, column)
        own = -1
        if OWN:
            own = order.own_row(row)
        for k in range(k_tiles):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NBYTES)
            if own >= 0:
                tma_load(own_desc, [own * BLOCK_M, k * BLOCK_K], full.index(stage), a_stages.index(stage))
            else:
                at = [k * BLOCK_K, row * BLOCK_M] if TURNED_A else [row * BLOCK_M, k * BLOCK_K]
                tma_load(a_desc, at, full.index(stage), a_stages.index(stage))
            at = [column * BLOCK_N, k * BLOCK_K] if TURNED_B else [k * BLOCK_K, column * BLOCK_N]
            tma_load(b_desc, at, full.index(stage), b_stages.index(stage))
            step += 1


@gluon.jit
def _store_part(part, values, sink, row, column):
    tma.store_wait(0)  # the part before has been read
    part.store(values)
    hopper.fence_async_shared()
    barrier()
    sink.store(part, row, column)


@gluon.jit
def _begin_step(
    a_stages, b_stages, full, step, acc, use_acc, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr
):  # fmt: skip
    """Begin to multiply a stage when it is full."""
    stage = step % a_stages.type.shape[0]
    mbarrier.wait(full.index(stage), (step // a_stages.type.shape[0]) & 1)
    left, right = a_stages.index(stage), b_stages.index(stage)
    left = left.permute((1, 0)) if TURNED_A else left  # M x K, and K x N, however they were stored
    right = right.permute((1, 0)) if TURNED_B else right
    return hopper.warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _add_blocks(
    a_stages, b_stages, full, empty, scales, row, column, step, k_tiles, HALF: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Return the sums of a partition's rows of a tile whose blocks are scaled, in two halves if it has 256 columns.

    What waits takes the tile's sums along, so that additions are moved neither behind it nor behind the next product:
    all products have the same registers.
    """
    STAGES: gl.constexpr = a_stages.type.shape[0]
    BLOCK_N: gl.constexpr = b_stages.type.shape[1]
    ROWS: gl.constexpr = 16 * NUM_WARPS
    WIDTH: gl.constexpr = _SCALED_COLUMNS if BLOCK_N > _SCALED_COLUMNS else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], instr_shape=[16, WIDTH, 32])
    left = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    right, sums = left, left
    for k in range(k_tiles):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)  # and for the rows of all ranks, with their scales
        down, across = scales.down(left, row, k), scales.across(column, k)
        a, b = a_stages.index(stage).slice(HALF * ROWS, ROWS), b_stages.index(stage)
        sums = hopper.warpgroup_mma(a, b.slice(0, WIDTH).permute((1, 0)), sums, use_acc=False, is_async=True)
        sums, left = hopper.warpgroup_mma_wait(0, deps=(sums, left))
        if BLOCK_N > WIDTH:
            left += sums * (down * across)[:, None]
            across = scales.across(column + WIDTH, k)
            sums, left = hopper.warpgroup_mma_wait(0, deps=(sums, left))
            sums = hopper.warpgroup_mma(a, b.slice(WIDTH, WIDTH).permute((1, 0)), sums, use_acc=False, is_async=True)
            sums, right = hopper.warpgroup_mma_wait(0, deps=(sums, right))
            mbarrier.arrive(empty.index(stage), count=1)
            right += sums * (down * across)[:, None]
            sums, right = hopper.warpgroup_mma_wait(0, deps=(sums, right))
        else:
            mbarrier.arrive(empty.index(stage), count=1)
            left += sums * (down * across)[:, None]
        step += 1
    return left, right


@gluon.jit
def _multiply(
    a_stages, b_stages, part, full, empty, order, sink, scales, first, tiles, every, k_tiles, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
    SCALES: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Run the other warps: multiply stage by stage, give each back, hand finished tiles to the sink."""
    STAGES: gl.constexpr = a_stages.type.shape[0]
    WIDTH: gl.constexpr = part.type.shape[1]
    DEPTH: gl.constexpr = 256 // a_stages.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], instr_shape=[16, BLOCK_N, DEPTH])
    gl.static_assert(BLOCK_N == WIDTH or BLOCK_N == 2 * WIDTH, "a tile is stored whole or in two parts")
    step = 0
    for tile in range(first, tiles, every):
        row, column = order.place(tile)
        if SCALES == "blocks":
            first_row, first_column = row * BLOCK_M + HALF * part.type.shape[0], column * BLOCK_N
            left, right = _add_blocks(
                a_stages, b_stages, full, empty, scales, first_row, first_column, step, k_tiles, HALF, NUM_WARPS
            )
            step += k_tiles
            _store_part(part, sink.finish(left, first_row, first_column).to(part.dtype), sink, first_row, first_column)
            if BLOCK_N > WIDTH:
                right = sink.finish(right, first_row, first_column + WIDTH).to(part.dtype)
                _store_part(part, right, sink, first_row, first_column + WIDTH)
        else:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
            for k in range(k_tiles):
                acc = _begin_step(a_stages, b_stages, full, step, acc, k > 0, TURNED_A, TURNED_B)
                # One multiplication stays under way; the one before it is done, and its stage is empty.
                acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            first_row, first_column = row * BLOCK_M, column * BLOCK_N
            if SCALES == "rows":
                acc = scales.of_rows(acc, first_row, first_column)
            values = sink.finish(acc, first_row, first_column).to(part.dtype)
            if BLOCK_N == WIDTH:
                _store_part(part, values, sink, first_row, first_column)
            else:  # half the shared memory, which pays for one more stage
                left, right = values.reshape([BLOCK_M, 2, WIDTH]).permute(0, 2, 1).split()
                _store_part(part, left, sink, first_row, first_column)
                _store_part(part, right, sink, first_row, first_column + WIDTH)
    await_bulk_stores()


@gluon.jit
def multiply_tiles(
    a_desc, b_desc, order, sink, tiles, k_tiles, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr, TURNED_A: gl.constexpr = False, TURNED_B: gl.constexpr = False, own_desc=None,
    scales=None, RESULT: gl.constexpr = None
):  # fmt: skip
    """Compute tiles of A @ B and hand them to a sink; returns when all that the sink has begun is done.

    Programs take the tiles in turn: program p those with tile % num_programs == p.  The kernel is launched with at
    most as many programs as there are multiprocessors: each fills one.

    Args:
        a_desc: descriptor of A, row major, float16, bfloat16 or 8-bit floats; its block is BLOCK_M x BLOCK_K.  If A is
            stored by columns, TURNED_A: the descriptor is of its transpose, with blocks of BLOCK_K x BLOCK_M.  8-bit
            floats are not turned, and those of B are: wgmma reads both along the inner dimension.
        b_desc: descriptor of B, row major, the same type; its block is BLOCK_K x BLOCK_N.  If B is stored by columns,
            as the weight of a linear layer, TURNED_B: of its transpose, with blocks of BLOCK_N x BLOCK_K.
        order: aggregate with the methods of `RowGroups`.
        sink: aggregate with the methods of `StoreTile`; its descriptors are of parts, `part_rows` x BLOCK_N / PARTS, in
            the default layout of such a block.
        tiles, k_tiles: number of tiles, and of blocks in the inner dimension, which is at least 1.
        STAGES: blocks of A and B that are in shared memory at the same time.
        PARTS: 1 or 2, the parts in which a tile goes to the sink.
        NUM_WARPS: the kernel's num_warps; 8 for BLOCK_M 128, or 4 where blocks are scaled.
        own_desc: descriptor of rows of A that lie elsewhere, like that of A, which is not TURNED_A then.  The order has
            a method `own_row(row)`: which of these rows of tiles is meant by a row of C, or -1 for one of A.
        scales: `iris_gluon.gemm.sinks.Scales` of 8-bit floats; of blocks with a BLOCK_K of 128, and in parts of at most
            128 columns.
        RESULT: type of C, of 16 bits; by default that of A.
    """
    OWN: gl.constexpr = own_desc is not None
    SCALES: gl.constexpr = "none" if scales is None else scales.kind
    gl.static_assert(not (OWN and TURNED_A), "rows of A in two places lie by rows")
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[1 if TURNED_A else 0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if TURNED_B else 1]
    gl.static_assert(BLOCK_M % (16 * NUM_WARPS) == 0, "BLOCK_M must be a multiple of 16 rows for each warp")
    a_stages = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_stages = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    OUT: gl.constexpr = a_desc.dtype if RESULT is None else RESULT
    ROWS: gl.constexpr = part_rows(BLOCK_M, NUM_WARPS, SCALES)
    HALVES: gl.constexpr = BLOCK_M // ROWS
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N // PARTS], OUT)
    part = gl.allocate_shared_memory(OUT, [ROWS, BLOCK_N // PARTS], part_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=HALVES)
    first, every = gl.program_id(0), gl.num_programs(0)
    gl.static_assert(HALVES == 1 or HALVES == 2, "a tile is multiplied by one partition or by two")
    if HALVES == 1:
        gl.warp_specialize(
            [
                (_multiply, (a_stages, b_stages, part, full, empty, order, sink, order if scales is None else scales,
                             first, tiles, every, k_tiles, BLOCK_M, BLOCK_N, NUM_WARPS, TURNED_A, TURNED_B, SCALES, 0)),
                (_load, (a_desc, own_desc if OWN else a_desc, b_desc, a_stages, b_stages, full, empty, order, first,
                         tiles, every, k_tiles, TURNED_A, TURNED_B, OWN)),
            ],
            [_LOADER_WARPS],
            [_LOADER_REGISTERS],
        )  # fmt: skip
    else:
        other = gl.allocate_shared_memory(OUT, [ROWS, BLOCK_N // PARTS], part_layout)
        gl.warp_specialize(
            [
                (_multiply, (a_stages, b_stages, part, full, empty, order, sink, scales, first, tiles, every, k_tiles,
                             BLOCK_M, BLOCK_N, NUM_WARPS, TURNED_A, TURNED_B, SCALES, 0)),
                (_multiply, (a_stages, b_stages, other, full, empty, order, sink, scales, first, tiles, every, k_tiles,
                             BLOCK_M, BLOCK_N, NUM_WARPS, TURNED_A, TURNED_B, SCALES, 1)),
                (_load, (a_desc, own_desc if OWN else a_desc, b_desc, a_stages, b_stages, full, empty, order, first,
                         tiles, every, k_tiles, TURNED_A, TURNED_B, OWN)),
            ],
            [NUM_WARPS, _LOADER_WARPS],
            [_SCALING_REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
