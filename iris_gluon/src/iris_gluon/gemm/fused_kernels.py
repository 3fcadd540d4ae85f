"""Fused products for Hopper: the core of `iris_gluon.gemm` with orders and sinks that communicate.

`push_product`: every tile goes to the outputs of all members, by TMA, while the next one is computed.
`reduce_product`: every tile goes into a slot of its owner; `iris_triton.gemm.sum_kernel` adds the slots up afterwards.
`await_product`: copy engines bring the others' rows of A here, and a word behind each shard; the warp that loads waits
for it.
`put_product`: some programs put the own rows of A to the others by TMA, and count their pieces there; the others begin
with the own rows, and the warp that loads waits for counters.

The protocols are those of `iris_triton.gemm`.  Words that say what has arrived are 0 between launches: the last program
that has waited for them clears them, so nothing is cleared in front of a product, and a graph can be replayed.  Own
rows are multiplied where A lies, so no copy is waited for.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris_gluon._compat import aggregate, tma_store
from iris_gluon.bulk import fence_async_global, put_bulk
from iris_gluon.gemm import AddBias, RowGroups, ScatterTile, StoreTile, multiply_tiles
from iris_gluon.layouts import default_layout
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.language.flags import await_own_flag

PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere; they begin at multiples of 16 bytes, as TMA wants."""

RUNTIME = (
    "me", "rank", "m", "n", "k", "a_down", "b_down", "out_down", "out_right", "bias_step", "tiles_m", "tiles_n",
    "k_tiles", "rows_each", "chunk", "timeout_ns", "status",
)  # fmt: skip
"""Arguments for whose values kernels are not compiled anew: a 1 would be a constant, which no order can hold."""

PUT_PARTS = gl.constexpr(4)
"""Pieces in which the rows of a tile are put, by a program each: so the first rows arrive early."""

_CLEARED = gl.constexpr(128)
"""Words that are cleared at a time."""


@aggregate
class OwnersInTurn:
    """`chunk` tiles of one owner, then of the next, beginning with the member after this one.

    With as many tiles in a chunk as an owner has, its tiles are one run, and the own ones come last: the rows of A that
    are in use at a time are few.  With fewer, all links carry something at any time.

    Attributes:
        tiles_each: rows of tiles that a member owns (int32).
        tiles_n: columns of tiles (int32).
        me: this member (int32).
        chunk: tiles in a row of an owner, at most all that it has (int32).
        group: row tiles of a group (constexpr).
        size: number of members (constexpr).
    """

    tiles_each: gl.tensor
    tiles_n: gl.tensor
    me: gl.tensor
    chunk: gl.tensor
    group: gl.constexpr
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_each, tiles_n, me, chunk, group, size):
        self.tiles_each = tiles_each
        self.tiles_n = tiles_n
        self.me = me
        self.chunk = chunk
        self.group = gl.constexpr(group)
        self.size = gl.constexpr(size)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles."""
        per_owner = self.tiles_each * self.tiles_n
        whole = per_owner // self.chunk * self.chunk  # what is left behind whole chunks goes owner by owner
        in_chunks = tile < whole * self.size
        left, rest = tile - whole * self.size, gl.maximum(per_owner - whole, 1)
        step = gl.where(in_chunks, tile // self.chunk % self.size, left // rest)
        number = tile // (self.chunk * self.size) * self.chunk + tile % self.chunk
        number = gl.where(in_chunks, number, whole + left % rest)
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(number)
        return (self.me + 1 + step) % self.size * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Return at once: all operands are local."""
        pass


@aggregate
class OwnersSlot:
    """This member's slot in the memory of the owner of a tile.

    Attributes:
        matrices: tuple of tensor descriptors, one for each owner: the rows that it owns.
        rows_each: rows of an owner (int32).
    """

    matrices: gl.tuple
    rows_each: gl.tensor

    @gluon.constexpr_function
    def __init__(self, matrices, rows_each):
        self.matrices = gl.tuple(matrices)
        self.rows_each = rows_each

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to its owner."""
        owner = row // self.rows_each
        for i in gl.static_range(len(self.matrices)):
            if owner == i:
                tma_store(self.matrices[i], [row - owner * self.rows_each, column], part)

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc


@aggregate
class ShardsInTurn:
    """Rows of one member after the other, beginning with the own ones; those of others when they have been copied.

    Attributes:
        tiles_each: rows of tiles of a member (int32).
        tiles_n: columns of tiles (int32).
        me: this member (int32).
        flags: pointer to int32, one for `tiles_per_flag` rows of tiles.
        full: value at which a flag says that its rows are there (int32).
        tiles_per_flag: rows of tiles that come together (int32).
        timeout_ns, status, rank: bound of the waits, and where they report.
        group: row tiles of a group (constexpr).
        size: number of members (constexpr).
    """

    tiles_each: gl.tensor
    tiles_n: gl.tensor
    me: gl.tensor
    flags: gl.tensor
    full: gl.tensor
    tiles_per_flag: gl.tensor
    timeout_ns: gl.tensor
    status: gl.tensor
    rank: gl.tensor
    group: gl.constexpr
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_each, tiles_n, me, flags, full, tiles_per_flag, timeout_ns, status, rank, group, size):
        self.tiles_each = tiles_each
        self.tiles_n = tiles_n
        self.me = me
        self.flags = flags
        self.full = full
        self.tiles_per_flag = tiles_per_flag
        self.timeout_ns = timeout_ns
        self.status = status
        self.rank = rank
        self.group = gl.constexpr(group)
        self.size = gl.constexpr(size)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles."""
        per_shard = self.tiles_each * self.tiles_n
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(tile % per_shard)
        return (self.me + tile // per_shard) % self.size * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Return when the rows of A are there.  Called by the loading warp, tile by tile."""
        if row // self.tiles_each != self.me:
            flag = self.flags + row // self.tiles_per_flag
            await_own_flag(flag, self.full, "reached", "acquire", "sys", self.timeout_ns, self.status, self.rank)
            fence_async_global(False)

    @gluon.jit
    def own_row(self, row):
        """Return which of the own rows of tiles this is, or -1 if it is another member's."""
        first = self.me * self.tiles_each
        return gl.where((row >= first) & (row < first + self.tiles_each), row - first, -1)


@gluon.jit
def _matrix(address, like, rows, columns, down, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Describe a matrix at an address (int64) for TMA, with elements like those of a pointer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], like.dtype.element_ty)
    pointer = gl.multiple_of(address.to(like.dtype), 16)
    return tma.make_tensor_descriptor(pointer, [rows, columns], [down, 1], [BLOCK_M, BLOCK_N], layout)


@gluon.jit
def _operand(
    matrix, rows, columns, down, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """Describe an operand for TMA, by rows or, TURNED, by columns."""
    if TURNED:
        return _matrix(matrix.to(gl.int64), matrix, columns, rows, gl.cast(down, gl.int64), BLOCK_COLUMNS, BLOCK_ROWS)
    else:
        return _matrix(matrix.to(gl.int64), matrix, rows, columns, gl.cast(down, gl.int64), BLOCK_ROWS, BLOCK_COLUMNS)


@gluon.jit
def _with_bias(sink, bias, step, m, n, BIAS: gl.constexpr):
    """Add the bias, if there is one, before the tiles go to the sink."""
    if BIAS == "none":
        return sink
    else:
        limit = n
        if BIAS == "rows":
            limit = m
        return AddBias(sink, bias, gl.cast(step, gl.int64), limit, BIAS)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, b_down, out_down, bias_step, tiles_m, tiles_n, k_tiles,
    timeout_ns, status,
    SIZE: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store A @ B into its place in the outputs of all members.

    Two meetings: the outputs may be written to; they are complete.

    Args:
        out: the output of this member, which others write to: dense rows.
        a, b: the operands.
        bias: or None; see BIAS.
        control: the team's control region (int64).
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        m, n, k: of the product.
        a_down, b_down, out_down: elements from row to row, or column to column; multiples of 16 bytes.
        bias_step: elements between values of the bias.
        tiles_m, tiles_n, k_tiles: tiles of the product, and steps of the inner dimension.
        timeout_ns, status: bound of waits, and where they report.
        SIZE: number of members.
        DIM: 0 if the products lie below each other in the output, 1 if beside each other.
        BIAS: what the bias lies along: "columns", "rows" (of this member's product) or "none".
        TURNED_A, TURNED_B: the operand lies by columns, not by rows.
        BLOCK_M ... NUM_WARPS: see `iris_gluon.gemm.GemmConfig`.
    """
    ITEM: gl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    nothing = members_of(SIZE).to(gl.int64) * 0
    tell(row, bases, me, nothing + (out.to(gl.int64) - gl.load(bases + me)), nothing + out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    matrices = ()
    for i in gl.static_range(SIZE):  # the next member first, the own output last
        peer = (me + 1 + i) % SIZE
        stride = told_second(row, peer, SIZE)
        address = gl.load(bases + peer) + told(row, peer, SIZE)
        if DIM == 0:
            address += gl.cast(me, gl.int64) * m * stride * ITEM
        else:
            address += gl.cast(me, gl.int64) * n * ITEM
        matrices = matrices + (_matrix(address, out, m, n, stride, BLOCK_M, BLOCK_N // PARTS),)  # noqa: RUF005
    multiply_tiles(
        _operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        RowGroups(tiles_m, tiles_n, GROUP), _with_bias(ScatterTile(matrices), bias, bias_step, m, n, BIAS),
        tiles_m * tiles_n, k_tiles, STAGES, PARTS, NUM_WARPS, 0, TURNED_A, TURNED_B,
    )  # fmt: skip
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def reduce_product(
    out, a, b, control, slots, bases, me, rank, m, n, k, a_down, b_down, out_down, rows_each, tiles_n, k_tiles, chunk,
    timeout_ns, status,
    SIZE: gl.constexpr, FORM: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store A @ B into slots of the owners of its rows, who add them up when this launch is over.

    Meetings: peers may be written to; the slots are full.  Only programs of the same number meet, but when all of a
    launch have met, all of the others' tiles are there.

    Args (beside those of `push_product`):
        out: with FORM "two_shot", members are told where it is, and its rows are dense and aligned.
        slots: symmetric memory for SIZE matrices of rows_each x n elements, of the output's type.
        n: a multiple of 8.
        out_down: stride in elements.
        rows_each: rows that a member owns, a multiple of BLOCK_M; the last members may own fewer, or none.
        chunk: see `OwnersInTurn`.
        FORM: "rows" or "two_shot"; see `iris_triton.gemm.sum_kernel`.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    if FORM == "two_shot":
        nothing = members_of(SIZE).to(gl.int64) * 0
        tell(row, bases, me, nothing + (out.to(gl.int64) - gl.load(bases + me)), nothing + out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    own = gl.load(bases + me)
    mine = slots.to(gl.int64) - own + gl.cast(me, gl.int64) * rows_each * n * 2
    matrices = ()
    for i in gl.static_range(SIZE):
        address = gl.load(bases + i) + mine
        part = _matrix(address, out, rows_each, n, gl.cast(n, gl.int64), BLOCK_M, BLOCK_N // PARTS)
        matrices = matrices + (part,)  # noqa: RUF005
    tiles_each = rows_each // BLOCK_M
    order = OwnersInTurn(tiles_each, tiles_n, me, chunk, GROUP, SIZE)
    multiply_tiles(
        _operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, OwnersSlot(matrices, rows_each), tiles_each * tiles_n * SIZE, k_tiles, STAGES, PARTS, NUM_WARPS, 0,
        TURNED_A, TURNED_B,
    )  # fmt: skip
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@gluon.jit
def _put(
    own, gathered, flags, control, bases, me, rank, rows_each, k, timeout_ns, status,
    SIZE: gl.constexpr, PUTTERS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """Put the own rows to the others, first to the member before this one, which begins with them.

    Programs of this member count the pieces of a block together, in words that no other member adds to.  They are 0
    before, because all members have come to this call, behind the last one, which has cleared them.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    blocks = rows_each // BLOCK_M
    each = blocks * PUT_PARTS
    ROWS: gl.constexpr = BLOCK_M // PUT_PARTS
    for number in range(gl.program_id(0), (SIZE - 1) * each, PUTTERS):
        member = (me + SIZE - 1 - number // each) % SIZE
        piece = number % each
        begin = gl.cast(piece, gl.int64) * ROWS * k
        there = gathered + gl.cast(me, gl.int64) * rows_each * k + begin
        put_bulk(own + begin, there, ROWS * k, me, member, bases, 16384, 4)
        distance = gl.load(bases + member) - gl.load(bases + me)
        counter = (flags + me * blocks + piece // PUT_PARTS).to(gl.int64) + distance
        gl.atomic_add(counter.to(flags.dtype), 1, sem="release", scope="sys")
    leave(row, epoch, SIZE)


@gluon.jit
def _clear(flags, count, programs):
    """Set words back to 0 behind the last of the programs that have waited for them; word `count` counts these."""
    if gl.atomic_add(flags + count, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lane = gl.arange(0, _CLEARED, layout=default_layout([_CLEARED]))
        for first in range(0, count + 1, _CLEARED):
            gl.store(flags + first + lane, 0, mask=first + lane <= count)


@gluon.jit
def _multiply_shards(
    out, own, b, bias, gathered, flags, full, tiles_per_flag, me, rank, n, k, b_down, out_down, bias_step, rows_each,
    tiles_n, k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    ASIDE: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each when its flag says that it is there; see `ShardsInTurn`.

    The first ASIDE programs do something else.
    """
    tiles_each = rows_each // BLOCK_M
    order = ShardsInTurn(
        tiles_each, tiles_n, me, flags, gl.cast(full, gl.int32), tiles_per_flag, gl.cast(timeout_ns, gl.int64),
        gl.cast(status, gl.int64), rank, GROUP, SIZE,
    )  # fmt: skip
    rows = rows_each * SIZE
    sink = StoreTile(_matrix(out.to(gl.int64), out, rows, n, gl.cast(out_down, gl.int64), BLOCK_M, BLOCK_N // PARTS))
    multiply_tiles(
        _operand(gathered, rows, k, k, BLOCK_M, BLOCK_K, False), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, _with_bias(sink, bias, bias_step, rows, n, BIAS), tiles_each * SIZE * tiles_n, k_tiles, STAGES, PARTS,
        NUM_WARPS, ASIDE, False, TURNED_B, _operand(own, rows_each, k, k, BLOCK_M, BLOCK_K, False),
    )  # fmt: skip
    _clear(flags, rows // BLOCK_M // tiles_per_flag, gl.num_programs(0) - ASIDE)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def put_product(
    out, a, b, bias, gathered, flags, control, bases, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n,
    k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, PUTTERS: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B.

    All programs have to be there at the same time, on all members: no more than a device has multiprocessors.  One
    meeting: peers may be written to.  That a member's own rows have been taken is not asked, for it gives them itself,
    and what it gets is complete when it has waited for every flag.

    Args (beside those of `push_product`):
        a: the own rows, rows_each x k, dense.
        gathered: symmetric memory for SIZE * rows_each rows of k elements.
        flags: symmetric memory for an int32 for each row of tiles and one more, 0 between launches.
        rows_each: rows of a member, a multiple of BLOCK_M.
        PUTTERS: programs that copy; the others compute.
        BIAS: what the bias lies along: "columns", "rows" (of the gathered matrix) or "none".
    """
    if gl.program_id(0) < PUTTERS:
        _put(
            a, gathered, flags, control, bases, me, rank, rows_each, k, timeout_ns, status, SIZE, PUTTERS, BLOCK_M
        )  # fmt: skip
    else:
        _multiply_shards(
            out, a, b, bias, gathered, flags, PUT_PARTS, gl.cast(1, gl.int32), me, rank, n, k, b_down, out_down,
            bias_step, rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP, STAGES, PARTS, NUM_WARPS, PUTTERS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def await_product(
    out, a, b, bias, gathered, flags, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n, k_tiles,
    timeout_ns, status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each member's when they are there.  No program waits for another one.

    Args (beside those of `put_product`):
        flags: an int32 for each member, 1 when its rows are there, and one more; 0 between launches.
    """
    _multiply_shards(
        out, a, b, bias, gathered, flags, 1, rows_each // BLOCK_M, me, rank, n, k, b_down, out_down, bias_step,
        rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES,
        PARTS, NUM_WARPS, 0,
    )  # fmt: skip
